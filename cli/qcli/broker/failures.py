"""Failures of requests to brokers and discovery services: unreachable, TLS errors, refusals."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterable
from http import HTTPStatus
from typing import TYPE_CHECKING

from trio_nsq.protocol.address import is_unix_path
from trio_nsq.text.wording import printable, untrusted_certificate

from ..framework.errors import ExitCode, Failure, chain, reason_of
from ..framework.output import is_terminal, print_diagnostic
from ..framework.params import Source, is_https, without_scheme
from .address_options import HTTP_OPTION, LOOKUPD_OPTION, TCP_OPTION
from .connection_options import ConnectOptions
from .wrong_ports import HTTP_OF_BROKER, TLS_PORT, what_listens

if TYPE_CHECKING:
    import trio

    from trio_nsq.client import BrokerError, BrokerUnreachable, ConnectionFailed, RequestRefused
    from trio_nsq.client.http.broker_http import BrokerHTTP

NO_ANSWER = "connected, but no answer"
"""The beginning of a reason, also of the library's, if a connection was accepted and nothing was sent."""


SLOW_S = 2.0
"""After this time without an answer, a note says on a terminal what the command waits for."""

_GIVE_SECRET = "Give --auth-secret-file, or set QCLI_CLIENT_AUTH_SECRET_FILE."
_GIVE_OTHER_SECRET = "Use another one: --auth-secret-file, or QCLI_CLIENT_AUTH_SECRET_FILE."
_DENIED = re.compile('AUTH failed for ([A-Z]+) on "(.*)" "(.*)"')
"""The text of nsqd and of this broker for a denied command, with its verb, topic and channel."""


class Refused(Failure):
    """The broker answered an HTTP request with an error.

    Attributes:
        status: Of HTTP.
        text: NSQ's code, such as `TOPIC_NOT_FOUND`, or another text.
    """

    def __init__(self, address: str, status: int, text: str) -> None:
        from trio_nsq.client.errors import meaning_of

        text = printable(text)  # of the broker: a line break could look like another message
        meaning = f": {found}" if (found := meaning_of(text)) else ""
        super().__init__(
            access_refusal(f"The broker at {address}", text)
            or _one_process(address, text)
            or f"The broker at {address} refused with HTTP status {status}: {text}{meaning}."
        )
        self.status = status
        self.text = text

    @property
    def is_about_secret(self) -> bool:
        """Whether the broker requires a secret, or refused it or what it is for."""
        return self.text.startswith(("AUTH_REQUIRED", "INVALID_TOKEN", "FORBIDDEN"))


def _one_process(address: str, text: str) -> str | None:
    """Return what to do about a request that several processes behind one address refuse; None: another answer."""
    if not text.startswith("ONE_PROCESS: ") or not (processes := text.rpartition(" ")[2]):
        return None
    return (
        f"Several processes share {address} ('qcli serve --processes'), and this needs the address of each: "
        f"{HTTP_OPTION} {processes}"
    )


def access_refusal(server: str, text: str) -> str | None:
    """Return sentences about the code of an HTTP answer that concerns access: the reason, and what to do.

    Args:
        server: The subject of the first sentence, such as `The broker at 127.0.0.1:4151`.

    Returns None: the code is about something else.
    """
    code, _, detail = text.partition(": ")
    if code == "FORBIDDEN":
        _, found, needs = detail.partition("this needs ")
        if not found:
            return f"{server} allows this to no secret."
        return f"{server} refused: your secret does not have {needs}. Use another one, or have it granted the role."
    if code == "HOST_NOT_ALLOWED":
        name = detail.partition(" is not ")[0]
        return f"{server} has no name {name}. Use its IP address, or add the name to its --http-allowed-host."
    return {
        "AUTH_REQUIRED": f"{server} requires a secret. {_GIVE_SECRET}",
        "INVALID_TOKEN": f"{server} rejected your secret: it is unknown, expired or revoked. {_GIVE_OTHER_SECRET}",
        "AUTH_UNAVAILABLE": f"{server} cannot verify your secret: its auth servers do not answer. Try again later.",
        "READ_ONLY": f"{server} allows no changes over HTTP: it runs with --http-read-only.",
        "NOT_FOR_WEB_PAGES": f"{server} takes this for a request of a foreign web page. A proxy may add its headers. "
        "Authenticate with --auth-secret-file.",
    }.get(code)


