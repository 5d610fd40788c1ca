"""The subscriptions of a consumer: one for each broker, re-established when lost."""

import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial

from trio_nsq.event_loop.retries import reconnect_delays
from trio_nsq.protocol import NSQError

from ...event_loop import runtime
from ...event_loop.retries import Delays
from ...lookup.query import lookup_topic
from ..connection.connection import Connection, connect
from ..discovery.discovery import Discovery
from ..errors import AuthRefused, ConnectionFailed, none_reached
from ..hooks import Hooks, notify
from .message import MessageBatch
from .options import ConsumerSettings
from .receive_queue import ReceiveQueue
from .subscription import FlowControl, Subscription

STALL_S = 10.0
"""How long no message is answered before a warning; it comes within twice this time."""

_logger = logging.getLogger("trio_nsq.client")


class Subscriptions:
    """Keeps a subscription to each broker: the given ones, and those that discovery finds.

    Args:
        addresses: The given brokers, `host:port` each.
        lookupds: The HTTP addresses of discovery services.
        random: Returns numbers in [0, 1), for the jitter.
        flow: Sets the ready counts.
        queue: Receives the messages.
        without_private_channels: With the option `private_channel`, awaited with the address of each broker that has no
            private channels, before each SUB there.

    Raises:
        ValueError: The reconnect delays are invalid.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        lookupds: Sequence[str],
        topic: str,
        channel: str,
        settings: ConsumerSettings,
        random: Callable[[], float],
        *,
        flow: FlowControl,
        queue: ReceiveQueue,
        without_private_channels: Callable[[str], Awaitable[None]],
    ) -> None:
        self._addresses = addresses
        self._topic = topic
        self._channel = channel
        self._settings = settings
        self._random = random
        self._flow = flow
        self._queue = queue
        self._without_private_channels = without_private_channels
        self._deliver: Callable[[MessageBatch], None] = queue.put
        if settings.hooks is not None:
            self._deliver = partial(_tell_and_put, settings.hooks, topic, channel, queue)
        self._new_delays()  # checks the settings
        query = partial(lookup_topic, topic=topic)
        self._discovery = Discovery(lookupds, settings, random, query, self._discovered)
        self._nursery: runtime.Nursery | None = None
        self._kept: set[str] = set()  # brokers with a task that keeps them connected
        self._trying = 0  # brokers and services whose first attempt is not decided
        self._failures: dict[str, ConnectionFailed] = {}  # first failures, by address of `_addresses`
        self._settled = runtime.Event()  # one broker is connected, or all have been tried
        self._opened = runtime.Event()
        self._deadline = -math.inf  # until then, what fails is tried again before it counts as tried
        self._stopped = False
        self._crash: Exception | None = None

    def crashed(self, error: Exception) -> None:
        """End all that wait for messages, or for the first connection, with this error: a defect ended `run`."""
        self._crash = error
        self._settled.set()
        self._queue.close(error)

    def stop(self) -> None:
        """Connect to no broker any more, and end `wait_opened`."""
        self._stopped = True
        self._settled.set()

    async def wait_opened(self) -> None:
        """Wait until a broker is connected, discovery services know none, or `stop`. Raises ConnectionFailed."""
        await self._settled.wait()
        if self._crash is not None:
            raise self._crash
        if not self._stopped and not self._opened.is_set() and not self._discovery.has_answer:
            failures = [self._failures[address] for address in self._addresses]
            raise none_reached([*failures, *self._discovery.failures_to_connect()])
        self._opened.set()

    async def run(self) -> None:
        """Connect and reconnect; runs until cancelled."""
        async with runtime.open_nursery() as nursery:
            self._nursery = nursery
            self._deadline = runtime.current_time() + self._settings.connect_timeout_s
            nursery.start_soon(self._flow.run)
            nursery.start_soon(_warn_of_stalls, f"{self._topic}/{self._channel}", self._flow, self._queue)
            self._trying += 1
            self._keep(self._addresses)
            nursery.start_soon(self._ask_first)
            await self._opened.wait()
            await self._discovery.keep_asking()

    async def _ask_first(self) -> None:
        await self._discovery.ask_until(self._deadline, lambda: self._discovery.has_answer)
        self._tried()

    def _discovered(self) -> None:
        self._keep(self._discovery.found)

    def _keep(self, addresses: Iterable[str]) -> None:
        """Start to keep these brokers connected; ignores those that are kept already."""
        assert self._nursery is not None
        for address in addresses:
            if address not in self._kept:
                self._kept.add(address)
                self._trying += 1
                self._nursery.start_soon(self._keep_connected, address)

    def _is_wanted(self, address: str) -> bool:
        return address in self._addresses or address in self._discovery.found

    async def _keep_connected(self, address: str) -> None:
        delays = self._new_delays()
        first = True
        while not self._stopped and self._is_wanted(address):
            try:
                connection = await self._subscribe(address, waits_for_leader=first)
            except ConnectionFailed as error:
                delay_s = delays.next_s()
                now = runtime.current_time()
                if first and not isinstance(error, AuthRefused) and now < self._deadline:
                    due = min(now + delay_s, self._deadline)
                    _logger.warning("%s; next attempt in %.1f s", error, due - now)
                    await runtime.sleep_until(due)
                    continue
                if first:
                    if address in self._addresses:  # discovered brokers change; do not collect their errors
                        self._failures[address] = error
                    self._tried()
                    await self._opened.wait()  # if no broker connects, `__aenter__` raises and cancels this
                if isinstance(error, AuthRefused):
                    self._give_up(error)
                    return
                _logger.warning("%s; next attempt in %.1f s", error, delay_s)
            else:
                if not first:
                    _logger.info("connected to %s", address)
                connected_at = runtime.current_time()
                reason = await self._receive(
                    Subscription(connection, self._settings, self._flow, self._deliver)
                )
                if self._stopped:
                    return
                delays.connection_lasted(runtime.current_time() - connected_at)
                delay_s = delays.next_s()
                _logger.warning("%s; reconnecting in %.1f s", reason, delay_s)
                self._discovery.ask_again()
            first = False
            await runtime.sleep(delay_s)
        self._kept.discard(address)

    def _give_up(self, error: AuthRefused) -> None:
        """End the consumer: the other brokers may refuse the secret only later, but it is the same one."""
        _logger.error("%s; the consumer stops", error)
        self.stop()
        self._flow.paused = True
        self._flow.update()
        self._queue.close(error)

    async def _subscribe(self, address: str, *, waits_for_leader: bool) -> Connection:
        """Connect to a broker and subscribe to the channel. Raises ConnectionFailed."""
        private = self._settings.private_channel
        connection = await connect(
            address,
            self._settings,
            extensions=[
                *("message_headers", "uncounted_requeues"),
                *(["private_channel"] if private else []),
            ],
            waits_for_leader=waits_for_leader,
        )
        if private and not connection.makes_private_channel:
            try:
                await self._without_private_channels(address)
            except BaseException:
                await connection.close_now()
                raise
        await connection.subscribe(self._topic, self._channel)
        return connection

    async def _receive(self, subscription: Subscription) -> NSQError:
        """Receive with a share of max_in_flight until the connection ends; return the reason."""
        self._flow.add(subscription)
        self._opened.set()
        self._settled.set()
        try:
            return await subscription.run()
        finally:
            self._queue.discard(subscription)
            self._flow.remove(subscription)

    def _tried(self) -> None:
        self._trying -= 1
        if not self._trying:
            self._settled.set()

    def _new_delays(self) -> Delays:
        settings = self._settings
        return reconnect_delays(settings.reconnect_min_s, settings.reconnect_max_s, self._random)


def _tell_and_put(hooks: Hooks, topic: str, channel: str, queue: ReceiveQueue, batch: MessageBatch) -> None:
    notify(hooks.received, topic, channel, batch)
    queue.put(batch)


async def _warn_of_stalls(source: str, flow: FlowControl, queue: ReceiveQueue) -> None:
    """Warn when the program waits for messages and answers none of those that it has; runs until cancelled.

    It warns once, and again after further answers.

    Args:
        source: `topic/channel`, for the log.
    """
    answered, warned = -1, False
    while True:
        await runtime.sleep(STALL_S)
        before, answered = answered, flow.finished + flow.requeued
        if answered != before:
            warned = False
        elif not warned and flow.awaits_answers and queue.is_awaited:
            warned = True
            _logger.warning(
                "%s: all %d messages that may be in flight are unanswered, and none was answered for %.0f s. The "
                "brokers send no more. Call finish() or requeue() for each message, or raise max_in_flight",
                source,
                flow.max_in_flight,
                STALL_S,
            )
