"""The line that a server's log has for a request."""

import logging

from .messages import Request


def log_request(logger: logging.Logger, request: Request, status: int, elapsed_s: float) -> None:
    """Log a request as nsqd does; one that could not be read shows what is known of it."""
    method, target = request.method or "-", request.target or "-"
    logger.info("%d %s %s (%s) %s", status, method, target, request.peer, _duration(elapsed_s))


def _duration(seconds: float) -> str:
    """As Go writes it, but for the digits: `921ns`, `5.140µs`, `1.116ms`."""
    for unit, size_s in (("s", 1), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size_s:
            return f"{seconds / size_s:.3f}{unit}"
    return f"{seconds * 1e9:.0f}ns"
