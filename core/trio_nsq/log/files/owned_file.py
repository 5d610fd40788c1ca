"""A file that is closed with the object that reads it. Not compiled: compiled classes have no weak references."""

import weakref

from .open_files import LogFile


class OwnedFile:
    """Closes a file when it is called, or when it is garbage collected with the object that reads the file.

    That may be late, because an error's traceback keeps its frames alive.
    """

    def __init__(self, file: LogFile) -> None:
        self._finalizer = weakref.finalize(self, file.close)

    def __call__(self) -> None:
        self._finalizer()
