"""Mask fields of JSON bodies.

The bodies themselves are rewritten, so that nothing made of them has the values. In a body that is no JSON object the
field cannot be found: only its size is kept.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from functools import partial
from typing import Any

from .conditions import Path, parse_path
from .exact_json import decode_object, json_text

_HIDDEN = "***"
_LAST = 4
_MIN_CHARS = 8
"""Of shorter values, the last characters would be most of them."""


class Mask(StrEnum):
    """What a value becomes: null, asterisks, its SHA-256 in hex, or asterisks and its last 4 characters.

    Of a value with less than 8 characters, and of an object or array, `LAST4` leaves the asterisks only.
    """

    NULL = "null"
    HIDE = "hide"
    SHA256 = "sha256"
    LAST4 = "last4"


class Scalar(dict[str, Any]):
    """An object that stands for one value, such as an extension of MessagePack: for masks, it has no fields."""


class BodyMasks:
    """The masks of bodies.

    Args:
        masks: Fields with their masks. Names of nested fields are separated by dots; in arrays, each element is
            masked. A field whose own name has these dots is masked, too. A value in which a nested field cannot be
            found, because it is neither an object nor an array, is masked itself.

    Attributes:
        text_paths: The paths whose masks are text.
        hidden: How many values `masked` has hidden so far, by field.
    """

    def __init__(self, masks: Iterable[tuple[str, Mask]]) -> None:
        self.hidden: Counter[str] = Counter()
        self.text_paths: list[Path] = []
        self._changes: list[tuple[Path, Callable[[Any], str | None]]] = []
        for field, mask in masks:
            paths = {(field,), parse_path(field)}
            self._changes += [(path, partial(self._hide, field, mask)) for path in paths]
            self.text_paths += paths if mask is not Mask.NULL else ()

    def readable(self, bodies: Iterable[bytes]) -> list[bytes]:
        """Return the bodies for a condition: with the text of values whose masks are text, so that they fit."""
        return [self._readable(body) for body in bodies] if self.text_paths else list(bodies)

    def _readable(self, body: bytes) -> bytes:
        try:
            found = decode_object(body)
            for path in self.text_paths:
                _changed(found, path, _text)
            return json_text(found).encode()
        except (ValueError, RecursionError):
            return body

    def masked(self, bodies: Iterable[bytes]) -> list[bytes]:
        """Return the bodies as JSON with masked fields."""
        masked = [(body, self.masked_object(body)) for body in bodies]
        return [b"withheld: %d bytes" % len(body) if found is None else found for body, found in masked]

    def masked_value(self, found: Any) -> Any:
        """Return the value of a decoded body with masked fields; a part of it is changed itself. Raises ValueError."""
        if not isinstance(found, dict) or isinstance(found, Scalar):
            raise ValueError("the body is not an object, so its fields cannot be masked")
        for path, change in self._changes:
            _changed(found, path, change)
        return found

    def masked_object(self, body: bytes) -> bytes | None:
        """Return a body as JSON with masked fields; None: it is no JSON object."""
        try:
            found = self.masked_value(decode_object(body))
            # Also without the field: the body may have two members of a name, of which only the last one is decoded.
            return json_text(found).encode()
        except (ValueError, RecursionError):
            return None

    def _hide(self, field: str, mask: Mask, value: Any) -> str | None:
        self.hidden[field] += 1
        return _hidden(value, mask)


def parse_masks(texts: Iterable[str], default: Mask) -> list[tuple[str, Mask]]:
    """Parse `FIELD` or `FIELD=MASK`. Raises ValueError."""
    found: dict[str, Mask] = {}
    for text in texts:
        field, equals, mask = text.strip().rpartition("=")
        if not equals:
            field, mask = mask, default
        if mask not in [*Mask]:
            raise ValueError(f"{mask!r} is not one of {', '.join(Mask)}")
        if field in found:
            raise ValueError(f"{field!r} is given twice")
        parse_path(field)
        found[field] = Mask(mask)
    return list(found.items())


def _changed(value: Any, path: Sequence[str], change: Callable[[Any], str | None]) -> Any:
    """Return a value whose field is changed, also in each element of an array.

    A value that cannot have the field is changed itself.
    """
    if path and isinstance(value, list):
        return [_changed(each, path, change) for each in value]
    if path and isinstance(value, dict) and not isinstance(value, Scalar):
        if path[0] in value:
            value[path[0]] = _changed(value[path[0]], path[1:], change)
        return value
    return change(value)


def _text(value: Any) -> str | None:
    """Return the text that a mask is made of."""
    return value if value is None or isinstance(value, str) else json_text(value)


def _hidden(value: Any, mask: Mask) -> str | None:
    text = _text(value)
    if text is None or mask is Mask.NULL:
        return None
    if mask is Mask.SHA256:
        return hashlib.sha256(text.encode()).hexdigest()
    if mask is Mask.HIDE:
        return _HIDDEN
    is_plain = not isinstance(value, dict | list)
    return _HIDDEN + text[-_LAST:] if is_plain and len(text) >= _MIN_CHARS else _HIDDEN
