"""What a follower answers itself over HTTP; all else is the leader's."""

from collections.abc import Mapping
from typing import Any

import trio

from ..access.audit_writer import AuditWriter
from ..access.authentication import Authentication
from ..access.policy import Identity, Rule
from ..broker.addresses import BoundAddresses
from ..broker.api.server import host_names, metrics_rule
from ..broker.api.status import ping_of_member
from ..broker.options import BrokerOptions
from ..broker.session.auth_service import AuthClient
from ..http.auditing import audited
from ..http.guard import Guard
from ..http.messages import HTTPError, Request, Response
from ..http.routing import Route, Router
from ..http.upgrade import CLUSTER_PROTOCOL as PROTOCOL
from ..http.web_pages import HostNames
from .context import MemberContext, about_member
from .following import REPLICATE, Following
from .front import FollowerFront

FORWARD = "/cluster/forward"


class FollowerAPI:
    """The routes of a follower, with the tokens of its auth file.

    Args:
        bound: The addresses of its listeners.
        trusted: See `serve`.

    Attributes:
        following: What it does; set while it follows.
        front: Passes its other clients on; set after its start.
        router: The routes.
        guard: Checks their clients.
    """

    def __init__(
        self,
        options: BrokerOptions,
        context: MemberContext,
        bound: BoundAddresses,
        trusted: Mapping[str, Identity] | None = None,
    ) -> None:
        self.following: Following | None = None
        self.front: FollowerFront | None = None
        self._context = context
        self._data_path = options.data_path
        self._audit = AuditWriter(options.audit_log)
        self._authentication = Authentication(
            options.auth_file,
            AuthClient(options) if options.auth_http_addresses else None,
            verifies_clients=options.tls.verifies_clients,
            audit=self._audit.log,
            trusted=trusted,
        )
        access = self._authentication.access
        self.guard: Guard = Guard(
            access, HostNames(host_names(options, bound)), read_only=options.http_read_only
        )
        admin, replicate = Rule("admin"), Rule("replicate")
        routes = [
            Route("GET", "/ping", self.ping, plain=True, rule=Rule(open=True)),
            Route("GET", "/metrics", self.metrics, plain=True, rule=metrics_rule(options)),
            Route("GET", "/cluster/member", self.member, rule=Rule()),
            Route("POST", "/cluster/promote", self.promote, rule=admin),
            # Not passed on: two members that take each other for the leader would pass it on in a circle.
            Route("GET", REPLICATE, self.refuse, rule=replicate, upgrade=PROTOCOL),
            Route("GET", FORWARD, self.refuse, rule=replicate, upgrade=PROTOCOL),
        ]
        self.router: Router = Router(audited(route, access.audit) for route in routes)

    async def run(self) -> None:
        """Write the audit log; runs until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._audit.run)
                nursery.start_soon(self._authentication.watch_expiry, self)
        finally:
            with trio.CancelScope(shield=True):
                await self._authentication.aclose()
                await self._audit.aclose()

    async def reload(self) -> None:
        """Read the auth file again, and open the audit log again."""
        await self._audit.reopen()
        await self._authentication.reload(self)

    def renew_identities(self) -> int:
        """Do nothing: each request is checked, and no connection stays open for long."""
        return 0

    async def ping(self, request: Request) -> Response:
        """Answer `OK`, also without a leader: the process is well."""
        return ping_of_member(request, "follower", "OK")

    async def member(self, request: Request) -> Response:
        """Return this member."""
        return Response.json(self._about())

    async def metrics(self, request: Request) -> Response:
        """Return the metrics of this member for Prometheus."""
        from ..broker.monitoring.cluster_metrics import (
            of_follower,
            of_member,
        )  # import a library that few need
        from ..broker.monitoring.exposition import scrape_without_broker

        about, front = self._about(), self.front
        assert front is not None
        families = [
            *of_member(about, self._context.times_led),
            *of_follower(
                about,
                forwarded=front.forwarded,
                forwarded_total=front.forwarded_total,
                waiting=front.waiting,
            ),
        ]
        return await scrape_without_broker(request, self._data_path, families)

    def _about(self) -> dict[str, Any]:
        context, following = self._context, self.following
        state, leader = context.state, following.leader if following is not None else None
        about = about_member(context, "follower", context.membership.epoch, None, ())
        if leader is not None:
            about |= {"leader": leader.member, "leader_addresses": [leader.url]}
            if state is not None and state.leader == leader.member:
                about["leader_addresses"] = list(state.addresses)
        if following is not None:
            about |= {
                "is_following": following.is_connected,
                "in_sync": state is not None and context.folder in state.in_sync,
                "position": following.position,
                "reason": following.reason,
            }
        return about

    async def promote(self, request: Request) -> Response:
        """Lead, although the coordinator does not elect this member."""
        if self.following is None:
            raise HTTPError(409, "REFUSED: this member leads already")
        if reason := await self.following.promote():
            raise HTTPError(409, f"REFUSED: {reason}")
        return Response.empty()

    async def refuse(self, request: Request) -> Response:
        """Refuse other members: this one does not lead."""
        raise HTTPError(503, "NOT_LEADER: this member does not lead the cluster")
