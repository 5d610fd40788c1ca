"""Call message handlers: finish the message if the handler returns, requeue it if it raises."""

import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Self

import trio

from .message import Message

Handler = Callable[[Message], Awaitable[object]]

MIN_TOUCH_INTERVAL_S = 0.1
"""A lower bound, whatever timeout a broker announces; nsqd's timeouts are at least a second."""

_logger = logging.getLogger("trio_nsq.client")


async def handle(
    message: Message, handler: Handler, *, max_attempts: int, given_up: Handler | None, auto_touch: bool
) -> None:
    """Call a handler, then finish the message, or requeue it if the handler failed. Keeps an answer of the handler.

    Args:
        max_attempts: A message that was delivered more often is not handled; 0: no limit.
        given_up: Called with such a message instead of `handler`; None: the message is only logged.
        auto_touch: While the handler runs, touch the message whenever half of its timeout has passed.
    """
    chosen: Handler | None = handler
    if 0 < max_attempts < message.attempts:
        _logger.warning("%r is not handled: it exceeds %d attempts", message, max_attempts)
        chosen = given_up
    failure = None if chosen is None else await _call(chosen, message, auto_touch)
    if failure is not None:
        _logger.error("%r failed, attempt %d", message, message.attempts, exc_info=failure)
    if message.answered:
        return
    if failure is None:
        message.finish()
    else:
        message.requeue()


async def _call(handler: Handler, message: Message, auto_touch: bool) -> Exception | None:
    if not auto_touch:
        return await _result_of(handler, message)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_touch, message)
        failure = await _result_of(handler, message)
        nursery.cancel_scope.cancel()
    return failure


async def _result_of(handler: Handler, message: Message) -> Exception | None:
    try:
        work = handler(message)
        if inspect.isawaitable(work):
            await work
            return None
    except Exception as failure:
        return failure
    # A defect of the handler: requeueing the message would not help.
    raise TypeError(f"a handler must be an async function; {handler!r} returned {work!r:.100}")


async def _touch(message: Message) -> None:
    interval_s = max(MIN_TOUCH_INTERVAL_S, message.timeout_s / 2)
    due = message.received_at + interval_s
    while True:
        await trio.sleep_until(due)
        message.touch()
        due = trio.current_time() + interval_s


class ActiveHandlers:
    """Counts active handlers; each runs in a `with` block."""

    def __init__(self) -> None:
        self._count = 0
        self._idle = trio.Event()

    def __enter__(self) -> Self:
        self._count += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._count -= 1
        if not self._count:
            self._idle.set()
            self._idle = trio.Event()

    async def wait_idle(self) -> None:
        """Wait until no handler is active."""
        if self._count:
            await self._idle.wait()
