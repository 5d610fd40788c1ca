"""The JSON text of decoded bodies, within limits of depth and size."""

import base64
import json
import math
from collections.abc import Iterator, Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from ..filters.masks import Scalar
from .errors import BodyError

MAX_DEPTH = 100
MAX_CHARACTERS = 1024 * 1024
"""Of the JSON text of a body, about. A schema has long names, which take no bytes in the body."""


def plain_value(value: object) -> Any:
    """Return a decoded value with the types of JSON only. An iterator becomes a list, and is read within the limits.

    Bytes become base64, times ISO 8601; decimals and numbers that JSON lacks become text.

    Raises:
        BodyError: It is nested too deep, or its text would be too long.
    """
    return _Plain().convert(value, 0)


def text_of_value(value: object) -> bytes:
    """Return the JSON text of a value of `plain_value`."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")


class _Plain:
    def __init__(self) -> None:
        self._left = MAX_CHARACTERS

    def convert(self, value: object, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise BodyError(f"the body is nested more than {MAX_DEPTH} levels deep")
        if isinstance(value, Mapping):
            self._take(2)
            found = {
                self._taken(self._name(name, depth)): self.convert(each, depth + 1)
                for name, each in value.items()
            }
            return Scalar(found) if isinstance(value, Scalar) else found
        if isinstance(value, list | tuple | set | frozenset | Iterator):
            self._take(2)
            return [self.convert(each, depth + 1) for each in value]
        if isinstance(value, str):
            return self._taken(value)
        if value is None or isinstance(value, bool | int):
            self._take(6 if value is None else 2 + value.bit_length() // 3)  # with the separator
            return value
        self._take(8)
        return self._taken(_scalar(value)) if not isinstance(value, float) else _float(value)

    def _name(self, name: object, depth: int) -> str:
        """Return the name of a field; in MessagePack it may be any value."""
        if name is None or isinstance(name, bool | tuple):
            return text_of_value(self.convert(name, depth + 1)).decode()
        return _name(name)

    def _taken(self, text: str) -> str:
        self._take(len(text) + 4)
        return text

    def _take(self, characters: int) -> None:
        self._left -= characters
        if self._left < 0:
            raise BodyError(f"the body has more than {MAX_CHARACTERS} characters as JSON")


def _name(name: object) -> str:
    if isinstance(name, str):
        return name
    if isinstance(name, bytes):  # of MessagePack: a mask of `card` counts for b"card", too
        try:
            return name.decode()
        except UnicodeDecodeError:
            return base64.b64encode(name).decode()
    return str(name)


def _float(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _scalar(value: object) -> str:
    match value:
        case bytes() | bytearray() | memoryview():
            return base64.b64encode(value).decode()
        case Decimal():
            return f"{value:f}" if abs(value.adjusted()) < MAX_DEPTH else str(value)
        case date() | time():  # and datetime
            return value.isoformat()
        case timedelta():
            return f"{value.total_seconds()}s"
        case UUID():
            return str(value)
    raise BodyError(f"the body has a value that JSON cannot have: {type(value).__name__}")
