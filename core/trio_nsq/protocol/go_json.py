"""Decode and encode JSON like Go's `encoding/json`, which nsqd and nsqlookupd use.

Go is more lenient than Python about the letter case of keys, missing fields and `null`, and stricter about numbers,
constants and encodings.
"""

import json
import math
import re
from typing import Any, NoReturn, TypeVar

_T = TypeVar("_T")

_MAX_DIGITS = 20
_LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")
INT64 = range(-(2**63), 2**63)


class GoObject:
    """A JSON object, read field by field.

    Pass field names in lower case; they match in any case. A missing or `null` field has the zero value of its type:
    "", 0, False, an empty list or object. If a field is repeated, the last value counts, but all must have the right
    type. Every method raises ValueError for a value of the wrong type.
    """

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        self._pairs = pairs
        self._values: dict[str, list[Any]] | None = None  # made on first use: most objects are never read

    def text(self, name: str) -> str:
        return _text(self._last(name, str, ""))

    def boolean(self, name: str) -> bool:
        return self._last(name, bool, False)

    def integer(self, name: str, allowed: range = INT64) -> int:
        """Return an integer in this range; a number with a decimal point or an exponent has the wrong type."""
        value = self._last(name, int, 0)
        if value not in allowed:
            raise _wrong(name)
        return value

    def texts(self, name: str) -> list[str]:
        """Return a list of strings; `null` items are ""."""
        return [_text(item or "") for item in self._items(name, str)]

    def booleans(self, name: str) -> list[bool]:
        """Return a list of booleans; `null` items are False."""
        return [item or False for item in self._items(name, bool)]

    def object(self, name: str) -> "GoObject":
        """Return an object; an empty one if the field is missing."""
        return self._last(name, GoObject, GoObject([]))

    def objects(self, name: str) -> "list[GoObject]":
        """Return a list of objects; `null` items are empty objects."""
        return [item or GoObject([]) for item in self._items(name, GoObject)]

    def _items(self, name: str, kind: type[_T]) -> list[_T | None]:
        items = self._last(name, list, [])
        if not all(item is None or isinstance(item, kind) for item in items):
            raise _wrong(name)
        return items

    def _last(self, name: str, kind: type[_T], zero: _T) -> _T:
        if self._values is None:
            self._values = {}
            for key, value in self._pairs:
                if value is not None:
                    self._values.setdefault(_fold(key), []).append(value)
        values = self._values.get(name)
        if values is None:
            return zero
        for value in values:
            if type(value) is not kind:  # not isinstance: in Python a bool is an int
                raise _wrong(name)
        found: _T = values[-1]
        return found


def decode_object(data: bytes) -> GoObject:
    """Decode one JSON object; `null` is an empty object. Raises ValueError."""
    try:
        # Bytes that are not UTF-8 become U+FFFD. (json.loads of bytes would also accept UTF-16 and others.)
        decoded: Any = _DECODER.decode(data.decode("utf-8", "replace"))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if decoded is None:
        return GoObject([])
    if not isinstance(decoded, GoObject):
        raise ValueError("not a JSON object")
    return decoded


def _integer(digits: str) -> float:
    """Return an integer; infinity for a very long one, which Python parses slowly or rejects."""
    return int(digits) if len(digits) <= _MAX_DIGITS else math.inf


def refuse_constant(name: str) -> NoReturn:
    """Raise ValueError: for `parse_constant` of decoders, which would take NaN and Infinity."""
    raise ValueError(f"{name} is not JSON")


# One for all: `json.loads` with arguments makes a decoder for each call.
_DECODER = json.JSONDecoder(object_pairs_hook=GoObject, parse_int=_integer, parse_constant=refuse_constant)


_ESCAPES = str.maketrans(
    {char: f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"},
)


def encode_object(value: dict[str, Any]) -> bytes:
    """Encode like Go: without spaces, with HTML and JavaScript characters escaped. Keys keep their order."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.translate(_ESCAPES).encode()  # these characters occur only in strings


def _fold(key: str) -> str:
    return key.lower().replace("\u017f", "s")  # the long s: Go uses Unicode case folding


def _text(value: str) -> str:
    return _LONE_SURROGATE.sub("\ufffd", value)


def _wrong(name: str) -> ValueError:
    return ValueError(f"{name} is of the wrong type")
