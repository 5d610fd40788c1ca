"""Discovery: who has which topics and channels (nsqlookupd's job), and how a broker makes itself known there.

The broker's side: `protocol` (the bytes) and `announcements` (what a service has to be told) are pure; `registration`
is the IO around them. The service: `commands` (what brokers send) and `registry` (who has what) are pure; `server` is
the IO around them, `http_api` the questions, `names_file` what outlives a restart. `query` is how consumers ask.
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
