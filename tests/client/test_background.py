"""Tests for the differences between `BackgroundTask` and a nursery."""

import pytest
import trio

from client.support.fake_broker import bounded
from trio_nsq.client.background import BackgroundTask


class Owner:
    """Uses a `BackgroundTask` as consumer and producer do."""

    def __init__(self, crash: Exception | None = None) -> None:
        self.background = BackgroundTask()
        self.ended = trio.Event()
        self._crash = crash

    async def _main(self) -> None:
        try:
            if self._crash is not None:
                raise self._crash
            await trio.sleep_forever()
        finally:
            self.ended.set()

    async def __aenter__(self) -> "Owner":
        await self.background.open(self._main)
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await self.background.close()


@bounded
async def test_exception_of_the_body_is_not_wrapped() -> None:
    owner = Owner()
    with pytest.raises(KeyError):
        async with owner:
            raise KeyError
    assert owner.ended.is_set()


@bounded
async def test_closing_what_is_not_open_does_nothing() -> None:
    owner = Owner()
    await owner.__aexit__(None, None, None)
    async with owner:
        pass
    await owner.__aexit__(None, None, None)


@bounded
async def test_stop_keeps_the_body_running() -> None:
    async with Owner() as owner:
        await owner.background.stop()
        assert owner.ended.is_set()
        await trio.lowlevel.checkpoint()
        await owner.background.stop()


@bounded
async def test_tasks_survive_a_cancellation_until_they_are_closed() -> None:
    owner = Owner()
    with trio.CancelScope() as scope:
        async with owner:
            scope.cancel()
            try:
                await trio.lowlevel.checkpoint()
            finally:
                with trio.CancelScope(shield=True):
                    await trio.testing.wait_all_tasks_blocked()
                assert not owner.ended.is_set()
    assert scope.cancelled_caught
    assert owner.ended.is_set()


@bounded
async def test_exception_of_the_body_wins_over_a_cancellation() -> None:
    async def cancel_and_raise(scope: trio.CancelScope) -> None:
        async with Owner():
            scope.cancel()
            raise KeyError

    with trio.CancelScope() as scope, pytest.raises(KeyError):
        await cancel_and_raise(scope)


@bounded
async def test_crash_cancels_the_body_and_is_raised() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with Owner(crash=KeyError("a defect")):
            await trio.sleep_forever()
    assert isinstance(caught.value.exceptions[0], KeyError)
