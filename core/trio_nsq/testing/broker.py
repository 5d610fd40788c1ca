"""What a test wants of a broker: topics of its own, and what became of messages."""

import base64
import math
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self, TypeVar

from trio_nsq.text.arguments import check_int, check_seconds
from trio_nsq.text.wording import count_of

from ..api import broker as api
from ..api.answers import ChannelStats, TopicStats
from ..client.arguments import check_name, in_ms
from ..client.errors import RequestRefused
from ..client.http.broker_http import BrokerHTTP
from ..event_loop import runtime
from ..protocol import MessageSet, pack_messages
from .server import NSQServer

_POLL_S = 0.01
_ANSWER_S = 10.0
_PAGE = 1000
_LONGEST_S = 86_400.0
"""Longer times are cut to this."""
_T = TypeVar("_T")


class NSQ:
    """A broker without the topics of other tests; a context manager.

    Leaving the block starts a broker that was killed or hangs, and deletes all topics that were created in the block,
    by whatever program. Methods block for about a millisecond, so that they may be called in async tests, too; the
    broker is another process. Those that wait longer have an async twin: `wait_empty` and `await_empty`.

    Args:
        server: The broker.

    Attributes:
        server: The broker.
        tcp_address, http_address: For clients, `host:port`.
    """

    def __init__(self, server: NSQServer) -> None:
        self.server = server
        self.tcp_address: str = server.tcp_address
        self.http_address: str = server.http_address
        self._http = BrokerHTTP(server.http_address, answer_timeout_s=_ANSWER_S, keep_alive_s=_ANSWER_S)
        self._others: set[str] = set()

    def __enter__(self) -> Self:
        self._others = set(self.topics())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.resume()
        self.server.start()
        try:
            self._delete_topics()
        finally:
            self._http.close()

    def _delete_topics(self) -> None:
        for topic in self.topics():
            try:
                self._http.ask(api.act("delete", topic))
            except RequestRefused as refused:
                if not refused.is_without_topic:
                    raise

    def topic(self, prefix: str = "topic") -> str:
        """Return a name that no other topic has, such as `orders-3f2a9c04d1`."""
        name = f"{prefix}-{uuid.uuid4().hex[:10]}"
        check_name("topic", name)
        return name

    def topics(self) -> list[str]:
        """Return the topics that were created since the test began, in order of their names."""
        found = {topic["topic_name"] for topic in self._http.ask(api.stats())["topics"]}
        return sorted(found - self._others)

    # ------------------------------------------------------------------ failures

    def kill(self) -> None:
        """Kill the broker (SIGKILL), also one that hangs. Until `restart`, clients cannot connect."""
        self.server.kill()

    def restart(self) -> None:
        """Start the broker with the same addresses and messages; if it runs, stop it gracefully before."""
        self.server.restart()

    def hang(self) -> None:
        """Suspend the broker (SIGSTOP): its connections stay open, clients can connect, and it answers nothing."""
        self.server.hang()

    def resume(self) -> None:
        """Let a broker that hangs go on. Does nothing if it does not hang."""
        self.server.resume()

    # ------------------------------------------------------------------ messages

    def publish(self, topic: str, *bodies: bytes, defer_s: float = 0) -> None:
        """Publish messages to a topic, which is created if it is missing.

        Args:
            defer_s: The delay before the delivery, in seconds; 0: no delay.

        Raises:
            RequestRefused: The broker refused them.
            TypeError, ValueError: The topic, a message or the delay is invalid.
        """
        check_name("topic", topic)
        defer_ms = in_ms("defer", defer_s, None) or None
        if bodies:
            messages: MessageSet = pack_messages(bodies)
            batch = len(messages).to_bytes(4, "big") + messages.data
            self._http.ask(api.publish_batch(topic, binary=True, defer_ms=defer_ms, body=batch))

    def published(self, topic: str) -> list[bytes]:
        """Return the bodies of all messages that were published to a topic, oldest first.

        They include those that were consumed, and those that are deferred. A topic that does not exist has none.
        """
        check_name("topic", topic)
        bodies = []
        start = 0
        try:
            while page := self._http.ask(api.read(topic, start, _PAGE)):
                for line in page:
                    if "body_base64" in line:
                        bodies.append(base64.b64decode(line["body_base64"]))
                    elif "body" in line:
                        bodies.append(line["body"].encode())
                last = page[-1]
                start = last["next_sequence"] if "gap" in last else last["sequence"] + 1
        except RequestRefused as refused:
            if not refused.is_without_topic:
                raise
        return bodies

    def depth(self, topic: str, channel: str | None = None) -> int:
        """Return how many messages wait for their delivery in a channel.

        Those in flight and those that are deferred do not count. Without a channel: messages that wait in the topic
        for its first channel, or while it is paused. What does not exist has none.
        """
        return self._count(topic, channel, "depth")

    def in_flight(self, topic: str, channel: str) -> int:
        """Return how many messages of a channel are delivered and not answered."""
        return self._count(topic, channel, "in_flight_count")

    def deferred(self, topic: str, channel: str) -> int:
        """Return how many messages of a channel wait for a time: deferred ones, and requeued ones with a delay."""
        return self._count(topic, channel, "deferred_count")

    def _count(self, topic: str, channel: str | None, name: str) -> int:
        found, of_channel = self._stats(topic, channel)
        queue = found if channel is None else of_channel
        return 0 if queue is None else int(queue.get(name) or 0)  # type: ignore[call-overload]  # a key of both

    def _stats(self, topic: str, channel: str | None) -> tuple[TopicStats | None, ChannelStats | None]:
        check_name("topic", topic)
        if channel is not None:
            check_name("channel", channel)
        for each in self._http.ask(api.stats(topic))["topics"]:
            if each["topic_name"] == topic:
                return each, next((one for one in each["channels"] if one["channel_name"] == channel), None)
        return None, None

    # ------------------------------------------------------------------ waiting

    def wait_published(self, topic: str, count: int = 1, *, timeout_s: float = 10.0) -> list[bytes]:
        """Wait until this many messages were published to a topic; return all, oldest first.

        Raises:
            TimeoutError: There were fewer at the end of `timeout_s`.
            RuntimeError: A task of an event loop called it, which could not run meanwhile; see `await_published`.
        """
        return _wait(self._has_published(topic, count), timeout_s, "await_published")

    async def await_published(self, topic: str, count: int = 1, *, timeout_s: float = 10.0) -> list[bytes]:
        """Wait as `wait_published`, while other tasks run."""
        return await _await(self._has_published(topic, count), timeout_s, "wait_published")

    def wait_empty(self, topic: str, channel: str, *, timeout_s: float = 10.0) -> None:
        """Wait until a channel has finished all messages of its topic: none waits, is in flight, or is deferred.

        The channel must exist by then.

        Raises:
            TimeoutError: There were some at the end of `timeout_s`.
            RuntimeError: A task of an event loop called it, which could not run meanwhile; see `await_empty`.
        """
        _wait(self._is_empty(topic, channel), timeout_s, "await_empty")

    async def await_empty(self, topic: str, channel: str, *, timeout_s: float = 10.0) -> None:
        """Wait as `wait_empty`, while other tasks run."""
        await _await(self._is_empty(topic, channel), timeout_s, "wait_empty")

    def _has_published(self, topic: str, count: int) -> Callable[[], list[bytes]]:
        check_name("topic", topic)
        check_int("count", count, 1)

        def look() -> list[bytes]:
            found = self.published(topic)
            if len(found) < count:
                raise _NotYet(f"topic {topic!r} has {count_of(len(found), 'message')}; {count} are expected")
            return found

        return look

    def _is_empty(self, topic: str, channel: str) -> Callable[[], None]:
        def look() -> None:
            of_topic, of_channel = self._stats(topic, channel)
            if of_topic is None:
                raise _NotYet(f"topic {topic!r} does not exist")
            if of_channel is None:
                raise _NotYet(f"topic {topic!r} has no channel {channel!r}")
            counts = {
                "in the topic": of_topic["depth"],
                "waiting": of_channel["depth"],
                "in flight": of_channel.get("in_flight_count", 0),
                "deferred": of_channel.get("deferred_count", 0),
            }
            if any(counts.values()):
                left = ", ".join(f"{count} {where}" for where, count in counts.items())
                raise _NotYet(f"{topic}/{channel} has messages: {left}")

        return look


