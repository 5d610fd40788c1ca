"""The small HTTP server that the broker, the discovery service and the admin endpoints share.

`httptools` parses requests, a `Router` finds the route, and its async handler answers. `serve_connection` handles
keep-alive, limits, deadlines and closing. Each client has a task; with a `Poller`, the poller reads the clients, and a
route can answer there by its `begin`, without a task switch.
"""

from .auditing import audited
from .connection import IDLE_TIMEOUT_S, LINGER_S, REQUEST_TIMEOUT_S, OnRequest
from .guard import Guard
from .messages import Body, CutOff, HTTPError, Request, Response, channel_names, given, valid_name
from .parsing import MAX_HEAD_BYTES
from .routing import DEFAULT_MAX_BODY_BYTES, Begin, Handler, Route, Router
from .serving import log_request, peer_of, serve_connection
from .tls_required import TLSRequiredRouter
from .web_pages import HostNames

__all__ = [
    "DEFAULT_MAX_BODY_BYTES",
    "IDLE_TIMEOUT_S",
    "LINGER_S",
    "MAX_HEAD_BYTES",
    "REQUEST_TIMEOUT_S",
    "Begin",
    "Body",
    "CutOff",
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
    "audited",
    "channel_names",
    "given",
    "log_request",
    "peer_of",
    "serve_connection",
    "valid_name",
]
