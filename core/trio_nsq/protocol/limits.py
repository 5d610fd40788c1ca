"""The limits of the protocol, with the defaults of nsqd 1.3.0."""

from dataclasses import dataclass
from typing import Final

MAGIC_V2: Final = b"  V2"

KIB: Final = 1024
MIB: Final = 1024 * KIB
SECOND_MS: Final = 1000
MINUTE_MS: Final = 60 * SECOND_MS
DAY_MS: Final = 24 * 60 * MINUTE_MS

MAX_LINE_BYTES: Final = 16 * KIB
"""The limit of a command line, including its line feed. A longer line closes the connection without an error frame."""

MAX_HANDSHAKE_BYTES: Final = 64 * KIB
"""The limit of the bodies of IDENTIFY and AUTH, which normally have a few hundred bytes. Unauthenticated clients send
them, and IDENTIFY is decoded on the event loop."""

MAX_RECORD_MESSAGES: Final = 2048
"""Maximum messages in a record that the broker writes: reading one message reads the sizes of all before it."""
MAX_RECORD_BYTES: Final = 256 * KIB
"""Maximum bytes in a record, unless a single message has more. Few large records are cheap to write, read and deliver,
but a record is read as a whole, and damage loses all of it."""

MAX_PRODUCER_TOPICS: Final = 10_000
"""How many topics one connection of a producer with a name may claim, as each takes memory of the broker."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a broker. All bounds are inclusive; every `_ms` is in milliseconds."""

    max_msg_size: int = 1 * MIB
    """The largest message body, in bytes."""
    max_body_size: int = 5 * MIB
    """The largest MPUB body, in bytes; also of IDENTIFY and AUTH, if less than `MAX_HANDSHAKE_BYTES`."""
    max_rdy_count: int = 2500
    max_req_timeout_ms: int = 60 * MINUTE_MS
    """A longer delay of REQ is reduced to this."""
    max_defer_ms: int = 365 * DAY_MS
    """A longer delay of DPUB is refused; nsqd uses `max_req_timeout_ms` for both."""
    max_heartbeat_interval_ms: int = MINUTE_MS
    heartbeat_interval_ms: int = 30 * SECOND_MS
    """The default for clients that request no other; nsqd uses half of its client timeout of 60 s."""
    max_output_buffer_size: int = 64 * KIB
    output_buffer_size: int = 16 * KIB
    min_output_buffer_timeout_ms: int = 25
    max_output_buffer_timeout_ms: int = 30 * SECOND_MS
    output_buffer_timeout_ms: int = 250
    msg_timeout_ms: int = MINUTE_MS
    """If a delivered message is not answered within this time, it is delivered again."""
    max_msg_timeout_ms: int = 15 * MINUTE_MS
    max_deflate_level: int = 6
    """A client that requests a higher level gets this one."""
    deflate: bool = True
    """Whether clients may use deflate."""
    snappy: bool = True
    """Whether clients may use snappy."""
