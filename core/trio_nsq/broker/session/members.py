"""The connections that other members of the cluster have opened."""

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeAlias

import trio

from ...access.access import Access
from ...http.auditing import record_action, record_closing
from ...http.messages import Request

logger: logging.Logger = logging.getLogger("trio_nsq.broker")

Serve: TypeAlias = Callable[[trio.abc.Stream], Awaitable[None]]


class MemberConnections:
    """Ends the connections of members whose token or certificate was revoked or has expired."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._connected: dict[trio.CancelScope, Request] = {}

    def record(self, request: Request) -> None:
        """Record in the audit log that a member may connect."""
        record_action(self._access.audit, request, 101)

    def until_revoked(self, request: Request, serve: Serve) -> Serve:
        """Return what serves the connection of a request while the member that has sent it may replicate."""
        return serve if request.identity is None else partial(self._serve, request, serve)

    async def _serve(self, request: Request, serve: Serve, stream: trio.abc.Stream) -> None:
        with trio.CancelScope() as scope:
            self._connected[scope] = request
            self._renew(scope)  # it was checked before the answer was sent
            try:
                await serve(stream)
            finally:
                del self._connected[scope]

    def renew_identities(self) -> int:
        """End the connections whose identity may not replicate any longer. Returns their number."""
        return sum(not self._renew(scope) for scope in self._connected if not scope.cancel_called)

    def _renew(self, scope: trio.CancelScope) -> bool:
        request = self._connected[scope]
        current = self._access.renew(request.identity) if request.identity is not None else None
        if current is not None and current.allows_everywhere("replicate"):
            request.identity = current
            return True
        logger.warning("%s: closed, its authentication was revoked or has expired", request.peer)
        record_closing(self._access.audit, request, "")
        scope.cancel()
        return False
