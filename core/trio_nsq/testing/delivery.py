"""Run message handlers without a broker, as `Consumer.run` does."""

import inspect
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, Literal

import trio

from trio_nsq.protocol.bodies import check_bytes
from trio_nsq.text.arguments import check_int, check_seconds

from ..client.consuming.answers import GivenUp
from ..client.consuming.consumer import Consumer
from ..client.consuming.handlers import ActiveHandlers, check_async, check_plain, decoding
from ..client.consuming.message import Message, MessageBatch
from ..client.consuming.receive_queue import ReceiveQueue
from ..event_loop import runtime
from ..protocol.frames import MessageRun
from ..protocol.headers import Headers, encode_headers_of_all

Outcome = Literal["finished", "requeued", "dead-lettered", "unanswered"]

_ADDRESS = "test:4150"
_TOPIC = "topic"


@dataclass(slots=True)
class Delivery:
    """What became of a message that `deliver` gave to a handler.

    Attributes:
        body: The message body.
        outcome: `finished`; `requeued` at its last delivery; `dead-lettered`: published to `dead_letter_topic`, and
            finished; `unanswered`: the handler has abandoned it.
        attempts: How often it was delivered.
        errors: What the handler raised, or decoding, in order.
        delay_s: The delay with which it was requeued last, in seconds; None: it was not requeued.
        dead_letter_topic: The topic of its dead letter; None: there is none.
        touched: How often its timeout was extended.
    """

    body: bytes
    outcome: Outcome = "unanswered"
    attempts: int = 0
    errors: list[Exception] = field(default_factory=list)
    delay_s: float | None = None
    dead_letter_topic: str | None = None
    touched: int = 0


async def deliver(
    handler: Callable[..., Awaitable[object]],
    *bodies: bytes,
    attempts: int = 1,
    deliveries: int | None = None,
    msg_timeout_s: float = 60.0,
    headers: Headers | Sequence[Headers] | None = None,
    **options: Any,
) -> list[Delivery]:
    """Call a handler with messages as `Consumer.run` does, without a broker, under trio or asyncio.

        [one, two] = await deliver(handle, b"good", b"bad", max_attempts=3, dead_letter_topic="failed")
        assert one.outcome == "finished"
        assert two.outcome == "dead-lettered"

    A requeued message is delivered again at once, whatever its delay, up to the number of deliveries.

    Args:
        handler: See `Consumer.run`.
        bodies: The messages, in the order of their delivery.
        attempts: The attempts of each message at its first delivery, at least 1.
        deliveries: How often a message is delivered that is requeued, at least 1; None: `max_attempts` if it is given,
            else once.
        msg_timeout_s: The message timeout, more than 0; with `auto_touch`, handlers extend it at half of this time.
        headers: The headers of all messages, or a list with those of each.
        options: As for `Consumer.run`.

    Returns:
        What became of each message, in the order of `bodies`.

    Raises:
        TypeError, ValueError: As from `Consumer.run` and `Producer.publish`, or a message is not `bytes`.
        BaseException: What the handler raises that is not an `Exception`.
    """
    check_async("handler", handler)
    check_bytes(bodies)
    check_int("attempts", attempts, 1)
    check_seconds("msg_timeout_s", msg_timeout_s, positive=True)
    if deliveries is None:
        deliveries = options.get("max_attempts") or 1
    check_int("deliveries", deliveries, 1)
    consumer = _LocalConsumer(max_in_flight=max(1, len(bodies)))
    texts = encode_headers_of_all(headers, len(bodies)) or [""] * len(bodies)
    source = _Source(consumer, bodies, texts, attempts, deliveries, msg_timeout_s)

    if (decode := options.pop("decode", None)) is not None:  # here, so that its errors are recorded, too
        check_plain("decode", decode)
        handler = decoding(handler, decode, _TOPIC)

    @wraps(handler)
    def call(message: Message) -> Awaitable[object]:
        with source.recording(message):
            work = handler(message)
        return source.record(message, work) if inspect.isawaitable(work) else work

    async with consumer:
        source.deliver_all()
        await consumer.run(call, **options)
    return source.deliveries


def deliver_sync(handler: Callable[..., object], *bodies: bytes, **options: Any) -> list[Delivery]:
    """Call a handler without async code with messages, as `trio_nsq.sync.Consumer.run` does, without a broker.

    The handler, and `given_up`, run in the calling thread. Arguments and results are those of `deliver`.
    """
    check_plain("handler", handler)

    async def handle(message: Message, *value: Any) -> object:
        return handler(message, *value)

    if (given_up := options.get("given_up")) is not None:
        check_plain("given_up", given_up)

        async def give_up(message: Message, error: Exception) -> object:
            result: object = given_up(message, error)
            return result

        options["given_up"] = give_up
    return trio.run(partial(deliver, handle, *bodies, **options))


