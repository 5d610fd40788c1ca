"""Call the handlers of `Consumer.run` in threads.

The async consumer hands one message to a thread and waits for it. Before the thread returns, it goes on with the
messages that the queue lends. So a busy handler costs no change of threads per message.
"""

from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from typing import Any, Protocol

import trio

from ..client.consuming import message as client_message
from ..client.consuming.answers import Answer, DeadLetter, Retry
from ..client.consuming.handlers import FailureCounts, check_result
from .message import Message, MessageBatch
from .portal import Portal
from .shared_queue import SharedQueue

_handling: ContextVar[Portal | None] = ContextVar("trio_nsq_handling", default=None)
"""The portal of the consumer whose handler runs here. Threads, and greenlets, have own contexts."""


def is_handling(portal: Portal) -> bool:
    """Whether this thread runs a handler of the consumer with this portal."""
    return _handling.get() is portal


class Workers(Protocol):
    """Threads, or what is used in their place."""

    async def run(self, function: Callable[..., object], *args: object) -> object:
        """Run a function in one of them and return its result. A cancellation waits for the end of the function."""


class Threads:
    """A limited number of threads."""

    def __init__(self, count: int) -> None:
        self._limiter = trio.CapacityLimiter(count)

    async def run(self, function: Callable[..., object], *args: object) -> object:
        return await trio.to_thread.run_sync(function, *args, limiter=self._limiter)


class ThreadedFunction:
    """An async function that calls a plain one, with a message, in a thread.

    Args:
        name: What the function is, for errors.
        function: Called with a message, and with further arguments.
        workers: The threads.
        portal: The consumer's.
    """

    def __init__(self, name: str, function: Callable[..., object], workers: Workers, portal: Portal) -> None:
        self._name = name
        self._function = function
        self._workers = workers
        self._portal = portal

    async def __call__(self, message: client_message.Message, *args: object) -> Any:
        try:
            return await self._workers.run(self._work, self._shared(message), *args)
        finally:
            self._portal.call_posted()  # an answer of the function

    def _shared(self, message: client_message.Message) -> Message:
        if isinstance(message, Message):
            return message
        batch, index = message._batch, message._index
        return Message(MessageBatch(batch, self._portal), batch, index, index)

    def _work(self, message: Message, *args: object) -> object:
        """Call the function, in a thread; return its result."""
        before = _handling.set(self._portal)
        try:
            result = self._function(message, *args)
        finally:
            _handling.reset(before)
        if result is not None:
            check_result(self._name, self._function, result)
        return result


class ThreadedHandler(ThreadedFunction):
    """The same for a handler: its thread goes on with the next messages while all goes well.

    A message that is not finished there, because the handler raised or answered something else, or the message has
    failed too often before, is returned to the queue. The consumer takes it next, and gets what the handler raised or
    answered.

    Args:
        goes_on: Whether it does. If not, it is a `ThreadedFunction`.
    """

    def __init__(
        self,
        handler: Callable[..., object],
        workers: Workers,
        portal: Portal,
        queue: SharedQueue,
        failures: FailureCounts,
        *,
        goes_on: bool,
    ) -> None:
        super().__init__("handler", handler, workers, portal)
        self._queue = queue
        self._failures = failures
        self._goes_on = goes_on
        # For messages returned to the queue: what the handler raised or answered.
        self._ends: dict[client_message.Message, BaseException | Answer] = {}

    async def __call__(self, message: client_message.Message, *args: object) -> Any:
        end = self._ends.pop(message, None)
        if isinstance(end, BaseException):
            raise end
        if end is not None:
            return end
        if self._goes_on:
            self._queue.lend()
        return await super().__call__(message, *args)

    def _work(self, message: Message, *args: object) -> object:
        if not self._goes_on:
            return super()._work(message, *args)
        context = (
            copy_context()
        )  # copied for each message: a handler sees no variable that another one has set
        result = context.copy().run(super()._work, message, *args)
        if isinstance(result, Retry | DeadLetter):
            return result
        if not message.answered:
            message.finish()  # not after the next messages
        while not _is_cancelled() and (following := self._queue.take_lent()) is not None:
            if not self._handle(following, context.copy()):
                self._queue.return_lent(following)
                break
        return result

    def _handle(self, message: Message, context: Context) -> bool:
        """Handle and finish a message; return False if the consumer must see it."""
        if self._failures.last_error(message) is not None:
            return False
        try:
            result = context.run(super()._work, message)
        except BaseException as error:
            self._ends[message] = error
            return False
        if isinstance(result, Retry | DeadLetter):
            self._ends[message] = result
            return False
        if not message.answered:
            message.finish()
        if self._failures.count(message):
            self._portal.post(self._failures.forget, message)
        return True


def _is_cancelled() -> bool:
    """Whether the task that waits for this thread is cancelled."""
    try:
        trio.from_thread.check_cancelled()
    except trio.Cancelled:
        return True
    return False
