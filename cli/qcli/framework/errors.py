"""How a command ends: the exit codes of all commands, and errors as a line for the user and an exit code.

The `--help` and the manual page of each command list the codes it can give, from here.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from enum import IntEnum
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from trio_nsq.client import ConnectionFailed


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


class Failure(Exception):
    """The command ends with this message on standard error and this exit code.

    Args:
        message: Whose fault it was and what to do about it, in a sentence or two.
        code: The exit status.
    """

    def __init__(self, message: str, code: ExitCode = ExitCode.FAILURE) -> None:
        super().__init__(message)
        self.message = message
        self.exit_code = code


class NotFound(Failure):
    """A broker has no such topic or channel; another broker may have it."""


class OutputClosed(Exception):
    """The reader of standard output is gone: the command ends quietly, as a success."""


class Terminated(BaseException):
    """SIGTERM arrived while a command was running that does not watch for it."""


NO_ANSWER = "connected, but no answer"
"""How a reason begins, the library's too, if something listens and then says nothing."""


def unreachable(address: str, option: str, reason: object) -> Failure:
    """The failure of a command that found no broker, or one that does not answer (see `NO_ANSWER`).

    Args:
        address: Where it looked.
        option: The option that names another address.
        reason: What the attempt came to.
    """
    if str(reason).startswith(NO_ANSWER):
        return Failure(
            f"The broker at {address} does not answer: {reason}. It runs, but is stopped (SIGSTOP), overloaded, or "
            f"waits for its disk: look at its log. Or name another address with {option}.",
            ExitCode.UNREACHABLE,
        )
    end = "" if str(reason).endswith("?") else "."
    return Failure(
        f"No broker answers at {address}: {reason}{end} "
        f"Start one with 'qcli serve', or name another address with {option}.",
        ExitCode.UNREACHABLE,
    )


def lookupd_unreachable(address: str, reason: object) -> Failure:
    """The failure of a command that found no discovery service.

    Args:
        address: Where it looked.
        reason: What the attempt came to.
    """
    return Failure(
        f"No nsqlookupd answers at {address}: {reason}. Start one with 'qcli lookupd', or name another address with "
        "--lookupd-http-address.",
        ExitCode.UNREACHABLE,
    )


def not_a_broker(address: str, option: str, wanted: str, other: str) -> Failure:
    """The failure of a command that was answered by something else than a broker.

    Args:
        address: Where it looked.
        option: The option that names another address.
        wanted: Which of a broker's ports it needs, `TCP` or `HTTP`.
        other: The one that the user may have named instead.
    """
    guess = f"Is it the {other} port, or another program's?"
    if wanted == "HTTP" and not address.startswith("https://"):
        guess = f"Is it the {other} port, that of HTTPS (then write https://{address}), or an nsqlookupd's?"
    return Failure(
        f"What answers at {address} is not an NSQ broker's {wanted} port. {guess} See {option}.",
        ExitCode.UNREACHABLE,
    )


def hung_up(address: str) -> str:
    """Why there was no answer at all to a request in the clear, probably. Ports of TLS hang up when they get one.

    Args:
        address: `host:port`.
    """
    return f"it hung up. Is it the port of HTTPS (then write https://{address})?"


def https_required(address: str, option: str) -> Failure:
    """The failure of a command that spoke to a broker in the clear which does not want that.

    Args:
        address: Where it looked.
        option: The option that names another address.
    """
    return Failure(
        f"The broker at {address} wants TLS: write {option} https://HOST:PORT, with its --https-address."
    )


def tls_failure(address: str, error: BaseException) -> Failure | None:
    """The failure of a command that could not speak TLS with a broker; None if that is not what happened.

    Args:
        address: Where it looked.
        error: What came of it; an `ssl.SSLError` is among its causes.
    """
    import ssl

    for cause in _chain(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            why = f"its certificate is not trusted: {cause.verify_message}. See --tls-root-ca-file."
        elif isinstance(cause, ssl.SSLError):
            why = f"{(cause.reason or str(cause)).lower().replace('_', ' ')}."
            why += " See --tls-cert." if "certificate" in why else ""
            why += " Is that the port of plain HTTP?" if "wrong version number" in why else ""
        else:
            continue
        return Failure(f"No TLS with the broker at {address}: {why}", ExitCode.UNREACHABLE)
    return None


def connection_failure(address: str, option: str, error: ConnectionFailed) -> Failure:
    """The failure of a command that could not open its connection, whatever the reason.

    Args:
        address: Where it looked.
        option: The option that names another address.
        error: What the library said.
    """
    from trio_nsq.client import BrokerError
    from trio_nsq.protocol import FrameError

    cause = error.__cause__
    if isinstance(cause, BrokerError):
        hint = " Say --tls." if "TLS required" in cause.text else ""
        return Failure(f"The broker at {address} refused: {cause}.{hint}")
    if failure := tls_failure(address, error):
        return failure
    # These two are no errors of the protocol; the library knows them by their words only.
    if "give auth_secret" in error.reason:
        return Failure(
            f"The broker at {address} wants to know who we are: give --auth-secret, or QCLI_CLIENT_AUTH_SECRET."
        )
    if "does not offer TLS" in error.reason:
        return Failure(
            f"The broker at {address} does not offer TLS, and nothing is to be sent in the clear; --no-tls allows it."
        )
    # What is no frame, or no answer to IDENTIFY; a UnicodeError is about the host's name.
    if isinstance(cause, (FrameError, ValueError, TypeError, AttributeError)) and not isinstance(
        cause, UnicodeError
    ):
        return not_a_broker(address, option, "TCP", "HTTP")
    return unreachable(address, option, reason_of(cause) if isinstance(cause, OSError) else error.reason)


def reason_of(error: BaseException) -> str:
    """What an OS error says, without its number and file names."""
    for cause in _chain(error):
        if isinstance(cause, OSError) and cause.errno and cause.errno > 0:
            return os.strerror(cause.errno).lower()
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror.lower()  # name resolution has numbers of its own
    return str(error) or type(error).__name__


def _chain(error: BaseException) -> Iterator[BaseException]:
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
    """Say how the command ends because of this error.

    Returns:
        None for a bug in qcli, which is shown with its traceback.
    """
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
