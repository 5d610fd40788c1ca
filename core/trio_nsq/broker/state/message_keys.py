"""The keys of messages, for channels that deliver the messages of a key one after the other: see `key_order.py`."""

import json
from collections.abc import Callable
from operator import attrgetter
from typing import Any, Final, TypeAlias

import msgspec

from ...filters.conditions import Path, parse_path
from ...protocol.go_json import refuse_constant
from ...protocol.headers import is_header_name
from .batch import Batch

Key: TypeAlias = object
"""A short text as it is, which is found fastest; and the hash of a longer one, or of another value. Two keys with the
same hash wait for each other, which delays a message but breaks no order."""

_MAX_TEXT: Final = 64
"""Maximum number of characters of a key that is not hashed: a channel has many keys, of any length."""

JSON_PREFIX: Final = "json:"
HEADER_PREFIX: Final = "header:"
_DECODER: Final = json.JSONDecoder(parse_constant=refuse_constant)
_TEXTS: Final = {str}
_KEY_TYPES: Final = frozenset((str, int, float, bool))


class MessageKeys:
    """Reads the keys of messages.

    A message has no key if its body is not a JSON object, or has no such member, or if the member is null, an object
    or an array; or if it has no such header, or an empty one.

    Args:
        order_by: `json:FIELD`, names of nested members separated by dots as in conditions; or `header:NAME`.

    Raises:
        ValueError: `order_by` is neither. The text says what is possible.
    """

    __slots__ = ("_decode", "_header", "_path", "_value", "order_by")

    def __init__(self, order_by: str) -> None:
        self.order_by: str = order_by
        self._decode: Callable[[bytes], Any] | None = None
        self._path: Path = ()
        self._value: Callable[[Any], Any] = _refuse  # returns the member of what `_decode` returns
        self._header = ""
        if order_by.startswith(JSON_PREFIX):
            self._path = parse_path(order_by.removeprefix(JSON_PREFIX))
            self._decode = _decoder_of(self._path)
            self._value = attrgetter(".".join(["value"] * len(self._path)))
            return
        name = order_by.removeprefix(HEADER_PREFIX)
        if name == order_by or not is_header_name(name):
            raise ValueError(
                "it must be json:FIELD, such as json:user.id, header:NAME in lower case, or empty"
            )
        self._header = f"\n{name}:"

    def of_all(self, batch: Batch) -> list[Key | None]:
        """Return the key of each message of a batch; None: the message has no key."""
        if self._decode is not None:
            return self._in_bodies(batch.bodies())
        if not batch.has_headers:
            return [None] * len(batch)
        return [self._in_headers(batch.headers(index)) for index in range(len(batch))]

    def of(self, batch: Batch, index: int) -> Key | None:
        """As `of_all`, for one message."""
        if self._decode is not None:
            return self._in_body(batch.body(index))
        return self._in_headers(batch.headers(index))

    def _in_bodies(self, bodies: list[bytes]) -> list[Key | None]:
        """As `_in_body`, for all messages of a batch: in few C calls if each of them has a key."""
        assert self._decode is not None
        try:
            values = list(map(self._value, map(self._decode, bodies)))
        except (ValueError, AttributeError, RecursionError):
            return [self._in_body(body) for body in bodies]
        if set(map(type, values)) == _TEXTS and max(map(len, values)) <= _MAX_TEXT:
            return values
        return list(map(_key_of, values))

    def _in_body(self, body: bytes) -> Key | None:
        assert self._decode is not None
        try:
            value = self._decode(body)
            for _ in self._path:
                if value is None:
                    return None
                value = value.value
        except (ValueError, RecursionError):
            value = self._in_any_body(body)
        return _key_of(value)

    def _in_any_body(self, body: bytes) -> object:
        """Return the member, also of what msgspec refuses: half a surrogate pair, numbers beyond a double's range."""
        try:
            value = _DECODER.decode(body.decode())
        except (ValueError, RecursionError):  # also of numbers with thousands of digits
            return None
        for name in self._path:
            if type(value) is not dict:
                return None
            value = value.get(name)
        return value

    def _in_headers(self, text: str) -> Key | None:
        """Return the key in the text of headers, see `protocol/headers.py`."""
        if not text:
            return None
        lines = "\n" + text
        start = lines.find(self._header)
        if start < 0:
            return None
        start += len(self._header)
        value = lines[start : lines.index("\n", start)]
        return _key_of(value) if value else None


def _key_of(value: object) -> Key | None:
    """Return the key of a member, or of a header that is not empty; None: such a member is no key."""
    if isinstance(value, str) and len(value) <= _MAX_TEXT:
        return value
    return hash(value) if type(value) in _KEY_TYPES else None


def _decoder_of(path: Path) -> Callable[[bytes], Any]:
    """Return a decoder of only the members of this path, which takes a third of the time of `json`.

    It raises ValueError for bodies that it cannot decode; for all, if msgspec does not support one of the names.
    """
    kind: Any = object
    try:
        for name in reversed(path):
            # The collector needs not look for cycles: JSON has none.
            kind = msgspec.defstruct("Object", [("value", kind, None)], rename={"value": name}, gc=False)
    except ValueError:  # the name has a quotation mark, a backslash or a control character
        return _refuse
    return msgspec.json.Decoder(kind).decode


def _refuse(_: object) -> Any:
    raise ValueError
