"""Makes looking up names below `slow.invalid` take a second, in the process that imports this: for `neighbours.py`."""

import socket
import time
from typing import Any

SLOW = ".slow.invalid"
SECONDS = 1.0

_getaddrinfo = socket.getaddrinfo


def _slow_getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
    name = host.decode(errors="replace") if isinstance(host, bytes) else str(host)
    if name.endswith(SLOW):
        time.sleep(SECONDS)
        raise socket.gaierror(socket.EAI_AGAIN, "nobody knows this name")
    return _getaddrinfo(host, *args, **kwargs)


socket.getaddrinfo = _slow_getaddrinfo
