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
    import sys

    # Until a command runs, SIGINT ends the process silently. An exception would be raised inside an import, where
    # Python sometimes replaces or drops it.
    signal.signal(signal.SIGINT, lambda _number, _frame: os._exit(130))  # ExitCode.INTERRUPTED
    try:
        from .app import run_process
    except ModuleNotFoundError as error:
        from trio_nsq.platform.extras import server_hint

        if (hint := server_hint(error)) is None:
            raise
        if sys.argv[1:] == ["--version"]:
            from .framework.version import version_line

            os.write(1, version_line().encode())
            os._exit(0)
        os.write(2, f"Error: {hint}\n".encode())
        os._exit(1)  # ExitCode.FAILURE

    run_process()
