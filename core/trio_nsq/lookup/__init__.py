"""Discovery: who has which topics and channels (nsqlookupd's job), and how a broker makes itself known there.

`protocol` (the bytes) and `announcements` (what a service has to be told) are pure; `registration` is the IO around
them.
"""

from .announcements import Announcements
from .protocol import LookupdError, PeerInfo, Register, ResponseReader, Unregister
from .registration import LookupRegistration

__all__ = [
    "Announcements",
    "LookupRegistration",
    "LookupdError",
    "PeerInfo",
    "Register",
    "ResponseReader",
    "Unregister",
]
