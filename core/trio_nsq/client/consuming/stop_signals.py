"""Call functions when the program receives a signal, such as SIGTERM."""

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class _Watched:
    """One signal, for all that are to be told of it.

    Attributes:
        stops: The functions to call.
    """

    def __init__(self, number: int) -> None:
        self.stops: list[Callable[[], object]] = []
        self._number = number
        # The program's own handler. It is restored at the first signal, so that a second one does what it does without
        # a consumer. Python does not know a handler that was not set from Python.
        self._previous: Any = signal.getsignal(number) or signal.SIG_DFL

    def install(self) -> None:
        """Handle the signal. Raises OSError, ValueError."""
        signal.signal(self._number, self._received)
        _watched[self._number] = self

    def _received(self, number: int, frame: FrameType | None) -> None:
        self.restore()
        for stop in self.stops:
            stop()

    def restore(self) -> None:
        if _watched.get(self._number) is self:
            del _watched[self._number]
            signal.signal(self._number, self._previous)


_watched: dict[int, _Watched] = {}
"""By signal. Only the main thread changes it: in others, Python refuses to set handlers."""


@contextmanager
def stopping_on(signals: Iterable[int], stop: Callable[[], object]) -> Iterator[None]:
    """Call a function at the first of these signals; several callers are told of the same one.

    Args:
        signals: If there are any, the caller must be in the main thread.
        stop: Called in a signal handler.

    Raises:
        ValueError: This is not the main thread, or a signal cannot be handled.
    """
    joined: list[_Watched] = []
    try:
        for number in dict.fromkeys(signals):
            try:
                watched = _watched.get(number) or _Watched(number)
                watched.stops.append(stop)
                joined.append(watched)
                watched.install()
            except (OSError, ValueError) as error:
                raise ValueError(f"stop_on: signal {number} cannot be handled here: {error}") from None
        yield
    finally:
        for watched in joined:
            watched.stops.remove(stop)
            if not watched.stops:
                watched.restore()