def unreachable(address: str, option: str, reason: object) -> Failure:
    """Return the failure for an unreachable broker, or one that does not answer; `option` sets another address."""
    reason = printable(str(reason))
    if reason.startswith(NO_ANSWER):
        brief = f"The broker at {address} does not answer: {reason}."
        return Failure(
            f"{brief} It may be stopped (SIGSTOP), overloaded, or waiting for its disk: see its log. Or use another "
            f"address: {option}.",
            ExitCode.UNREACHABLE,
            brief=brief,
        )
    end = "" if reason.endswith("?") else "."
    waiting = ""
    if "connection refused" in reason.lower():
        waiting = " 'qcli stat --once --wait 10s' waits for a broker that is starting."
    brief = f"No broker answers at {address}: {reason}{end}"
    return Failure(
        f"{brief} Start a broker with 'qcli serve', or use another address: {option}.{waiting}",
        ExitCode.UNREACHABLE,
        brief=brief,
    )


def not_a_lookupd(address: str) -> Failure:
    what = what_listens(address)
    guess = f", but {what}." if what else ". Is it a broker's, or the TCP port?"
    return Failure(
        f"{address} is not the HTTP port of an nsqlookupd{guess} See {LOOKUPD_OPTION}.", ExitCode.UNREACHABLE
    )


def lookupd_unreachable(address: str, reason: str) -> Failure:
    from trio_nsq.lookup.query import WRONG_PORT

    if reason.endswith(WRONG_PORT) or (_may_be_wrong_port(reason) and what_listens(address)):
        return not_a_lookupd(address)
    reason = printable(reason)
    if text := access_refusal(f"The nsqlookupd at {address}", reason.partition(": ")[2]):
        return Failure(text)
    return Failure(
        f"No nsqlookupd answers at {address}: {reason}. Start one with 'qcli lookupd', or use another address: "
        f"{LOOKUPD_OPTION}.",
        ExitCode.UNREACHABLE,
        brief=f"nsqlookupd {address}: {reason}",
    )


def not_a_broker(address: str) -> Failure:
    guess = ". Is it the TCP port, or another program's?"
    if what := what_listens(address):
        guess = f", but {what}." + (f" Write https://{address}." if what == TLS_PORT else "")
    elif not is_https(address):
        guess = f". Is it the TCP port, that of HTTPS (then write https://{address}), or an nsqlookupd's?"
    return Failure(
        f"{address} is not the HTTP port of an NSQ broker{guess} See {HTTP_OPTION}.",
        ExitCode.UNREACHABLE,
    )


def check_broker(http: BrokerHTTP) -> None:
    """Ask what listens, before a change: a discovery service takes some of a broker's requests for its own.

    A server that refuses to tell refuses the change too.

    Raises:
        Failure: It is no broker.
        BrokerUnreachable: No server answers.
    """
    from trio_nsq.api.broker import info as api_info
    from trio_nsq.client.errors import NotABroker, RequestRefused

    try:
        info = http.ask(api_info())
    except NotABroker as error:
        if error.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            return
        raise not_a_broker(http.address) from error
    except RequestRefused as error:
        if error.text != "NOT_FOUND":  # every broker has this path
            return
        raise not_a_broker(http.address) from error
    if "tcp_port" not in info:
        raise not_a_broker(http.address)


def _may_be_wrong_port(reason: str) -> bool:
    """Whether a server hung up, as those of other protocols do."""
    return any(each in reason for each in ("reset by peer", "connection was lost", "disconnected"))


