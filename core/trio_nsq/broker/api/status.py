"""`/ping`, `/info`, `/stats` and `/metrics` (NSQ's HTTP API), and `/access`."""

import socket
import time
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..._version import __version__
from ...access.description import describe
from ...http.messages import Request, Response, compact_json
from ...server.listening import port_of
from ..addresses import BoundAddresses, Broadcast
from ..monitoring.clients import ClientDescriber, Clients
from ..monitoring.disk import disk_space
from ..monitoring.forms import Texts
from ..monitoring.lines import ClientLines, QueueLines
from ..monitoring.oldest import OldestMessages
from ..monitoring.queues import QueueDescriber, Queues
from ..monitoring.stats import broker_stats
from ..monitoring.stats_text import join_text
from ..server import Server
from .targets import is_set

if TYPE_CHECKING:
    from ..monitoring.metrics import MetricsExposition

_NS_PER_MS = 1_000_000
_NS_PER_S = 1_000_000_000
_TEXTS = Texts()


class Status:
    """The handlers for status and metrics. `bound` has the broker's addresses."""

    def __init__(self, server: Server, bound: BoundAddresses) -> None:
        self._server = server
        self._bound = bound
        self._oldest = OldestMessages()
        self._clients = Clients(_TEXTS, keeps=True)
        self._metrics: MetricsExposition | None = None

    async def ping(self, request: Request) -> Response:
        """Answer `OK`, or 500 and the reason if the broker is not healthy."""
        if self._server.replication is not None:
            return ping_of_member(request, "leader", self._health(request))
        answer = _ping(self._health(request))
        if (archiving := self._server.archiving) is not None:
            answer = replace(answer, headers={"X-NSQ-Archive-Lag": f"{archiving.status().lag_s:.1f}"})
        return answer

    def _health(self, request: Request) -> str:
        """Return the broker's health; the reason, which can name a topic or a path, only for clients that read all."""
        identity = request.identity
        tells = identity.allows_everywhere("read") if identity else self._server.authentication.access.is_open
        return self._server.health if tells else self._server.health.partition(" - ")[0]

    async def info(self, request: Request) -> Response:
        """Return version, addresses and limits."""
        limits = self._server.options.limits
        info: dict[str, Any] = {
            "version": __version__,
            "broadcast_address": Broadcast.of(self._server.options, self._bound).address,
            "hostname": socket.gethostname(),
            # The bound ports, not the announced ones.
            "http_port": port_of(self._bound.http_address) or -1,
            "tcp_port": port_of(self._bound.tcp_address) or -1,
            "start_time": self._server.start_time_s,
            "instance": self._server.instance,
            "max_heartbeat_interval": limits.max_heartbeat_interval_ms * _NS_PER_MS,
            "max_output_buffer_size": limits.max_output_buffer_size,
            "max_output_buffer_timeout": limits.max_output_buffer_timeout_ms * _NS_PER_MS,
            "max_deflate_level": limits.max_deflate_level,
        }
        options = self._server.options
        if options.topology_region or options.topology_zone:
            info["topology_region"] = options.topology_region
            info["topology_zone"] = options.topology_zone
        if self._server.broker.draining:
            info["draining"] = True
        if (replication := self._server.replication) is not None:
            info["cluster"] = asdict(replication.leadership)
        return Response.json(info)

    async def access(self, request: Request) -> Response:
        """Return who the client is, and what it may do."""
        return Response.json(describe(request.identity, read_only=self._server.options.http_read_only))

    async def stats(self, request: Request) -> Response:
        """Return statistics: JSON with `format=json`, else text."""
        query, identity = request.query, request.identity
        topic, channel = query.get("topic", ""), query.get("channel", "")
        limited = identity if identity is not None and not identity.allows_everywhere("read") else None
        is_json = query.get("format") == "json"
        if is_json:  # the text has no ages
            await self._oldest.refresh(
                each
                for found in self._server.broker.topics.values()
                if topic in ("", found.name) and (limited is None or limited.sees(found.name))
                for each in found.channels.values()
                if channel in ("", each.name)
            )
        now_ns = time.time_ns()
        figures_only = identity is not None and identity.source == "anonymous"
        options = self._server.options
        queues: QueueDescriber = QueueLines(options, now_ns)
        clients: ClientDescriber = ClientLines(now_ns // _NS_PER_S)
        if is_json:
            queues = Queues(_TEXTS, options, now_ns, self._oldest, figures_only=figures_only)
            clients = self._clients
        stats = await broker_stats(
            self._server,
            now_ns,
            topic=topic,
            channel=channel,
            include_clients=is_set(request, "include_clients", "true"),
            include_mem=is_set(request, "include_mem", "true"),
            sees=limited.sees if limited is not None else None,
            reads=partial(limited.allows, "read") if limited is not None else None,
            figures_only=figures_only,
            queues=queues,
            of_clients=clients,
        )
        stats["health"] = self._health(request)
        if is_set(request, "include_disk") and limited is None:
            stats["disk"] = await disk_space(self._server.broker, options.data_path)
        if is_json:
            return _encode(stats)
        uptime_ns = self._server.clock.now_ns() - self._server.start_time_ns
        return Response.text(join_text(stats, uptime_ns))

    async def metrics(self, request: Request) -> Response:
        """Return metrics for Prometheus."""
        if self._metrics is None:
            from ..monitoring.metrics import MetricsExposition  # imports a library that few brokers need

            self._metrics = MetricsExposition(self._server, self._oldest)
        return await self._metrics.scrape(request)


def _ping(health: str) -> Response:
    return Response.text(health, 200 if health == "OK" else 500)


def ping_of_member(request: Request, role: str, health: str) -> Response:
    """Answer `/ping` of a member of a cluster; 503 if the client asks for another role."""
    has_role = request.query.get("role", role) == role
    answer = _ping(health) if has_role else Response.text(f"NOK - this member is a {role}", 503)
    return replace(answer, headers={"X-NSQ-Role": role})


def _encode(stats: dict[str, Any]) -> Response:
    """Build the response of `Response.json` from `broker_stats` of which most is encoded."""
    fields = []
    for name, value in stats.items():
        is_encoded = name in ("topics", "producers") and value
        fields.append(f'"{name}":' + (f"[{','.join(value)}]" if is_encoded else compact_json(value)))
    return Response.encoded(f"{{{','.join(fields)}}}".encode())
