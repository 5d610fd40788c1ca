"""A buffered view of a file for reading records one after the other."""

from collections.abc import Callable


class Window:
    """The part of a file that was read last, so that one system call serves many records.

    Args:
        read: `read(size, offset, needed)` returns at most `size` bytes, and at least `needed` unless the file ends.
        at_a_time: Bytes to read at least.
    """

    __slots__ = ("_at_a_time", "_read", "_start", "data")

    def __init__(self, read: Callable[[int, int, int], bytes], at_a_time: int) -> None:
        self.data = b""
        self._start = 0
        self._read = read
        self._at_a_time = at_a_time

    def at(self, offset: int, size: int) -> int:
        """Return the position in `data` of the byte at `offset`, having read `size` bytes from it on."""
        position = offset - self._start
        if position < 0 or position + size > len(self.data):
            self.data = self._read(max(size, self._at_a_time), offset, size)
            self._start, position = offset, 0
        return position
