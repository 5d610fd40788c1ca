"""A producer for one or more brokers."""

import random as random_module
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from math import inf
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, overload

from trio_nsq.protocol import MessageSet, pack_messages
from trio_nsq.protocol.batcher import split_for_mpub
from trio_nsq.protocol.bodies import check_bytes, list_of
from trio_nsq.protocol.headers import Headers, prefix_of, split_for_hpub
from trio_nsq.text.arguments import check_seconds, check_type

from ...event_loop import runtime
from ..arguments import check_name, in_ms
from ..background import BackgroundTask
from ..connection.addresses import addresses_of
from ..connection.options import accepted_options
from ..errors import ProducerClosed, PublishFailed
from ..hooks import PublishCall
from ..topics import Topic, encoded
from .broker_pool import BrokerPool
from .options import ProducerOptions, ProducerSettings
from .queue import Command, CommandGroup, PublishAck, PublishFuture
from .receipt import ProducerStats, Receipt, timed_out

T = TypeVar("T")


class Producer:
    """Publishes to one broker, or to several in turn; an async context manager.

        async with Producer("127.0.0.1:4150") as producer:
            await producer.publish("clicks", b"...")

    A publish returns once a broker has acknowledged it. Otherwise it raises `PublishFailed`, which says whether the
    message may be stored. The producer never sends a message twice, unless `retry` is set or it has a name.

    With a `name`, the producer numbers its messages, and a broker stores each number once. After a lost connection, or
    if a broker cannot store a publish now, the producer tries again for `patience_s`. The messages of a topic keep
    their order on each broker. What was sent to a broker waits for that broker, and is never sent to another one. A
    program that starts again with the same name takes over: in an earlier one that still runs, publishes fail because
    of `ProducerFenced`. Connecting to nsqd, which knows no names, fails.

    Any number of tasks may publish at the same time, in the event loop that entered the producer. In another one, its
    methods raise RuntimeError. Single messages to one topic that wait for the same write are sent as one MPUB. The
    broker stores all messages of an MPUB or none: if it refuses one, all of them fail.

    Publishes go to the brokers in turn: the given ones, and all brokers that discovery services know, whatever their
    topics. A broker that cannot be reached, loses its connection or drains is excluded and tried again after a growing
    delay. Meanwhile the other brokers get all publishes, including those that waited for this broker and were not sent.
    A broker that does not answer for `silence_timeout_s` gets no publishes until it answers. If no broker is available,
    each publish tries all of them before it fails. The producer reconnects when there is something to publish.

    The producer uses a new broker as soon as a discovery service returns it. It disconnects from a broker that drains
    or that no service returns any more, once its publishes are settled. If the services return no broker at all, it
    keeps those that it has. For a topic that has a tombstone on a broker, it uses the others, if there are any. It asks
    the services again at once if all brokers fail.

    A refused publish does not fail others. Brokers close the connection after most refusals and do not execute later
    commands; the producer sends those again over the next connection. `qcli serve` keeps the connection open if the
    topic or the disk is full.

    The producer checks names and the limits below before it sends. If the brokers' limits are not nsqd's defaults, set
    them here.

    Args:
        nsqd_tcp_addresses: Brokers, `host:port` each; or a single one. None: `127.0.0.1:4150`, unless discovery
            services are given.
        lookupd_http_addresses: Discovery services (nsqlookupd), `host:port` or a URL each; or a single one.
        random: Returns numbers in [0, 1), for the jitter of the delays.
        options: See `ProducerSettings`, `DiscoverySettings` and `ConnectionSettings`.

    Raises:
        TypeError: An option is unknown, or an address is not a string.
        ValueError: An address or an option is invalid.
    """

    def __init__(
        self,
        nsqd_tcp_addresses: str | Sequence[str] | None = None,
        *,
        lookupd_http_addresses: str | Sequence[str] = (),
        random: Callable[[], float] = random_module.random,
        **options: Unpack[ProducerOptions],
    ) -> None:
        check_type("random", random, Callable)
        self._settings = settings = ProducerSettings(**accepted_options(Producer, ProducerSettings, options))
        self._hooks = settings.hooks
        self._limits = settings.limits
        self._part_bytes = settings.part_bytes
        addresses, lookupds = addresses_of(nsqd_tcp_addresses, lookupd_http_addresses)
        if settings.ordered and (len(addresses) > 1 or lookupds):
            what = "discovery services" if lookupds else f"{len(addresses)} brokers"
            raise ValueError(f"ordered is True with {what}; it works with one broker only")
        if not (settings.wait_connected or addresses):
            raise ValueError("wait_connected is False without nsqd_tcp_addresses")
        self._loop = runtime.OwnLoop("trio_nsq.Producer", "trio_nsq.sync.Producer")
        self._brokers = BrokerPool(addresses, lookupds, settings, random)
        self._background = BackgroundTask(self._crashed)
        self._entered = self._opened = self._closing = False
        self._closed = runtime.Event()

    async def __aenter__(self) -> Self:
        """Connect to all brokers; returns as soon as one connection is open.

        Raises:
            ConnectionFailed: No broker could be reached, or the discovery services know none.
            RuntimeError: The caller is not a task of trio or asyncio, or the producer was entered before.
        """
        if self._entered:
            raise RuntimeError("a Producer can be entered only once; create another one")
        self._loop.enter()
        self._entered = True
        await self._background.open(self._brokers.run)
        try:
            await self._brokers.wait_opened()
        except BaseException:
            self._closing = True
            self._closed.set()
            await self._background.close()
            raise
        self._opened = True
        return self

    def _crashed(self, error: Exception) -> None:
        self._opened = False
        self._brokers.crashed(error)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.check_task()  # in another loop, the tasks in the background would never end
        try:
            await self.aclose()
        finally:
            await self._background.close()

    async def aclose(self) -> None:
        """Wait for pending acknowledgements and disconnect.

        Waits for `close_timeout_s` at most; then unacknowledged publishes fail. If this is cancelled, they fail at
        once. Later publishes raise `ProducerClosed`. May be called again.
        """
        self._loop.check_task()
        if self._closing:
            await self._closed.wait()
            return
        self._closing = True
        try:
            with runtime.move_on_after(self._settings.close_timeout_s):
                await self._settle_all()
        finally:
            await runtime.shielded(self._disconnect)

    async def flush(self, timeout_s: float | None = None) -> None:
        """Wait until all messages given to this producer before are acknowledged, or have failed.

        It does not raise the errors of failed messages: their receipts do, and `stats` counts them.

        Args:
            timeout_s: The longest time to wait; None: no limit.

        Raises:
            ProducerClosed: The producer is not open.
            TimeoutError: Some messages are neither acknowledged nor failed after this time. They are still published.
            ValueError: timeout_s is less than 0.
        """
        if timeout_s is not None:
            check_seconds("timeout_s", timeout_s)
        self._loop.check()
        self._check_open()
        await runtime.checkpoint()
        with runtime.move_on_after(inf if timeout_s is None else timeout_s) as scope:
            await self._settle_all()
        if scope.cancelled_caught:
            stats = self.stats()
            raise TimeoutError(
                f"{stats.waiting + stats.sent} messages are not acknowledged after {timeout_s:g} s"
            )

    def stats(self) -> ProducerStats:
        """Return the counts of this producer."""
        return self._brokers.stats()

    async def _settle_all(self) -> None:
        for future in [*self._brokers.futures()]:
            if not future.settled.is_set():
                await future.settled.wait()

    async def _disconnect(self) -> None:
        if self._entered:
            await self._background.stop()
        self._brokers.fail_all(ProducerClosed("the producer was closed before the broker acknowledged it"))
        self._closed.set()

    @overload
    async def publish(
        self,
        topic: str,
        body: bytes,
        *,
        defer_s: float = 0,
        timeout_s: float | None = None,
        headers: Headers | None = None,
    ) -> PublishAck: ...

    @overload
    async def publish(
        self,
        topic: Topic[T],
        body: T,
        *,
        defer_s: float = 0,
        timeout_s: float | None = None,
        headers: Headers | None = None,
    ) -> PublishAck: ...

    async def publish(
        self,
        topic: str | Topic[Any],
        body: Any,
        *,
        defer_s: float = 0,
        timeout_s: float | None = None,
        headers: Headers | None = None,
        defer_ms: int | None = None,
    ) -> PublishAck:
        """Publish a message and wait for its acknowledgement.

        If cancelled, the message is withdrawn unless it was written to the socket; then it may be stored.

        Args:
            topic: The topic; created if missing.
            body: The message, 1 to `max_msg_size` bytes; with a `Topic`, the value that it encodes.
            defer_s: The delay before the delivery, in seconds; 0: no delay.
            timeout_s: How long to wait for the acknowledgement, more than 0; then the publish fails, and what was not
                written to the socket is withdrawn. None: the producer's settings decide.
            headers: Names and values, both strings: names of at most 128 lower-case letters, digits, `-`, `_` and `.`,
                values without control characters; at most 64, and 16 KiB together. Empty or None: no headers.
            defer_ms: Deprecated: `defer_s` in milliseconds.

        Returns:
            Where it is stored.

        Raises:
            PublishFailed: The message was not acknowledged. Its `__cause__` is `HeadersRefused` if no broker knows
                headers; then nothing was sent.
            ProducerClosed: The producer is not open.
            TypeError: The topic or a header is not a string, the message not `bytes`, or a time not a number.
            ValueError: The topic, the message, a time or a header is invalid.
            Exception: What the codec of a `Topic` raises; nothing was sent.
        """
        if timeout_s is not None:
            check_seconds("timeout_s", timeout_s, positive=True)
        defer_ms = in_ms("defer", defer_s, defer_ms) or 0
        if self._loop.running() != self._loop.own:  # as `check` does
            self._loop.check()
        if self._hooks is None:
            return await self._settle(self._queue(*encoded(topic, body), defer_ms, headers), timeout_s)
        call, message = self._begin(*encoded(topic, body), defer_ms, headers)
        with call.running():
            ack = await self._settle(self._enqueue(*message), timeout_s)
            call.end(None, ack.nsqd_address)
        return ack

    @overload
    def submit(
        self, topic: str, body: bytes, *, defer_s: float = 0, headers: Headers | None = None
    ) -> Receipt: ...

    @overload
    def submit(
        self, topic: Topic[T], body: T, *, defer_s: float = 0, headers: Headers | None = None
    ) -> Receipt: ...

    def submit(
        self,
        topic: str | Topic[Any],
        body: Any,
        *,
        defer_s: float = 0,
        headers: Headers | None = None,
        defer_ms: int | None = None,
    ) -> Receipt:
        """Queue a message without waiting; the receipt tells what becomes of it.

        Nothing limits how many messages wait: a program that submits faster than the brokers acknowledge must wait for
        receipts.

        With a receipt, a program that was interrupted knows whether the message is stored. If `Receipt.wait` is
        interrupted, call `Receipt.withdraw`. If that returns False, `Receipt.state` tells a stored message from a sent
        one.

        Args:
            topic, body, defer_s, headers, defer_ms: See `publish`.

        Raises:
            ProducerClosed: The producer is not open.
            TypeError, ValueError: See `publish`.
        """
        defer_ms = in_ms("defer", defer_s, defer_ms) or 0
        if self._loop.running() != self._loop.own:  # as `check` does
            self._loop.check()
        if self._hooks is None:
            return Receipt(self._queue(*encoded(topic, body), defer_ms, headers))
        call, message = self._begin(*encoded(topic, body), defer_ms, headers)
        future = self._enqueue(*message)
        call.end_with(future)
        return Receipt(future)

    def _queue(self, topic: str, body: bytes, defer_ms: int, headers: Headers | None) -> PublishFuture:
        message, has_headers = self._check_message(topic, body, defer_ms, headers)
        return self._enqueue(topic, message, defer_ms, has_headers)

    def _check_message(
        self, topic: str, body: bytes, defer_ms: int, headers: Headers | None
    ) -> tuple[bytes, bool]:
        """Raise the errors of `publish` that show before it waits. Any thread may call it.

        Returns what to enqueue, and whether that begins with headers.
        """
        self._check_call(topic)
        return self._prepare(body, defer_ms, headers)

    def _prepare(self, body: bytes, defer_ms: int, headers: Headers | None) -> tuple[bytes, bool]:
        self._limits.check_message(body)
        self._limits.check_defer(defer_ms)
        text = "" if headers is None else self._limits.check_headers(headers, len(body))
        return (prefix_of(text) + body, True) if text else (body, False)

    def _begin(
        self, topic: str, body: bytes, defer_ms: int, headers: Headers | None
    ) -> tuple[PublishCall, tuple[str, bytes, int, bool, bool]]:
        """Check a message and tell the hooks that it is published. Any thread may call it.

        Returns the call, and the arguments of `_enqueue`.
        """
        assert self._hooks is not None
        message, has_headers = self._check_message(topic, body, defer_ms, headers)
        call = PublishCall(self._hooks, topic, [body], headers, defer_ms=defer_ms)
        call.start()
        optional = False
        try:
            message, has_headers = self._prepare(call.bodies[0], defer_ms, call.headers[0])
            optional = call.headers_optional
        except (TypeError, ValueError, LookupError) as error:
            call.undo_changes(error)
        return call, (topic, message, defer_ms, has_headers, optional)

    def _enqueue(
        self, topic: str, message: bytes, defer_ms: int, has_headers: bool, optional: bool = False
    ) -> PublishFuture:
        """Queue a message that was checked; `optional`: without its headers, if the broker knows none."""
        link = self._brokers.next_link(topic)
        assert link is not None  # there is one while the producer is open
        if defer_ms:
            command = Command(
                topic,
                body=message,
                defer_ms=defer_ms,
                has_headers=has_headers,
                headers_optional=optional,
            )
            future = link.queue.add(command)
        elif has_headers:
            future = link.queue.add_message_with_headers(topic, message, optional=optional)
        else:
            future = link.queue.add_message(topic, message)
        link.wake()
        return future

    @overload
    async def publish_many(
        self,
        topic: str,
        bodies: Iterable[bytes],
        *,
        defer_s: float = 0,
        timeout_s: float | None = None,
        headers: Headers | Sequence[Headers] | None = None,
    ) -> None: ...

    @overload
    async def publish_many(
        self,
        topic: Topic[T],
        bodies: Iterable[T],
        *,
        defer_s: float = 0,
        timeout_s: float | None = None,
        headers: Headers | Sequence[Headers] | None = None,
    ) -> None: ...

    async def publish_many(
        self,
        topic: str | Topic[Any],
        bodies: Iterable[Any],
        *,
        defer_s: float = 0,
        timeout_s: float | None = None,
        headers: Headers | Sequence[Headers] | None = None,
        defer_ms: int | None = None,
    ) -> None:
        """Publish messages in order and wait until all are acknowledged.

        They are sent as MPUBs of moderate size, several in flight within `max_in_flight_bytes`, all to one broker
        while it is available. A broker stores all messages of an MPUB or none. To store all messages or none, use
        `publish_set`. If cancelled, messages that were written to the socket may be stored, the others are not.

        Args:
            topic: The topic; created if missing.
            bodies: The messages, 1 to `max_msg_size` bytes each; if empty, nothing is sent. With a `Topic`, the values
                that it encodes.
            defer_s: The delay before the delivery, in seconds; 0: no delay. Deferred messages are sent and stored
                one by one: NSQ has no command to defer several. Those with headers are not.
            timeout_s: How long to wait for all acknowledgements, more than 0; then the publish fails, and what was not
                written to the socket is withdrawn. None: the producer's settings decide.
            headers: The headers of all messages, or a list with those of each; see `publish`.
            defer_ms: Deprecated: `defer_s` in milliseconds.

        Raises:
            PublishFailed: Not all were acknowledged; `acknowledged` says how many were, from the first on, and
                `maybe_stored` whether some of the others may be stored.
            ProducerClosed: The producer is not open.
            TypeError: `bodies` is not several messages, or a message is not `bytes`; some may be stored.
            ValueError: The topic or a message is invalid; nothing was sent.
        """
        if isinstance(topic, Topic):
            bodies = list(map(topic.encode, bodies))
            topic = topic.name
        if timeout_s is not None:
            check_seconds("timeout_s", timeout_s, positive=True)
        defer_ms = in_ms("defer", defer_s, defer_ms) or 0
        self._loop.check()
        self._check_call(topic)
        bodies = list_of(bodies)
        try:
            sizes = list(map(len, bodies))
        except TypeError:
            check_bytes(bodies)
            raise
        self._limits.check_list(sizes)
        self._limits.check_defer(defer_ms)
        texts = self._limits.check_headers_of_all(headers, sizes)
        if defer_ms or texts or self._hooks is not None:
            check_bytes(bodies)
        if self._hooks is None or not bodies:
            await self._publish_list(topic, bodies, sizes, texts, defer_ms, timeout_s)
            return
        call = PublishCall(self._hooks, topic, bodies, headers, defer_ms=defer_ms, is_list=True)
        call.start()
        with call.running():
            try:
                new_sizes = list(map(len, call.bodies))
                if len(new_sizes) != call.count:
                    raise ValueError(f"{len(new_sizes)} messages, but there were {call.count}")
                self._limits.check_list(new_sizes)
                check_bytes(call.bodies)
                new_texts = self._limits.check_headers_of_all(call.common_headers, new_sizes)
            except (TypeError, ValueError) as error:
                call.undo_changes(error)
            else:
                bodies, sizes, texts = call.bodies, new_sizes, new_texts
            optional = call.headers_optional
            await self._publish_list(topic, bodies, sizes, texts, defer_ms, timeout_s, optional=optional)

    async def _publish_list(
        self,
        topic: str,
        bodies: Sequence[bytes],
        sizes: Sequence[int],
        texts: Sequence[str],
        defer_ms: int,
        timeout_s: float | None,
        *,
        optional: bool = False,
    ) -> None:
        """Publish valid messages; `optional`: without their headers, if a broker knows none."""
        group = CommandGroup()
        pending: deque[PublishFuture] = deque()
        acknowledged = in_flight_bytes = 0
        if bodies:
            await runtime.checkpoint_if_cancelled()  # what starts later is queued later
        else:
            await runtime.checkpoint()
        try:
            with runtime.move_on_after(inf if timeout_s is None else timeout_s) as scope:
                for command in self._commands(topic, bodies, sizes, texts, defer_ms, group, optional):
                    while pending and in_flight_bytes + command.size > self._settings.max_in_flight_bytes:
                        done = await self._settle_first(pending)
                        acknowledged += len(done)
                        in_flight_bytes -= done.size
                    pending.append(self._submit(command))
                    in_flight_bytes += command.size
                while pending:
                    acknowledged += len(await self._settle_first(pending))
        except PublishFailed as error:
            maybe_stored = await self._settle_rest(pending)
            raise PublishFailed(
                error.reason, maybe_stored=maybe_stored, acknowledged=acknowledged
            ) from error.__cause__
        except TypeError:
            check_bytes(bodies)
            raise
        finally:
            for future in pending:
                future.withdraw()
        if scope.cancelled_caught:
            raise timed_out(pending, timeout_s, acknowledged)

    def _commands(
        self,
        topic: str,
        bodies: Sequence[bytes],
        sizes: Sequence[int],
        texts: Sequence[str],
        defer_ms: int,
        group: CommandGroup,
        optional: bool,
    ) -> Iterator[Command]:
        """Yield the commands that publish messages with the given texts of headers, or without headers."""
        if texts and not (defer_ms and optional):
            for part in split_for_hpub(bodies, texts, self._part_bytes):
                yield Command(
                    topic,
                    messages=part,
                    defer_ms=defer_ms,
                    group=group,
                    has_headers=True,
                    headers_optional=optional,
                )
        elif defer_ms:  # one by one: without headers, several cannot be deferred together
            for body, text in zip(bodies, texts or repeat(""), strict=False):
                message = prefix_of(text) + body if text else body
                yield Command(
                    topic,
                    body=message,
                    defer_ms=defer_ms,
                    group=group,
                    has_headers=bool(text),
                    headers_optional=optional,
                )
        else:
            for bodies_of_part in split_for_mpub(bodies, sizes, self._part_bytes):
                yield Command(topic, messages=pack_messages(bodies_of_part), group=group)

    async def publish_set(
        self, topic: str, messages: MessageSet, *, timeout_s: float | None = None
    ) -> PublishAck | None:
        """Publish packed messages as one MPUB and wait for its acknowledgement.

        The broker stores all or none of them (nsqd: unless a disk error occurs half-way). If cancelled, they are
        withdrawn unless they were written to the socket; then they may be stored.

        Args:
            topic: The topic; created if missing.
            messages: 1 to `max_msg_size` bytes each, and at most `max_body_size` - 4 bytes in total, size fields
                included; if empty, nothing is sent.
            timeout_s: How long to wait for the acknowledgement, more than 0; then the publish fails, and what was not
                written to the socket is withdrawn. None: the producer's settings decide.

        Returns:
            Where they are stored; None: there are none.

        Raises:
            PublishFailed: The messages were not acknowledged.
            ProducerClosed: The producer is not open.
            TypeError: These are not packed messages.
            ValueError: The topic, a message or the total size is invalid.
        """
        self._loop.check()
        self._check_call(topic)
        if not isinstance(messages, MessageSet):
            raise TypeError(f"messages must be the result of pack_messages, not {type(messages).__name__}")
        self._limits.check_set(messages)
        if timeout_s is not None:
            check_seconds("timeout_s", timeout_s, positive=True)
        if not messages.sizes:
            await runtime.checkpoint()
            return None
        if self._hooks is None:
            return await self._settle(self._submit(Command(topic, messages=messages)), timeout_s)
        call = PublishCall(self._hooks, topic, (), packed=len(messages))
        call.start()
        with call.running():
            ack = await self._settle(self._submit(Command(topic, messages=messages)), timeout_s)
            call.end(None, ack.nsqd_address)
        return ack

    def _check_call(self, topic: str) -> None:
        """Raise the errors of a call that do not depend on the message. Any thread may call it."""
        self._check_open()
        check_name("topic", topic)
        if (fenced := self._brokers.fenced_topics.get(topic)) is not None:
            raise PublishFailed(str(fenced), maybe_stored=False) from fenced

    def _check_open(self) -> None:
        if self._closing:
            raise ProducerClosed("the producer is closed")
        if not self._opened:  # it may never open, and the publish would never return
            if (crash := self._brokers.crash) is not None:
                raise ProducerClosed(f"the producer failed: {crash!r}")
            raise ProducerClosed("the producer is not open yet: publish inside its `async with` block")

    async def last_number(self, topic: str) -> int | None:
        """Return the number of the last message that this producer, by its name, has stored in a topic.

        A program that publishes the messages of a source in order continues after a restart with the message whose
        number is one more: the first message has the number 0. It must have no publish to the topic under way.

        Only for a producer with a name and one broker.

        Args:
            topic: The topic; it need not exist.

        Returns:
            None if there is none.

        Raises:
            PublishFailed: The broker did not answer for `patience_s`, or another producer of this name publishes.
            ProducerClosed: The producer is not open.
            RuntimeError: The producer has no name, or several brokers.
            TypeError: The topic is not a string.
            ValueError: The topic is invalid.
        """
        self._loop.check()
        self._check_call(topic)
        link = self._brokers.only_link()
        if self._settings.name is None or link is None:
            raise RuntimeError("last_number needs a producer with a name and one broker")
        future = link.queue.add(Command(topic, is_question=True))
        link.wake()
        await self._settle(future)
        return link.queue.stored(topic)

    def _submit(self, command: Command) -> PublishFuture:
        if self._closing:
            command.fail(ProducerClosed("the producer was closed"))
        else:
            self._brokers.send(command)
        return command.first_future()

    async def _settle(self, future: PublishFuture, timeout_s: float | None = None) -> PublishAck:
        """Wait for the outcome; if cancelled or after the timeout, withdraw the message if possible."""
        try:
            if timeout_s is None:
                await future.settled.wait()
            else:
                with runtime.move_on_after(timeout_s):
                    await future.settled.wait()
        except BaseException:
            future.withdraw()
            raise
        if not future.settled.is_set():
            raise timed_out([future], timeout_s)
        if future.failure is not None:
            raise future.failure
        return future.ack

    async def _settle_first(self, pending: deque[PublishFuture]) -> Command:
        """Wait for the first of these and remove it; return its command. Raises its failure."""
        await pending[0].settled.wait()
        if (failure := pending[0].failure) is not None:
            raise failure
        return pending.popleft().command

    async def _settle_rest(self, pending: deque[PublishFuture]) -> bool:
        """After the first of these failed, withdraw the unsent ones and wait for the others.

        Returns:
            Whether any of these messages may be stored.
        """
        maybe_stored = False
        for future in pending:
            if future.withdraw():
                maybe_stored |= future.command.maybe_stored
            else:
                await future.settled.wait()
                maybe_stored |= future.failure is None or future.failure.maybe_stored
        return maybe_stored
