"""The NSQ TCP protocol V2 without IO: bytes in, events out; commands in, bytes out.

The modules open no sockets, read no clock, start no tasks and do not log. The broker and the client share them.
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
