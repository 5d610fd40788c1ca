"""qcli: one command in front of a message broker. `python -m qcli` is the same as `qcli`."""

from typing import NoReturn


def main() -> NoReturn:
    """Run the command line in `sys.argv` and end the process with its exit code."""
    # Imported here so that `import qcli` costs nothing.
    from .app import run_process

    run_process()
