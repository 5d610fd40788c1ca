"""Hooks: a program's own code that runs when the client publishes, receives and handles messages, or connects.

Without hooks, the client tests one attribute for each publish and each received batch, and calls nothing.
"""

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

from trio_nsq.protocol import NSQError
from trio_nsq.protocol.headers import Headers, encode_headers
from trio_nsq.protocol.limits import SECOND_MS

from ..event_loop import runtime
from .consuming.message import Message, MessageBatch
from .errors import ConnectionFailed, PublishFailed
from .publishing.queue import PublishFuture

_logger = logging.getLogger("trio_nsq.client")


class PublishCall:
    """A publish that hooks observe: a call of `publish`, `submit`, `publish_many` or `publish_set`.

    `Hooks.publish_started` may replace bodies and headers in these lists, and the lists by others as long, unless
    `is_packed`.

    Attributes:
        topic: The topic.
        bodies: The messages.
        headers: The headers of each message.
        defer_s: The delay before the delivery, in seconds; 0: no delay.
        is_list: Several messages, however many there are: `publish_many` or `publish_set`.
        is_packed: `publish_set`: the messages are packed already, so `bodies` is empty, and nothing can be replaced.
        count: The number of messages.
        nsqd_address: Once it is stored: the broker, `host:port`. None: not stored, or a list.
        state: For the hooks; None at first.
    """

    __slots__ = (
        "_has_own_headers",
        "_hooks",
        "_pending",
        "bodies",
        "count",
        "defer_s",
        "headers",
        "is_list",
        "is_packed",
        "nsqd_address",
        "state",
        "topic",
    )

    def __init__(
        self,
        hooks: "Hooks",
        topic: str,
        bodies: Sequence[bytes],
        headers: Headers | Sequence[Headers] | None = None,
        *,
        defer_ms: int = 0,
        is_list: bool = False,
        packed: int = 0,
    ) -> None:
        is_one = headers is None or isinstance(headers, Mapping)
        each: Any = [headers or {}] * len(bodies) if is_one else headers
        self.topic: str = topic
        self.bodies: list[bytes] = [*bodies]
        self.headers: list[Headers] = [*each]
        self.defer_s: float = defer_ms / SECOND_MS
        self.is_list: bool = is_list or bool(packed)
        self.is_packed: bool = bool(packed)
        self.count: int = packed or len(bodies)
        self.nsqd_address: str | None = None
        self.state: Any = None
        self._hooks = hooks
        self._has_own_headers = any(each)
        self._pending = [self]  # empty once the end is told: two threads may come to that

    def add_headers(self, headers: Headers) -> None:
        """Add headers to each message. A broker that knows no headers gets the messages without them.

        Keeps those that the program has given, except for names that occur in both. Adds none to a message that would
        have too many.
        """
        if not headers:
            return
        merged: dict[int, Headers] = {}  # by the identity of what it comes from: lists often share theirs
        for index, own in enumerate(self.headers):
            if id(own) not in merged:
                merged[id(own)] = _merged(own, headers)
            self.headers[index] = merged[id(own)]

    @property
    def common_headers(self) -> Headers | Sequence[Headers]:
        """The headers of all messages if they are the same, which costs less; otherwise those of each."""
        first = self.headers[0] if self.headers else {}
        return first if all(each is first for each in self.headers) else self.headers

    @property
    def headers_optional(self) -> bool:
        """Whether the messages may be sent without their headers: the program has given none."""
        return not self._has_own_headers

    def start(self) -> None:
        """Tell the hooks."""
        notify(self._hooks.publish_started, self)

    def undo_changes(self, error: Exception) -> None:
        """Log that what the hooks have made of the messages is invalid; they are published as they were."""
        _logger.error(
            "hooks have made a message invalid, which is published without their changes: %s", error
        )

    def end(self, error: BaseException | None, nsqd_address: str | None = None) -> None:
        """Tell the hooks, the first time."""
        try:
            self._pending.pop()
        except IndexError:
            return
        self.nsqd_address = nsqd_address
        notify(self._hooks.publish_ended, self, error)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Tell the end of the block, if it was not told in it."""
        try:
            yield
        except BaseException as error:
            self.end(error)
            raise
        self.end(None)

    def end_with(self, future: PublishFuture) -> None:
        """Tell the end when the publish is settled."""
        future.settled = _Settled(self, future)

    def settled(self, future: PublishFuture) -> None:
        """Tell the end of a publish that is settled."""
        if future.is_withdrawn:
            self.end(PublishFailed("it was withdrawn", maybe_stored=False))
        elif future.failure is not None:
            self.end(future.failure)
        else:
            self.end(None, future.ack.nsqd_address)


class _Settled(runtime.Event):
    """The event of a publish, which tells the hooks."""

    __slots__ = ("_call", "_future")

    def __init__(self, call: PublishCall, future: PublishFuture) -> None:
        super().__init__()
        self._call = call
        self._future = future

    def set(self) -> None:
        super().set()
        self._call.settled(self._future)


def _merged(own: Headers, added: Headers) -> Headers:
    merged = {**own, **added}
    try:
        encode_headers(merged)
    except ValueError:
        return own
    return merged


class ProcessCall:
    """The processing of a message or a batch that hooks observe: a call of a handler, or a block.

    Attributes:
        topic, channel: Those of the consumer.
        ids, bodies, headers, timestamps_ns, attempts: Those of each message; see `MessageBatch`.
        is_batch: A batch, however many messages it has.
        nsqd_address: The broker, as of `MessageBatch`.
        answer: What the handler has returned, once it has ended.
        state: For the hooks; None at first.
    """

    __slots__ = (
        "answer",
        "attempts",
        "bodies",
        "channel",
        "headers",
        "ids",
        "is_batch",
        "nsqd_address",
        "state",
        "timestamps_ns",
        "topic",
    )

    def __init__(self, topic: str, channel: str, messages: Any) -> None:
        self.topic: str = topic
        self.channel: str = channel
        self.nsqd_address: str = messages.nsqd_address
        self.answer: object = None
        self.state: Any = None
        self.is_batch: bool = not isinstance(messages, Message)
        self.ids: list[bytes]
        self.bodies: list[bytes]
        self.headers: list[Mapping[str, str]]
        self.timestamps_ns: list[int]
        self.attempts: list[int]
        if self.is_batch:
            self.ids, self.bodies, self.headers = messages.ids, messages.bodies, messages.headers
            self.timestamps_ns, self.attempts = messages.timestamps_ns, messages.attempts
        else:
            self.ids, self.bodies, self.headers = [messages.id], [messages.body], [messages.headers]
            self.timestamps_ns, self.attempts = [messages.timestamp_ns], [messages.attempts]


class Hooks:
    """What a program runs when a producer or a consumer does something: a base class whose methods do nothing.

    Override what you need, and pass an object as the option `hooks` of `Producer` or `Consumer`, or `install` it.
    `trio_nsq.otel` has hooks for OpenTelemetry.

    Methods must return soon: the event loop waits for them. What they raise is logged, and changes nothing. The methods
    for publishes and handlers run with the context variables of the task or thread that publishes or handles.
    Those for the ends of publishes may run elsewhere: in the event loop's task that got the acknowledgement.
    """

    def publish_started(self, call: PublishCall) -> None:
        """Called before a publish, whose arguments are valid; may change the messages."""

    def publish_ended(self, call: PublishCall, error: BaseException | None) -> None:
        """Called once when a publish is acknowledged, has failed or is cancelled; None: acknowledged.

        After `publish_started` always; for `submit`, when the receipt is settled.
        """

    def received(self, topic: str, channel: str, batch: MessageBatch) -> None:
        """Called with messages that a broker has delivered to a consumer, before the program gets them."""

    def process_started(self, call: ProcessCall) -> None:
        """Called before a handler of `Consumer.run`, or at the begin of a block `with consumer.processing(...)`."""

    def process_ended(self, call: ProcessCall, error: BaseException | None) -> None:
        """Called in the same context when the handler or the block has ended; with what it raised."""

    def connected(self, nsqd_address: str) -> None:
        """Called when a connection to a broker is open and its settings are negotiated."""

    def connection_failed(self, nsqd_address: str, error: ConnectionFailed) -> None:
        """Called when an attempt to connect has failed."""

    def disconnected(self, nsqd_address: str, error: NSQError | None) -> None:
        """Called when a connection has ended, with the reason; None: this side has closed it."""

    def install(self) -> None:
        """Use these hooks for all producers and consumers that are created later without the option `hooks`."""
        _installed[:] = [self]

    def uninstall(self) -> None:
        """Undo `install`; does nothing if other hooks are installed."""
        if installed_hooks() is self:
            _installed.clear()


_installed: list[Hooks] = []  # at most one


def installed_hooks() -> Hooks | None:
    """Return the hooks that are used if none are given."""
    return _installed[0] if _installed else None


def notify(function: Callable[..., object], *args: object) -> None:
    """Call a method of hooks; log what it raises."""
    try:
        function(*args)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # also asyncio's CancelledError, which would silently end a task of the client
        _logger.exception("%r failed", function)


@contextmanager
def processing(hooks: Hooks | None, topic: str, channel: str, messages: Any) -> Iterator[ProcessCall | None]:
    """Tell hooks the begin and the end of a block that processes a message or a batch."""
    if hooks is None:
        yield None
        return
    call = ProcessCall(topic, channel, messages)
    notify(hooks.process_started, call)
    try:
        yield call
    except BaseException as error:
        notify(hooks.process_ended, call, error)
        raise
    notify(hooks.process_ended, call, None)


def observed(
    handler: Callable[..., Any], hooks: Hooks, topic: str, channel: str, check: Callable[[object], object]
) -> Callable[[Message], Awaitable[object]]:
    """Return an async handler that calls another one, whose begin and end it tells to hooks.

    Args:
        check: Called with what the handler returned; raises if that is not awaitable.
    """

    @wraps(handler)
    async def handle(message: Message) -> object:
        with processing(hooks, topic, channel, message) as call:
            result = handler(message)
            check(result)
            result = await result
            assert call is not None
            call.answer = result
        return result

    return handle


def observed_plain(
    handler: Callable[..., object], hooks: Hooks, topic: str, channel: str
) -> Callable[[Any], object]:
    """As `observed`, for a handler that runs in a thread."""

    @wraps(handler)
    def handle(message: Any) -> object:
        with processing(hooks, topic, channel, message) as call:
            result = handler(message)
            assert call is not None
            call.answer = result
        return result

    return handle
