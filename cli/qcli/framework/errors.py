"""Exit codes of all commands, and the conversion of errors into a message and an exit code.

The manual page of each command lists its codes, from here.
"""

import errno
import os
import traceback
from collections.abc import Iterator
from enum import IntEnum

import click


class ExitCode(IntEnum):
    """Exit status of `qcli`.

    2 is click's code for a usage error; 130 and 143 are 128 + the number of the signal, as in shells.
    """

    OK = 0, "Success; also if the reader of standard output closed it early."
    FAILURE = 1, "Failure; the reason is on standard error."
    USAGE = 2, "The command line is wrong."
    UNREACHABLE = 3, "No broker answers at the address."
    PARTIAL = 4, "Failure after a part was done; standard error says which part."
    DAMAGED = 5, "Data on disk is damaged; the output says what."
    MISSING = 6, "Messages are no longer retained; the output says which."
    CHANGES = 7, "There is something to change; the output says what."
    INTERRUPTED = 130, "Interrupted (SIGINT)."
    TERMINATED = 143, "Terminated (SIGTERM)."

    meaning: str
    """The default text; a command may have a more specific one."""

    def __new__(cls, value: int, meaning: str) -> "ExitCode":
        code = int.__new__(cls, value)
        code._value_ = value
        code.meaning = meaning
        return code


class Failure(Exception):
    """The command ends with this message on standard error and this exit code.

    Attributes:
        message: What failed, why, and what to do.
        brief: What failed and why, for a list of several failures.
    """

    def __init__(self, message: str, code: ExitCode = ExitCode.FAILURE, *, brief: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.exit_code = code
        self.brief = brief or message


class OutputClosed(Exception):
    """The reader of standard output closed it: the command ends silently, as a success."""


class Terminated(BaseException):
    """SIGTERM arrived while a command was running that does not handle it."""


def reason_of(error: BaseException) -> str:
    """Return the text of an OS error, without its number and file names."""
    for cause in chain(error):
        if isinstance(cause, OSError) and cause.errno and cause.errno > 0:
            return os.strerror(cause.errno).lower()
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror.lower()  # name resolution has its own numbers
    return str(error) or type(error).__name__


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, its causes, and the members of groups among them; outermost first."""
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


def causes_of(error: BaseException) -> str:
    """Return the traces of what led to a failure, without secrets."""
    from trio_nsq.access.secret import redacted

    return redacted("".join(traceback.format_exception(error.__cause__ or error))).rstrip()


def leaf_exceptions(error: BaseException) -> list[BaseException]:
    """Return the errors in a group, at any depth; for another error, the error itself."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for member in error.exceptions for leaf in leaf_exceptions(member)]
    return [error]


def translate(error: BaseException) -> Failure | click.ClickException | OutputClosed | None:
    """Return how the command ends because of this error; None: a bug in qcli, which is shown with its traceback."""
    # Errors of concurrent tasks arrive together; the first known one is the reason.
    for leaf in leaf_exceptions(error):
        if isinstance(leaf, (Failure, click.ClickException, OutputClosed)):
            return leaf
        if isinstance(leaf, BrokenPipeError):
            return OutputClosed()
    for leaf in leaf_exceptions(error):
        if isinstance(leaf, ModuleNotFoundError):
            from trio_nsq.platform.extras import (
                server_hint,  # not above: most commands do not import the library
            )

            if (hint := server_hint(leaf)) is not None:
                return Failure(hint)
        if isinstance(leaf, OSError) and leaf.errno is not None:
            return Failure(_os_error(leaf))
        # By name, because commands without a broker do not import the library.
        if any(base.__name__ == "NSQError" for base in type(leaf).__mro__):
            return Failure(str(leaf))
    return None


def _os_error(error: OSError) -> str:
    text = os.strerror(error.errno or 0)
    if error.errno == errno.EMFILE:
        return f"{text}: raise the limit with 'ulimit -n'."
    if error.errno == errno.ENOTDIR and error.filename:
        return f"{error.filename}: {text}. Name another folder."
    return f"{error.filename}: {text}" if error.filename else text
