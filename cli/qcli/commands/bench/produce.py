"""Produces a load to its end: in a thread, with signals and a status line, and errors as failures."""

import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import trio

from trio_nsq.client import BrokerError, ConnectionLost
from trio_nsq.protocol import NSQError

from ...broker.failures import refused
from ...framework.errors import ExitCode, Failure
from ...framework.output import is_live_terminal
from ...framework.signals import at_first_signal, run_trio
from ...terminal.progress import show_progress
from .load import Load
from .measurement import Measurement


@dataclass(slots=True)
class Outcome:
    """What a load has measured, and why it ended early: a failure or a signal."""

    measured: Measurement | None = None
    failure: Failure | None = None
    signal: ExitCode | None = None


def produce(make: Callable[[], Awaitable[Load]], share: Callable[[Load], float]) -> Outcome:
    """Produce a load to its end, with a status line on a terminal.

    Args:
        make: Connects, and returns the load.
        share: Returns how much of it is done, 0 to 1.

    Raises Failure: the load did not begin.
    """
    outcome = Outcome()
    early: Exception | None = None

    async def main() -> None:
        nonlocal early
        load: Load | None = None

        def stop(code: ExitCode) -> None:
            outcome.signal = code
            if load is None:
                nursery.cancel_scope.cancel()
            else:
                load.stop()

        async with trio.open_nursery() as nursery:
            at_first_signal(stop)
            try:
                load = await make()
            except Exception as error:  # raised below: the nursery would wrap it
                early = error
            else:
                if is_live_terminal(sys.stderr):
                    nursery.start_soon(
                        show_progress, lambda: (load.counter.total, load.body_bytes, share(load))
                    )
                await _run_in_thread(load, outcome)
            nursery.cancel_scope.cancel()

    run_trio(main)
    if early is not None:
        raise early
    return outcome


async def _run_in_thread(load: Load, outcome: Outcome) -> None:
    cpu_s = time.process_time()
    try:
        await trio.to_thread.run_sync(load.run)
    except NSQError as error:
        outcome.failure = _failure(error)
    finally:
        load.close()
    outcome.measured = load.result()
    outcome.measured.cpu_s = time.process_time() - cpu_s


def _failure(error: NSQError) -> Failure:
    if isinstance(error, BrokerError):
        return Failure(refused(f"The broker at {error.address}", error))
    if isinstance(error, ConnectionLost):
        return Failure(
            f"The broker at {error.address} did not take part to the end: {error.reason}. See its log.",
            ExitCode.UNREACHABLE,
        )
    return Failure(f"{error}.")
