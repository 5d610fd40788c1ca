"""A producer without a broker, whose failures a test orders."""

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

from trio_nsq.text.arguments import check_int, check_seconds, check_type

from .. import sync
from ..client.errors import BrokerError, ConnectionLost, ProducerClosed, ProducerFenced
from ..client.publishing.options import ProducerOptions, ProducerSettings
from ..client.publishing.producer import Producer
from ..client.publishing.queue import Command, PublishFuture, PublishQueue
from ..client.publishing.receipt import ProducerStats
from ..event_loop import runtime
from ..protocol import NSQError, pack_messages
from ..protocol.bulk import MAX_INT32
from ..protocol.headers import Headers, decode_headers, split_prefixes
from ..sync.portal import Portal

_ADDRESS = "fake:4150"


@dataclass(frozen=True, slots=True)
class FakeMessage:
    """A message that a `FakeProducer` has stored.

    Attributes:
        defer_s: The delay before the delivery, in seconds; 0: no delay.
        headers: As of `trio_nsq.Message`.
    """

    topic: str
    body: bytes
    defer_s: float
    headers: Headers = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Step:
    """What happens to the next publish: it is stored or not, and fails or not, after a delay."""

    is_stored: bool = True
    error: NSQError | None = None
    delay_s: float = 0.0


class _Orders:
    """What a test orders and sees of a producer without a broker; see `FakeProducer`."""

    messages: list[FakeMessage]
    _steps: deque[_Step]

    def published(self, topic: str) -> list[bytes]:
        """Return the bodies of the messages that are stored in a topic, in order."""
        return [message.body for message in self.messages if message.topic == topic]

    def accept(self, count: int = 1) -> None:
        """Store the next publishes, and acknowledge them."""
        self._order(_Step(), count)

    def refuse(self, count: int = 1, *, error: NSQError | None = None) -> None:
        """Fail the next publishes with a `PublishFailed` whose `maybe_stored` is False.

        Args:
            error: Its `__cause__`, such as a `ConnectionFailed`; None: a `BrokerError` with the code E_TOPIC_FULL.
        """
        check_type("error", error, NSQError | None)
        self._order(_Step(False, error or BrokerError(_ADDRESS, "E_TOPIC_FULL", "PUB topic is full")), count)

    def lose_answer(self, count: int = 1, *, stored: bool = True) -> None:
        """Fail the next publishes with a `PublishFailed` whose `maybe_stored` is True: they are in doubt.

        Args:
            stored: Whether the messages are stored nevertheless, so that publishing them again duplicates them.
        """
        check_type("stored", stored, bool)
        self._order(_Step(stored, ConnectionLost(_ADDRESS, "the broker closed the connection")), count)

    def delay(self, delay_s: float, count: int = 1) -> None:
        """Acknowledge the next publishes after a delay, in seconds; `math.inf`: never. Later ones wait behind them."""
        check_seconds("delay_s", delay_s)
        self._order(_Step(delay_s=delay_s), count)

    def _order(self, step: _Step, count: int) -> None:
        check_int("count", count, 1)
        self._steps.extend([step] * count)


class FakeProducer(_Orders, Producer):
    """A `trio_nsq.Producer` that connects to no broker: it stores messages in a list, or fails as a test has ordered.

        producer = FakeProducer()
        producer.accept(2)
        producer.refuse()

        async with producer:
            await program(producer)

        assert producer.published("orders") == [b"one", b"two"]

    `accept`, `refuse`, `lose_answer` and `delay` order what happens to the next publishes, one after the other. A call
    of `publish`, `submit` or `publish_set` is one publish, and so is each part of `publish_many`, which splits long
    lists. Publishes beyond those that were ordered are accepted.

    All else is that of `Producer`: arguments are checked, and receipts, cancellation and closing work as there.

    Args:
        options: See `Producer`.

    Attributes:
        messages: The stored messages, in order.
    """

    def __init__(self, **options: Unpack[ProducerOptions]) -> None:
        super().__init__(_ADDRESS, **options)
        self.messages: list[FakeMessage] = []
        self._steps = deque()
        self._brokers: Any = _Script(self._settings, self.messages, self._steps)


