"""The failures of commands that talk to brokers and discovery services: no answer, no TLS, a refusal."""

from __future__ import annotations

import http
from typing import TYPE_CHECKING

from ..framework.errors import ExitCode, Failure, chain, reason_of
from ..framework.params import Source, is_https, is_unix_path
from .address_options import HTTP_OPTION, LOOKUPD_OPTION, TCP_OPTION

if TYPE_CHECKING:
    from trio_nsq.client import BrokerUnreachable, ConnectionFailed, RequestRefused

NO_ANSWER = "connected, but no answer"
"""How a reason begins, also one of the library, if something listens and then says nothing."""

CANNOT_BE_READ = "cannot be read by sequence or time"
"""What is said of a broker that does not have the requests for it; see `refusal`."""

_FOR_THE_USER = ("INVALID_SETTING: ", "INVALID_ID: ")
"""Codes in front of sentences that say all there is to say."""


class NotFound(Failure):
    """A broker has no such topic or channel; another broker may have it."""


class ChannelNotFound(NotFound):
    """There is no such channel."""


class Refused(Failure):
    """The broker answered a request over HTTP, but not with success.

    Attributes:
        text: NSQ's code, such as `TOPIC_NOT_FOUND`, or what else it said.
    """

    def __init__(self, address: str, status: int, text: str) -> None:
        super().__init__(f"The broker at {address} refused with HTTP status {status}: {text}.")
        self.text = text


def unreachable(address: str, option: str, reason: object) -> Failure:
    """No broker was found, or one that does not answer (see `NO_ANSWER`); `option` names another address."""
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


def lookupd_unreachable(address: str, reason: str) -> Failure:
    """No discovery service was found."""
    return Failure(
        f"No nsqlookupd answers at {address}: {reason}. Start one with 'qcli lookupd', or name another address with "
        f"{LOOKUPD_OPTION}.",
        ExitCode.UNREACHABLE,
    )


def not_a_broker(address: str) -> Failure:
    """What answered a request over HTTP is no broker."""
    guess = "Is it the TCP port, or another program's?"
    if not is_https(address):
        guess = f"Is it the TCP port, that of HTTPS (then write https://{address}), or an nsqlookupd's?"
    return Failure(
        f"What answers at {address} is not an NSQ broker's HTTP port. {guess} See {HTTP_OPTION}.",
        ExitCode.UNREACHABLE,
    )


def hung_up(address: str) -> str:
    """Why there was no answer at all to a request in the clear, probably: ports of TLS hang up when they get one."""
    return f"it hung up. Is it the port of HTTPS (then write https://{address})?"


def tls_failure(address: str, error: BaseException) -> Failure | None:
    """TLS failed, as an `ssl.SSLError` among the causes of the error says; None: there is none."""
    import ssl

    for cause in chain(error):
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


def connection_failure(error: ConnectionFailed, address: str | None = None) -> Failure:
    """No TCP connection could be opened, at the address that the error names, or at this one."""
    from trio_nsq.client import BrokerError
    from trio_nsq.protocol import FrameError

    address = address or error.address
    cause = error.__cause__
    if isinstance(cause, BrokerError):
        hint = " Say --tls." if "TLS required" in cause.text else ""
        return Failure(f"The broker at {address} refused: {cause}.{hint}")
    if failure := tls_failure(address, error):
        return failure
    # These two are no errors of the protocol; the library knows them by their words only.
    if "requires authentication" in error.reason:
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
        return Failure(
            f"What answers at {address} is not an NSQ broker's TCP port. Is it the HTTP port, or another program's? "
            f"See {TCP_OPTION}.",
            ExitCode.UNREACHABLE,
        )
    return unreachable(address, TCP_OPTION, reason_of(cause) if isinstance(cause, OSError) else error.reason)


def http_failure(error: RequestRefused | BrokerUnreachable) -> Failure:
    """A request over HTTP failed: the broker refused, did not answer, or is none."""
    from trio_nsq.client.errors import NotABroker, RequestRefused

    address = error.address
    if isinstance(error, RequestRefused) and error.text == "TLS_REQUIRED":
        return Failure(
            f"The broker at {address} wants TLS: write {HTTP_OPTION} https://HOST:PORT, with its --https-address."
        )
    if isinstance(error, NotABroker) and error.status in (0, http.HTTPStatus.NOT_FOUND):
        return not_a_broker(address)  # a broker would say what it did not find
    if isinstance(error, RequestRefused | NotABroker):
        return Refused(address, error.status, error.text)
    if failure := tls_failure(address, error):
        return failure
    reason = error.reason
    if error.cause is not None and not isinstance(error.cause, TimeoutError):
        reason = reason_of(error.cause)
    if isinstance(error.cause, ConnectionResetError) and not (is_https(address) or is_unix_path(address)):
        reason = hung_up(address)
    return unreachable(address, HTTP_OPTION, reason)


def not_found(address: str, wanted: Source, text: str) -> NotFound | None:
    """What a broker's code says that is about a topic or channel; None: it is another code."""
    if text == "TOPIC_NOT_FOUND":
        return NotFound(f"There is no topic {wanted.topic} on {address}.")
    if text == "CHANNEL_NOT_FOUND":
        if wanted.channel is None:  # the one that a dead-letter topic has
            return NotFound(f"Topic {wanted.topic} on {address} never had a dead letter.")
        return ChannelNotFound(f"There is no channel {wanted} on {address}.")
    return None


def refusal(address: str, wanted: Source, text: str, what: str) -> Failure | None:
    """What a broker's code says, to a request that only `qcli serve` has and not nsqd; None: it is another code.

    `what` is said of a broker that does not have the request, such as `has no dead letters`.
    """
    if text == "NOT_FOUND":  # that is, the endpoint
        return Failure(f"The broker at {address} {what}: it is an nsqd, or an older 'qcli serve'.")
    for code in _FOR_THE_USER:
        if text.startswith(code):
            return Failure(f"{text.removeprefix(code)}.")
    return not_found(address, wanted, text)


def read_failure(error: RequestRefused) -> Failure:
    """The broker refused to have a topic's log read."""
    return refusal(error.address, Source(error.topic, None), error.text, CANNOT_BE_READ) or http_failure(
        error
    )
