"""What one client may do, where auth servers say so (NSQ protocol: AUTH)."""

import logging
from typing import TYPE_CHECKING

import trio

from ...protocol import CommandError
from ...protocol.errors import quote

if TYPE_CHECKING:
    from .auth_client import AuthClient, Authorizations
    from .tls import TLSSession

logger = logging.getLogger("trio_nsq.broker")


class Authorizer:
    """Asks for a client, and remembers the answer for as long as it is good for.

    Args:
        auth_client: Whom to ask; None: everybody may do everything.
        peer: The client's address.

    Attributes:
        authorizations: What it may do, once AUTH went well.
        idle: Everything is allowed: there is nobody to ask.
    """

    def __init__(self, auth_client: "AuthClient | None", peer: str) -> None:
        self.authorizations: Authorizations | None = None
        self.idle = auth_client is None
        self._auth_client = auth_client
        self._peer = peer
        self._secret = b""
        self._tls: TLSSession | None = None

    async def authenticate(self, secret: bytes, tls: "TLSSession | None") -> bytes:
        """AUTH; returns the reply.

        Raises:
            CommandError: It fails, for one of the many reasons.
        """
        if self.authorizations is not None:
            raise CommandError("E_INVALID", "AUTH already set")
        if self._auth_client is None:
            raise CommandError("E_AUTH_DISABLED", "AUTH disabled")
        from .auth_client import auth_reply  # here, for most brokers have no auth server

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

    async def _ask(self, auth_client: "AuthClient") -> "Authorizations":
        from .auth_client import AuthError

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
