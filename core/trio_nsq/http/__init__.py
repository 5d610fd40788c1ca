"""The small HTTP server that the broker, the discovery service and the admin endpoints share.

`httptools` parses requests, a `Router` finds the route, and its async handler answers. `serve_connection` handles
keep-alive, limits, deadlines and closing. Each client has a task; with a `Poller`, the poller reads the clients, and a
route can answer there by its `begin`, without a task switch.

Names are imported on first use: clients need only `client`, not the server.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .auditing import audited
    from .connection import IDLE_TIMEOUT_S, LINGER_S, REQUEST_TIMEOUT_S, OnRequest, WaitingClients
    from .guard import Guard
    from .limiting import AnswerLimiter
    from .messages import (
        Body,
        CutOff,
        ForeignRequest,
        HTTPError,
        Request,
        Response,
        channel_names,
        compact_json,
        given,
        switching,
        valid_name,
    )
    from .parsing import MAX_HEAD_BYTES
    from .routing import DEFAULT_MAX_BODY_BYTES, Begin, Handler, Route, Router, TLSRequiredRouter
    from .serving import log_request, peer_of, serve_connection
    from .web_pages import HostNames

__all__ = [
    "DEFAULT_MAX_BODY_BYTES",
    "IDLE_TIMEOUT_S",
    "LINGER_S",
    "MAX_HEAD_BYTES",
    "REQUEST_TIMEOUT_S",
    "AnswerLimiter",
    "Begin",
    "Body",
    "CutOff",
    "ForeignRequest",
    "Guard",
    "HTTPError",
    "Handler",
    "HostNames",
    "OnRequest",
    "Request",
    "Response",
    "Route",
    "Router",
    "TLSRequiredRouter",
    "WaitingClients",
    "audited",
    "channel_names",
    "compact_json",
    "given",
    "log_request",
    "peer_of",
    "serve_connection",
    "switching",
    "valid_name",
]

_MODULES = {
    "AnswerLimiter": ".limiting",
    "Begin": ".routing",
    "Body": ".messages",
    "CutOff": ".messages",
    "DEFAULT_MAX_BODY_BYTES": ".routing",
    "ForeignRequest": ".messages",
    "Guard": ".guard",
    "HTTPError": ".messages",
    "Handler": ".routing",
    "HostNames": ".web_pages",
    "IDLE_TIMEOUT_S": ".connection",
    "LINGER_S": ".connection",
    "MAX_HEAD_BYTES": ".parsing",
    "OnRequest": ".connection",
    "REQUEST_TIMEOUT_S": ".connection",
    "Request": ".messages",
    "Response": ".messages",
    "Route": ".routing",
    "Router": ".routing",
    "TLSRequiredRouter": ".routing",
    "WaitingClients": ".connection",
    "audited": ".auditing",
    "channel_names": ".messages",
    "compact_json": ".messages",
    "given": ".messages",
    "log_request": ".serving",
    "peer_of": ".serving",
    "serve_connection": ".serving",
    "switching": ".messages",
    "valid_name": ".messages",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
