"""Checks the URL of a Spark master before Spark starts, which takes a minute to give up."""

import re
import socket

from .failures import SparkFailed

_CONNECT_TIMEOUT_S = 3.0
_URL = re.compile(
    r"local(\[(\d+|\*)(,\s*\d+)?\])?|local-cluster\[\d+,\s*\d+,\s*\d+\]|spark://[^/]+|yarn|k8s://.+"
)


def check_master(url: str | None) -> None:
    """Check the form of the URL, and that one of the masters of a standalone cluster accepts connections.

    Args:
        url: None: Spark's own settings name the master.

    Raises:
        SparkFailed: The URL is wrong, or no master answers within a few seconds.
    """
    if url is None:
        return
    if not _URL.fullmatch(url):
        hint = "; Spark Connect is not supported" if url.startswith("sc://") else ""
        raise SparkFailed(
            f"the URL {url} is not that of a Spark master{hint}: give local[N], spark://HOST:PORT, yarn, or "
            "k8s://https://HOST:PORT"
        )
    if not url.startswith("spark://"):
        return
    reasons = []
    for place in url.removeprefix("spark://").split(","):
        host, _, port = place.rpartition(":")
        if not (host and port.isdecimal()):
            raise SparkFailed(f"the URL {url} is not that of a Spark master: {place} is not HOST:PORT")
        try:
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()
        except (OSError, OverflowError) as exc:
            reasons.append(f"{place}: {getattr(exc, 'strerror', None) or exc}".lower())
        else:
            return
    raise SparkFailed(
        f"no Spark master answers at {url} ({'; '.join(reasons)}): start it, or give the URL that its log and its web "
        "page show"
    )
