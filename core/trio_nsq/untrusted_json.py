"""Decode JSON from untrusted peers and files."""

import json
from typing import Any


def decode_json(data: bytes | bytearray | str) -> Any:
    """Decode one JSON value.

    Raises:
        ValueError: The data is not JSON, or is nested too deeply for Python's decoder.
    """
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None
