"""What the API asks brokers and discovery services: fresh for each request, all servers at once."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import trio

from ...api import lookupd
from ...api.broker import unchecked_info, unchecked_stats
from ...api.request import Request
from ...fleet.stats import number, objects, text
from ...lookup.hosts import host_filter
from ...protocol import NSQError
from ...protocol.address import without_secrets
from ..access.viewer import Viewer
from ..actions.cluster import aliases, usable
from ..console import Console
from ..fleet.inactive import find_channels
from ..upstream.client import Results, UpstreamError
from ..upstream.discovery import ask_lookup, ask_names, ask_nodes
from .aggregate import Object, topic_part
from .producers import Producer, in_order, merge

_TOPICS_IN_A_TURN = 64
"""So that a large fleet delays no other request."""


class AllFailed(NSQError):
    """No server gave an answer. The text is nsqadmin's, with the reason of each server.

    Attributes:
        errors: The reasons.
    """

    def __init__(self, servers: str, errors: Sequence[UpstreamError]) -> None:
        reasons = "\n".join(map(str, errors)) or "there is none"
        super().__init__(f"failed to query any {servers}: {reasons}")
        self.errors = errors


@dataclass
class Questions:
    """The questions of one request.

    Attributes:
        warnings: The errors of servers, while others answered; one text for each question.
    """

    console: Console
    viewer: Viewer
    warnings: list[str] = field(default_factory=list)

    @property
    def lookupds(self) -> Sequence[str]:
        """The discovery services."""
        return self.console.watcher.lookupds

    async def topics(self) -> list[str]:
        """Return the names of all topics. Raises AllFailed."""
        if not self.lookupds:
            return sorted({topic for producer in await self.producers() for topic in producer.topics})
        found = await ask_names(self.console.upstream, self.lookupds, lookupd.topics())
        names = {name for names in self._answered("nsqlookupd", found).values() for name in names}
        names.update(topic for producer in await self._with_given(()) for topic in producer.topics)
        return sorted(name for name in names if self.viewer.sees(name))

    async def inactive_topics(self, topics: Sequence[str]) -> dict[str, list[str] | None]:
        """Return those topics that no broker has, and their channels. Errors are left out, as in nsqadmin."""
        if not self.lookupds:
            return {}
        upstream = self.console.upstream
        listed = await ask_nodes(upstream, self.lookupds)
        active = {
            topic
            for nodes in listed.values.values()
            for node in nodes
            for topic in node.topics
            if topic not in node.tombstones
        }
        wanted = [topic for topic in topics if topic not in active]
        found = await find_channels(upstream, self.lookupds, wanted)
        return {topic: channels or None for topic, channels in found.items()}

    async def producers(self) -> list[Producer]:
        """Return all brokers: those that discovery services list, and those whose address was given.

        Raises:
            AllFailed: No discovery service answers; without one, no broker.
        """
        found: list[Producer] = []
        if self.lookupds:
            listed = self._answered("nsqlookupd", await ask_nodes(self.console.upstream, self.lookupds))
            allows = host_filter(self.console.options.lookupd_allowed_hosts)
            known = aliases(self.console)
            nodes = {
                without_secrets(lookupd): [
                    node for node in found if node.has_usable_host and allows(node.broadcast_address)
                ]
                for lookupd, found in listed.items()
            }
            found = merge(nodes, lambda address: known.get(address, address))
        return await self._with_given(found)

    async def topic_producers(self, topic: str) -> list[Producer]:
        """Return the brokers that have a topic. Raises AllFailed as `producers`."""
        found: list[Producer] = []
        if self.lookupds:
            answers = await ask_lookup(self.console.upstream, self.lookupds, topic)
            listed = self._answered("nsqlookupd", answers)
            known = aliases(self.console)
            allowed = {
                address for addresses in usable(self.console, answers).values() for address in addresses
            }
            by_address = {
                known.get(address, address): place
                for places in listed.values()
                for place in places
                if (address := place.http_address) in allowed and address is not None
            }
            found = [
                Producer(address, place.hostname, place.broadcast_address, place.tcp_port, place.http_port)
                for address, place in by_address.items()
            ]
        return await self._with_given(found, topic)

    async def topic_parts(
        self, producers: Sequence[Producer], topic: str = "", channel: str = "", *, clients: bool = False
    ) -> list[Object]:
        """Return the topics of brokers, each part for itself.

        Args:
            topic, channel: Return only this topic, and only this channel; empty: all.
            clients: Return the clients of channels, too.

        Raises:
            AllFailed: No broker answers, or there is none.
        """
        request = unchecked_stats(topic or None, channel or None, clients=clients)
        by_address = {producer.address: producer for producer in producers}
        found = await self._ask_brokers(list(by_address), request)
        now_s = int(time.time())
        parts = []
        for address, stats in self._answered("nsqd", found).items():
            producer = by_address[address]
            for count, raw in enumerate(objects(stats.get("topics")), 1):
                if count % _TOPICS_IN_A_TURN == 0:
                    await trio.lowlevel.checkpoint()
                name = text(raw, "topic_name")
                if (not topic or name == topic) and self.viewer.sees(name):
                    part = topic_part(raw, producer.node, producer.hostname, now_s)
                    if not self.viewer.allows("read", name):
                        _hide_clients(part)
                    parts.append(part)
        return parts

    async def _with_given(self, found: Sequence[Producer], topic: str = "") -> list[Producer]:
        """Add the brokers whose address was given; with `topic`, those that have it."""
        there = {producer.address for producer in found}
        given = [each for each in self.console.options.nsqd_http_addresses if each not in there]
        if not given:
            return in_order(found)
        stats = await self._ask_brokers(given, unchecked_stats(topic or None))
        names = {
            address: [text(raw, "topic_name") for raw in objects(answer.get("topics"))]
            for address, answer in stats.values.items()
        }
        wanted = [address for address, topics in names.items() if not topic or topic in topics]
        infos = await self._ask_brokers(wanted, unchecked_info())
        errors = Results(stats.values, stats.errors | infos.errors)
        if self.lookupds:
            self._warn(errors)
        elif len(errors.errors) == len(given):
            raise AllFailed("nsqd", list(errors.errors.values()))
        else:
            self._warn(errors)
        added = [self._producer(address, info, names[address]) for address, info in infos.values.items()]
        return in_order([*found, *added])

    def _producer(self, address: str, info: Mapping[str, Any], topics: Sequence[str]) -> Producer:
        return Producer(
            address,
            text(info, "hostname"),
            text(info, "broadcast_address"),
            number(info, "tcp_port"),
            number(info, "http_port"),
            text(info, "version"),
            {topic: False for topic in topics if self.viewer.sees(topic)},
        )

    async def _ask_brokers(
        self, addresses: Sequence[str], request: Request[dict[str, Any]]
    ) -> Results[dict[str, Any]]:
        return await self.console.upstream.with_token(self.viewer.token).ask_all(addresses, request)

    def _answered(self, servers: str, results: "Results[Any]") -> dict[str, Any]:
        """Return the answers, and note the errors. Raises AllFailed: there are no answers."""
        if not results.values:
            raise AllFailed(servers, list(results.errors.values()))
        self._warn(results)
        return results.values

    def _warn(self, results: "Results[Any]") -> None:
        if results.errors:
            self.warnings.append("\n".join(map(str, results.errors.values())))


def _hide_clients(part: Object) -> None:
    for channel in part["channels"] or ():
        channel["clients"] = None
