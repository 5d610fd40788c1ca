"""Logins with a provider, from the redirection to it until the user is known."""

import logging
import time
from collections.abc import Callable, Mapping
from urllib.parse import urlencode

import trio

from ...protocol.errors import StartupError
from ..access.request_head import Refused
from ..access.rights import NOTHING
from ..access.sessions import User
from .id_token import InvalidIDToken
from .options import OIDCOptions
from .pending import PendingLogins
from .provider import CodeRefused, Provider, ProviderError, shown
from .users import UserRights, groups_of, user_of

logger: logging.Logger = logging.getLogger("trio_nsq.console")

_MAX_CODE_CHARACTERS = 4096
_CANCELLED = "access_denied"
_LOG_S = 60.0
_MAX_LOGGED = 10


class OIDCLogins:
    """Begins and finishes logins.

    Args:
        key: The key of the console's cookies, 32 random bytes.
        connect_timeout_s, request_timeout_s: Limits of one request to the provider.
        unix_time: Returns the time in Unix seconds.

    Attributes:
        name: The name of the provider for people.
        redirect_url: Where the provider sends the browser back; empty: it depends on the host that was asked for.
        rights: What users may do.

    Raises:
        StartupError: A package is missing, or a file cannot be used.
    """

    def __init__(
        self,
        options: OIDCOptions,
        key: bytes,
        *,
        connect_timeout_s: float,
        request_timeout_s: float,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self._options = options
        self._provider = Provider(
            options, connect_timeout_s=connect_timeout_s, request_timeout_s=request_timeout_s
        )
        self._pending = PendingLogins(key)
        self._unix_time = unix_time
        self.name: str = options.shown_name
        self.redirect_url: str = options.redirect_url
        self._logged: dict[str, float] = {}  # when, by text
        self.rights: UserRights = UserRights(options)

    async def run(self) -> None:
        """Ask the provider for its endpoints and keys, so that the log tells at the start what is wrong."""
        try:
            await self._provider.check()
        except ProviderError as exc:
            self._log(exc)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._provider.aclose()

    async def begin(self, redirect_url: str, next_path: str) -> tuple[str, str]:
        """Begin a login.

        Args:
            redirect_url: Where the provider sends the browser back.
            next_path: The page that is shown after the login.

        Returns:
            The URL of the provider to which the browser is sent, and the cookie of the login.

        Raises:
            Refused: The provider does not answer.
        """
        try:
            metadata = await self._provider.metadata()
        except ProviderError as exc:
            raise self._unavailable(exc) from exc
        login, cookie = self._pending.begin(redirect_url, next_path, self._unix_time())
        query = {
            "response_type": "code",
            "client_id": self._options.client_id,
            "redirect_uri": redirect_url,
            "scope": " ".join(self._options.scopes),
            "state": login.state,
            "nonce": login.nonce,
            "code_challenge": login.challenge,
            "code_challenge_method": "S256",
        }
        return _with_query(metadata.authorization_endpoint, query), cookie

    async def finish(self, cookie: str, query: Mapping[str, str]) -> tuple[User, str]:
        """Finish a login.

        Args:
            cookie: Of the login; empty without one.
            query: The parameters with which the provider has sent the browser back.

        Returns:
            The user, and the page to show.

        Raises:
            Refused: The login is not that of this browser, is too old or was finished before; the provider has refused
                it, or does not answer; or the user may do nothing.
        """
        now_s = self._unix_time()
        login = self._pending.take(cookie, query.get("state", ""), now_s)
        if login is None:  # nothing of the query is shown: anyone can make a link with another one
            raise Refused(
                403,
                "LOGIN_OUTDATED",
                "This login was begun in another browser or tab or at another address of the console, took longer than "
                "10 minutes, or is finished. Log in again.",
            )
        try:
            metadata = await self._provider.metadata()
            issuer = query.get("iss")
            if issuer != self._options.issuer and (issuer is not None or metadata.sends_issuer):
                raise _refused("another provider has sent this login")
            if "error" in query:
                raise self._refusal_of(query)
            code = query.get("code", "")
            if not 0 < len(code) <= _MAX_CODE_CHARACTERS:
                raise _refused("the provider has sent no code")
            claims = await self._provider.claims(code, login, now_s)
        except ProviderError as exc:
            raise self._unavailable(exc) from exc
        except (CodeRefused, InvalidIDToken) as exc:
            if isinstance(
                exc, InvalidIDToken
            ):  # anybody can send a wrong code, but only the provider a token
                logger.warning("OIDC: a login failed: %s", exc)
            raise _refused(str(exc)) from exc
        user = user_of(claims, self._options)
        if self.rights.of(user) == NOTHING:
            raise self._without_role(user, bool(groups_of(claims, self._options.groups_claim)))
        return user, login.next_path

    def logout_url(self, return_url: str) -> str:
        """Return where a user logs out of the provider, too; empty if it has no such page, or was not asked yet."""
        known = self._provider.known
        if known is None or not known.end_session_endpoint:
            return ""
        query = {"client_id": self._options.client_id, "post_logout_redirect_uri": return_url}
        return _with_query(known.end_session_endpoint, query)

    def _refusal_of(self, query: Mapping[str, str]) -> Refused:
        """Return the error for what the provider answers instead of a code."""
        error, about = shown(query["error"]), shown(query.get("error_description", ""))
        if error == _CANCELLED:
            return _refused("it was cancelled at the provider, or you may not use this client there")
        return _refused(f"the provider answered {error}" + (f": {about}" if about else ""))

    def _log(self, error: ProviderError) -> None:
        """Log why the provider cannot be used, each reason once a minute: strangers can begin logins."""
        now_s, text = trio.current_time(), str(error)
        self._logged = {known: at_s for known, at_s in self._logged.items() if now_s < at_s + _LOG_S}
        if text not in self._logged and len(self._logged) < _MAX_LOGGED:
            self._logged[text] = now_s
            logger.error("OIDC: %s", text)

    def _unavailable(self, error: ProviderError) -> Refused:
        self._log(error)
        return Refused(
            503, "PROVIDER_UNAVAILABLE", f"{_capital(str(error))}. Try again, or tell who runs this console."
        )

    def _without_role(self, user: User, has_groups: bool) -> Refused:
        claim = self._options.groups_claim
        why = (
            "none of your groups has a role in this console"
            if has_groups
            else f"{self.name} does not say in which groups you are (the claim {claim!r})"
        )
        logger.warning("OIDC: %s (%s) may not log in: %s", user.name, user.subject, why)
        return Refused(403, "NO_ROLE", f"You are {user.name} at {self.name}, but {why}.")


def check_provider(options: OIDCOptions, *, connect_timeout_s: float, request_timeout_s: float) -> None:
    """Ask a provider for its endpoints and keys, and wait for the answer.

    Raises:
        StartupError: It cannot be used, a package is missing, or a file cannot be used.
    """
    provider = Provider(options, connect_timeout_s=connect_timeout_s, request_timeout_s=request_timeout_s)

    async def check() -> None:
        try:
            await provider.check()
        finally:
            await provider.aclose()

    try:
        trio.run(check)
    except ProviderError as exc:
        raise StartupError(f"--oidc-issuer: {exc}") from exc


def _refused(reason: str) -> Refused:
    return Refused(403, "LOGIN_REFUSED", f"The login failed: {reason}. Log in again.")


def _with_query(url: str, query: Mapping[str, str]) -> str:
    return f"{url}{'&' if '?' in url else '?'}{urlencode(query)}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
