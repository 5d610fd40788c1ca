"""Decides who the viewer of a request is."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import trio

from ...access.attempts import FailedAttempts
from ...access.audit import Event
from ...access.audit_writer import AuditWriter
from ...access.auth_file import AuthFileError, read_auth_file
from ...access.policy import Identity, Policy
from ...http.credentials import token_of
from ...http.web_pages import HostNames
from ...protocol.address import host_of, is_loopback
from ...protocol.errors import StartupError
from ..fleet.watcher import Watcher
from ..oidc.login import OIDCLogins
from ..oidc.options import CALLBACK
from ..oidc.pending import LIFETIME_S
from ..options import ConsoleOptions
from ..upstream.client import Upstream
from .attempts import Attempts
from .brokers import BrokerLogins
from .cookies import cookie_header, login_cookie, session_cookie, visitor_cookie
from .forms import Forms
from .identified import Identified
from .proxies import Proxies
from .request_head import Refused, RequestHead
from .rights import EVERYTHING, NOTHING, READ, Rights, rights_of
from .sessions import MAX_TOKEN_BYTES, Session, Sessions, User, new_id, session_key
from .viewer import Viewer

_LEVELS = {"none": NOTHING, "read": READ, "manage": EVERYTHING}


@dataclass(frozen=True, slots=True)
class _TokenOwner:
    """The owner of a token. `forwarded`: requests to brokers have the token."""

    name: str
    rights: Rights
    expires_at_s: float
    forwarded: bool


class Access:
    """Identifies viewers: by a token, a session, a trusted proxy, or not at all.

    A session has a token, or a user that an OpenID Connect provider has named. As for the viewers that a proxy names,
    the console checks the rights of such a user, and its own credentials act at the brokers.

    Args:
        unix_time: Returns the time in Unix seconds.

    Attributes:
        audit: The audit log.
        hosts: The names of the console.
        proxies: The trusted proxies.
        forms: Checks requests that change something.
        oidc: Logins with an OpenID Connect provider; None: there is none.
        base_path: The path of the first page of this fleet.

    Raises:
        StartupError: A file or an option cannot be used.
    """

    def __init__(
        self,
        options: ConsoleOptions,
        upstream: Upstream,
        watcher: Watcher,
        *,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self._options = options
        self._unix_time = unix_time
        self._policy = read_policy(options.auth_file)
        key = options.session_key or session_key(options.session_key_file)
        self._sessions = Sessions(key)
        self.oidc: OIDCLogins | None = None
        if options.oidc is not None:
            self.oidc = OIDCLogins(
                options.oidc,
                key,
                connect_timeout_s=options.connect_timeout_ms / 1000,
                request_timeout_s=options.request_timeout_ms / 1000,
                unix_time=unix_time,
            )
        self.proxies: Proxies = Proxies(options.trusted_proxies, options.acl_http_header, options.admin_users)
        self.forms: Forms = Forms(self._sessions, self.proxies)
        self._brokers = BrokerLogins(upstream, watcher, lends_credentials=_has_credentials(options))
        self._attempts = Attempts()
        self._failures = FailedAttempts()
        host = host_of(options.http_address)
        self._is_local = is_loopback(host) and options.base_path == "/"  # only a proxy needs another path
        self.hosts: HostNames = HostNames(
            [*options.http_allowed_hosts, host] if host else options.http_allowed_hosts
        )
        self.base_path: str = options.root
        self.audit: AuditWriter = AuditWriter(options.audit_log)

    async def run(self) -> None:
        """Check logins again, and write the audit log, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._brokers.run)
            nursery.start_soon(self.audit.run)
            if self.oidc is not None:
                nursery.start_soon(self.oidc.run)
            await self.hosts.learn_own_name()

    async def aclose(self) -> None:
        """Close the audit log, and connections to the provider."""
        await self.audit.aclose()
        if self.oidc is not None:
            await self.oidc.aclose()

    async def reload(self) -> None:
        """Read the auth file again. Raises AuthFileError: the previous one stays in use."""
        if self._options.auth_file is None:
            return
        file = str(self._options.auth_file)
        try:
            policy = await trio.to_thread.run_sync(_read_tokens, self._options.auth_file)
        except AuthFileError as exc:
            self.audit.log.record("reload", "", None, file=file, error=str(exc.__cause__ or exc))
            raise
        self._policy = policy
        self.audit.log.record("reload", "", None, file=file, tokens=len(policy.tokens))

    # --------------------------------------------------------------- the viewer

    @property
    def takes_tokens(self) -> bool:
        """Whether a broker or the auth file of the console can check a token."""
        return self._policy is not None or self._brokers.required

    @property
    def can_log_in(self) -> bool:
        """Whether viewers can log in: with a token, or with a provider."""
        return self.oidc is not None or self.takes_tokens

    def identify(self, incoming: RequestHead) -> Identified | None:
        """Return the viewer of a request; None if brokers have to be asked: `look_up`."""
        if not self._brokers.have_started:
            return None
        token, session = self._claim(incoming)
        if token is None:
            return self._without_token(incoming, session)
        who = self._known(token)
        return None if who is None else self._with_token(who, token, session)

    async def look_up(self, incoming: RequestHead) -> Identified:
        """Return the viewer of a request. Raises Refused: its token or session is not valid."""
        await self._brokers.wait_until_started()
        token, session = self._claim(incoming)
        if token is None:
            return self._without_token(incoming, session)
        try:
            who = await (self._who_limited(incoming, token) if session is None else self._who(token))
        except Refused as exc:
            if session is None:
                self._record_failure(incoming, exc)
            elif exc.ends_session:
                self._sessions.end(session, self._unix_time())
            raise
        return self._with_token(who, token, session)

    def _claim(self, incoming: RequestHead) -> tuple[str | None, Session | None]:
        """Return the token of a request that counts; and its session, which has that token, or a user and none."""
        token = token_of(incoming.headers)
        named = self.proxies.viewer(incoming.host, incoming.headers)
        # A proxy that asks for a password passes it on as Basic credentials.
        if token is not None and self.takes_tokens and not (named and not incoming.is_bearer):
            return token.decode("latin-1"), None
        session = self.session_of(incoming)
        return (None if session is None else session.token or None), session

    def _with_token(self, who: _TokenOwner, token: str, session: Session | None) -> Identified:
        csrf = "" if session is None else self._sessions.form_token(session.id)
        sent = token if who.forwarded else None
        viewer = Viewer(who.name, sent, csrf, who.rights, "token", has_session=session is not None)
        return Identified(viewer, session, token=token)

    def _without_token(self, incoming: RequestHead, session: Session | None) -> Identified:
        if session is not None and session.user is not None and self.oidc is not None:
            user, rights = session.user, self.oidc.rights.of(session.user)
            if rights != NOTHING:
                csrf = self._sessions.form_token(session.id)
                return Identified(
                    Viewer(user.name, None, csrf, rights, "oidc", has_session=True, subject=user.subject),
                    session,
                )
        viewer = Viewer(rights=self._anonymous(incoming))
        if named := self.proxies.viewer(incoming.host, incoming.headers):
            viewer = Viewer(
                named, rights=EVERYTHING if named in self.proxies.admins else READ, source="proxy"
            )
        known = self._sessions.visitor(incoming.cookies.get(visitor_cookie(incoming), ""))
        id_ = known or new_id()
        return Identified(
            replace(viewer, csrf=self._sessions.form_token(id_)), visitor=id_, is_new_visitor=not known
        )

    def is_current(self, incoming: RequestHead, identified: Identified) -> bool:
        """Whether an answer that is being sent may go on: the login is valid, and its rights are the same."""
        now_s = self._unix_time()
        if identified.session is not None and self._sessions.has_ended(identified.session, now_s):
            return False
        if identified.token:
            known = self._policy and self._policy.find_token(identified.token.encode(), now_s)
            rights = rights_of([known]) if known else self._brokers.rights(identified.token)
            return rights is not None and rights.key == identified.viewer.rights.key
        viewer = identified.viewer
        return bool(viewer.source) or self._anonymous(incoming) == viewer.rights

    def session_of(self, incoming: RequestHead) -> Session | None:
        """Return the session of a request; None without a valid one."""
        cookie = incoming.cookies.get(session_cookie(incoming))
        return None if cookie is None else self._sessions.read(cookie, self._unix_time())

    def _anonymous(self, incoming: RequestHead) -> Rights:
        if self._options.anonymous:
            return _LEVELS[self._options.anonymous]
        if self.can_log_in:
            return NOTHING
        if self._options.admin_users or not self._is_local or incoming.is_forwarded:
            return READ
        return EVERYTHING

    # ------------------------------------------------------------------- tokens

    async def log_in(self, incoming: RequestHead, token: str) -> tuple[str, float]:
        """Begin a session; returns its cookie, and for how many seconds it is valid. Raises Refused."""
        try:
            if not self.takes_tokens:
                raise Refused(401, "NO_AUTHENTICATION", "No broker has authentication: no login is needed.")
            who = await self._who_limited(incoming, token)
        except Refused as exc:
            self._record_failure(incoming, exc)
            raise
        return self._begin_session(incoming, token, Identity(who.name, "token", ()), who.expires_at_s)

    def _begin_session(
        self, incoming: RequestHead, login: str | User, identity: Identity, expires_at_s: float = math.inf
    ) -> tuple[str, float]:
        now_s = self._unix_time()
        expires_at_s = min(now_s + self._options.session_lifetime_ms / 1000, expires_at_s)
        _, cookie = self._sessions.begin(login, now_s, expires_at_s)
        subject = login.subject if isinstance(login, User) else ""
        self._record_session("login", incoming, identity, subject)
        return cookie, expires_at_s - now_s

    def log_out(self, incoming: RequestHead, identified: Identified) -> None:
        """End the session of a viewer, if it has one."""
        if identified.session is not None:
            viewer = identified.viewer
            self._sessions.end(identified.session, self._unix_time())
            self._record_session(
                "logout", incoming, Identity(viewer.name, viewer.source or "token", ()), viewer.subject
            )

    async def _who_limited(self, incoming: RequestHead, token: str) -> _TokenOwner:
        """Return the owner of a token that a stranger may have sent. Raises Refused, after some time."""
        if not 0 < len(token) <= MAX_TOKEN_BYTES or not (token.isascii() and token.isprintable()):
            raise Refused(
                401, "INVALID_TOKEN", f"A token has 1 to {MAX_TOKEN_BYTES} printable ASCII characters."
            )
        if (found := self._known(token)) is not None:
            return found
        client = self.proxies.client(incoming.host, incoming.headers)
        try:
            async with self._attempts.one(client):
                return await self._who(token)
        except Refused as exc:
            if exc.code == "INVALID_TOKEN":
                await trio.sleep(self._failures.record_failure(client, trio.current_time(), "http"))
            raise

    async def _who(self, token: str) -> _TokenOwner:
        """Return the owner of a token. Raises Refused."""
        if (found := self._known(token)) is not None:
            return found
        if self._policy is not None and not self._brokers.required:
            raise Refused(
                401, "INVALID_TOKEN", "The token is unknown, expired or revoked.", ends_session=True
            )
        login = await self._brokers.login(token)
        return _TokenOwner(login.name, login.rights, login.expires_at_s, True)

    def _known(self, token: str) -> _TokenOwner | None:
        """Return the owner of a token without asking brokers; None if they have to be asked."""
        if self._policy is not None:
            identity = self._policy.find_token(token.encode(), self._unix_time())
            if identity is not None:
                return _TokenOwner(identity.name, rights_of([identity]), identity.expires_at_s, False)
        login = self._brokers.known(token)
        return None if login is None else _TokenOwner(login.name, login.rights, login.expires_at_s, True)

    # ----------------------------------------------------------------- provider

    async def begin_with_provider(
        self, oidc: OIDCLogins, incoming: RequestHead, next_path: str
    ) -> tuple[str, str]:
        """Begin a login with the provider; returns its URL, and a `Set-Cookie` header. Raises Refused."""
        url, cookie = await oidc.begin(oidc.redirect_url or self.url_of(incoming, CALLBACK), next_path)
        return url, self._login_header(incoming, cookie, LIFETIME_S)

    async def finish_with_provider(
        self, oidc: OIDCLogins, incoming: RequestHead, query: Mapping[str, str]
    ) -> tuple[str, list[str]]:
        """Finish a login with the provider; returns the page to show, and `Set-Cookie` headers. Raises Refused."""
        client = self.proxies.client(incoming.host, incoming.headers)
        try:
            async with self._attempts.one(client):
                user, next_path = await oidc.finish(incoming.cookies.get(login_cookie(incoming), ""), query)
        except Refused as exc:
            self._record_failure(incoming, exc)
            if exc.status == 403:
                await trio.sleep(self._failures.record_failure(client, trio.current_time(), "http"))
            raise
        cookie, lifetime_s = self._begin_session(incoming, user, Identity(user.name, "oidc", ()))
        cookies = [
            self.session_header(incoming, cookie, int(lifetime_s)),
            self._login_header(incoming, "", 0),
        ]
        return next_path, cookies

    def url_of(self, incoming: RequestHead, path: str) -> str:
        """Return the URL by which the browser reaches a path below the base path.

        Raises Refused: a proxy names another host than those of the console. Some pass on what their client says.
        """
        scheme = "https" if self.is_secure(incoming) else "http"
        host = self.proxies.host(incoming.host, incoming.headers)
        if not self.hosts.allows(host):
            text = f"{host[:100]} is not a name of this console: see --http-allowed-host and --oidc-redirect-url."
            raise Refused(403, "HOST_NOT_ALLOWED", text)
        return f"{scheme}://{host}{self.base_path.rstrip('/')}{path}"

    # ------------------------------------------------------------------ cookies

    def session_header(self, incoming: RequestHead, cookie: str, max_age_s: int) -> str:
        """Return the header that sets the cookie of a session; with 0 seconds, deletes it."""
        name, secure = session_cookie(incoming), self.is_secure(incoming)
        return cookie_header(
            name, cookie, path=self.base_path, strict=True, secure=secure, max_age_s=max_age_s
        )

    def _login_header(self, incoming: RequestHead, cookie: str, max_age_s: int) -> str:
        """Return the header that sets the cookie of an unfinished login. The provider's page leads back: not strict."""
        name, secure = login_cookie(incoming), self.is_secure(incoming)
        return cookie_header(
            name, cookie, path=self.base_path, strict=False, secure=secure, max_age_s=max_age_s
        )

    def visitor_header(self, incoming: RequestHead, identified: Identified) -> str:
        """Return the header that sets the cookie of a viewer without a session.

        It is not strict: after a click on a link of another site, the browser would get a new one, and the forms in
        other tabs would be outdated.
        """
        name, secure = visitor_cookie(incoming), self.is_secure(incoming)
        cookie = self._sessions.visitor_cookie(identified.visitor)
        return cookie_header(name, cookie, path=self.base_path, strict=False, secure=secure)

    def is_secure(self, incoming: RequestHead) -> bool:
        """Whether the browser has sent a request over https, perhaps to a proxy."""
        return self.proxies.is_secure(incoming.host, incoming.headers, incoming.scheme)

    # -------------------------------------------------------------------- audit

    def _record_session(
        self, event: Literal["login", "logout"], incoming: RequestHead, identity: Identity, subject: str
    ) -> None:
        fleet, forwarded_for = self._options.fleet, self._forwarded(incoming)
        self.audit.log.record(
            event, incoming.peer, identity, subject=subject, fleet=fleet, forwarded_for=forwarded_for
        )

    def _record_failure(self, incoming: RequestHead, refused: Refused) -> None:
        self.audit.log.record(
            "login_failed",
            incoming.peer,
            None,
            fleet=self._options.fleet,
            action=f"{incoming.method} {incoming.path}",
            status=refused.status,
            error=refused.code,
            forwarded_for=self._forwarded(incoming),
        )

    def record_change(
        self, incoming: RequestHead, viewer: Viewer, status: int, code: str, about: Mapping[str, str | int]
    ) -> None:
        """Record a request that changes something, or its refusal."""
        identity = Identity(viewer.name, viewer.source, ()) if viewer.source else None
        details: dict[str, Any] = {
            "fleet": self._options.fleet,
            "action": f"{incoming.method} {incoming.path}",
            **about,
            "status": status,
            "error": code,
            "forwarded_for": self._forwarded(incoming),
        }
        event: Event = "refused" if status in (401, 403) else "action"
        self.audit.log.record(event, incoming.peer, identity, subject=viewer.subject, **details)

    def _forwarded(self, incoming: RequestHead) -> str:
        client = self.proxies.client(incoming.host, incoming.headers)
        return client if client != incoming.host else ""


def read_policy(auth_file: Path | None) -> Policy | None:
    """Read the auth file; None without one. Raises StartupError."""
    if auth_file is None:
        return None
    try:
        return _read_tokens(auth_file)
    except AuthFileError as exc:
        raise StartupError(f"--auth-file: {exc}") from exc


def _read_tokens(auth_file: Path) -> Policy:
    """Read an auth file, which may not have `[anonymous]`. Raises AuthFileError."""
    policy = read_auth_file(auth_file)
    if policy.anonymous is not None:
        raise AuthFileError(
            f"the auth file {auth_file} has [anonymous], which is for brokers and discovery services: --anonymous says "
            "what viewers without a login may do"
        )
    return policy


def _has_credentials(options: ConsoleOptions) -> bool:
    """Whether the console authenticates itself at brokers."""
    return (
        bool(options.secret) or bool(options.tls.cert) or any("@" in a for a in options.nsqd_http_addresses)
    )
