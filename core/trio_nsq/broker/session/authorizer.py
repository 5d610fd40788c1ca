"""Authorizes the commands of one TCP client (NSQ protocol: AUTH). It never allows a command that nsqd would refuse."""

import logging
import math
from typing import TYPE_CHECKING

import trio

from ...access.access import Access, AuthDenied, AuthError
from ...access.attempts import Reason
from ...access.audit import Event
from ...access.policy import Identity
from ...protocol import CommandError
from ...protocol.address import host_of
from ...protocol.errors import AuthRequired, quote
from ...protocol.go_json import encode_object

if TYPE_CHECKING:
    from ...tls.session import TLSSession

logger: logging.Logger = logging.getLogger("trio_nsq.broker")

_MOST_TOPICS = 10_000
"""Limit of the topics that a client's cache has."""


def auth_reply(identity: Identity) -> bytes:
    """Encode the JSON reply to AUTH, keys in nsqd's order."""
    return encode_object(
        {"identity": identity.name, "identity_url": identity.url, "permission_count": len(identity.grants)}
    )


class Authorizer:
    """Authorizes one client.

    Args:
        peer: The client's address.

    Attributes:
        identity: The client's identity; None before AUTH, unless its certificate has one.
        allows_all: There is no authentication, so everything is allowed.
        host: The host of the client's address.
    """

    def __init__(self, access: Access, peer: str) -> None:
        self.identity: Identity | None = None
        self.allows_all: bool = access.is_open
        self._access = access
        self._peer = peer
        self.host: str = host_of(peer)
        self._subject = ""
        self._secret = b""
        self._tls: TLSSession | None = None
        self._ask_again_at_s = math.inf  # by trio's clock
        self._publishable: set[str] = set()  # topics that the client may publish to: a cache

    async def authenticate(self, secret: bytes, tls: "TLSSession | None") -> bytes:
        """Execute AUTH and return the reply. Raises CommandError."""
        if self._access.is_open:
            raise CommandError("E_AUTH_DISABLED", "AUTH disabled")
        if self.identity is not None and self.identity.source != "certificate":
            raise CommandError("E_INVALID", "AUTH already set")
        self._subject = tls.subject if tls is not None else ""
        identity = self._access.find(secret, self._subject)
        if identity is None and self._access.service is not None:
            self._secret, self._tls = secret, tls
            try:
                identity = await self._ask()
            except AuthDenied as exc:
                await self._delay_failure("auth_server", "E_AUTH_FAILED")
                raise CommandError("E_AUTH_FAILED", "AUTH failed") from exc
            if not identity.grants:
                await self._delay_failure("auth_server", "E_UNAUTHORIZED")
                raise CommandError("E_UNAUTHORIZED", "AUTH no authorizations found")
        if identity is None:
            await self._delay_failure("token", "E_AUTH_FAILED")
            raise CommandError("E_AUTH_FAILED", "AUTH failed: the token is unknown, expired or revoked")
        self.identity = identity
        self._publishable.clear()  # of the identity of the certificate
        return auth_reply(identity)

    @property
    def is_authenticated(self) -> bool:
        """Whether the client needs no AUTH, or no more."""
        return self.allows_all or self.identity is not None

    def use_certificate(self, tls: "TLSSession") -> None:
        """Authenticate the client by its verified certificate, if the auth file has its subject.

        A client that has sent AUTH before its connection was encrypted keeps that identity.
        """
        self._subject = tls.subject
        if self.identity is None:
            self.identity = self._access.find(None, tls.subject)

    def may_publish(self, topic: str) -> bool:
        """Whether the client may publish to a topic. If False, `check` decides."""
        return self.allows_all or (
            topic in self._publishable
            and (self._ask_again_at_s == math.inf or trio.current_time() < self._ask_again_at_s)
        )

    async def check(self, verb: str, topic: str, channel: str | None = None) -> None:
        """Check that the client may subscribe to the channel or, without one, publish to the topic.

        Raises:
            CommandError: The client lacks the role or has not sent AUTH, or no auth server answers.
        """
        if self._access.is_open:
            return
        if self.identity is None:
            raise AuthRequired(verb)
        if self._ask_again_at_s <= trio.current_time():
            self._publishable.clear()
            try:
                self.identity = await self._ask()
            except AuthDenied as exc:
                self._record("refused", verb, "E_AUTH_FAILED", topic, channel)
                raise CommandError("E_AUTH_FAILED", "AUTH failed") from exc
        if not self.identity.allows("publish" if channel is None else "consume", topic, channel):
            self._record("refused", verb, "E_UNAUTHORIZED", topic, channel)
            target = f"{quote(topic)} {quote(channel or '')}"
            raise CommandError("E_UNAUTHORIZED", f"AUTH failed for {verb} on {target}")
        if channel is None:
            if len(self._publishable) >= _MOST_TOPICS:  # a client may name topics that cannot be created
                self._publishable.clear()
            self._publishable.add(topic)

    def renew(self, topic: str | None, channel: str | None) -> bool:
        """Take the client's identity from the current auth file.

        Args:
            topic, channel: The client's subscription; None without one.

        Returns:
            Whether the connection may stay: the identity is still valid, and allows the subscription.
        """
        self._publishable.clear()
        before = self.identity
        if before is None:
            return True
        self.identity = self._access.renew(before)
        if self.identity is not None and (topic is None or self.identity.allows("consume", topic, channel)):
            return True
        self._access.audit.record(
            "closed", self._peer, before, subject=self._subject, topic=topic, channel=channel
        )
        return False

    def record_missing_auth(self, error: AuthRequired) -> None:
        """Record in the audit log that the client has not sent AUTH."""
        self._record("refused", error.verb, error.code)

    async def _delay_failure(self, reason: Reason, error: str) -> None:
        self._record("login_failed", "AUTH", error)
        await trio.sleep(self._access.failures.record_failure(self.host, trio.current_time(), "tcp", reason))

    async def _ask(self) -> Identity:
        """Ask the auth servers. Raises AuthDenied; CommandError if none answers."""
        service = self._access.service
        assert service is not None  # the caller has checked it
        try:
            identity, self._ask_again_at_s = await service.query(
                remote_ip=self.host,
                tls=self._tls is not None,
                common_name=self._tls.common_name if self._tls is not None else "",
                secret=self._secret,
            )
        except AuthError as exc:
            logger.error("%s: AUTH failed: %s", self._peer, exc)
            if isinstance(exc, AuthDenied):
                raise
            self._record("refused", "AUTH", "AUTH_UNAVAILABLE")
            raise CommandError("E_AUTH_FAILED", "AUTH failed") from exc
        return identity

    def _record(
        self, event: Event, verb: str, error: str, topic: str | None = None, channel: str | None = None
    ) -> None:
        self._access.audit.record(
            event,
            self._peer,
            self.identity,
            subject=self._subject,
            action=verb,
            topic=topic,
            channel=channel,
            error=error,
        )
