"""Checks of messages that a caller gives. Not compiled: compiled functions have errors of their own for wrong types."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

_Item = TypeVar("_Item")
_BYTES = frozenset({bytes})


def list_of(bodies: Iterable[_Item]) -> Sequence[_Item]:
    """Return messages as a sequence. Raises TypeError if these are not several messages."""
    if isinstance(bodies, list | tuple):
        return bodies
    if isinstance(bodies, str | bytes | bytearray | memoryview) or not isinstance(bodies, Iterable):
        raise TypeError(f"the messages must be a list, or another iterable, not {type(bodies).__name__}")
    return list(bodies)


def check_bytes(bodies: Sequence[bytes]) -> None:
    """Check that messages are bytes: otherwise the writer fails, and other publishes with it. Raises TypeError."""
    if _BYTES.issuperset(map(type, bodies)):
        return  # in less than half the time of the loop
    for body in bodies:
        if not isinstance(body, bytes):
            hint = "; encode it, such as text.encode()" if isinstance(body, str) else ""
            raise TypeError(f"a message must be bytes, not {type(body).__name__}{hint}")
