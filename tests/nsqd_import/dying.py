"""`python -m nsqd_import.dying NSQD_DATA_PATH FOLDER`: an import that is killed before each thing it does to the disk.

For each N an import into FOLDER/N is killed (SIGKILL, in a process of its own) before its Nth operation. Prints how
many there were.
"""

import os
import signal
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from trio_nsq.log import Files
from trio_nsq.nsqd_import import NsqdFolder, import_topics

OPERATIONS = (
    *("create", "write", "truncate", "sync", "unlink", "replace", "rename"),
    *("make_folder", "sync_folder", "remove_folder"),
)


class DyingFiles(Files):
    """Kills the process before the Nth operation."""

    def __init__(self, operations: int) -> None:
        self._left = operations

    def __getattribute__(self, name: str) -> Any:
        if name in OPERATIONS:
            self._left -= 1
            if self._left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().__getattribute__(name)


def main(source: Path, folder: Path) -> int:
    """Do it until an import comes to its end; returns the number of the last one."""
    number = 0
    while True:
        child = os.fork()
        if not child:
            with closing(NsqdFolder(source)) as nsqd:
                for _ in import_topics(nsqd, folder / str(number), files=DyingFiles(number)):
                    pass
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            assert os.waitstatus_to_exitcode(status) == 0
            return number
        number += 1


if __name__ == "__main__":
    print(main(*map(Path, sys.argv[1:])))
