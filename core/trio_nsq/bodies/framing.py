"""The bytes before a body: Confluent's framing, and Avro's single-object encoding.

    Confluent:      0x00, the id of the schema in the registry (4 bytes, big-endian), for Protobuf message indexes, body
    single object:  0xC3 0x01, the fingerprint of the schema (8 bytes), body

Message indexes say which message of a Protobuf file the body is: a zigzag varint with their number, and as many more.
The first message of a file, `[0]`, is the single byte 0.
"""

from .errors import BodyError

SINGLE_OBJECT = b"\xc3\x01"
FINGERPRINT_END = 10
"""Where the body of a single object begins."""
_CONFLUENT = 0
_ID_END = 5
_MAX_ID = 2**31 - 1
"""Ids are signed. For a greater one, the registry's answer is the one for a path that it does not have."""
_MAX_VARINT_BYTES = 10
_MAX_INDEXES = 32
"""Messages are nested in each other that deep at most."""


def schema_id(body: bytes) -> int:
    """Return the id of the schema of a framed body; the body begins at index 5. Raises BodyError."""
    if len(body) < _ID_END or body[0] != _CONFLUENT:
        raise BodyError("the body has no framing of a schema registry")
    found = int.from_bytes(body[1:_ID_END], "big")
    if found > _MAX_ID:
        raise BodyError(f"the body has no valid id of a schema: {found}")
    return found


def message_indexes(body: bytes) -> tuple[tuple[int, ...], int]:
    """Return the message indexes of a framed Protobuf body, and where the message begins. Raises BodyError."""
    count, at = _zigzag(body, _ID_END)
    if count == 0:
        return (0,), at
    if not 0 < count <= _MAX_INDEXES:
        raise BodyError("the body has no valid message indexes")
    indexes = []
    for _ in range(count):
        index, at = _zigzag(body, at)
        indexes.append(index)
    return tuple(indexes), at


def _zigzag(body: bytes, at: int) -> tuple[int, int]:
    """Return a number, and the index after it."""
    found = 0
    for shift, byte in enumerate(body[at : at + _MAX_VARINT_BYTES]):
        found |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            return (found >> 1) ^ -(found & 1), at + shift + 1
    raise BodyError("the body ends in its message indexes")
