"""Who may do what: services outside say it, and are asked over HTTP (NSQ protocol: AUTH).

`AuthClient` asks, `Authorizer` remembers the answer for one client. Nothing is ever allowed that nsqd would refuse.
"""

import importlib
import logging
import random
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlencode

import trio

from ...http.client import HTTPClient, RequestFailed
from ...protocol import CommandError, NSQError
from ...protocol.address import parse_address, without_secrets
from ...protocol.errors import quote
from ...protocol.go_json import GoObject, decode_object, encode_object
from ...protocol.limits import MIB
from ..errors import StartupError
from ..options import BrokerOptions

if TYPE_CHECKING:
    import httpx

    from .tls import TLSSession

logger = logging.getLogger("trio_nsq.broker")

PERMISSIONS = frozenset({"subscribe", "publish"})
MAX_ANSWER_BYTES = 1 * MIB
"""Of an auth server's answer, which is some hundred bytes for most; parsing one this long takes about 0.3 s."""


class AuthError(NSQError):
    """No auth server gave a valid answer. The text is for the log: the client is told no more than `AUTH failed`."""


# ---------------------------------------------------------------------- the answer


class Pattern(Protocol):
    """A compiled regular expression."""

    def fullmatch(self, text: str, /) -> object | None: ...


@dataclass(frozen=True, slots=True)
class Authorization:
    """One line of an answer: these permissions, on these topics and channels."""

    topic: Pattern
    channels: tuple[Pattern, ...]
    permissions: frozenset[str]


@dataclass(frozen=True, slots=True)
class Authorizations:
    """What one client may do.

    Attributes:
        identity: Who it is, in the auth server's words.
        identity_url: Where more can be read about it.
        expires_at: When to ask again: seconds on the clock that `parse_answer` was given the time of.
        authorizations: In the server's order.
    """

    identity: str
    identity_url: str
    expires_at: float
    authorizations: tuple[Authorization, ...]

    @property
    def permission_count(self) -> int:
        """How many authorizations there are; with none the client is refused."""
        return len(self.authorizations)

    def allows(self, topic: str, channel: str | None) -> bool:
        """Whether the client may subscribe to a channel or, if that is None, publish to the topic.

        A pattern has to match the whole name. As in nsqd the patterns for channels count for publishes, too, where
        they are held against the empty string: `.*` allows them, `archive` or no pattern at all does not. That
        surprises, but whoever relies on it must not find publishing allowed here.
        """
        permission = "publish" if channel is None else "subscribe"
        return any(
            permission in line.permissions
            and line.topic.fullmatch(topic)
            and any(pattern.fullmatch(channel or "") for pattern in line.channels)
            for line in self.authorizations
        )


def parse_answer(body: bytes, now: float) -> Authorizations:
    """Read an auth server's answer, `{"ttl", "identity", "identity_url", "authorizations"}`, as strictly as nsqd does.

    `now` is the time on the caller's clock, in seconds. Raises AuthError: something in the answer is not valid.
    """
    try:
        answer = decode_object(body)
        authorizations = tuple(_authorization(line) for line in answer.objects("authorizations"))
        ttl_s = answer.integer("ttl")
        identity, identity_url = answer.text("identity"), answer.text("identity_url")
    except ValueError as exc:
        raise AuthError(f"the answer is not valid: {exc}") from exc
    if ttl_s <= 0:
        raise AuthError(f"invalid TTL {ttl_s} (must be >0)")
    return Authorizations(identity, identity_url, now + ttl_s, authorizations)


def _authorization(line: GoObject) -> Authorization:
    permissions = frozenset(line.texts("permissions"))
    if unknown := permissions - PERMISSIONS:
        raise ValueError(f"unknown permission {min(unknown)}")
    channels = tuple(_compile("channel", pattern) for pattern in line.texts("channels"))
    return Authorization(_compile("topic", line.text("topic")), channels, permissions)


def _compile(what: str, pattern: str) -> Pattern:
    # RE2, as in nsqd, and not `re`: the same syntax is valid and means the same, and no pattern, however careless,
    # takes more than linear time on a name that a client chose. It keeps the patterns used last compiled.
    re2 = _re2()
    options = re2.Options()
    options.log_errors = False  # it would write them to standard error
    try:
        compiled: Pattern = re2.compile(pattern, options)
    except re2.error as exc:
        reason = exc.args[0].decode("utf-8", "replace")
        raise ValueError(f"unable to compile {what} {pattern!r}: {reason}") from None
    return compiled


def _re2() -> Any:  # the package has no type information
    return importlib.import_module("re2")


def auth_reply(authorizations: Authorizations) -> bytes:
    """The JSON that answers AUTH, keys in nsqd's order."""
    return encode_object(
        {
            "identity": authorizations.identity,
            "identity_url": authorizations.identity_url,
            "permission_count": authorizations.permission_count,
        }
    )


# ---------------------------------------------------------------------- asking


def encode_query(*, remote_ip: str, tls: bool, common_name: str, secret: bytes) -> str:
    """The query string of a request, its parameters in nsqd's order."""
    parameters: dict[str, str | bytes] = {
        "common_name": common_name,
        "remote_ip": remote_ip,
        "secret": secret,
        "tls": "true" if tls else "false",
    }
    return urlencode(parameters, errors="surrogateescape")


