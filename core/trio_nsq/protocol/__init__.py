"""The NSQ TCP protocol V2 without IO: bytes in, events out; commands in, bytes out.

Nothing here opens a socket, reads a clock, starts a task or logs; `tests/protocol` asserts that importing it
imports neither trio nor a clock. The broker and the client share all of it.
"""

from .commands import (
    Auth,
    Command,
    CommandReader,
    Finish,
    Identify,
    NoOperation,
    Publish,
    Ready,
    Requeue,
    StartClose,
    Subscribe,
    Touch,
)
from .encode import (
    encode_auth,
    encode_cls,
    encode_dpub,
    encode_finish,
    encode_identify,
    encode_mpub,
    encode_nop,
    encode_pub,
    encode_rdy,
    encode_requeue,
    encode_sub,
    encode_touch,
)
from .errors import CommandError, FrameError, NSQError
from .frames import (
    CLOSE_WAIT_FRAME,
    HEARTBEAT_FRAME,
    OK_FRAME,
    ErrorFrame,
    FrameReader,
    FrameType,
    MessageRun,
    ResponseFrame,
    encode_error,
    encode_frame,
    encode_response,
)
from .identify import IdentifyRequest, IdentifySettings, identify_reply, negotiate, parse_identify
from .limits import MAGIC_V2, Limits
from .messages import MessageSet, pack_messages, walk_messages
from .names import is_ephemeral, is_valid_name
from .states import LEGAL_STATES, State

__all__ = [
    "CLOSE_WAIT_FRAME",
    "HEARTBEAT_FRAME",
    "LEGAL_STATES",
    "MAGIC_V2",
    "OK_FRAME",
    "Auth",
    "Command",
    "CommandError",
    "CommandReader",
    "ErrorFrame",
    "Finish",
    "FrameError",
    "FrameReader",
    "FrameType",
    "Identify",
    "IdentifyRequest",
    "IdentifySettings",
    "Limits",
    "MessageRun",
    "MessageSet",
    "NSQError",
    "NoOperation",
    "Publish",
    "Ready",
    "Requeue",
    "ResponseFrame",
    "StartClose",
    "State",
    "Subscribe",
    "Touch",
    "encode_auth",
    "encode_cls",
    "encode_dpub",
    "encode_error",
    "encode_finish",
    "encode_frame",
    "encode_identify",
    "encode_mpub",
    "encode_nop",
    "encode_pub",
    "encode_rdy",
    "encode_requeue",
    "encode_response",
    "encode_sub",
    "encode_touch",
    "identify_reply",
    "is_ephemeral",
    "is_valid_name",
    "negotiate",
    "pack_messages",
    "parse_identify",
    "walk_messages",
]
