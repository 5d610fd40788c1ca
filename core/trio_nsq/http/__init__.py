"""The small HTTP server that the broker, the discovery service and the admin endpoints share.

Requests are parsed by `httptools`, matched by a `Router`, answered by an async handler, and everything about
connections (keep-alive, limits, deadlines, closing) stays in `serve_connection`.
"""

from .connection import IDLE_TIMEOUT_S, LINGER_S, REQUEST_TIMEOUT_S, OnRequest, peer_of, serve_connection
from .messages import Body, CutOff, HTTPError, Request, Response
from .parsing import MAX_HEAD_BYTES
from .routing import DEFAULT_MAX_BODY_BYTES, Handler, Route, Router

__all__ = [
    "DEFAULT_MAX_BODY_BYTES",
    "IDLE_TIMEOUT_S",
    "LINGER_S",
    "MAX_HEAD_BYTES",
    "REQUEST_TIMEOUT_S",
    "Body",
    "CutOff",
    "HTTPError",
    "Handler",
    "OnRequest",
    "Request",
    "Response",
    "Route",
    "Router",
    "peer_of",
    "serve_connection",
]
