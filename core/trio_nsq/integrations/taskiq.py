"""A broker for taskiq: tasks are messages of one NSQ topic, workers share one channel of it."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Unpack

from taskiq import AckableMessage, AsyncBroker, BrokerMessage

from ..client.arguments import check_name
from ..client.consuming.consumer import Consumer
from ..client.consuming.message import Message
from ..client.consuming.touching import keep_touched
from ..client.discovery.options import DiscoveryOptions
from ..client.publishing.producer import Producer
from ..text.arguments import check_seconds

DELAY_LABEL = "delay"


class NSQBroker(AsyncBroker):
    """Sends and receives the tasks of a topic; both ends run under asyncio.

        broker = NSQBroker("127.0.0.1:4150", topic="jobs")

        @broker.task
        async def add(left: int, right: int) -> int: ...

    A task is acknowledged when taskiq says so (`--ack-type`, or the label `ack_type`). A worker that stops returns its
    unacknowledged tasks, and the tasks of a worker that is killed are delivered again, so a task may run twice. While
    a task runs, the worker extends the message timeout (TOUCH), up to the broker's `--max-msg-timeout` in total, 15
    minutes by default; then the broker delivers the task to another worker, too.

    The label `delay` defers a task: `add.kicker().with_labels(delay=2.5).kiq(1, 2)`. Its value is seconds, at most what
    the broker allows: one year by default, or one hour for nsqd. Labels are part of the message.

    Args:
        nsqd_tcp_addresses, lookupd_http_addresses: See `Producer` and `Consumer`.
        topic: The topic of the tasks.
        channel: The channel that the workers share. Another channel gets all tasks, too.
        max_in_flight: Unacknowledged tasks of one worker process, at least 1. If the worker is started with
            `--max-async-tasks` or `--max-prefetch`, give their sum: what the process cannot start times out.
        options: See `DiscoverySettings` and `ConnectionSettings`.

    Raises:
        TypeError: An option is unknown or has another type.
        ValueError: An address, a name or an option is invalid.
    """

    def __init__(
        self,
        nsqd_tcp_addresses: str | Sequence[str] | None = None,
        *,
        lookupd_http_addresses: str | Sequence[str] = (),
        topic: str = "taskiq",
        channel: str = "taskiq",
        max_in_flight: int = 100,
        **options: Unpack[DiscoveryOptions],
    ) -> None:
        super().__init__()
        check_name("topic", topic)
        self.topic = topic
        self._new_producer = partial(
            Producer, nsqd_tcp_addresses, lookupd_http_addresses=lookupd_http_addresses, **options
        )
        self._new_consumer = partial(
            Consumer,
            topic,
            channel,
            nsqd_tcp_addresses=nsqd_tcp_addresses,
            lookupd_http_addresses=lookupd_http_addresses,
            max_in_flight=max_in_flight,
            **options,
        )
        self._new_producer(), self._new_consumer()  # refuse invalid arguments here
        self._producer: Producer | None = None
        self._consumer: Consumer | None = None
        self._opened = AsyncExitStack()
        self._running: dict[Message, asyncio.Task[None]] = {}  # unacknowledged tasks, and what touches them

    async def startup(self) -> None:
        """Connect; a worker process also subscribes.

        Raises:
            ConnectionFailed: No broker could be reached within `connect_timeout_s`.
        """
        async with AsyncExitStack() as opened:
            self._producer = await opened.enter_async_context(self._new_producer())
            if self.is_worker_process:
                self._consumer = await opened.enter_async_context(self._new_consumer())
                self._consumer.pause()  # until `listen`
            await super().startup()
            self._opened = opened.pop_all()

    async def shutdown(self) -> None:
        """Call the shutdown handlers, then return unacknowledged tasks to the broker and disconnect."""
        try:
            await super().shutdown()
        finally:
            self._producer = self._consumer = None
            await self._opened.aclose()
            for touching in [*self._running.values()]:
                touching.cancel()

    async def kick(self, message: BrokerMessage) -> None:
        """Publish a task and wait until the broker has stored it.

        Raises:
            PublishFailed: It was not acknowledged; `maybe_stored` says whether it may be stored.
            RuntimeError: `startup` was not called.
            TypeError, ValueError: The label `delay` is not a number of seconds, or the message is too long.
        """
        if self._producer is None:
            raise RuntimeError("the broker is not started: await broker.startup() first")
        delay_s = _seconds(message.labels.get(DELAY_LABEL))
        await self._producer.publish(self.topic, message.message, defer_s=delay_s)

    async def listen(self) -> AsyncGenerator[AckableMessage, None]:
        """Yield tasks; when the generator is closed, the worker gets no more.

        Raises:
            AuthRefused: A broker refused the secret.
            RuntimeError: The process is not a worker, or `startup` was not called.
        """
        if (consumer := self._consumer) is None:
            raise RuntimeError("only a worker process listens, after startup()")
        consumer.unpause()
        try:
            async for message in consumer:
                self._running[message] = touching = asyncio.create_task(keep_touched(message))
                touching.add_done_callback(partial(self._forget, message))
                yield AckableMessage(data=message.body, ack=partial(self._finish, message))
        finally:
            consumer.pause()

    def _forget(self, message: Message, _: object) -> None:
        self._running.pop(message, None)

    def _finish(self, message: Message) -> None:
        if (touching := self._running.get(message)) is not None:
            touching.cancel()
        if not message.answered:
            message.finish()


def _seconds(delay: Any) -> float:
    """Return the value of the label, which may be text. Raises TypeError or ValueError."""
    if delay is None:
        return 0.0
    if isinstance(delay, str):
        delay = float(delay)
    check_seconds(DELAY_LABEL, delay)
    return float(delay)
