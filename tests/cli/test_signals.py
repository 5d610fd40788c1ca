"""Signals at every moment of a run of trio: their handlers only wake a task, and no signal is lost."""

import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
import trio

from qcli.framework.errors import ExitCode, Terminated
from qcli.framework.raised_signals import interrupt, sending_dropped_again, terminate
from qcli.framework.signals import at_first_signal, run_trio, watch_signal

HANDLERS = {signal.SIGINT: interrupt, signal.SIGTERM: terminate}
RAISED = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: Terminated}
CODES = {signal.SIGINT: ExitCode.INTERRUPTED, signal.SIGTERM: ExitCode.TERMINATED}
MOMENTS = 60


@pytest.fixture(params=RAISED)
def number(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """The signal, which raises an error outside of `run_trio`, as in every command."""
    which: signal.Signals = request.param
    before = signal.signal(which, HANDLERS[which])
    with sending_dropped_again():
        yield which
    signal.signal(which, before)


@contextmanager
def signal_at_call(number: signal.Signals, moment: int) -> Iterator[list[int]]:
    """Send this process a signal at the call of a Python function with this number in this block.

    Yields a list with the number of calls.
    """
    calls = [0]

    def profile(_frame: object, event: str, _arg: object) -> None:
        if event == "call":
            calls[0] += 1
            if calls[0] == moment:
                os.kill(os.getpid(), number)

    sys.setprofile(profile)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def ends(number: signal.Signals, work: Callable[[], Awaitable[None]]) -> Iterator[BaseException | None]:
    """Run work with a signal at many moments, from its begin to the end of `run_trio`; yield how it ends."""
    with signal_at_call(number, -1) as calls:
        run_trio(work)
    total = calls[0]
    for moment in range(1, total, total // MOMENTS):
        error: BaseException | None = None
        try:
            with sending_dropped_again(), signal_at_call(number, moment) as calls:
                run_trio(work)
        except BaseException as caught:
            error = caught
        if calls[0] >= moment:  # the number of calls varies a little
            yield error


async def a_few_turns() -> None:
    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(trio.lowlevel.checkpoint)
        await trio.sleep(0.0001)
        await trio.to_thread.run_sync(os.getpid)


def test_a_signal_at_any_moment_cancels_the_work(number: signal.Signals) -> None:
    found = [type(end) for end in ends(number, a_few_turns)]
    assert len(found) > MOMENTS / 2
    assert set(found) == {RAISED[number]}


def test_a_signal_at_any_moment_calls_the_function_that_the_work_gave(number: signal.Signals) -> None:
    stopped: list[ExitCode] = []
    work_ended = False

    async def work() -> None:
        nonlocal work_ended
        at_first_signal(stopped.append)
        await a_few_turns()
        work_ended = True

    stops = 0
    for end in ends(number, work):
        assert type(end) in (type(None), RAISED[number])
        assert stopped == ([] if end else [CODES[number]])  # exactly once, or it is raised
        if stopped:
            assert work_ended
            stops += 1
        stopped.clear()
        work_ended = False
    assert stops > MOMENTS / 3


class Referred:
    """Something that a weak reference can refer to."""


def send_where_python_drops_exceptions(number: signal.Signals) -> None:
    referred = Referred()
    reference = weakref.ref(referred, lambda _: signal.raise_signal(number))
    del referred
    assert reference() is None


def test_a_signal_whose_exception_python_drops_arrives_again(number: signal.Signals) -> None:
    def wait() -> None:
        send_where_python_drops_exceptions(number)
        signal.pause()

    with pytest.raises(RAISED[number]):
        wait()


def test_a_dropped_signal_arrives_again_on_a_busy_machine(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starting a thread takes long there, and the signal must not arrive while it is started."""
    start = threading.Thread.start

    def start_slowly(thread: threading.Thread) -> None:
        start(thread)
        time.sleep(0.05)

    monkeypatch.setattr(threading.Thread, "start", start_slowly)

    def wait() -> None:
        send_where_python_drops_exceptions(number)
        signal.pause()

    with pytest.raises(RAISED[number]):
        wait()


def test_a_signal_whose_exception_python_drops_silently_cancels_the_work_that_follows(
    number: signal.Signals,
) -> None:
    with suppress(RAISED[number]):
        signal.raise_signal(number)
    with pytest.raises(RAISED[number]):
        run_trio(trio.sleep_forever)


def test_a_watched_signal_is_ignored_when_nobody_watches_it_any_more() -> None:
    """SIGHUP would end a server that is stopping."""
    seen: list[str] = []
    before = signal.signal(signal.SIGHUP, lambda *_: seen.append("the handler of before"))

    async def work() -> None:
        acted = trio.Event()

        async def act() -> None:
            seen.append("acted")
            acted.set()

        async with trio.open_nursery() as nursery:
            await nursery.start(watch_signal, signal.SIGHUP, act)
            os.kill(os.getpid(), signal.SIGHUP)
            await acted.wait()
            nursery.cancel_scope.cancel()
        os.kill(os.getpid(), signal.SIGHUP)
        await trio.lowlevel.checkpoint()

    try:
        run_trio(work)
        assert seen == ["acted"]
        os.kill(os.getpid(), signal.SIGHUP)
        assert seen == ["acted", "the handler of before"]
    finally:
        signal.signal(signal.SIGHUP, before)
