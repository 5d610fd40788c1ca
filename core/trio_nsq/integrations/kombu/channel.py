"""A channel of kombu: publishes to queues and exchanges, and consumes queues with a common prefetch count."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

from amqp.protocol import queue_declare_ok_t
from kombu.transport import virtual
from kombu.utils.uuid import uuid

from ...protocol.names import is_ephemeral
from . import envelope
from .names import nsq_name
from .subscription import Received, Source, Subscription

UNLIMITED_RDY = 1000
"""The messages in flight of a channel without a prefetch count, or whose messages need no acknowledgement."""
EARLY_S = 1.0
"""A task that is due sooner waits in the worker, which starts it at its time."""
GET_TIMEOUT_S = 1.0
"""How long `basic_get` waits for the broker."""
TRANSIENT = 1
"""The delivery mode of messages that may be lost."""
_logger = logging.getLogger("trio_nsq.kombu")
_delivery_tags = count(1)


class QoS:
    """The messages of a channel that are not acknowledged, and how many there may be; 0: no limit."""

    def __init__(self, channel: "Channel", prefetch_count: int = 0) -> None:
        self.channel = channel
        self.prefetch_count = prefetch_count
        self._unanswered: dict[str, tuple[Subscription, bytes]] = {}

    def __len__(self) -> int:
        return len(self._unanswered)

    def can_consume(self) -> bool:
        return not self.prefetch_count or len(self) < self.prefetch_count

    def add(self, tag: str, subscription: Subscription, message_id: bytes) -> None:
        self._unanswered[tag] = subscription, message_id

    def ack(self, tag: str) -> None:
        """Finish the message, unless it is answered."""
        if (found := self._unanswered.pop(tag, None)) is not None:
            subscription, message_id = found
            subscription.finish(message_id)

    def reject(self, tag: str, requeue: bool = False) -> None:
        """Requeue the message, or drop it."""
        if not requeue:
            self.ack(tag)
        elif (found := self._unanswered.pop(tag, None)) is not None:
            subscription, message_id = found
            subscription.requeue(message_id)

    def restore_unacked(self) -> None:
        """Return all of them to the broker."""
        for tag in [*self._unanswered]:
            self.reject(tag, requeue=True)


class Connected(Protocol):
    """What a channel needs of its transport."""

    transient: set[str]
    """The queues that delete themselves."""
    nsq_channel: str
    max_defer_s: float

    @property
    def lock(self) -> AbstractContextManager[Any]: ...

    def publish(self, topic: str, body: bytes, wait_s: float = 0) -> None: ...

    def subscribe(self, channel: "Channel", source: Source) -> Subscription: ...

    def unsubscribe(self, subscription: Subscription) -> None: ...

    def wait(self, subscriptions: Sequence[Subscription], timeout_s: float) -> list[Subscription]: ...

    def depth(self, topic: str, channel: str) -> int: ...

    def purge(self, topic: str, channel: str) -> int: ...

    def close_channel(self, channel: "Channel") -> None: ...


@dataclass(frozen=True, slots=True)
class _Consumer:
    queue: str
    no_ack: bool
    callback: Callable[[Any], object]


class Channel(virtual.Channel):  # type: ignore[misc]  # kombu has few types
    """See `Transport` for what queues and exchanges become."""

    QoS = QoS
    supports_fanout = True
    connection: Connected
    closed: bool

    def __init__(self, connection: Connected, **arguments: Any) -> None:
        super().__init__(connection, **arguments)
        self._subscribed: dict[str, list[Subscription]] = {}  # by queue
        self._consuming: dict[str, _Consumer] = {}  # by consumer tag
        self._handling: dict[str, _Consumer] = {}  # by queue

    # ---------------------------------------------------------------------------------------------- queues

    def queue_declare(self, queue: str | None = None, passive: bool = False, **options: Any) -> Any:
        """Note whether the queue is transient. A topic is created by the first publish or subscription.

        Args:
            passive: Ask for the number of messages, over HTTP; else it is 0.
        """
        queue = queue or f"amq.gen-{uuid()}"
        if not passive:
            is_transient = bool(options.get("auto_delete") or options.get("exclusive"))
            (self.connection.transient.add if is_transient else self.connection.transient.discard)(queue)
        return queue_declare_ok_t(queue, self._size(queue) if passive else 0, 0)

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str | None, queue: str) -> None:
        # The answers to a remote control command may come before their queue is consumed.
        if queue in self.connection.transient and not self.state.exchanges[exchange]["durable"]:
            self._subscribe(queue)

    def _delete(
        self, queue: str, exchange: str, routing_key: str, pattern: str | None, *_: Any, **__: Any
    ) -> None:
        table = self.get_table(exchange)
        table[:] = [entry for entry in table if entry != (routing_key, pattern, queue)]
        if queue not in self.connection.transient:
            self._purge(queue)
        elif queue not in self._handling:
            self._unsubscribe(queue)

    def _purge(self, queue: str) -> int:
        """Empty the queue over HTTP; return how many messages waited."""
        return self.connection.purge(self._topic_of(queue), self.connection.nsq_channel)

    def _size(self, queue: str) -> int:
        return self.connection.depth(self._topic_of(queue), self.connection.nsq_channel)

    def _topic_of(self, queue: str) -> str:
        return nsq_name(queue, ephemeral=queue in self.connection.transient)

    # ------------------------------------------------------------------------------------------ publishing

    def basic_publish(self, message: envelope.Raw, exchange: str, routing_key: str, **_: Any) -> None:
        """Publish to the topics of queues and exchanges; returns when the broker has stored the message.

        Raises:
            BrokerError: The broker refuses the message.
            ConnectionFailed: No broker answers; the message is not stored.
            PublishFailed: It is not acknowledged; `maybe_stored` says whether it may be stored.
        """
        self._inplace_augment_message(message, exchange, routing_key)
        wait_s = envelope.wait_s(message)
        body = envelope.encode(message)
        for topic in self._topics(message, exchange, routing_key):
            self.connection.publish(topic, body, wait_s)

    def _put(self, queue: str, message: envelope.Raw, **_: Any) -> None:
        self.connection.publish(self._topic_of(queue), envelope.encode(message), envelope.wait_s(message))

    def encode_body(self, body: Any, encoding: str | None = None) -> tuple[Any, str | None]:
        """Keep text as it is, so that it can be read in the topic."""
        if isinstance(body, str):
            return body, "utf-8"
        encoded: tuple[Any, str | None] = super().encode_body(body, encoding)
        return encoded

    def _topics(self, message: envelope.Raw, exchange: str, routing_key: str) -> Iterator[str]:
        if not exchange:
            yield self._topic_of(routing_key)
            return
        queues = self._lookup(exchange, routing_key)
        if not queues and not self._is_shared(exchange):
            _logger.warning(
                "exchange %s has no queue for the key %r: a message is dropped", exchange, routing_key
            )
        transient = {queue for queue in queues if queue in self.connection.transient}
        if not self._is_shared(exchange):
            yield from map(self._topic_of, queues)
            return
        if not self._is_fanout(exchange):
            yield from map(self._topic_of, set(queues) - transient)
        is_for_all = self._is_fanout(exchange) or not self.state.exchanges[exchange]["durable"]
        if is_for_all or transient or message["properties"].get("delivery_mode") == TRANSIENT:
            yield nsq_name(exchange, ephemeral=True)

    def _is_shared(self, exchange: str) -> bool:
        """Whether the exchange has a topic of its own, for queues that the publisher may not know."""
        declared = self.state.exchanges.get(exchange)
        return declared is not None and (declared["type"] != "direct" or not declared["durable"])

    def _is_fanout(self, exchange: str) -> bool:
        return bool(self.state.exchanges[exchange]["type"] == "fanout")

    # ------------------------------------------------------------------------------------------- consuming

    def _sources(self, queue: str) -> Iterator[Source]:
        """Yield where a queue receives from: its own topic, and those of exchanges."""
        is_transient = queue in self.connection.transient
        exchanges = {binding.exchange for binding in self.state.queue_bindings(queue)}
        shared = {
            each for each in exchanges if self._is_shared(each) and (is_transient or self._is_fanout(each))
        }
        for exchange in sorted(shared):
            topic, channel = (
                nsq_name(exchange, ephemeral=True),
                nsq_name(queue, ephemeral=is_transient),
            )
            yield Source(topic, channel, exchange, is_new=is_transient)
        if not shared or exchanges - shared:
            topic = self._topic_of(queue)
            yield Source(
                topic, nsq_name(self.connection.nsq_channel, ephemeral=is_transient and is_ephemeral(topic))
            )

    def _subscribe(self, queue: str) -> list[Subscription]:
        """Return the subscriptions of a queue; open those that are missing."""
        if queue not in self._subscribed:
            opened: list[Subscription] = []
            try:
                opened.extend(self.connection.subscribe(self, source) for source in self._sources(queue))
            except BaseException:
                for subscription in opened:
                    self.connection.unsubscribe(subscription)
                raise
            self._subscribed[queue] = opened
        return self._subscribed[queue]

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Callable[[Any], object], consumer_tag: str, **_: Any
    ) -> None:
        """Receive the messages of a queue in `callback`. Raises ConnectionFailed."""
        self._subscribe(queue)
        self._consuming[consumer_tag] = self._handling[queue] = _Consumer(queue, no_ack, callback)
        self._consumers.add(consumer_tag)
        self.set_rdy()

    def basic_cancel(self, consumer_tag: str) -> None:
        """Receive no more; messages that are not acknowledged may still be."""
        self._consumers.discard(consumer_tag)
        consumer = self._consuming.pop(consumer_tag, None)
        if consumer is None or self._handling.get(consumer.queue) is not consumer:
            return
        del self._handling[consumer.queue]
        subscriptions = self._subscribed[consumer.queue]
        if any(each.in_flight for each in subscriptions):
            for each in subscriptions:
                each.set_rdy(0)
        else:
            self._unsubscribe(consumer.queue)

    def _unsubscribe(self, queue: str) -> None:
        for subscription in self._subscribed.pop(queue, ()):
            self.connection.unsubscribe(subscription)

    def basic_qos(self, prefetch_size: int = 0, prefetch_count: int = 0, apply_global: bool = False) -> None:
        """Limit the unacknowledged messages of the channel; 0: no limit."""
        self.qos.prefetch_count = prefetch_count
        self.set_rdy()

    def set_rdy(self) -> None:
        """Share what the prefetch count leaves among the queues.

        Each gets at least one while there is something left, so that none starves: with several queues, there may be
        as many more messages as there are queues, less one.
        """
        if self.closed:
            return
        with self.connection.lock:
            qos = self.qos
            limited: list[Subscription] = []
            for queue, consumer in [*self._handling.items()]:
                for subscription in self._subscribed.get(queue, ()):
                    if consumer.no_ack:
                        subscription.set_rdy(UNLIMITED_RDY)
                    else:
                        limited.append(subscription)
            left = (qos.prefetch_count or UNLIMITED_RDY) - len(qos)
            share = max(1, left // len(limited)) if limited and left > 0 else 0
            for subscription in limited:
                subscription.set_rdy(subscription.in_flight + share)

    def receive(self, subscription: Subscription) -> int:
        """Pass on what has arrived; return how many messages a consumer got. Raises ConnectionLost."""
        delivered = 0
        for received in subscription.receive():
            queue = self._queue_of(subscription)
            consumer = None if queue is None else self._handling.get(queue)
            if consumer is None:
                subscription.requeue(received.id)  # it arrived while the consumer was canceled
            elif (
                message := self._message(subscription, consumer.queue, received, consumer.no_ack)
            ) is not None:
                consumer.callback(message)
                delivered += 1
        self.set_rdy()
        return delivered

    def _queue_of(self, subscription: Subscription) -> str | None:
        for queue, subscriptions in self._subscribed.items():
            if subscription in subscriptions:
                return queue
        return None

    def _message(
        self, subscription: Subscription, queue: str, received: Received, no_ack: bool
    ) -> virtual.Message | None:
        """Return the message for a consumer; None: it is not for this queue, or not yet due."""
        raw = envelope.decode(received.body)
        if (wait_s := envelope.wait_s(raw)) > EARLY_S:
            subscription.requeue(received.id, min(wait_s, self.connection.max_defer_s))
            return None
        about = raw["properties"]["delivery_info"]
        exchange = subscription.source.exchange
        if exchange and queue not in self.typeof(exchange).lookup(
            self.get_table(exchange), exchange, str(about.get("routing_key") or ""), None
        ):
            subscription.finish(received.id)
            return None
        about["redelivered"] = received.attempts > 1
        # A publisher's tag comes again with each delivery, also while an earlier one is not acknowledged.
        tag = raw["properties"]["delivery_tag"] = f"{received.id.decode()}.{next(_delivery_tags)}"
        try:
            message = self.Message(raw, channel=self)
        except Exception:  # whatever is wrong with a message that another program has published
            _logger.exception(
                "topic %s: a message that kombu cannot read is dropped", subscription.source.topic
            )
            subscription.finish(received.id)
            return None
        if no_ack:
            subscription.finish(received.id)
        else:
            self.qos.add(tag, subscription, received.id)
        return message

    def basic_get(self, queue: str, no_ack: bool = False, **_: Any) -> virtual.Message | None:
        """Return a message; None if none arrives within a second. Raises ConnectionFailed or ConnectionLost."""
        if queue in self._handling:
            raise ValueError(f"queue {queue!r} is being consumed by this channel")
        subscriptions = self._subscribe(queue)
        try:
            for subscription in subscriptions:
                subscription.set_rdy(subscription.in_flight + 1)
            found = None
            for subscription in self.connection.wait(subscriptions, GET_TIMEOUT_S):
                for received in subscription.receive():
                    if found is None:
                        found = self._message(subscription, queue, received, no_ack)
                    else:
                        subscription.requeue(received.id)
            return found
        finally:
            for subscription in subscriptions:
                subscription.set_rdy(0)

    def basic_ack(self, delivery_tag: str, multiple: bool = False) -> None:
        """Finish a message. If its connection is lost, the broker delivers it again."""
        self.qos.ack(delivery_tag)
        self.set_rdy()

    def basic_reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Requeue a message without delay, or drop it."""
        self.qos.reject(delivery_tag, requeue=requeue)
        self.set_rdy()

    def basic_recover(self, requeue: bool = False) -> None:
        """Return all messages that are not acknowledged to the broker."""
        self.qos.restore_unacked()
        self.set_rdy()

    def close(self) -> None:
        """Cancel all consumers, return all messages that are not acknowledged, and disconnect."""
        if self.closed:
            return
        self.closed = True
        self._consumers.clear()
        self._consuming.clear()
        self._handling.clear()
        for queue in [*self._subscribed]:
            self._unsubscribe(queue)
        if self.connection is not None:
            self.connection.close_channel(self)
