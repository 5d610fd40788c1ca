"""qcli: one command in front of a message broker. `python -m qcli` is the same as `qcli`."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


# Whatever is needed is imported here so that `import qcli` costs nothing.
def main() -> NoReturn:
    """Run the command line in `sys.argv` and end the process with its exit code."""
    import os
    import signal

    # Until there is a command to interrupt, SIGINT ends the process without a word. It may not become an exception
    # before: that would come out of an import, and in some places Python makes another of it, or drops it.
    signal.signal(signal.SIGINT, lambda _number, _frame: os._exit(130))  # ExitCode.INTERRUPTED
    from .app import run_process

    run_process()
