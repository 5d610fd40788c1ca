"""How a command ends: the exit codes of all commands, and errors as a line for the user and an exit code.

The `--help` and the manual page of each command list the codes it can give, from here.
"""

import errno
import os
from collections.abc import Iterator
from enum import IntEnum

import click


class ExitCode(IntEnum):
    """Exit status of `qcli`.

    2 is what click gives for a usage error; 130 and 143 are 128 + the number of the signal, as shells report a
    process that a signal ended.
    """

    OK = 0, "All was done. Also when the reader of standard output went away early."
    FAILURE = 1, "It could not be done; the reason is on standard error."
    USAGE = 2, "The command line is wrong."
    UNREACHABLE = 3, "No broker answers at the address, or what answers is none."
    PARTIAL = 4, "Part of it was done, then it failed; what was done is on standard error."
    DAMAGED = 5, "Something on disk is damaged; what it is was said."
    INTERRUPTED = 130, "Interrupted (SIGINT)."
    TERMINATED = 143, "Terminated (SIGTERM)."

    meaning: str
    """What it says unless a command says it more exactly."""

    def __new__(cls, value: int, meaning: str) -> "ExitCode":
        code = int.__new__(cls, value)
        code._value_ = value
        code.meaning = meaning
        return code


class Failure(Exception):
    """The command ends with this message, what to do about it included, on standard error, and this exit code."""

    def __init__(self, message: str, code: ExitCode = ExitCode.FAILURE) -> None:
        super().__init__(message)
        self.message = message
        self.exit_code = code


class OutputClosed(Exception):
    """The reader of standard output is gone: the command ends quietly, as a success."""


class Terminated(BaseException):
    """SIGTERM arrived while a command was running that does not watch for it."""


def reason_of(error: BaseException) -> str:
    """What an OS error says, without its number and file names."""
    for cause in chain(error):
        if isinstance(cause, OSError) and cause.errno and cause.errno > 0:
            return os.strerror(cause.errno).lower()
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror.lower()  # name resolution has numbers of its own
    return str(error) or type(error).__name__


def chain(error: BaseException) -> Iterator[BaseException]:
    """The error, its causes, and the members of the groups among them; outermost first."""
    pending: list[BaseException] = [error]
    seen: set[int] = set()
    while pending:
        current = pending.pop(0)
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        if isinstance(current, BaseExceptionGroup):
            pending.extend(current.exceptions)
        pending.extend(cause for cause in (current.__cause__, current.__context__) if cause is not None)


def leaf_exceptions(error: BaseException) -> list[BaseException]:
    """The errors in a group, however deeply nested; of a lone error, itself."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for member in error.exceptions for leaf in leaf_exceptions(member)]
    return [error]


def translate(error: BaseException) -> Failure | click.ClickException | OutputClosed | None:
    """Say how the command ends because of this error; None: it is a bug in qcli, which is shown with its traceback."""
    # Errors of tasks that ran side by side arrive together; the first that can be explained is the reason.
    for leaf in leaf_exceptions(error):
        if isinstance(leaf, (Failure, click.ClickException, OutputClosed)):
            return leaf
        if isinstance(leaf, BrokenPipeError):
            return OutputClosed()
    for leaf in leaf_exceptions(error):
        if isinstance(leaf, OSError) and leaf.errno is not None:
            return Failure(_os_error(leaf))
        # Only a command that talks to a broker has imported the library by now.
        if any(base.__name__ == "NSQError" for base in type(leaf).__mro__):
            return Failure(str(leaf))
    return None


def _os_error(error: OSError) -> str:
    text = os.strerror(error.errno or 0)
    if error.errno == errno.EMFILE:
        return f"{text}: raise the limit with 'ulimit -n'."
    return f"{error.filename}: {text}" if error.filename else text
