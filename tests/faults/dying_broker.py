"""`python -m faults.dying_broker DATA_PATH HTTP_ADDRESS MOMENT COUNT`: a broker that is killed while it stores a batch.

It gets SIGKILL during the COUNTth write. MOMENT is `unwritten`, `written` (not synced yet) or `synced` (not answered
yet). Prints "ready" when it listens.
"""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import trio

from trio_nsq.broker import BrokerOptions, serve
from trio_nsq.log import Files


class DyingFiles(Files):
    """Kills the process."""

    def __init__(self, moment: str, count: int) -> None:
        self._moment = moment
        self._left = count
        self._storing = False

    def _pass(self, moment: str) -> None:
        if self._storing and not self._left and moment == self._moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def write(self, fd: int, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        self._storing = bytes(parts[0]).startswith(b"NSQB")
        self._left -= self._storing
        self._pass("unwritten")
        super().write(fd, offset, parts)
        self._pass("written")

    def sync(self, fd: int) -> None:
        super().sync(fd)
        self._pass("synced")
        self._storing = False


async def main(data_path: Path, http_address: str, moment: str, count: int) -> None:
    """Run until killed."""
    options = BrokerOptions(data_path=data_path, tcp_address="127.0.0.1:0", http_address=http_address)
    async with trio.open_nursery() as nursery:
        await nursery.start(
            lambda task_status: serve(options, files=DyingFiles(moment, count), task_status=task_status)
        )
        print("ready", flush=True)


if __name__ == "__main__":
    trio.run(main, Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
