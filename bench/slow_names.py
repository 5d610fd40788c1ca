"""Make lookups of names below `slow.invalid` take 1 s in the importing process, for `neighbours.py`."""

import socket
import time
from typing import Any

SLOW = ".slow.invalid"
SECONDS = 1.0

_getaddrinfo = socket.getaddrinfo


def _slow_getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
    name = host.decode(errors="replace") if isinstance(host, bytes) else str(host)
    numeric_only = (
        kwargs.get("flags", args[4] if len(args) > 4 else 0) & socket.AI_NUMERICHOST
    )  # takes no time
    if name.endswith(SLOW) and not numeric_only:
        time.sleep(SECONDS)
        raise socket.gaierror(socket.EAI_AGAIN, "the name is not known")
    return _getaddrinfo(host, *args, **kwargs)


socket.getaddrinfo = _slow_getaddrinfo
