"""Reads a broker's `/stats`. Answers are untrusted: what has the wrong type counts as missing. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_MAX_NUMBER = 2**63
_MAX_TEXT = 1000
_MAX_OBJECTS = 200_000
"""Objects of one list that are looked at, such as the topics of a broker."""


@dataclass(slots=True)
class Queue:
    """The numbers of a topic or a channel, on one broker or summed over all. Treat it as immutable.

    Attributes:
        depth: Messages that wait: for a topic, for its first channel or the end of a pause.
        backend_depth: Those of them that are not in memory.
        in_flight, deferred, requeued, timed_out, clients: Of a channel; 0 for a topic, but `deferred`.
        messages: Published since the broker's start.
        paused: On at least one broker.
        oldest_age_ms: The age of the oldest message that is ready or in flight; None: unknown, as on nsqd.
        in_rate: Messages published per second, since the poll before; None: unknown.
        out_rate: Messages that left the channel for good per second; None: unknown, or a topic.
        unavailable: Why the broker cannot use the topic; empty if it can.
        dead_letters: Messages moved to the dead-letter topic.
        rate_limit_per_s: The most deliveries of a channel per second; 0: without limit, on one broker at least.
        raw: Its object in `/stats`, without types checked; of a sum, nothing.
    """

    depth: int = 0
    backend_depth: int = 0
    in_flight: int = 0
    deferred: int = 0
    requeued: int = 0
    timed_out: int = 0
    messages: int = 0
    clients: int = 0
    paused: bool = False
    oldest_age_ms: int | None = None
    in_rate: float | None = None
    out_rate: float | None = None
    unavailable: str = ""
    dead_letters: int = 0
    rate_limit_per_s: int = 0
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def waiting(self) -> int:
        """All messages that are still there: ready, in flight and deferred."""
        return self.depth + self.in_flight + self.deferred


@dataclass(slots=True)
class TopicStats:
    """A topic of one broker, and its channels by name."""

    queue: Queue
    channels: dict[str, Queue] = field(default_factory=dict)

    @property
    def depth(self) -> int:
        """Messages that wait in the topic and in all its channels: each copy counts."""
        return self.queue.depth + sum(channel.depth for channel in self.channels.values())

    @property
    def waiting(self) -> int:
        """All messages that are still there, in the topic and in all its channels: each copy counts."""
        return self.queue.waiting + sum(channel.waiting for channel in self.channels.values())


def parse_topics(stats: Any) -> dict[str, TopicStats]:
    """Return the topics of an answer to `/stats?format=json`, by name. Raises ValueError: it is not such an answer."""
    if not isinstance(stats, dict) or not isinstance(stats.get("topics"), list | None):
        raise ValueError("its answer is not an object with topics: it is not a broker")
    found: dict[str, TopicStats] = {}
    for name, raw in _named(stats.get("topics"), "topic_name"):
        channels = {channel: _queue(each) for channel, each in _named(raw.get("channels"), "channel_name")}
        found[name] = TopicStats(_queue(raw), channels)
    return found


def add_rates(now: Mapping[str, TopicStats], before: Mapping[str, TopicStats], elapsed_s: float) -> None:
    """Set the rates of a broker's topics and channels, from its answer before; unchanged if the broker restarted."""
    if elapsed_s <= 0:
        return
    for name, topic in now.items():
        if (old := before.get(name)) is None:
            continue
        topic.queue.in_rate = _rate(topic.queue.messages - old.queue.messages, elapsed_s)
        for channel, queue in topic.channels.items():
            if (queue_before := old.channels.get(channel)) is not None:
                queue.in_rate = _rate(queue.messages - queue_before.messages, elapsed_s)
                if queue.in_rate is not None:
                    queue.out_rate = max(0, _left(queue) - _left(queue_before)) / elapsed_s


def total(queues: list[Queue]) -> Queue:
    """Return the sum of at least one queue; of ages the highest. A single one is returned as it is."""
    if len(queues) == 1:
        return queues[0]
    sums = Queue()
    reasons: dict[str, None] = {}
    for each in queues:
        sums.depth += each.depth
        sums.backend_depth += each.backend_depth
        sums.in_flight += each.in_flight
        sums.deferred += each.deferred
        sums.requeued += each.requeued
        sums.timed_out += each.timed_out
        sums.messages += each.messages
        sums.clients += each.clients
        sums.dead_letters += each.dead_letters
        sums.paused |= each.paused
        if each.oldest_age_ms is not None:
            sums.oldest_age_ms = max(sums.oldest_age_ms or 0, each.oldest_age_ms)
        if each.in_rate is not None:
            sums.in_rate = (sums.in_rate or 0) + each.in_rate
        if each.out_rate is not None:
            sums.out_rate = (sums.out_rate or 0) + each.out_rate
        if each.unavailable:
            reasons[each.unavailable] = None
    sums.unavailable = "; ".join(reasons)
    if all(each.rate_limit_per_s for each in queues):
        sums.rate_limit_per_s = sum(each.rate_limit_per_s for each in queues)
    return sums


def objects(found: Any) -> list[dict[str, Any]]:
    """Return the objects of an untrusted list."""
    items = found[:_MAX_OBJECTS] if isinstance(found, list) else ()
    return [each for each in items if isinstance(each, dict)]


def number(raw: Mapping[str, Any], key: str) -> int:
    """Return a number of an untrusted object; 0 if it has none."""
    value = raw.get(key)
    return value if type(value) is int and -_MAX_NUMBER < value < _MAX_NUMBER else 0


def text(raw: Mapping[str, Any], key: str) -> str:
    """Return a text of an untrusted object, cut off if it is long; empty if it has none."""
    value = raw.get(key)
    return value[:_MAX_TEXT] if isinstance(value, str) else ""


def _named(found: Any, key: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for each in objects(found):
        if isinstance(name := each.get(key), str) and 0 < len(name) <= 64:
            yield name, each


def _queue(raw: Mapping[str, Any]) -> Queue:
    return Queue(
        number(raw, "depth"),
        number(raw, "backend_depth"),
        number(raw, "in_flight_count"),
        number(raw, "deferred_count"),
        number(raw, "requeue_count"),
        number(raw, "timeout_count"),
        number(raw, "message_count"),
        number(raw, "client_count"),
        raw.get("paused") is True,
        number(raw, "oldest_message_age_ms") if raw.get("oldest_message_age_ms") is not None else None,
        unavailable=text(raw, "unavailable"),
        dead_letters=number(raw, "dead_letter_count"),
        rate_limit_per_s=number(raw, "rate_limit_per_s"),
        raw=raw,
    )


def _rate(difference: int, elapsed_s: float) -> float | None:
    return difference / elapsed_s if difference >= 0 else None


def _left(queue: Queue) -> int:
    return queue.messages - queue.waiting
