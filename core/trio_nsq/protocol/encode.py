"""Encode a client's commands. Callers check names with `is_valid_name`.

`first` is the number of the first message, for a producer with a name; None: no number.
"""

import json
from collections.abc import Mapping, Sequence
from struct import Struct

from .messages import MessageSet

_INT32 = Struct(">i")
_MPUB_HEAD = Struct(">ii")


def encode_identify(settings: Mapping[str, object]) -> bytes:
    """IDENTIFY with these JSON fields, named as in `IdentifyRequest`."""
    return encode_identify_body(json.dumps(settings, separators=(",", ":")).encode())


def encode_identify_body(body: bytes) -> bytes:
    """IDENTIFY with this JSON."""
    return b"IDENTIFY\n" + _INT32.pack(len(body)) + body


def encode_auth(secret: bytes) -> bytes:
    """AUTH with this secret."""
    return b"AUTH\n" + _INT32.pack(len(secret)) + secret


def encode_sub(topic: str, channel: str) -> bytes:
    """SUB to a channel of a topic; the broker creates missing ones."""
    return f"SUB {topic} {channel}\n".encode()


def encode_pub(topic: str, body: bytes, first: int | None = None) -> bytes:
    """PUB one message."""
    return b"PUB %s%s\n%s%s" % (topic.encode(), _number(first), _INT32.pack(len(body)), body)


def encode_dpub(topic: str, defer_ms: int, body: bytes, first: int | None = None) -> bytes:
    """DPUB one message, to be delivered after at least `defer_ms` milliseconds."""
    return b"DPUB %s %d%s\n%s%s" % (
        topic.encode(),
        defer_ms,
        _number(first),
        _INT32.pack(len(body)),
        body,
    )


def encode_mpub(topic: str, messages: MessageSet, first: int | None = None) -> bytes:
    """MPUB a message set, which must not be empty."""
    head = _MPUB_HEAD.pack(4 + len(messages.data), len(messages))
    return b"MPUB %s%s\n%s%s" % (topic.encode(), _number(first), head, messages.data)


def encode_claim(topic: str) -> bytes:
    """PRODUCER: claim a topic for a producer with a name, and ask for its last number."""
    return b"PRODUCER %s\n" % topic.encode()


def _number(first: int | None) -> bytes:
    return b"" if first is None else b" %d" % first


def encode_hpub(topic: str, messages: MessageSet, defer_ms: int = 0, first: int | None = None) -> bytes:
    """HPUB messages that begin with their headers, see `headers.with_prefixes`; at least one."""
    head = _MPUB_HEAD.pack(4 + len(messages.data), len(messages))
    return b"HPUB %s %d%s\n%s%s" % (topic.encode(), defer_ms, _number(first), head, messages.data)


def encode_rdy(count: int) -> bytes:
    """RDY: at most `count` messages may be in flight."""
    return b"RDY %d\n" % count


def encode_finish(ids: Sequence[bytes]) -> bytes:
    """FIN for each id of 16 bytes; b"" without ids."""
    return b"FIN " + b"\nFIN ".join(ids) + b"\n" if ids else b""


def encode_requeue(message_id: bytes, delay_ms: int, *, counts_attempt: bool = True) -> bytes:
    """REQ: requeue the message, to be delivered after at least `delay_ms` milliseconds.

    `counts_attempt=False` needs a broker that has confirmed `uncounted_requeues` in IDENTIFY.
    """
    return b"REQ %s %d%s\n" % (message_id, delay_ms, b"" if counts_attempt else b" uncounted")


def encode_touch(message_id: bytes) -> bytes:
    """TOUCH: restart the message timeout."""
    return b"TOUCH %s\n" % message_id


def encode_cls() -> bytes:
    """CLS: send no more messages; those in flight may still be answered."""
    return b"CLS\n"


def encode_nop() -> bytes:
    """NOP: the conventional answer to a heartbeat."""
    return b"NOP\n"
