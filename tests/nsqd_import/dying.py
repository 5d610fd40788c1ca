"""`python -m nsqd_import.dying NSQD_DATA_PATH FOLDER`: an import that is killed before each of its disk
operations.

For each N, an import into FOLDER/N, in its own process, is killed with SIGKILL before its Nth operation.
Prints the number of operations.
"""

import os
import signal
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from trio_nsq.log import Files
from trio_nsq.nsqd_import.importer import import_topics
from trio_nsq.nsqd_import.nsqd_folder import NsqdFolder

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
    """Repeat until an import completes; return the number of the last one."""
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
