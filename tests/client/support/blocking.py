"""Helpers for tests of the client without async code."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from interop.peers import Broker
from trio_nsq import sync

PATIENCE_S = 60.0


def consumer_of(broker: Broker, topic: str, **options: Any) -> sync.Consumer:
    """Return a consumer of the topic's channel."""
    defaults = {"max_in_flight": 200, "output_buffer_timeout_s": 0.025}
    return sync.Consumer(topic, "c", nsqd_tcp_addresses=[broker.tcp_address], **defaults | options)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@contextmanager
def interrupting(when: Callable[[], bool]) -> Iterator[None]:
    """Raise KeyboardInterrupt in this thread, once, as soon as a condition holds, and not after the block.
    One signal is not enough: Python misses a signal that arrives just before it waits for a lock.
    """
    this = threading.get_ident()
    interrupted = threading.Event()

    def hear(*_: object) -> None:
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    def interrupt() -> None:
        until(when)
        while not interrupted.is_set():
            signal.pthread_kill(this, signal.SIGINT)
            interrupted.wait(0.1)

    before = signal.signal(signal.SIGINT, hear)
    try:
        with ThreadPoolExecutor(1) as executor:
            future = executor.submit(interrupt)
            try:
                yield
            except BaseException:
                interrupted.set()
                raise
            future.result()
    finally:
        signal.signal(signal.SIGINT, before)
