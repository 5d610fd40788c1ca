"""What the exit status of a command means: one enum for all of them.

Each command's `--help` and manual page list the codes it can give, from here.
"""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit status of `qcli`.

    2 is what click gives for a usage error; 130 and 143 are 128 + the number of the signal, as shells report a
    process that a signal ended.
    """

    OK = 0
    FAILURE = 1
    USAGE = 2
    UNREACHABLE = 3
    PARTIAL = 4
    DAMAGED = 5
    INTERRUPTED = 130
    TERMINATED = 143

    @property
    def meaning(self) -> str:
        """What it says unless a command says it more exactly."""
        return _MEANINGS[self]


_MEANINGS = {
    ExitCode.OK: "All was done. Also when the reader of standard output went away early.",
    ExitCode.FAILURE: "It could not be done; the reason is on standard error.",
    ExitCode.USAGE: "The command line is wrong.",
    ExitCode.UNREACHABLE: "No broker answers at the address, or what answers is none.",
    ExitCode.PARTIAL: "Part of it was done, then it failed; what was done is on standard error.",
    ExitCode.DAMAGED: "Something on disk is damaged; what it is was said.",
    ExitCode.INTERRUPTED: "Interrupted (SIGINT).",
    ExitCode.TERMINATED: "Terminated (SIGTERM).",
}
