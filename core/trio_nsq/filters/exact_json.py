"""JSON values whose numbers keep all digits, and their text."""

import base64
import json
import math
import re
from datetime import date, time
from decimal import Decimal
from typing import Any

from ..protocol.go_json import refuse_constant

_MAX_DIGITS = 800
"""A double written without exponent has at most 767 digits that are not zero."""
_SHORT = 16
"""A number with a point and at most 15 digits."""
_HAS_NEGATIVE_ZERO = re.compile(r"[\s:,[]-0[\s,\]}]").search
NEGATIVE_ZERO = "-0"
_JSON_SPACE = " \t\r\n"


class Digits:
    """A number whose text is not that of its double, such as `1.10`; of whole numbers only `-0`.

    Attributes:
        text: The number in the body.
        value: The nearest double, or a float near it.
    """

    __slots__ = ("text", "value")

    def __init__(self, text: str, value: float) -> None:
        self.text: str = text
        self.value: float = value

    @property
    def is_exact(self) -> bool:
        """Whether the value, rounded to as many digits as the text has, is the number."""
        mantissa = self.text.lower().partition("e")[0].strip("-0.")
        if not self.value or not mantissa:
            return not mantissa
        if not math.isfinite(self.value):
            return False
        digits = min(len(mantissa.replace(".", "")), _MAX_DIGITS)
        return Decimal(f"{self.value:.{digits - 1}e}") == Decimal(self.text)


def decode_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object, without the extensions NaN and Infinity. Raises ValueError, RecursionError."""
    text = body.decode().strip(_JSON_SPACE)
    decoder = _DECODER
    if NEGATIVE_ZERO in text and _HAS_NEGATIVE_ZERO(text):
        decoder = _ZERO_DECODER
    found, end = decoder.raw_decode(text)  # faster than `decode`, which allows space around the value
    if end != len(text) or not isinstance(found, dict):
        raise ValueError("not an object")
    return found


def _number(text: str) -> float | Digits:
    value = float(text)
    # Up to 15 digits `repr` returns the same, and takes as long as all of the rest.
    if (
        len(text) <= _SHORT
        and text[-1] in "123456789"
        and not -0.001 < value < 0.001
        and "e" not in text.lower()
    ):
        return value
    return value if repr(value) == text else Digits(text, value)


_DECODER = json.JSONDecoder(parse_constant=refuse_constant, parse_float=_number)
_ZERO_DECODER = json.JSONDecoder(
    parse_constant=refuse_constant,
    parse_float=_number,
    parse_int=lambda text: int(text) if text != NEGATIVE_ZERO else Digits(text, -0.0),
)
"""Keeps `-0`, which is 0 as an int; takes longer."""
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
"""`json.dumps` would create one for each value."""


def json_text(value: object) -> str:
    try:
        text = _ENCODER.encode(value)
    except TypeError:  # of `Digits`
        text = _with_digits(value)
    return string(text)


def _with_digits(value: object) -> str:
    """Encode a value with `Digits`, which takes several times as long."""
    if isinstance(value, Digits):
        return value.text
    if isinstance(value, dict):
        return (
            f"{{{','.join(f'{_ENCODER.encode(name)}:{_with_digits(each)}' for name, each in value.items())}}}"
        )
    if isinstance(value, list):
        return f"[{','.join(map(_with_digits, value))}]"
    return _ENCODER.encode(_as_json(value))


def _as_json(value: object) -> object:
    """Return what JSON has for a value of another format."""
    match value:
        case bytes():
            return base64.b64encode(value).decode()
        case Decimal():
            return f"{value:f}"
        case date() | time():  # and datetime
            return value.isoformat()
    return value


def string(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("no string")
    if not value.isascii():
        value.encode()  # half of a surrogate pair raises
    return value
