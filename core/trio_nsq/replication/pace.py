"""A limit of bytes per second. No IO; time is a parameter."""


class Pace:
    """Says how long to wait after bytes, so that there are not more of them on average.

    Args:
        bytes_per_s: The limit; 0: none.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._due_s = 0.0

    def wait_s(self, now_s: float, size: int) -> float:
        """Return how long to wait after this many more bytes. Time that was not used before does not count."""
        if not self._bytes_per_s:
            return 0.0
        self._due_s = max(self._due_s, now_s) + size / self._bytes_per_s
        return self._due_s - now_s