def hung_up(address: str) -> str:
    """Return the probable reason for a closed connection: TCP and TLS ports close it after a plain HTTP request."""
    return (
        f"it closed the connection. Is it the TCP port, or the port of HTTPS (then write https://{address})?"
    )


def tls_failure(address: str, error: BaseException) -> Failure | None:
    """Return the failure if an `ssl.SSLError` is among the causes of the error; else None."""
    import ssl

    from trio_nsq.tls.errors import alert_meaning
    from trio_nsq.tls.errors import reason_of as reason_of_tls

    for cause in chain(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            why = f"{untrusted_certificate(cause.verify_message)}. {_about_certificate(cause.verify_code)}"
        elif isinstance(cause, ssl.SSLError):
            reason = reason_of_tls(cause)
            meaning = alert_meaning(reason)
            why = f"{meaning} ({reason})." if meaning else f"{reason}."
            why += " See --tls-cert." if "certificate" in why else ""
            why += _about_plain_port(address) if "wrong version number" in why else ""
        else:
            continue
        return Failure(f"TLS with the broker at {address} failed: {why}", ExitCode.UNREACHABLE)
    return None


_WRONG_TIME = (9, 10)
_WRONG_NAME = (62, 64)
"""Codes of OpenSSL: the certificate is not yet valid or has expired; it lacks the host name or the IP address."""


def _about_certificate(verify_code: int) -> str:
    """Return what to do about a broker's certificate that is not trusted."""
    if verify_code in _WRONG_TIME:
        return "Renew it, or correct the clock of this machine."
    if verify_code in _WRONG_NAME:
        return "Use a name or an address that it contains, or add this one to its subjectAltName."
    return "Give its CA: --tls-root-ca-file."


def _about_plain_port(address: str) -> str:
    plain = without_scheme(address)
    what = what_listens(plain)
    if is_https(address) and what.startswith(HTTP_OF_BROKER):
        return f" It is the port of plain HTTP: write http://{plain}, or the broker's --https-address."
    return f" It is {what}." if what else " Is that the port of plain HTTP?"


def refused(broker: str, error: BrokerError) -> str:
    """Return sentences about an error of the TCP protocol: the reason, and what to do.

    Args:
        broker: The subject of the first sentence, such as `The broker at 127.0.0.1:4150`.
    """
    if "TLS required" in error.text:
        return (
            f"{broker} requires TLS. Use --tls, and --tls-root-ca-file if its certificate is of a private CA."
        )
    if error.code == "E_AUTH_FIRST":
        if ConnectOptions.of_command().auth_secret:  # the broker accepted it before
            return f"{broker} rejected your secret: the token is expired or revoked. {_GIVE_OTHER_SECRET}"
        return f"{broker} requires AUTH. {_GIVE_SECRET}"
    if error.code == "E_AUTH_FAILED":
        if reason := error.text.partition(": ")[2]:
            return f"{broker} rejected your secret: {reason}. {_GIVE_OTHER_SECRET}"
        return (
            f"{broker} could not verify your secret: its auth server rejected the secret or did not answer. "
            "The broker's log has the reason."
        )
    if error.code == "E_UNAUTHORIZED":
        if (denied := _DENIED.search(error.text)) is None:
            return f"{broker} rejected your secret: it has no rights. {_GIVE_OTHER_SECRET}"
        verb, topic, channel = denied.groups()
        action = f"consume {Source(topic, channel)}" if verb == "SUB" else f"publish to {topic}"
        role = "consume" if verb == "SUB" else "publish"
        return f"{broker} does not allow you to {action}. Use another secret, or have this one granted the role {role}."
    text = f"{broker} refused: {f'{error.code} {error.text}'.rstrip()}."
    if error.code == "E_BAD_MESSAGE" and "too big" in error.text:
        text += " Its limits are --max-msg-size and --max-body-size of 'qcli serve' and nsqd."
    elif os.strerror(errno.ENOSPC) in error.text:
        text += " Free space on the broker's disk, or delete messages: 'qcli topic empty'."
    return text


def connection_failure(
    error: ConnectionFailed, address: str | None = None, option: str = TCP_OPTION
) -> Failure:
    """Return the failure for a TCP connection to the error's address, or to this one; `option` sets another."""
    from trio_nsq.client import BrokerError
    from trio_nsq.client.errors import ConnectionLost
    from trio_nsq.protocol import FrameError

    address = address or error.address
    cause = error.__cause__
    if isinstance(cause, BrokerError):
        return Failure(refused(f"The broker at {address}", cause))
    if failure := tls_failure(address, error):
        return failure
    # The library has no types for these two errors, only their texts.
    if "requires authentication" in error.reason:
        return Failure(f"The broker at {address} requires AUTH. {_GIVE_SECRET}")
    if "does not offer TLS" in error.reason:
        return Failure(
            f"The broker at {address} does not offer TLS. To connect without encryption, use --no-tls; to offer it, "
            "give the broker --tls-cert and --tls-key."
        )
    # Not a frame, or not an answer to IDENTIFY. A UnicodeError is about the host's name.
    is_other = isinstance(cause, FrameError | ValueError | TypeError | AttributeError)
    # A broker that is stopping closes connections, too.
    hung_up_on = any(isinstance(each, ConnectionLost | ConnectionResetError) for each in chain(error))
    what = what_listens(address) if hung_up_on else ""
    if what == TLS_PORT or (is_other and not isinstance(cause, UnicodeError)):
        what = what or what_listens(address)
        guess = f", but {what}." if what else ". Is it the HTTP port, or another program's?"
        return Failure(
            f"{address} is not the TCP port of an NSQ broker{guess} See {option}.", ExitCode.UNREACHABLE
        )
    return unreachable(address, option, reason_of(cause) if isinstance(cause, OSError) else error.reason)


def reason_unreachable(error: BrokerUnreachable) -> str:
    """Return why no server answered an HTTP request; the library's texts of timeouts name the step."""
    if error.cause is None or isinstance(error.cause, TimeoutError):
        return error.reason
    return reason_of(error.cause)


def http_failure(error: RequestRefused | BrokerUnreachable) -> Failure:
    """Return the failure for an HTTP request that was refused or not answered, or answered by another program."""
    from trio_nsq.client.errors import NotABroker, RequestRefused

    address = error.address
    if isinstance(error, RequestRefused) and error.text == "TLS_REQUIRED":
        return Failure(
            f"The broker at {address} requires TLS: write {HTTP_OPTION} https://HOST:PORT, with its --https-address."
        )
    if isinstance(error, NotABroker) and error.status in (0, HTTPStatus.NOT_FOUND):
        return not_a_broker(address)  # a broker's answer would have a code
    if isinstance(error, RequestRefused | NotABroker):
        return Refused(address, error.status, error.text)
    if failure := tls_failure(address, error):
        return failure
    reason = reason_unreachable(error)
    if isinstance(error.cause, ConnectionResetError) and not (is_https(address) or is_unix_path(address)):
        if what_listens(address):
            return not_a_broker(address)
        reason = hung_up(address)
    return unreachable(address, HTTP_OPTION, reason)


async def note_if_slow(addresses: Iterable[str], answered: trio.Event) -> None:
    """Say on a terminal, once, that servers have not answered for `SLOW_S`.

    Args:
        addresses: Those that have not answered, after this time.
        answered: Set before that if all have answered: then this returns.
    """
    import trio

    with trio.move_on_after(SLOW_S):
        await answered.wait()
        return
    if is_terminal(sys.stderr):
        print_diagnostic(
            f"Note: no answer yet from {', '.join(addresses)}. A member of a cluster waits up to 30 s for a leader. "
            "Ctrl-C ends."
        )
