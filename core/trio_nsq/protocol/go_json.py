"""JSON as Go's `encoding/json` takes it, for what peers written for NSQ send.

Go is more lenient than Python in some things (letter case of keys, missing fields, `null`) and stricter in others
(numbers, constants, encodings). Whoever reads JSON that nsqd or nsqlookupd would read reads it with these.
"""

import json
import math
import re
from typing import Any, TypeVar

_T = TypeVar("_T")

_MAX_DIGITS = 20
_LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")
_INT64 = range(-(2**63), 2**63)


class GoObject:
    """A JSON object, read field by field.

    Field names are given in lower case and found in any. A field that is missing or `null` has its type's zero: "",
    0, an empty list or object; of one that occurs twice the last counts, but each must have the right type. Every
    method raises ValueError for a value of the wrong type.
    """

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        self._pairs = pairs  # their keys are folded when they are looked at: most objects never are

    def text(self, name: str) -> str:
        """A string."""
        return _text(self._last(name, str, ""))

    def integer(self, name: str) -> int:
        """A whole number of 64 bits; one written with a point or an exponent is of the wrong type."""
        value = self._last(name, int, 0)
        if value not in _INT64:
            raise _wrong(name)
        return value

    def texts(self, name: str) -> list[str]:
        """A list of strings; `null` among them is ""."""
        items = self._last(name, list, [])
        if not all(item is None or isinstance(item, str) for item in items):
            raise _wrong(name)
        return [_text(item or "") for item in items]

    def object(self, name: str) -> "GoObject":
        """An object; one without fields if it is missing."""
        return self._last(name, GoObject, GoObject([]))

    def objects(self, name: str) -> "list[GoObject]":
        """A list of objects; `null` among them is one without fields."""
        items = self._last(name, list, [])
        if not all(item is None or isinstance(item, GoObject) for item in items):
            raise _wrong(name)
        return [item or GoObject([]) for item in items]

    def _last(self, name: str, kind: type[_T], zero: _T) -> _T:
        found = zero
        for key, value in self._pairs:
            if value is not None and _fold(key) == name:
                if type(value) is not kind:  # exactly: a bool is an int to Python only
                    raise _wrong(name)
                found = value
        return found


def decode_object(data: bytes) -> GoObject:
    """Decode one JSON object; `null` is one without fields.

    Raises:
        ValueError: It is not JSON, or not an object.
    """
    try:
        # What is not UTF-8 becomes U+FFFD. (Given bytes, json would take UTF-16 and others for JSON, too.)
        decoded: Any = json.loads(
            data.decode("utf-8", "replace"),
            object_pairs_hook=GoObject,
            parse_int=_integer,
            parse_constant=_refuse_constant,
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if decoded is None:
        return GoObject([])
    if not isinstance(decoded, GoObject):
        raise ValueError("not a JSON object")
    return decoded


_ESCAPES = str.maketrans(
    {char: f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"},
)


def encode_object(value: dict[str, Any]) -> bytes:
    """Encode as Go does: no blanks, and what HTML or JavaScript would take amiss escaped. Keys keep their order."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.translate(_ESCAPES).encode()  # these characters occur inside of strings only


def _fold(key: str) -> str:
    return key.lower().replace("\u017f", "s")  # the long s: Go folds case as Unicode says


def _text(value: str) -> str:
    return _LONE_SURROGATE.sub("\ufffd", value)


def _integer(digits: str) -> float:
    """An integer; infinity for one longer than any we want, which Python would be slow to read, or refuse."""
    return int(digits) if len(digits) <= _MAX_DIGITS else math.inf


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _wrong(name: str) -> ValueError:
    return ValueError(f"{name} is of the wrong type")
