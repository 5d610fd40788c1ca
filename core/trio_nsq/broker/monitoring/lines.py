"""The lines of `/stats` as text, in nsqd's layout, which scripts parse.

Compiled, because brokers have thousands of clients and channels.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

from ..session.session import Session
from ..state.channel import Channel
from ..state.topic import Topic
from .clients import ClientDescriber, counts_of, publishes_of
from .queues import QueueDescriber

_NS_PER_S: Final = 1_000_000_000
_TOPIC: Final = "%s[%-15s] depth: %-5d be-depth: %-5d msgs: %-8d e2e%%: %s\n"
_CHANNEL: Final = (
    "   %s[%-25s] depth: %-5d be-depth: %-5d inflt: %-4d def: %-4d"
    " re-q: %-5d timeout: %-5d msgs: %-8d e2e%%: %s\n"
)
_CONSUMER: Final = (
    "[V2 %-21s] state: %d inflt: %-4d rdy: %-4d fin: %-8d re-q: %-8d msgs: %-8d connected: %s\n"
)
_PRODUCER: Final = "[V2 %-21s] msgs: %-8d topics: %s connected: %s\n"


class ClientLines(ClientDescriber):
    """Describes clients as lines, without their indentation.

    Args:
        now_s: Unix seconds by the wall clock.
    """

    def __init__(self, now_s: int) -> None:
        self._now_s = now_s
        self._durations: dict[int, str] = {}  # by the time of the connect, which many clients share

    def describe(self, client: Session, topic: str) -> Any:
        identity = client.handshake.identity
        published: Sequence[tuple[str, int]] = ()
        if client.pub_counts:
            published = publishes_of(client, topic)
        ready, in_flight, messages, finished, requeued = counts_of(client)
        return self.line(
            identity.hostname, client.peer, identity.user_agent, client.connected_s, published,
            int(client.reader.state), ready, in_flight, messages, finished, requeued,
        )  # fmt: skip

    def line(
        self,
        hostname: str,
        address: str,
        user_agent: str,
        connected_s: int,
        published: Sequence[tuple[str, int]],
        state: int,
        ready: int,
        in_flight: int,
        messages: int,
        finished: int,
        requeued: int,
    ) -> str:
        """Return the line of a client; `published`: topics with their counts, instead of the figures after it."""
        port = address.rpartition(":")[2] if ":" in address else ""
        name = f"{hostname}:{port} {user_agent}"
        duration = self._durations.get(connected_s)
        if duration is None:
            duration = self._durations[connected_s] = go_duration((self._now_s - connected_s) * _NS_PER_S)
        if published:
            topics = ",".join([f"{each}={count}" for each, count in published])
            return _PRODUCER % (name, sum([count for _, count in published]), topics, duration)
        return _CONSUMER % (name, state, in_flight, ready, finished, requeued, messages, duration)

    def together(self, described: list[Any], indent: str) -> list[Any]:
        return [indent + indent.join(described)]


class QueueLines(QueueDescriber):
    """Describes topics and channels as lines, each in a list with the lines of what it contains."""

    def topic(self, topic: Topic, channels: list[Any]) -> Any:
        latency = self._latency(topic.channels.values())
        line = topic_line(
            topic.name, topic.depth, topic.backend_depth, topic.message_count, latency, paused=topic.paused
        )
        return [line, *[each for lines in channels for each in lines]]

    def unavailable(self, name: str, reason: str) -> Any:
        return [topic_line(name, 0, 0, 0, "", paused=False), unavailable_line(reason)]

    def channel(self, topic: Topic, channel: Channel, clients: list[Any] | None) -> Any:
        depth, backend_depth, in_flight, deferred, messages, requeued, timed_out, _ = channel.counts()
        line = channel_line(
            channel.name, depth, backend_depth, in_flight, deferred, requeued, timed_out, messages,
            self._latency([channel]), paused=channel.paused,
        )  # fmt: skip
        return [line] if clients is None else [line, *clients]

    def _latency(self, channels: Iterable[Channel]) -> str:
        measured = self.latency(channels)
        return "" if measured is None else latency_text(measured[1])


def topic_line(
    name: str, depth: int, backend_depth: int, messages: int, latency: str, *, paused: bool
) -> str:
    """Return the line of a topic; `latency`: its percentiles, as of `latency_text`."""
    return _TOPIC % ("*P " if paused else "   ", name, depth, backend_depth, messages, latency)


def unavailable_line(reason: str) -> str:
    """Return the line that follows that of a topic which cannot be used."""
    return f"        unavailable: {reason}\n"


def channel_line(
    name: str,
    depth: int,
    backend_depth: int,
    in_flight: int,
    deferred: int,
    requeued: int,
    timed_out: int,
    messages: int,
    latency: str,
    *,
    paused: bool,
) -> str:
    """Return the line of a channel; `latency`: its percentiles, as of `latency_text`."""
    mark = "*P " if paused else "   "
    return _CHANNEL % (
        mark, name, depth, backend_depth, in_flight, deferred, requeued, timed_out, messages, latency
    )  # fmt: skip


def latency_text(values_ns: Iterable[int]) -> str:
    """Format the percentiles of a latency."""
    return ", ".join([short_duration(value) for value in values_ns])


def short_duration(nanoseconds: int) -> str:
    """Format a duration with one decimal, in the largest unit that gives a value above 1: `450.4ms`, `0.0ns`."""
    for unit, size_ns in (("s", _NS_PER_S), ("ms", 1_000_000), ("us", 1000)):
        if nanoseconds > size_ns:
            return f"{nanoseconds / size_ns:.1f}{unit}"
    return f"{nanoseconds:.1f}ns"


def go_duration(nanoseconds: int) -> str:
    """Format a duration as Go does, with all digits: `1h0m2.5s`, `4.155519ms`, `0s`."""
    if nanoseconds < 0:
        return f"-{go_duration(-nanoseconds)}"
    if nanoseconds < _NS_PER_S:
        for unit, size_ns in (("ms", 1_000_000), ("µs", 1000), ("ns", 1)):
            if nanoseconds >= size_ns:
                return f"{_decimal(nanoseconds, size_ns)}{unit}"
        return "0s"
    minutes, rest_ns = divmod(nanoseconds, 60 * _NS_PER_S)
    text = f"{_decimal(rest_ns, _NS_PER_S)}s"
    if minutes:
        text = f"{minutes % 60}m{text}"
    if minutes >= 60:
        text = f"{minutes // 60}h{text}"
    return text


def _decimal(value: int, unit: int) -> str:
    """Format `value / unit` with all digits; `unit` is a power of ten."""
    whole, fraction = divmod(value, unit)
    digits = f"{fraction:0{len(str(unit)) - 1}}".rstrip("0") if fraction else ""
    return f"{whole}.{digits}" if digits else str(whole)
