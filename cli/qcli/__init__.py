"""qcli: one command in front of a message broker. `python -m qcli` is the same as `qcli`."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


# Imports are inside the function, so that `import qcli` is fast.
def main() -> NoReturn:
    """Run the command line in `sys.argv` and end the process with its exit code."""
    import os
    import signal

    # Until a command runs, SIGINT ends the process silently. An exception would be raised inside an import, where
    # Python sometimes replaces or drops it.
    signal.signal(signal.SIGINT, lambda _number, _frame: os._exit(130))  # ExitCode.INTERRUPTED
    from .app import run_process

    run_process()
