"""Decode JSON from untrusted peers and files."""

import json
import math
import re
from typing import Any

from .go_json import refuse_constant

_HALF_OF_A_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
_MAX_DIGITS = 300
"""A float can have the value of such a number, so that a division is no OverflowError."""


def decode_json(data: bytes | bytearray | str) -> Any:
    """Decode one JSON value. What it has can be encoded again: escaped halves of surrogate pairs become U+FFFD.

    Raises:
        ValueError: The data is not JSON, or is nested too deeply for Python's decoder, or has a number beyond the range
            of floats.
    """
    text = data if isinstance(data, str) else data.decode(json.detect_encoding(data))
    try:
        value = _DECODER.decode(text)
        if _HALF_OF_A_PAIR.search(text) is None:
            return value
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return _DECODER.decode(text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"))


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def _float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"the number {text[:20]} is too large")
    return number


_DECODER = json.JSONDecoder(parse_int=_integer, parse_float=_float, parse_constant=refuse_constant)
