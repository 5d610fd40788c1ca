"""The numbers of batches at a destination, which tell a restarted program where to continue. No IO.

The number of a batch has the sequence of its last message at the source, and a mark, a few bits that are derived from
the id of this message. A topic that was deleted and created again, or that lost its last messages in a power cut, has
other messages with these sequences. The mark tells that; the copies of the new log then belong to the next generation,
another producer at the destination.

     63 bits:  sequence (45)  mark (18)
"""

from hashlib import sha256
from zlib import crc32

_MARK_BITS = 18
_MARKS = (1 << _MARK_BITS) - 1


def producer_name(log: str, topic: str, channel: str, generation: int) -> str:
    """Return the name under which the messages of a log are published.

    Args:
        log: See `FoundLog.key`. Older versions used the address of the broker.
    """
    digest = sha256(f"{log}/{topic}/{channel}".encode()).hexdigest()[:32]
    return f"to-nsq-{digest}-{generation}"


def number_of(sequence: int, message_id: bytes) -> int:
    """Return the number of a batch whose last message has this sequence and id (16 hex digits)."""
    return sequence << _MARK_BITS | _mark(message_id)


def least_number(sequence: int) -> int:
    return sequence << _MARK_BITS


def sequence_in(number: int) -> int:
    return number >> _MARK_BITS


def is_of_message(number: int, message_id: bytes) -> bool:
    """Return whether the message with the number's sequence can have this id."""
    return number & _MARKS == _mark(message_id)


def _mark(message_id: bytes) -> int:
    # Not the last digits: they are counted from a fixed value after each start of a broker.
    return crc32(message_id) & _MARKS
