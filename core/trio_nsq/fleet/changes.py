"""Changes of topics and channels on all brokers and discovery services: who gets which request, in which order, and
what is lost. No IO.

A deleted topic comes back if a consumer finds a broker by an old registration. So discovery services first hide the
brokers, then the brokers delete the topic, and at last the services forget it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from ..api import broker as api
from ..api import lookupd
from ..api.request import Request
from ..protocol.address import without_secrets
from .stats import TopicStats


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a topic; with `channel`, of that channel."""

    verb: api.Action
    topic: str
    channel: str = ""

    @property
    def kind(self) -> str:
        """`topic` or `channel`."""
        return "channel" if self.channel else "topic"

    @property
    def request(self) -> Request[bytes]:
        return api.act(self.verb, self.topic, self.channel or None)

    @property
    def name(self) -> str:
        """nsqadmin's name of the action, such as `pause_channel`."""
        return f"{self.verb}_{self.kind}"


@dataclass(frozen=True, slots=True)
class Step:
    """A request to one server, a broker or a discovery service."""

    server: str
    request: Request[bytes]
    is_lookupd: bool = False

    @property
    def name(self) -> str:
        """The address without secrets, for pages and logs."""
        return without_secrets(self.server)


@dataclass(frozen=True, slots=True)
class Places:
    """Where a topic is.

    Attributes:
        lookupds: All discovery services.
        brokers: The brokers that have the topic, or may have it, by the addresses for requests.
        listed: The registered addresses of its brokers, by discovery service.
        may_create: Brokers that create the topic themselves: those that are given, if there is no discovery service.
    """

    lookupds: Sequence[str] = ()
    brokers: Sequence[str] = ()
    listed: Mapping[str, Sequence[str]] = field(default_factory=dict)
    may_create: Sequence[str] = ()


def rounds(change: Change, places: Places) -> list[list[Step]]:
    """Return the requests: those of a round are made at once, and the next round begins when all have ended."""

    def to_lookupds(request: Request[bytes]) -> list[Step]:
        return [Step(address, request, is_lookupd=True) for address in places.lookupds]

    on_brokers = [Step(broker, change.request) for broker in places.brokers]
    if change.verb == "create":
        create = api.act("create", change.topic)
        plan = [to_lookupds(create) + [Step(broker, create) for broker in places.may_create]]
        if change.channel:
            plan.append(to_lookupds(change.request) + on_brokers)
        return plan
    if change.verb != "delete":
        return [on_brokers]
    hidden = [
        Step(address, lookupd.tombstone(change.topic, node), is_lookupd=True)
        for address, nodes in places.listed.items()
        for node in nodes
        if not change.channel
    ]
    return [hidden, on_brokers, to_lookupds(change.request)]


def by_server(steps: Iterable[Step]) -> dict[str, list[Step]]:
    """Return the requests of a round by server: those to one server are made one after the other."""
    found: dict[str, list[Step]] = {}
    for step in steps:
        found.setdefault(step.server, []).append(step)
    return found


@dataclass(frozen=True, slots=True)
class Count:
    """Messages, channels and consumers of a topic or channel on one broker, or on all."""

    messages: int = 0
    channels: int = 0
    clients: int = 0

    def __add__(self, other: Self) -> "Count":
        return Count(
            self.messages + other.messages, self.channels + other.channels, self.clients + other.clients
        )


def removed_by(change: Change, topic: TopicStats) -> Count | None:
    """Return what a deletion or emptying removes on one broker; None: it does not have the channel.

    Each channel's copy of a message counts.
    """
    if change.channel:
        queue = topic.channels.get(change.channel)
        return None if queue is None else Count(queue.waiting, 0, queue.clients)
    if change.verb == "empty":
        return Count(topic.queue.waiting)  # its channels keep their messages
    channels = topic.channels.values()
    return Count(topic.waiting, len(channels), sum(each.clients for each in channels))
