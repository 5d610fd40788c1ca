"""Asks auth servers over HTTP what a client may do (NSQ protocol: AUTH)."""

import random
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import urlencode, urlsplit

import trio

from ...access.access import AuthDenied, AuthError
from ...access.patterns import ALL_REGEX, Pattern, compile_regex, import_re2
from ...access.policy import Grant, Identity, Role
from ...http.client import HTTPClient, RequestFailed, UnexpectedStatus
from ...http.urls import URL
from ...protocol.address import parse_address, without_secrets
from ...protocol.go_json import GoObject, decode_object
from ...protocol.limits import MIB
from ...tls.client import client_context
from ..errors import StartupError
from ..options import BrokerOptions

_ROLES: dict[str, Role] = {
    "subscribe": "consume",
    "publish": "publish",
    # nsqd knows only the permissions above; these are for HTTP.
    "read": "read",
    "manage": "manage",
    "admin": "admin",
}
_DENIALS = (401, 403)
MAX_ANSWER_BYTES = 1 * MIB
"""Limit of an auth server's answer. Most have some hundred bytes; parsing one of this size takes about 0.3 s."""


class Answer(NamedTuple):
    """An auth server's answer: a client's identity, and until when it is valid, by the clock of `parse_answer`."""

    identity: Identity
    valid_until_s: float


def parse_answer(body: bytes, now: float) -> Answer:
    """Parse an auth server's answer, `{"ttl", "identity", "identity_url", "authorizations"}`, as strictly as nsqd does.

    `now` is the time by the caller's clock, in seconds. Raises AuthError: the answer is not valid.
    """
    try:
        answer = decode_object(body)
        grants = tuple(_grant(line) for line in answer.objects("authorizations"))
        ttl_s = answer.integer("ttl")
        name, url = answer.text("identity"), answer.text("identity_url")
    except ValueError as exc:
        raise AuthError(f"the answer is not valid: {exc}") from exc
    if ttl_s <= 0:
        raise AuthError(f"invalid TTL {ttl_s} (must be >0)")
    return Answer(Identity(name, "auth server", grants, url=url), now + ttl_s)


def _grant(line: GoObject) -> Grant:
    """Convert an authorization to one grant, even if it allows nothing: the reply to AUTH has the number of grants."""
    permissions = frozenset(line.texts("permissions"))
    if unknown := permissions - _ROLES.keys():
        raise ValueError(f"unknown permission {min(unknown)}")
    topics, channels = (line.text("topic"),), tuple(line.texts("channels"))
    compiled = tuple(_compile("channel", pattern) for pattern in channels)
    roles = {_ROLES[permission] for permission in permissions}
    if not any(pattern.fullmatch("") for pattern in compiled):
        # As in nsqd, a publish also needs a channel pattern that matches the empty string: `.*` does, `archive` or no
        # pattern at all does not. This is surprising, but auth servers may rely on it.
        roles.discard("publish")
    every_channel = ALL_REGEX in channels
    everywhere = ALL_REGEX in topics and every_channel
    return Grant(frozenset(roles), (_compile("topic", topics[0]),), compiled, everywhere, every_channel)


def _compile(what: str, pattern: str) -> Pattern:
    try:
        return compile_regex(pattern)
    except ValueError as exc:
        raise ValueError(f"unable to compile {what} {pattern!r}: {exc}") from None


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
            import_re2()
        except ModuleNotFoundError as exc:
            raise StartupError(
                "--auth-http-address needs the package google-re2, which is not installed: pip install google-re2"
            ) from exc
        self._services = [_service_url(address) for address in options.auth_http_addresses]
        self._pick = pick
        self._options = options
        self._client = _http_client(options)

    async def query(self, *, remote_ip: str, tls: bool, common_name: str, secret: bytes) -> Answer:
        """Query a client's permissions: from one server, then from the others until one gives a valid answer.

        Takes up to the request timeout for each server, and twice that for a server that redirects to https.

        Args:
            remote_ip: The client's IP address without the port; empty if it has none.
            common_name: The common name of the client's certificate; empty without one.
            secret: The body of AUTH.

        Raises:
            AuthDenied: A server refused the secret, and no other one gave a valid answer.
            AuthError: No server gave a valid answer.
        """
        query = encode_query(remote_ip=remote_ip, tls=tls, common_name=common_name, secret=secret)
        start = self._pick(len(self._services))
        failures, denied = [], False
        for service in self._services[start:] + self._services[:start]:
            try:
                answer = await self._client.get(f"{service}?{query}")
                return parse_answer(answer, trio.current_time())
            except (RequestFailed, AuthError) as exc:
                denied = denied or (isinstance(exc, UnexpectedStatus) and exc.status in _DENIALS)
                failures.append(f"failed to auth against {without_secrets(service)} - {exc}")
        raise (AuthDenied if denied else AuthError)("; ".join(failures))

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
        tls=client_context(options.tls),
    )


def _service_url(address: str) -> str:
    url, shown = address, without_secrets(address)
    try:
        if "://" not in address:
            parse_address(address, default_port=80)
            url = f"http://{address}/auth"
        elif urlsplit(address).scheme not in ("http", "https") or not urlsplit(address).hostname:
            raise StartupError(f"--auth-http-address: {shown} is neither host:port nor an http or https URL")
        URL.parse(url)
    except ValueError as exc:
        # The parser's error may repeat a part of the password.
        reason = exc if shown == address else "not a URL; is the password percent-encoded?"
        raise StartupError(f"--auth-http-address: {shown}: {reason}") from None
    return url
