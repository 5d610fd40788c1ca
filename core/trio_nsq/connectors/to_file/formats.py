"""How messages become bytes of a file: delimited or length-prefixed bodies."""

from collections.abc import Callable, Sequence

from ...protocol.messages import pack_messages
from ..source.batch import SourceBatch

Encoder = Callable[[SourceBatch, int, int], bytes]
"""Returns the bytes of the messages of a batch from one index to another."""


def _part(batch: SourceBatch, start: int, stop: int) -> Sequence[bytes]:
    return batch.bodies if stop - start == len(batch.bodies) else batch.bodies[start:stop]


def delimited(delimiter: bytes) -> Encoder:
    """Return an encoder that writes the delimiter after each body."""

    def encode(batch: SourceBatch, start: int, stop: int) -> bytes:
        return delimiter.join([*_part(batch, start, stop), b""])

    return encode


def length_prefixed(batch: SourceBatch, start: int, stop: int) -> bytes:
    """Write each body after its length, a 4-byte big-endian integer, as in the body of an MPUB."""
    return pack_messages(_part(batch, start, stop)).data
