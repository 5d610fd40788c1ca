"""Requests to the provider: its discovery document and keys, the exchange of a code, and claims of the user."""

import logging
import math
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from urllib.parse import quote_plus, urlencode

import trio

from ...access.secret import SecretFileError
from ...client.connection.tls import TLSFiles, TLSFilesError
from ...http.client import HTTPClient, Reply, RequestFailed
from ...platform.extras import install_hint
from ...protocol.errors import NSQError, StartupError
from ...protocol.limits import MIB
from ...protocol.untrusted_json import decode_json
from .id_token import UnknownKey, parse_keys, read_id_token
from .metadata import Metadata, parse_metadata
from .options import OIDCOptions
from .pending import PendingLogin

if TYPE_CHECKING:
    from joserfc.jwk import KeySet

logger: logging.Logger = logging.getLogger("trio_nsq.console")

_T = TypeVar("_T")
FRESH_S = 3600.0
"""The discovery document and the keys are fetched again after this time."""
NEW_KEYS_S = 10.0
"""Tokens with unknown keys have the keys fetched again at most once in this time."""
RETRY_S = 3.0
"""After a failure, all requests fail for this time: they do not wait for a provider that hangs one after another."""
_MAX_ANSWER_BYTES = MIB
_MAX_SHOWN = 200
_FORM = "application/x-www-form-urlencoded"
_JSON = {"Accept": "application/json"}


class ProviderError(NSQError):
    """The provider does not answer, or its answer cannot be used. The text names the provider and the reason."""


class CodeRefused(NSQError):
    """The provider does not accept the code of a login."""


@dataclass(slots=True)
class _Kept(Generic[_T]):
    """A document that is fetched when it is needed, and kept. Times are by trio's clock."""

    fetch: Callable[[], Awaitable[_T]]
    value: _T | None = None
    fetched_at_s: float = 0.0
    failure: ProviderError | None = None
    lock: trio.Lock = field(default_factory=trio.Lock)

    async def get(self, max_age_s: float = FRESH_S) -> _T:
        """Return the document, not older than this. Raises ProviderError."""
        async with self.lock:
            age_s = trio.current_time() - self.fetched_at_s
            if self.failure is not None and age_s < RETRY_S:
                raise ProviderError(*self.failure.args)
            if self.failure is None and self.value is not None and age_s < max_age_s:
                return self.value
            try:
                self.value, self.failure = await self.fetch(), None
            except ProviderError as exc:
                self.failure, self.fetched_at_s = exc, trio.current_time()
                raise
            self.fetched_at_s = trio.current_time()
            return self.value


