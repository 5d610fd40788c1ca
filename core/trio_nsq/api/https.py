"""The answer of a server that requires TLS: 403, with its port of HTTPS. nsqd answers plain HTTP like that."""

from ..protocol.address import format_address
from ..protocol.untrusted_json import decode_json

REFUSED = 403
_HTTP = "http://"


def https_port(status: int, body: bytes) -> int:
    """Return the port at which a request is to be repeated; 0: the answer names none."""
    try:
        port = decode_json(body)["https_port"] if status == REFUSED else 0
    except (ValueError, KeyError, TypeError):
        return 0
    return port if type(port) is int and 0 < port <= 65535 else 0


def https_address(address: str, status: int, body: bytes) -> str:
    """Return the HTTPS address for a `host:port`, with or without `http://`; empty if the answer names none."""
    if not (port := https_port(status, body)):
        return ""
    return f"https://{format_address(address.removeprefix(_HTTP).rpartition(':')[0].strip('[]'), port)}"
