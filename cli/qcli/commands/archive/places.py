"""Archives on the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ...framework.errors import ExitCode, Failure
from ..shared.engine import library_errors
from ..shared.places import without_secrets

if TYPE_CHECKING:
    from trio_nsq.storage import Storage


def storage_of(archive: str) -> Storage:
    """Return the storage of an archive, a path or a URL. Raises StorageError, Failure."""
    from trio_nsq.storage import storage_at

    return storage_at(without_secrets(archive))


class BytesRead:
    """Counts bytes, and advances a bar.

    Attributes:
        count: How many were read.
        progress: Advances the bar; None: there is none.
    """

    def __init__(self, progress: Callable[[int], None] | None = None) -> None:
        self.count = 0
        self.progress = progress

    def __call__(self, more: int) -> None:
        self.count += more
        if self.progress is not None:
            self.progress(more)


@contextmanager
def archive_errors() -> Iterator[None]:
    """Convert the library's errors inside the block into failures; those of damaged archives have their exit code."""
    from trio_nsq.archive.manifest import ArchiveDamaged

    try:
        with library_errors():
            yield
    except Failure as failure:
        if isinstance(failure.__cause__, ArchiveDamaged):
            failure.exit_code = ExitCode.DAMAGED
        raise
