"""Authorization (NSQ protocol: AUTH): asks auth servers over HTTP what a client may do.

`AuthClient` sends the queries, `Authorizer` caches the answer for one client. It never allows a command that nsqd
would refuse.
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
"""Limit of an auth server's answer. Most have some hundred bytes; parsing one of this size takes about 0.3 s."""


class AuthError(NSQError):
    """No auth server gave a valid answer. The text is for the log; the client gets only `AUTH failed`."""


# ---------------------------------------------------------------------- the answer


class Pattern(Protocol):
    """A compiled regular expression."""

    def fullmatch(self, text: str, /) -> object | None: ...


@dataclass(frozen=True, slots=True)
class Authorization:
    """One entry of an answer: permissions on matching topics and channels."""

    topic: Pattern
    channels: tuple[Pattern, ...]
    permissions: frozenset[str]


@dataclass(frozen=True, slots=True)
class Authorizations:
    """The permissions of one client.

    Attributes:
        identity: The client's identity according to the auth server.
        identity_url: A URL with more about the identity.
        expires_at: When to query again: seconds, by the clock of the caller of `parse_answer`.
        authorizations: The entries, in the server's order.
    """

    identity: str
    identity_url: str
    expires_at: float
    authorizations: tuple[Authorization, ...]

    @property
    def permission_count(self) -> int:
        """Number of authorizations. If it is 0, the client is refused."""
        return len(self.authorizations)

    def allows(self, topic: str, channel: str | None) -> bool:
        """Whether the client may subscribe to a channel or, if that is None, publish to the topic.

        A pattern must match the whole name. As in nsqd, a publish also needs a channel pattern that matches the empty
        string: `.*` allows it, `archive` or no pattern at all does not. This is surprising, but auth servers may rely
        on it.
        """
        permission = "publish" if channel is None else "subscribe"
        return any(
            permission in line.permissions
            and line.topic.fullmatch(topic)
            and any(pattern.fullmatch(channel or "") for pattern in line.channels)
            for line in self.authorizations
        )


def parse_answer(body: bytes, now: float) -> Authorizations:
    """Parse an auth server's answer, `{"ttl", "identity", "identity_url", "authorizations"}`, as strictly as nsqd does.

    `now` is the time by the caller's clock, in seconds. Raises AuthError: the answer is not valid.
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
    # RE2, not `re`: it has nsqd's syntax, and every pattern takes linear time on a name that a client chose. It caches
    # compiled patterns.
    re2 = _re2()
    options = re2.Options()
    options.log_errors = False  # RE2 would write them to stderr
    try:
        compiled: Pattern = re2.compile(pattern, options)
    except re2.error as exc:
        reason = exc.args[0].decode("utf-8", "replace")
        raise ValueError(f"unable to compile {what} {pattern!r}: {reason}") from None
    return compiled


def _re2() -> Any:  # the package has no type information
    return importlib.import_module("re2")


def auth_reply(authorizations: Authorizations) -> bytes:
    """Encode the JSON reply to AUTH, keys in nsqd's order."""
    return encode_object(
        {
            "identity": authorizations.identity,
            "identity_url": authorizations.identity_url,
            "permission_count": authorizations.permission_count,
        }
    )


# ---------------------------------------------------------------------- queries


def encode_query(*, remote_ip: str, tls: bool, common_name: str, secret: bytes) -> str:
    """Encode the query string of a request, parameters in nsqd's order."""
    parameters: dict[str, str | bytes] = {
        "common_name": common_name,
        "remote_ip": remote_ip,
        "secret": secret,
        "tls": "true" if tls else "false",
    }
    return urlencode(parameters, errors="surrogateescape")


class AuthClient:
    """Queries the auth servers of a broker. It runs no tasks.

    Args:
        options: The auth servers, timeouts and trusted CAs.
        pick: Returns a random number below its argument: the index of the server to query first.

    Raises:
        StartupError: An address or the CA file is invalid, or a package is missing.
    """

    def __init__(self, options: BrokerOptions, *, pick: Callable[[int], int] = random.randrange) -> None:
        try:
            _re2()
        except ModuleNotFoundError as exc:
            raise StartupError(
                "--auth-http-address needs the package google-re2, which is not installed: pip install google-re2"
            ) from exc
        self._services = [_service_url(address) for address in options.auth_http_addresses]
        self._pick = pick
        self._options = options
        self._client = _http_client(options)

    async def query(self, *, remote_ip: str, tls: bool, common_name: str, secret: bytes) -> Authorizations:
        """Query a client's permissions: from one server, then from the others until one gives a valid answer.

        Takes up to the request timeout for each server, and twice that for a server that redirects to https.

        Args:
            remote_ip: The client's IP address without the port; empty if it has none.
            common_name: The common name of the client's certificate; empty without one.
            secret: The body of AUTH.

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
        """Read the CA file again, for later queries. Raises StartupError and keeps the previous CAs."""
        # The previous client keeps no connections open, so it need not be closed.
        self._client = await trio.to_thread.run_sync(_http_client, self._options)

    async def aclose(self) -> None:
        """Close all connections. Running queries fail."""
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
        # The parser's error may repeat a part of the password.
        reason = exc if shown == address else "not a URL; is the password percent-encoded?"
        raise StartupError(f"--auth-http-address: {shown}: {reason}") from None
    if url.scheme not in ("http", "https") or not url.host:
        shown = without_secrets(address)
        raise StartupError(f"--auth-http-address: {shown} is neither host:port nor an http or https URL")
    return url


def _tls_context(options: BrokerOptions) -> ssl.SSLContext:
    """Return the TLS settings for https auth servers: at least TLS 1.2, or 1.3 if `tls_min_version` is 1.3."""
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
    """Authorizes one client, and caches the answer until it expires. Without an `auth_client` it allows everything.

    Attributes:
        authorizations: The client's permissions, after a successful AUTH.
        allows_all: There are no auth servers, so everything is allowed.
    """

    def __init__(self, auth_client: AuthClient | None, peer: str) -> None:
        self.authorizations: Authorizations | None = None
        self.allows_all = auth_client is None
        self._auth_client = auth_client
        self._peer = peer
        self._secret = b""
        self._tls: TLSSession | None = None

    async def authenticate(self, secret: bytes, tls: "TLSSession | None") -> bytes:
        """Execute AUTH and return the reply. Raises CommandError."""
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
        """Check that the client may subscribe to the channel or, without one, publish to the topic.

        Raises:
            CommandError: The client lacks the permission or has not sent AUTH, or no auth server answers.
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