class AuthClient:
    """Asks the auth servers of a broker. It runs no tasks of its own.

    Args:
        options: Whom to ask, how long to wait, and whose certificates to trust.
        pick: Returns a random number below the one it is given: the server to ask first.

    Raises:
        StartupError: An address or the file of CAs cannot be used, or a package is missing.
    """

    def __init__(self, options: BrokerOptions, *, pick: Callable[[int], int] = random.randrange) -> None:
        try:
            _re2()
        except ModuleNotFoundError as exc:
            raise StartupError(
                "--auth-http-address needs the package google-re2, which is missing here: pip install google-re2"
            ) from exc
        self._services = [_service_url(address) for address in options.auth_http_addresses]
        self._pick = pick
        self._options = options
        self._client = _http_client(options)

    async def query(self, *, remote_ip: str, tls: bool, common_name: str, secret: bytes) -> Authorizations:
        """Ask what a client may do: one server, and then the others until one gives a valid answer.

        Takes up to the request timeout with each server, twice that with one that sends us to https.

        Args:
            remote_ip: The client's, without its port; empty if it has none.
            common_name: That of its certificate; empty without one.
            secret: What it sent with AUTH.

        Raises:
            AuthError: No server gave a valid answer.
        """
        query = encode_query(remote_ip=remote_ip, tls=tls, common_name=common_name, secret=secret)
        start = self._pick(len(self._services))
        failures = []
        for service in self._services[start:] + self._services[:start]:
            try:
                answer = await self._client.get(f"{service}?{query}")
                return parse_answer(answer, trio.current_time())
            except (RequestFailed, AuthError) as exc:
                failures.append(f"failed to auth against {without_secrets(str(service))} - {exc}")
        raise AuthError("; ".join(failures))

    async def reload(self) -> None:
        """Read the file of CAs again, for queries to come. Raises StartupError, and nothing is changed."""
        # The one before keeps no connections: it goes with the last of its queries.
        self._client = await trio.to_thread.run_sync(_http_client, self._options)

    async def aclose(self) -> None:
        """Let go of everything; queries under way fail."""
        await self._client.aclose()


def _http_client(options: BrokerOptions) -> HTTPClient:
    return HTTPClient(
        connect_timeout_s=options.http_client_connect_timeout_ms / 1000,
        request_timeout_s=options.http_client_request_timeout_ms / 1000,
        max_answer_bytes=MAX_ANSWER_BYTES,
        tls=_tls_context(options),
    )


def _service_url(address: str) -> "httpx.URL":
    import httpx

    try:
        if "://" in address:
            url = httpx.URL(address)
        else:
            parse_address(address, default_port=80)
            url = httpx.URL(f"http://{address}/auth")
    except (ValueError, httpx.InvalidURL) as exc:
        shown = without_secrets(address)
        # What it says may repeat a part of the password.
        reason = exc if shown == address else "not a URL; is the password percent-encoded?"
        raise StartupError(f"--auth-http-address: {shown}: {reason}") from None
    if url.scheme not in ("http", "https") or not url.host:
        shown = without_secrets(address)
        raise StartupError(f"--auth-http-address: {shown} is neither host:port nor an http or https URL")
    return url


def _tls_context(options: BrokerOptions) -> ssl.SSLContext:
    """For https to auth servers: TLS 1.2, or 1.3 if that is the oldest the broker speaks."""
    path = options.tls_root_ca_file
    try:
        context = ssl.create_default_context(cafile=path)
    except OSError as exc:  # ssl.SSLError is one
        reason = "not a PEM file of certificates" if isinstance(exc, ssl.SSLError) else exc.strerror
        raise StartupError(f"--tls-root-ca-file: {path}: {reason}") from exc
    if options.tls_min_version == "tls1.3":
        context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


# ---------------------------------------------------------------------- one client


class Authorizer:
    """Asks for one client, and remembers the answer until it expires. Without an `auth_client` everything is allowed.

    Attributes:
        authorizations: What it may do, once AUTH went well.
        idle: Everything is allowed: there is nobody to ask.
    """

    def __init__(self, auth_client: AuthClient | None, peer: str) -> None:
        self.authorizations: Authorizations | None = None
        self.idle = auth_client is None
        self._auth_client = auth_client
        self._peer = peer
        self._secret = b""
        self._tls: TLSSession | None = None

    async def authenticate(self, secret: bytes, tls: "TLSSession | None") -> bytes:
        """AUTH; returns the reply. Raises CommandError."""
        if self.authorizations is not None:
            raise CommandError("E_INVALID", "AUTH already set")
        if self._auth_client is None:
            raise CommandError("E_AUTH_DISABLED", "AUTH disabled")
        self._secret, self._tls = secret, tls
        authorizations = await self._ask(self._auth_client)
        if not authorizations.permission_count:
            raise CommandError("E_UNAUTHORIZED", "AUTH no authorizations found")
        self.authorizations = authorizations
        return auth_reply(authorizations)

    async def check(self, verb: str, topic: str, channel: str | None = None) -> None:
        """See to it that the client may subscribe to the channel or, without one, publish to the topic.

        Raises:
            CommandError: It may not, has not said who it is, or the auth servers do not say.
        """
        if self._auth_client is None:
            return
        if self.authorizations is None:
            raise CommandError("E_AUTH_FIRST", f"AUTH required before {verb}")
        if self.authorizations.expires_at <= trio.current_time():
            self.authorizations = await self._ask(self._auth_client)
        if not self.authorizations.allows(topic, channel):
            target = f"{quote(topic)} {quote(channel or '')}"
            raise CommandError("E_UNAUTHORIZED", f"AUTH failed for {verb} on {target}")

    async def _ask(self, auth_client: AuthClient) -> Authorizations:
        try:
            return await auth_client.query(
                remote_ip=self._peer.rpartition(":")[0].strip("[]"),
                tls=self._tls is not None,
                common_name=self._tls.common_name if self._tls is not None else "",
                secret=self._secret,
            )
        except AuthError as exc:
            logger.error("%s: AUTH failed: %s", self._peer, exc)
            raise CommandError("E_AUTH_FAILED", "AUTH failed") from exc
