"""The NSQ TCP protocol V2 without IO: bytes in, events out; commands in, bytes out.

Nothing here opens a socket, reads a clock, starts a task or logs. The broker and the client share it.
"""

from .errors import CommandError, FrameError, NSQError
from .limits import Limits
from .messages import MessageSet, pack_messages
from .names import is_ephemeral, is_valid_name

__all__ = [
    "CommandError",
    "FrameError",
    "Limits",
    "MessageSet",
    "NSQError",
    "is_ephemeral",
    "is_valid_name",
    "pack_messages",
]
