"""Run the client's tests under trio and asyncio, and cancel a call at each place where it waits."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import anyio
import pytest
import trio

from client.support.fake_broker import PATIENCE_S

Result = TypeVar("Result")
Loop = Literal["trio", "asyncio"]
on_both = pytest.mark.parametrize("loop", ["trio", "asyncio"])


def run(loop: Loop, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a test, which must not take too long, under a loop. Errors of asyncio's tasks and callbacks fail it."""
    errors: list[dict[str, Any]] = []

    async def limited() -> None:
        if loop == "asyncio":
            asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        with anyio.fail_after(PATIENCE_S):
            await main()

    anyio.run(limited, backend=loop)
    assert not errors


@dataclass(frozen=True, slots=True)
class Cancellation:
    """Where to cancel a call.

    Attributes:
        at: When it waits for the n-th time.
        is_late: Only when that wait has ended, which asyncio does if the task has not run since.
    """

    at: int
    is_late: bool = False


@dataclass(slots=True)
class Outcome(Generic[Result]):
    """The end of a call: it was cancelled, or returned a result.

    Attributes:
        waited: It waited as often as the cancellation wanted.
    """

    result: Result | None = None
    was_cancelled: bool = False
    waited: bool = False


async def cancelled(call: Awaitable[Result], cancellation: Cancellation) -> Outcome[Result]:
    """Run a call and cancel it once."""
    outcome: Outcome[Result] = Outcome()
    try:
        asyncio.current_task()
    except RuntimeError:
        with trio.CancelScope() as scope:
            outcome.result = await _Steps(call, cancellation, scope.cancel, outcome)
        outcome.was_cancelled = scope.cancelled_caught
        return outcome

    async def drive() -> Result:
        task = asyncio.current_task()
        assert task is not None
        return await _Steps(call, cancellation, task.cancel, outcome)

    try:
        outcome.result = await asyncio.create_task(drive())
    except asyncio.CancelledError:
        outcome.was_cancelled = True
    return outcome


class _Steps(Generic[Result]):
    def __init__(
        self,
        call: Awaitable[Result],
        cancellation: Cancellation,
        cancel: Callable[[], object],
        outcome: Outcome[Result],
    ) -> None:
        self._call = call
        self._cancellation = cancellation
        self._cancel = cancel
        self._outcome = outcome

    def __await__(self) -> Generator[Any, Any, Result]:
        steps = self._call.__await__()
        count = 0
        try:
            waits_for = next(steps)
            while True:
                count += 1
                is_now = count == self._cancellation.at
                self._outcome.waited |= is_now
                if is_now and not self._cancellation.is_late:
                    self._cancel()
                try:
                    value = yield waits_for
                    if is_now and self._cancellation.is_late:
                        raise asyncio.CancelledError
                except BaseException as error:
                    waits_for = steps.throw(error)
                else:
                    waits_for = steps.send(value)
        except StopIteration as end:
            result: Result = end.value
            return result