class Provider:
    """Makes requests to a provider. It runs no tasks.

    Args:
        connect_timeout_s, request_timeout_s: Limits of one request.

    Raises:
        StartupError: The package joserfc is not installed, or a file cannot be used.
    """

    def __init__(self, options: OIDCOptions, *, connect_timeout_s: float, request_timeout_s: float) -> None:
        require_joserfc()
        self._options = options
        try:
            tls = TLSFiles(options.root_ca_file).context() if options.root_ca_file else None
            options.client_secret.read()
        except TLSFilesError as exc:
            raise StartupError(f"--oidc-root-ca-file: {exc}".replace("tls_root_ca_file ", "")) from exc
        except SecretFileError as exc:
            raise StartupError(f"--oidc-client-secret-file: {exc}".replace("auth_secret_file ", "")) from exc
        self._http = HTTPClient(
            connect_timeout_s=connect_timeout_s,
            request_timeout_s=request_timeout_s,
            max_answer_bytes=_MAX_ANSWER_BYTES,
            tls=tls,
        )
        self._metadata = _Kept(self._fetch_metadata)
        self._keys = _Kept(self._fetch_keys)
        self._new_keys_at_s = -math.inf

    @property
    def known(self) -> Metadata | None:
        """What the provider has said about itself; None if it was not asked yet."""
        return self._metadata.value

    async def metadata(self) -> Metadata:
        """Return what the provider says about itself. Raises ProviderError."""
        return await self._metadata.get()

    async def check(self) -> None:
        """Fetch the discovery document and the keys. Raises ProviderError."""
        await self._keys.get()

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def claims(self, code: str, login: PendingLogin, now_s: float) -> Mapping[str, Any]:
        """Exchange the code of a login; return the verified claims of the user.

        If the ID token lacks the claim with the groups, the userinfo endpoint is asked, too.

        Raises:
            ProviderError: The provider does not answer, or not as it should.
            CodeRefused: It refuses the code.
            InvalidIDToken: Its ID token is not accepted.
        """
        metadata = await self.metadata()
        tokens = await self._exchange(metadata, code, login)
        id_token, access_token = tokens.get("id_token"), tokens.get("access_token")
        if not isinstance(id_token, str):
            raise self._error("it has sent no ID token; --oidc-scopes needs openid")
        claims = await self._verified(metadata, id_token, login, now_s)
        if self._options.groups_claim in claims or not metadata.userinfo_endpoint:
            return claims
        if not isinstance(access_token, str):
            raise self._error("it has sent no access token")
        more = await self._userinfo(metadata.userinfo_endpoint, access_token)
        if more.get("sub") != claims["sub"]:  # else one user could get the groups of another
            raise self._error("its userinfo endpoint answers with another user than the ID token")
        return {**more, **claims}

    async def _verified(
        self, metadata: Metadata, id_token: str, login: PendingLogin, now_s: float
    ) -> dict[str, Any]:
        def read(keys: "KeySet") -> dict[str, Any]:
            return read_id_token(
                id_token,
                keys,
                issuer=self._options.issuer,
                client_id=self._options.client_id,
                nonce=login.nonce,
                algorithms=metadata.algorithms,
                now_s=now_s,
            )

        try:
            return read(await self._keys.get())
        except UnknownKey:
            now = trio.current_time()
            is_due = now >= self._new_keys_at_s + NEW_KEYS_S
            if is_due:
                self._new_keys_at_s = now
            return read(await self._keys.get(0 if is_due else FRESH_S))

    async def _exchange(self, metadata: Metadata, code: str, login: PendingLogin) -> dict[str, Any]:
        options = self._options
        fields = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": login.redirect_url,
            "code_verifier": login.verifier,
        }
        headers = dict(_JSON)
        try:
            secret = options.client_secret.read()
        except SecretFileError as exc:
            logger.error("OIDC: --oidc-client-secret-file: %s", exc)
            raise self._error("the console cannot read its own secret; its log has the reason") from exc
        if not secret:
            fields["client_id"] = options.client_id
        elif metadata.authentication == "client_secret_post":
            fields |= {"client_id": options.client_id, "client_secret": secret}
        else:  # RFC 6749: both are encoded as in a form first
            pair = f"{quote_plus(options.client_id)}:{quote_plus(secret)}"
            headers["Authorization"] = f"Basic {b64encode(pair.encode()).decode()}"
        reply = await self._send("POST", metadata.token_endpoint, urlencode(fields).encode(), _FORM, headers)
        if reply.status == 200:
            return self._object(reply, "its token endpoint")
        error = self._error_code(reply)
        if error == "invalid_grant":
            raise CodeRefused("the provider does not accept the code of this login: invalid_grant")
        hint = "; see --oidc-client-id and --oidc-client-secret-file" if "client" in error else ""
        raise self._error(f"its token endpoint answered with status {reply.status} {error}".rstrip() + hint)

    async def _userinfo(self, url: str, access_token: str) -> dict[str, Any]:
        headers = {**_JSON, "Authorization": f"Bearer {access_token}"}
        reply = await self._send("GET", url, headers=headers)
        if reply.status != 200:
            raise self._error(f"its userinfo endpoint answered with status {reply.status}")
        return self._object(reply, "its userinfo endpoint")

    async def _fetch_metadata(self) -> Metadata:
        url = self._options.issuer.rstrip("/") + "/.well-known/openid-configuration"
        return await self._fetch(url, lambda value: parse_metadata(value, self._options.issuer))

    async def _fetch_keys(self) -> "KeySet":
        return await self._fetch((await self.metadata()).jwks_uri, parse_keys)

    async def _fetch(self, url: str, parse: Callable[[Any], _T]) -> _T:
        reply = await self._send("GET", url, headers=_JSON)
        if reply.status != 200:
            raise self._error(f"{url} answered with status {reply.status}")
        try:
            return parse(self._object(reply, url))
        except ValueError as exc:
            raise self._error(str(exc)) from exc

    async def _send(
        self,
        method: str,
        url: str,
        body: bytes = b"",
        content_type: str = "",
        headers: Mapping[str, str] = _JSON,
    ) -> Reply:
        try:
            return await self._http.request(method, url, body, content_type, headers)
        except RequestFailed as exc:
            raise self._error(f"{url}: {exc}") from exc

    def _object(self, reply: Reply, what: str) -> dict[str, Any]:
        """Return the JSON object of an answer. Raises ProviderError."""
        try:
            found = decode_json(reply.body)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise self._error(f"the answer of {what} is not a JSON object")
        return found

    def _error_code(self, reply: Reply) -> str:
        """Return the code of an OAuth error, such as `invalid_client`; empty without one."""
        try:
            found = decode_json(reply.body)
        except ValueError:
            return ""
        code = found.get("error") if isinstance(found, dict) else ""
        return shown(code) if isinstance(code, str) else ""

    def _error(self, reason: str) -> ProviderError:
        return ProviderError(f"the provider {self._options.issuer} cannot be used: {reason}")


def require_joserfc() -> None:
    """Raises StartupError: the package of the extra `oidc` is not installed."""
    try:
        import joserfc  # noqa: F401 -- only whether it is there
    except ModuleNotFoundError as exc:
        raise StartupError(f"--oidc-issuer needs the package {exc.name}: {install_hint('oidc')}") from exc


def shown(text: str) -> str:
    """Return a text of the provider or a browser for people: short, and only printable characters."""
    return "".join(char if char.isprintable() else "?" for char in text[:_MAX_SHOWN])
