"""Call message handlers: do what the handler answers, finish the message if it returns, requeue it if it raises.

A message that failed too often is given up. Only failures of the handler count, not deliveries: a message that was
received and returned without being handled has not failed.
"""

import inspect
import logging
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

from ...event_loop import runtime
from ..errors import AuthRefused, DecodeFailed
from .answers import ANSWERS, Answer, DeadLetter, Finish, GivenUp, Handler, OnFailure, Retry
from .message import Message
from .touching import keep_touched

MOST_COUNTED = 100_000
"""How many messages `FailureCounts` knows: beyond that, the count of the one that failed longest ago is forgotten."""
MOST_ERRORS = 1000
"""How many errors `FailureCounts` keeps; they may refer to large objects."""

_logger = logging.getLogger("trio_nsq.client")


class FailureCounts:
    """How often a consumer's handlers failed each message. The broker's attempts count deliveries instead."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, bytes], int] = {}  # the one that failed longest ago first
        self._last_errors: dict[tuple[str, bytes], Exception] = {}  # oldest first

    def add(self, message: Message) -> int:
        """Count a failure; return how often the message has failed."""
        key = message.nsqd_address, message.id
        count = self._counts.pop(key, 0) + 1
        self._counts[key] = count
        if len(self._counts) > MOST_COUNTED:
            del self._counts[next(iter(self._counts))]
        return count

    def take_back(self, message: Message) -> None:
        """Take back the failure that `add` has just counted."""
        key = message.nsqd_address, message.id
        if (count := self._counts.pop(key, 0)) > 1:
            self._counts[key] = count - 1

    def count(self, message: Message) -> int:
        """Return how often a message has failed."""
        return self._counts.get((message.nsqd_address, message.id), 0)

    def give_up_later(self, message: Message, error: Exception) -> None:
        """Keep the last error of a message that its handler has answered, for the next delivery."""
        key = message.nsqd_address, message.id
        self._last_errors.pop(key, None)
        self._last_errors[key] = error.with_traceback(None)  # it is logged; its frames may keep large objects
        if len(self._last_errors) > MOST_ERRORS:
            del self._last_errors[next(iter(self._last_errors))]

    def last_error(self, message: Message) -> Exception | None:
        """Return the error for which a message is to be given up before it is handled; None: it is to be handled."""
        if not self._last_errors:
            return None
        return self._last_errors.get((message.nsqd_address, message.id))

    def forget(self, message: Message) -> None:
        """Forget the failures of a message: it is finished."""
        if self._counts:
            key = message.nsqd_address, message.id
            self._counts.pop(key, None)
            self._last_errors.pop(key, None)


@dataclass(frozen=True, slots=True)
class Handling:
    """How `Consumer.run` handles messages.

    Args:
        source: `topic/channel`, for the log.
        handler: Called with each message.
        on_failure: Called with each message that the handler failed and the error; may decide what happens. None: not
            given.
        max_attempts: A message that the handler failed this often is given up; 0: no limit.
        given_up: Called with such a message and the last error, before it is finished. None: it is only logged.
        dead_letters: Returns a function that publishes messages to a topic; may raise ValueError.
        auto_touch: While a handler runs, touch the message, see `keep_touched`.
        failures: The consumer's.
    """

    source: str
    handler: Handler
    on_failure: OnFailure | None
    max_attempts: int
    given_up: GivenUp | None
    dead_letters: Callable[[str], GivenUp]
    auto_touch: bool
    failures: FailureCounts

    async def handle(self, message: Message, nursery: runtime.Nursery) -> None:
        """Handle a message, then do what was answered. Keeps an answer that the handler has given by itself.

        Args:
            nursery: Runs the task that touches the message. A nursery here would wrap what the handler raises.

        Raises HandlerTypeError: a function is not an async one, or its answer has the wrong type.
        """
        if not self.auto_touch:
            await self._handle(message)
            return
        scope = runtime.cancel_scope()
        nursery.start_soon(_touch, message, scope)
        try:
            await self._handle(message)
        finally:
            scope.cancel()

    async def _handle(self, message: Message) -> None:
        answer: Answer
        failure = self.failures.last_error(message) if self.max_attempts else None
        if failure is not None:
            answer = await self._give_up(message, failure)
        else:
            result, failure = await _result_of("handler", partial(self.handler, message))
            if failure is not None:
                answer = await self._answer_to(message, failure)
            else:
                answer = result if isinstance(result, ANSWERS) else Finish()
        if isinstance(answer, DeadLetter) and not message.answered:
            answer = await self._publish(message, answer, failure)
        if not isinstance(answer, Retry):
            self.failures.forget(message)
        if message.answered:
            return
        if isinstance(answer, Retry):
            answer.apply_to(message)
        else:
            message.finish()

    async def _answer_to(self, message: Message, failure: Exception) -> Answer:
        """Log a failure, and decide what happens to the message."""
        count = self.failures.add(message) if self.max_attempts else 0
        if self.max_attempts:
            self._log("%r failed, %d of %d times", message, count, self.max_attempts, error=failure)
        else:
            self._log("%r failed, attempt %d", message, message.attempts, error=failure)
        answer = Retry() if self.on_failure is None else await self._ask(self.on_failure, message, failure)
        if isinstance(answer, Retry) and not answer.count_attempt:
            self.failures.take_back(message)
            return answer
        if not isinstance(answer, Retry) or not self.max_attempts or count < self.max_attempts:
            return answer
        if message.answered:  # if the handler has requeued it, it is delivered again
            self.failures.give_up_later(message, failure)
            return answer
        if not message.connected:  # it is delivered again, and may succeed
            return answer
        return await self._give_up(message, failure)

    async def _ask(self, on_failure: OnFailure, message: Message, failure: Exception) -> Answer:
        call: partial[Any] = partial(on_failure, message, failure)
        answer, error = await _result_of("on_failure", call, may_be_plain=True)
        if error is not None:
            self._log("on_failure failed for %r, which is requeued", message, error=error)
        elif isinstance(answer, ANSWERS):
            return answer
        elif answer is not None:
            raise HandlerTypeError(
                f"on_failure must return Finish, Retry, DeadLetter or None, not {answer!r:.100}"
            )
        return Retry()

    async def _give_up(self, message: Message, failure: Exception) -> Finish | Retry:
        """Give a message up that failed too often; requeue it if that fails."""
        count = self.failures.count(message)
        if self.given_up is None:
            self._log("%r is discarded: it failed %d times", message, count)
            return Finish()
        _, refused = await _result_of("given_up", partial(self.given_up, message, failure))
        if refused is not None:
            self._log("%r failed %d times and could not be given up", message, count, error=refused)
            return Retry()
        self._log("%r is given up: it failed %d times", message, count)
        return Finish()

    async def _publish(
        self, message: Message, letter: DeadLetter, failure: Exception | None
    ) -> Finish | Retry:
        """Publish a message to a topic of dead letters; requeue it if that fails."""
        if not message.connected:  # it is delivered again
            return Retry()

        async def publish() -> None:
            await self.dead_letters(letter.topic)(message, failure or RuntimeError(letter.reason))

        _, refused = await _result_of("the publish of a dead letter", partial(publish))
        because = f": {letter.reason}" if letter.reason else ""
        if refused is not None:
            self._log("%r could not be published to %s%s", message, letter.topic, because, error=refused)
            return Retry()
        _logger.warning("%s: %r is published to %s%s", self.source, message, letter.topic, because)
        return Finish()

    def _log(self, text: str, *args: object, error: Exception | None = None) -> None:
        _logger.error(f"%s: {text}", self.source, *args, exc_info=error)


async def handle_all(
    messages: AsyncIterator[Message],
    handling: Handling,
    concurrency: int,
    active: "ActiveHandlers",
    put_back: Callable[[Message], None],
) -> None:
    """Handle messages with this many tasks, until there are no more.

    Args:
        put_back: Called at the end with each message that was not handled, the newest first.
    """
    ends: list[BaseException] = []  # raised below: the nursery would wrap them in a group
    unhandled: list[Message] = []  # put back at the end: until then, other handlers would receive them

    async def handle_each() -> None:
        task = active.new_task()
        try:
            async for message in messages:
                if ends:  # this task was awake already
                    unhandled.append(message)
                    return
                with task:
                    try:
                        await handling.handle(message, nursery)
                    except BaseException:
                        unhandled.append(message)
                        raise
        except AuthRefused as refusal:
            ends.append(refusal)  # other handlers may finish their messages
        except BaseException as error:
            if runtime.is_cancellation(error):
                raise
            ends.append(error)
            nursery.cancel_scope.cancel()

    try:
        async with runtime.open_nursery() as nursery:
            for _ in range(concurrency):
                nursery.start_soon(handle_each)
    finally:
        for message in reversed(unhandled):
            put_back(message)
    if ends:
        raise next((error for error in ends if not isinstance(error, AuthRefused)), ends[0])


class HandlerTypeError(TypeError):
    """A handler is the wrong kind of function: its message was not handled, and requeueing it would not help."""


async def _result_of(
    name: str, call: partial[Any], *, may_be_plain: bool = False
) -> tuple[object, Exception | None]:
    """Call a function; return its result, or None and what it raised."""
    try:
        result = call()
        if inspect.isawaitable(result):
            result = await result
        elif not may_be_plain:
            check_awaitable(name, call.func, result)
        if result is not None:
            check_result(name, call.func, result)
        return result, None
    except HandlerTypeError:
        raise
    except Exception as failure:
        return None, failure
    except BaseException as error:
        if not runtime.is_stray_cancellation(error):
            raise
        stray = RuntimeError(f"{name} raised CancelledError, but its task was not cancelled")
        stray.__cause__ = error
        return None, stray


def check_awaitable(name: str, function: object, result: object) -> None:
    """Raise HandlerTypeError if a function did not return an awaitable."""
    if not inspect.isawaitable(result):
        raise HandlerTypeError(f"{name} must be an async function; {function!r} returned {result!r:.100}")


def check_result(name: str, function: object, result: object) -> None:
    """Check what a handler returned at its end. Raises HandlerTypeError.

    A coroutine or generator has not run, and a class is no answer.
    """
    if isinstance(result, type) and issubclass(result, ANSWERS):
        raise HandlerTypeError(
            f"{name} {function!r} returned the class {result.__name__}, not {result.__name__}(...)"
        )
    if not (inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result)):
        return
    if inspect.iscoroutine(result):
        result.close()  # otherwise Python warns that it was never awaited
    raise HandlerTypeError(f"{name} {function!r} returned {result!r:.100}, of which nothing has run")


def decoding(
    handler: Callable[..., Any], decode: Callable[[bytes], object], topic: str
) -> Callable[[Message], Any]:
    """Return a handler that calls another one with the message and its decoded body. Raises DecodeFailed."""

    @wraps(handler)
    def handle(message: Message) -> Any:
        try:
            value = decode(message.body)
        except DecodeFailed:
            raise
        except Exception as error:
            raise DecodeFailed(topic, f"{error!r:.200}") from error
        return handler(message, value)

    return handle


def check_async(name: str, function: object) -> None:
    """Check that a function can be a handler of async code, as far as it shows before a call. Raises TypeError.

    A lambda, a wrapper or an object may return an awaitable; its result shows that.
    """
    _check_callable(name, function)
    kind = _underlying(function)
    if inspect.iscoroutinefunction(kind):
        return
    is_wrapper = getattr(kind, "__name__", "") == "<lambda>" or hasattr(kind, "__wrapped__")
    if _yields(kind) or (inspect.isfunction(kind) and not is_wrapper):
        raise TypeError(f"{name} must be an async function; {function!r} is not")


def check_plain(name: str, function: object) -> None:
    """Check that a function can be a handler of code without async, as far as it shows. Raises TypeError."""
    _check_callable(name, function)
    kind = _underlying(function)
    if inspect.iscoroutinefunction(kind) or _yields(kind):
        raise TypeError(f"{name} must be a plain function; {function!r} is an async function or a generator")


def _check_callable(name: str, function: object) -> None:
    if not callable(function):
        raise TypeError(f"{name} must be a function, not {function!r:.100}")


def _yields(function: object) -> bool:
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def _underlying(function: object) -> object:
    """Return the function that a call runs: of a partial, a method, or an object with `__call__`."""
    while isinstance(function, partial):
        function = function.func
    if not inspect.isroutine(function) and not inspect.isclass(function):
        function = type(function).__call__
    return getattr(function, "__func__", function)


async def _touch(message: Message, scope: runtime.CancelScope) -> None:
    with scope:
        await keep_touched(message)


class ActiveHandlers:
    """Knows whether a handler is active, and whether a task belongs to one."""

    def __init__(self) -> None:
        self.count: int = 0
        self._idle = runtime.Event()

    def new_task(self) -> "HandlerTask":
        """Note that the calling task calls handlers, each in a `with` block of the result."""
        task = HandlerTask(self, _handler_task.get())
        _handler_task.set(task)
        return task

    def include_caller(self) -> bool:
        """Whether the caller runs in an active handler, or in a task that one has started."""
        task = _handler_task.get()
        while task is not None and not (task.is_active and task.handlers is self):
            task = task.outer
        return task is not None

    def became_idle(self) -> None:
        """Wake the tasks that wait for this."""
        if self._idle.is_awaited:
            self._idle.set()
            self._idle = runtime.Event()

    async def wait_idle(self) -> None:
        """Wait until no handler is active."""
        if self.count:
            await self._idle.wait()


class HandlerTask:
    """A task that calls handlers; each runs in a `with` block.

    Attributes:
        handlers: What it belongs to.
        outer: The task that calls the handler that has started this one, if there is one.
        is_active: A handler runs.
    """

    __slots__ = ("handlers", "is_active", "outer")

    def __init__(self, handlers: ActiveHandlers, outer: "HandlerTask | None") -> None:
        self.handlers: ActiveHandlers = handlers
        self.outer: HandlerTask | None = outer
        self.is_active: bool = False

    def __enter__(self) -> None:
        self.is_active = True
        self.handlers.count += 1

    def __exit__(self, *_: object) -> None:
        self.is_active = False
        self.handlers.count -= 1
        if not self.handlers.count:
            self.handlers.became_idle()


_handler_task: ContextVar[HandlerTask | None] = ContextVar("trio_nsq_handler_task", default=None)
"""Tasks inherit it from those that start them, under trio and asyncio."""
