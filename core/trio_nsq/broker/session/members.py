"""The connections that other members of the cluster have opened."""

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeAlias

import trio

from ...access.access import Access
from ...access.policy import Identity

logger = logging.getLogger("trio_nsq.broker")

Serve: TypeAlias = Callable[[trio.abc.Stream], Awaitable[None]]


class MemberConnections:
    """Ends the connections of members whose token or certificate was revoked or has expired."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._connected: dict[trio.CancelScope, Identity] = {}

    def until_revoked(self, identity: Identity | None, serve: Serve) -> Serve:
        """Return what serves a connection while the member's identity is valid; None: there is no authentication."""
        return serve if identity is None else partial(self._serve, identity, serve)

    async def _serve(self, identity: Identity, serve: Serve, stream: trio.abc.Stream) -> None:
        with trio.CancelScope() as scope:
            self._connected[scope] = identity
            self._renew(scope)  # it was checked before the answer was sent
            try:
                await serve(stream)
            finally:
                del self._connected[scope]

    def renew_identities(self) -> int:
        """End the connections whose identity may not replicate any longer. Returns their number."""
        return sum(not self._renew(scope) for scope in self._connected)

    def _renew(self, scope: trio.CancelScope) -> bool:
        identity = self._connected[scope]
        current = self._access.renew(identity)
        if current is not None and current.allows_everywhere("replicate"):
            self._connected[scope] = current
            return True
        logger.warning("%s: connection closed, its authentication was revoked or has expired", identity.name)
        scope.cancel()
        return False