class _LocalConsumer(Consumer):
    """A consumer that connects to no broker; its queue is filled by a `_Source`."""

    def __init__(self, max_in_flight: int) -> None:
        super().__init__(_TOPIC, "channel", nsqd_tcp_addresses=_ADDRESS, max_in_flight=max_in_flight)
        self._subscriptions: Any = _NoSubscriptions(self._queue)
        self._active = _EndWhenIdle(self._queue)
        self.dead_lettered: Callable[[Message, str], None] = lambda *_: None

    def _to_dead_letters(self, topic: str) -> GivenUp:
        super()._to_dead_letters(topic)  # checks it

        async def publish(message: Message, _: Exception) -> None:
            self.dead_lettered(message, topic)

        return publish


class _NoSubscriptions:
    """Takes the place of the connections."""

    def __init__(self, queue: ReceiveQueue) -> None:
        self._queue = queue

    async def run(self) -> None:
        await runtime.Event().wait()

    async def wait_opened(self) -> None:
        await runtime.checkpoint()

    def stop(self) -> None:
        pass

    def crashed(self, error: Exception) -> None:
        self._queue.close(error)


class _EndWhenIdle(ActiveHandlers):
    """Ends `run` when a handler has returned and no message is left: only handlers requeue messages."""

    def __init__(self, queue: ReceiveQueue) -> None:
        super().__init__()
        self._queue = queue

    def became_idle(self) -> None:
        super().became_idle()
        if not self._queue.available:
            self._queue.close()


class _Source:
    """Delivers the messages, each in a batch of its own, and records the answers to them, as a connection."""

    address = _ADDRESS
    live = True

    def __init__(
        self,
        consumer: _LocalConsumer,
        bodies: Sequence[bytes],
        texts: Sequence[str],
        attempts: int,
        most_deliveries: int,
        msg_timeout_s: float,
    ) -> None:
        self.msg_timeout_s = self.max_msg_timeout_s = msg_timeout_s
        self.last_message_at = 0.0
        self.deliveries = [Delivery(body) for body in bodies]
        self._by_id = {b"%016x" % number: each for number, each in enumerate(self.deliveries)}
        self._texts = dict(zip(self._by_id, texts, strict=True))
        self._consumer = consumer
        self._before = attempts - 1
        self._uncounted: Counter[bytes] = Counter()  # deliveries that count as no attempt, by message
        self._most_deliveries = most_deliveries
        consumer.dead_lettered = self._dead_lettered

    def deliver_all(self) -> None:
        """Put all messages into the queue."""
        if not self._by_id:
            self._consumer._queue.close()
        for message_id in self._by_id:
            self._deliver(message_id)

    def _deliver(self, message_id: bytes) -> None:
        delivery = self._by_id[message_id]
        delivery.attempts += 1
        self.last_message_at = runtime.current_time()
        attempts = self._before + delivery.attempts - self._uncounted[message_id]
        run = MessageRun(
            [message_id], [delivery.body], [time.time_ns()], [attempts], [self._texts[message_id]]
        )
        self._consumer._queue.put(MessageBatch(run, self))

    async def record(self, message: Message, work: Awaitable[object]) -> object:
        """Await the handler, and record what it raises."""
        with self.recording(message):
            return await work

    @contextmanager
    def recording(self, message: Message) -> Iterator[None]:
        """Record what the block raises."""
        try:
            yield
        except Exception as error:
            self._by_id[message.id].errors.append(error)
            raise

    def _dead_lettered(self, message: Message, topic: str) -> None:
        self._by_id[message.id].dead_letter_topic = topic

    # ------------------------------------------------------------------ what messages call

    def hold(self, batch: MessageBatch) -> None:
        pass

    def release(self, batch: MessageBatch) -> None:
        pass

    def finish(self, ids: Sequence[bytes]) -> None:
        for message_id in ids:
            self.finish_one(message_id)

    def finish_one(self, message_id: bytes) -> None:
        delivery = self._by_id[message_id]
        delivery.outcome = "finished" if delivery.dead_letter_topic is None else "dead-lettered"

    def requeue(
        self,
        ids: Sequence[bytes],
        attempts: Sequence[int],
        delay_ms: int | None,
        backoff: bool,
        count_attempt: bool,
    ) -> None:
        delay_of = self._consumer._settings.requeue_delay_ms
        for message_id, count in zip(ids, attempts, strict=True):
            delivery = self._by_id[message_id]
            delivery.delay_s = (delay_of(count) if delay_ms is None else delay_ms) / 1000
            delivery.outcome = "requeued"
            self._uncounted[message_id] += not count_attempt
            if delivery.attempts < self._most_deliveries:
                self._deliver(message_id)

    def touch(self, ids: Sequence[bytes]) -> None:
        for message_id in ids:
            self._by_id[message_id].touched += 1