class FakeSyncProducer(_Orders, sync.Producer):
    """A `trio_nsq.sync.Producer` that connects to no broker; see `FakeProducer`."""

    def __init__(self, **options: Unpack[ProducerOptions]) -> None:
        super().__init__(_ADDRESS, **options)
        self._producer = producer = FakeProducer(**options)
        self._portal = Portal(producer, "trio_nsq producer", self._wake_all)
        self.messages: list[FakeMessage] = producer.messages
        self._steps = producer._steps  # a deque, which threads may share


class _Queue(PublishQueue):
    """One command at a time, of one message, as each has its own outcome."""

    def __init__(self, messages: list[FakeMessage], *, ordered: bool) -> None:
        super().__init__(1, 0, ordered=ordered, address=_ADDRESS)
        self._messages = messages

    def stored(self, topic: str) -> int | None:
        count = sum(message.topic == topic for message in self._messages)
        return count - 1 if count else None


class _Script:
    """Takes the place of the brokers: each command has the outcome of the next step."""

    def __init__(self, settings: ProducerSettings, messages: list[FakeMessage], steps: deque[_Step]) -> None:
        self.queue = _Queue(messages, ordered=settings.ordered)
        self.fenced_topics: dict[str, ProducerFenced] = {}
        self.crash: Exception | None = None
        self._is_ordered = settings.ordered
        self._has_numbers = settings.name is not None
        self._messages = messages
        self._steps = steps
        self._wanted = runtime.Event()

    def wake(self) -> None:
        """There is a command: the script is the only link, too."""
        self._wanted.set()

    def next_link(self, topic: str, without: Collection[str] = ()) -> "_Script":
        return self

    def only_link(self) -> "_Script":
        return self

    def send(self, command: Command) -> bool:
        self.queue.add(command)
        self.wake()
        return True

    async def run(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted = runtime.Event()
            while self.queue.take():
                command = self.queue.oldest
                assert command is not None
                if command.is_question:
                    self.queue.acknowledge()
                    continue
                await self._execute(command, self._steps.popleft() if self._steps else _Step())

    async def _execute(self, command: Command, step: _Step) -> None:
        if step.delay_s:
            await runtime.sleep(step.delay_s)
        stored = self.queue.stored(command.topic)
        if step.is_stored:
            self._messages += _messages_of(command)
        if step.error is None:
            if self._has_numbers:
                command.first = 0 if stored is None else stored + 1
            self.queue.acknowledge()
            return
        self.queue.refuse()
        command.fail(step.error, maybe_stored=isinstance(step.error, ConnectionLost))
        if self._is_ordered:
            self.fail_all(step.error)

    async def wait_opened(self) -> None:
        await runtime.checkpoint()

    def crashed(self, error: Exception) -> None:
        self.crash = error
        self.fail_all(ProducerClosed(f"the producer failed: {error!r}"))

    def stats(self) -> ProducerStats:
        waiting, sent = self.queue.unsettled()
        counts = self.queue.counts
        return ProducerStats(waiting, sent, counts.stored, counts.failed, connections=1)

    def futures(self) -> Iterator[PublishFuture]:
        yield from self.queue.futures()

    def fail_all(self, reason: NSQError) -> None:
        for command in self.queue.clear():
            command.fail(reason, maybe_stored=command.taken)


def _messages_of(command: Command) -> list[FakeMessage]:
    messages = command.messages or pack_messages(list(command.futures.values()))
    texts: Sequence[str] = [""] * len(messages)
    if command.has_headers:
        messages, texts = split_prefixes(messages, MAX_INT32)
    return [
        FakeMessage(command.topic, body, command.defer_ms / 1000, decode_headers(text))
        for body, text in zip(messages.bodies(), texts, strict=True)
    ]
