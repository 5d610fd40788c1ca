"""How messages become bytes of a file: delimited or length-prefixed bodies, or JSON."""

from collections.abc import Callable, Sequence

from ...protocol.message_json import json_lines, message_record
from ...protocol.messages import pack_messages
from ..source.batch import SourceBatch

Encoder = Callable[[SourceBatch, int, int], bytes]
"""Returns the bytes of the messages of a batch from one index to another."""

JSON_BYTES = 170
"""About what a JSON object adds to a body, for rotation by size."""


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


def as_json(batch: SourceBatch, start: int, stop: int) -> bytes:
    """Write a JSON object on a line for each message."""
    sequences, dues_ns, headers = batch.sequences, batch.dues_ns, batch.headers
    return json_lines(
        message_record(
            batch.topic,
            batch.ids[index].decode("ascii", "replace"),
            batch.timestamps_ns[index],
            batch.attempts[index],
            batch.bodies[index],
            sequence=None if sequences is None else sequences[index],
            due_ns=0 if dues_ns is None else dues_ns[index],
            headers=headers[index] if headers else None,
        )
        for index in range(start, stop)
    ).encode()
