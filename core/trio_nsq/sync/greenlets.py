"""Handlers of the synchronous client as greenlets; loaded only under gevent."""

from collections.abc import Callable
from contextvars import copy_context

import gevent

from ..event_loop import runtime
from .portal import Portal, Result


class Greenlets:
    """Runs functions in greenlets of the thread that creates it."""

    def __init__(self, portal: Portal) -> None:
        self._portal = portal
        self._hub_loop = gevent.get_hub().loop

    async def run(self, function: Callable[..., object], *args: object) -> object:
        """Run a function in a new greenlet; a cancellation waits for its end."""
        result: Result[object] = Result()
        ended = runtime.Event()
        context = copy_context()

        def work() -> None:
            try:
                result.set(context.run(function, *args))
            except BaseException as error:
                result.fail(error)
            self._portal.post(ended.set)

        self._hub_loop.run_callback_threadsafe(gevent.spawn, work)
        await runtime.shielded(ended.wait)
        return result.get()
