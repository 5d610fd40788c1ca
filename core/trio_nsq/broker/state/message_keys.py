"""The keys of messages, for channels that deliver the messages of a key one after the other: see `key_order.py`."""

import json
from typing import Final, TypeAlias

from ...filters.conditions import Path, parse_path
from ...protocol.go_json import refuse_constant
from ...protocol.headers import is_header_name
from .batch import Batch

Key: TypeAlias = object
"""The hash of a key: a channel has many keys, of any length. Two keys with the same hash wait for each other, which
delays a message but breaks no order."""

JSON_PREFIX: Final = "json:"
HEADER_PREFIX: Final = "header:"
_DECODER: Final = json.JSONDecoder(parse_constant=refuse_constant)
_scan = _DECODER.scan_once  # type: ignore[attr-defined]  # the type information lacks it
_KEY_TYPES: Final = (str, int, float, bool)


class MessageKeys:
    """Reads the keys of messages.

    A message has no key if its body is not a JSON object, or has no such member, or if the member is null, an object
    or an array; or if it has no such header, or an empty one.

    Args:
        order_by: `json:FIELD`, names of nested members separated by dots as in conditions; or `header:NAME`.

    Raises:
        ValueError: `order_by` is neither. The text says what is possible.
    """

    __slots__ = ("_header", "_path", "order_by")

    def __init__(self, order_by: str) -> None:
        self.order_by: str = order_by
        self._path: Path | None = None
        self._header = ""
        if order_by.startswith(JSON_PREFIX):
            self._path = parse_path(order_by.removeprefix(JSON_PREFIX))
            return
        name = order_by.removeprefix(HEADER_PREFIX)
        if name == order_by or not is_header_name(name):
            raise ValueError(
                "it must be json:FIELD, such as json:user.id, header:NAME in lower case, or empty"
            )
        self._header = f"\n{name}:"

    def of_all(self, batch: Batch) -> list[Key | None]:
        """Return the key of each message of a batch; None: the message has no key."""
        if self._path is not None:
            return [self._in_body(body) for body in batch.bodies()]
        if not batch.has_headers:
            return [None] * len(batch)
        return [self._in_headers(batch.headers(index)) for index in range(len(batch))]

    def of(self, batch: Batch, index: int) -> Key | None:
        """As `of_all`, for one message."""
        if self._path is not None:
            return self._in_body(batch.body(index))
        return self._in_headers(batch.headers(index))

    def _in_body(self, body: bytes) -> Key | None:
        try:
            text = body.decode()
            # Half of the time of `decode`, which skips space around the value.
            value, end = _scan(text, 0) if text.startswith("{") else (None, -1)
            if end != len(text):
                value = _DECODER.decode(text)
        except (ValueError, RecursionError, StopIteration):  # also of numbers with thousands of digits
            return None
        for name in self._path or ():
            if type(value) is not dict:
                return None
            value = value.get(name)
        return hash(value) if type(value) is str or type(value) in _KEY_TYPES else None

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
        return hash(value) if value else None
