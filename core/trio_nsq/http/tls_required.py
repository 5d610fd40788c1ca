"""The router of a plain-text listener when clients must use TLS."""

import json

from .messages import Response
from .routing import Route, Router


class TLSRequiredRouter(Router):
    """Refers every request to the HTTPS port (0 without one), in the form that NSQ's HTTP clients understand."""

    def __init__(self, https_port: int) -> None:
        super().__init__([])
        # With the blanks that nsqd sends.
        body = json.dumps({"message": "TLS_REQUIRED", "https_port": https_port})
        self._answer = Response(403, body.encode(), "application/json; charset=utf-8")

    def resolve(self, method: str, path: str, query: str = "") -> Route | Response:
        """Return the same answer for every request."""
        return self._answer