class _NotYet(Exception):
    """What a test waits for has not happened; the reason is its text."""


def _wait(look: Callable[[], _T], timeout_s: float, instead: str) -> _T:
    """Call `look` until it does not raise `_NotYet`, and return its result. Raises TimeoutError."""
    if _is_in_task():
        raise RuntimeError(
            f"this would block the event loop, and the program under test in it: await {instead}"
        )
    for left in _polls(timeout_s):
        try:
            return look()
        except _NotYet as reason:
            if not left:
                raise TimeoutError(f"{reason}, after {timeout_s:g} s") from None
        time.sleep(_POLL_S)
    raise AssertionError


async def _await(look: Callable[[], _T], timeout_s: float, instead: str) -> _T:
    """As `_wait`, while other tasks run."""
    runtime.require_task("this method", instead)
    for left in _polls(timeout_s):
        try:
            return look()
        except _NotYet as reason:
            if not left:
                raise TimeoutError(f"{reason}, after {timeout_s:g} s") from None
        await runtime.sleep(_POLL_S)
    raise AssertionError


def _polls(timeout_s: float) -> Iterator[int]:
    """Yield how many more times to look. A clock could be that of a test, which stands still."""
    check_seconds("timeout_s", timeout_s)
    return iter(range(math.ceil(min(timeout_s, _LONGEST_S) / _POLL_S), -1, -1))


def _is_in_task() -> bool:
    """Whether a task or callback of an event loop calls."""
    if "trio" in sys.modules and sys.modules["trio"].lowlevel.in_trio_run():
        return True
    return "asyncio" in sys.modules and sys.modules["asyncio"]._get_running_loop() is not None
