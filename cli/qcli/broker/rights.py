"""What the user may do at a broker: answers that depend on it leave out what the user may not see."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_nsq.access.description import parse_description
from trio_nsq.access.policy import Identity
from trio_nsq.api.request import Request

from .failures import Refused

if TYPE_CHECKING:
    from .admin_client import AdminClient

_ACCESS: Request[Identity | None] = Request(
    "GET", "/access", lambda body, decode: parse_description(decode(body)).identity
)
_NO_RIGHTS = Identity("", "anonymous", ())


def identity_at(broker: AdminClient) -> Identity | None:
    """Return who the user is at a broker of this project; None: it has no authentication.

    Without a valid token, the user has no rights, and perhaps sees the topics of `[anonymous]`.

    Raises Failure: no broker answers.
    """
    try:
        return broker.ask(_ACCESS)
    except Refused as error:
        if error.text.startswith("NOT_FOUND"):  # an older broker, or an nsqd
            return None
        return _NO_RIGHTS
