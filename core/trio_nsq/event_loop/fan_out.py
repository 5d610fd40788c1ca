"""Blocking calls for many servers at once, in threads that do not keep the process from ending."""

import queue
import threading
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:  # slow to import, and every start of qcli imports this
    from concurrent.futures import Future

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

MAX_THREADS = 64


def start_all(
    act: Callable[[K], V], keys: Iterable[K], *, at_most: int = MAX_THREADS
) -> "dict[K, Future[V]]":
    """Begin to call a function for each key, and return the futures of its results, in the order of the keys.

    Args:
        at_most: The maximum of calls at the same time.
    """
    from concurrent.futures import Future

    futures: dict[K, Future[V]] = {key: Future() for key in keys}
    waiting: queue.SimpleQueue[tuple[K, Future[V]]] = queue.SimpleQueue()
    for item in futures.items():
        waiting.put(item)

    def work() -> None:
        while True:
            try:
                key, future = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                future.set_result(act(key))
            except Exception as error:
                future.set_exception(error)
            except BaseException as error:  # obstore raises `PanicException` for bugs
                future.set_exception(RuntimeError(str(error)))

    for _ in range(min(at_most, len(futures))):
        # A daemon: Python must not wait for it when the user interrupts the program.
        threading.Thread(target=work, name="trio-nsq-fan-out", daemon=True).start()
    return futures


def start(call: Callable[[], V]) -> "Future[V]":
    """Begin to call a function, and return the future of its result."""
    return start_all(lambda _: call(), [None])[None]
