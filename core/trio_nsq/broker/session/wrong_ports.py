"""Logs clients that speak another protocol than that of the port: one line that names the right port."""

import logging
import time
from collections.abc import Callable

logger: logging.Logger = logging.getLogger("trio_nsq.broker")

EVERY_S = 60.0
MAX_CLIENTS = 1000
"""The clients that are remembered, so that each is logged once in `EVERY_S`; more of them replace the oldest."""


class WrongPorts:
    """The clients at wrong ports.

    Args:
        clock_s: Returns the time in seconds.

    Attributes:
        tcp, http, https: The addresses of the broker; None: it does not listen there.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self.tcp: str | None = None
        self.http: str | None = None
        self.https: str | None = None
        self._logged_s: dict[tuple[str, str, str], float] = {}

    def report(self, peer: str, spoken: str, expected: str) -> None:
        """Log a client that speaks `HTTP`, `TLS` or `NSQ` at the port for `NSQ` or `HTTP`."""
        key = (peer.rpartition(":")[0], spoken, expected)
        now_s = self._clock_s()
        logged_s = self._logged_s.get(key)
        if logged_s is not None and now_s - logged_s < EVERY_S:
            return
        self._logged_s.pop(key, None)
        if len(self._logged_s) >= MAX_CLIENTS:
            del self._logged_s[next(iter(self._logged_s))]
        self._logged_s[key] = now_s
        here = "the TCP port" if expected == "NSQ" else "the port for plain HTTP"
        logger.warning(
            "[%s] - the client speaks %s, and this is %s. %s",
            peer,
            _NAMES[spoken],
            here,
            self._advice(spoken, expected),
        )

    def _advice(self, spoken: str, expected: str) -> str:
        if spoken == "NSQ":
            return f"The TCP port is {self.tcp}."
        https = f"HTTPS is at {self.https}." if self.https else "There is no port for HTTPS."
        if spoken == "HTTP":
            return f"HTTP is at {self.http}." if self.http else https
        return f"NSQ clients begin TLS after IDENTIFY (tls_v1). {https}" if expected == "NSQ" else https


_NAMES = {"HTTP": "HTTP", "TLS": "TLS", "NSQ": "the NSQ protocol"}
