"""JSON that strangers sent, or that lies in files others may have written."""

import json
from typing import Any


def decode_json(data: bytes | bytearray | str) -> Any:
    """Decode one JSON value.

    Raises:
        ValueError: It is not JSON, or it is nested deeper than Python can follow.
    """
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None
