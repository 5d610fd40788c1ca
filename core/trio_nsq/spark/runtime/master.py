"""Checks the URL of a Spark master before Spark starts, which takes a minute to give up."""

import re
import socket
import struct

from ...protocol.address import parse_address
from .failures import SparkFailed

_CONNECT_TIMEOUT_S, _ANSWER_TIMEOUT_S = 3.0, 10.0
_NO_STREAM = b"/jars/"
_QUESTION = struct.pack(">qbi", 13 + len(_NO_STREAM), 6, len(_NO_STREAM)) + _NO_STREAM
"""A StreamRequest of Spark's protocol: its own length, the type, and the name of a stream, which does not exist."""
_ANSWER_START = bytes(4)
"""The first half of the length of an answer."""
_URL = re.compile(
    r"local(\[(\d+|\*)(,\s*\d+)?\])?|local-cluster\[\d+,\s*\d+,\s*\d+\]|spark://[^/]+|yarn|k8s://.+"
)


def check_master(url: str | None) -> None:
    """Check the form of the URL, and that a master of a standalone cluster answers in Spark's protocol.

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
        try:
            host, port = parse_address(place)
        except ValueError:
            raise SparkFailed(
                f"the URL {url} is not that of a Spark master: {place} is not HOST:PORT"
            ) from None
        try:
            _ask(host, port)
        except OSError as exc:
            reasons.append(f"{place}: {getattr(exc, 'strerror', None) or exc}".lower())
        else:
            return
    raise SparkFailed(
        f"no Spark master answers at {url} ({'; '.join(reasons)}): start it, or give the URL that its log and its web "
        "page show"
    )


def _ask(host: str, port: int) -> None:
    """Check that a server speaks Spark's protocol.

    A master closes the connection unanswered if it has TLS, so that is no error.

    Raises:
        OSError: It does not accept connections, does not answer, or speaks another protocol.
    """
    with socket.create_connection((host, port), _CONNECT_TIMEOUT_S) as connection:
        connection.settimeout(_ANSWER_TIMEOUT_S)
        try:
            connection.sendall(_QUESTION)
            answer = connection.recv(len(_ANSWER_START), socket.MSG_WAITALL)
        except ConnectionError:
            return
    if not _ANSWER_START.startswith(answer):
        raise OSError("another server has this port")
