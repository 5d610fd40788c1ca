"""Mask fields of JSON bodies before anything else of an export sees them, except the condition of `--where`.

The bodies themselves are rewritten, so the columns, `rest`, `unparsed`, `body`, dead letters and inferred types have
the masked values. In a body that is no JSON object the field cannot be found: only its size is kept.
"""

import hashlib
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any

from ...filters.conditions import Path, parse_path
from .json_values import decode_object, json_text
from .layout import Layout

_HIDDEN = "***"
_LAST = 4


class Mask(StrEnum):
    """What a value becomes: null, its SHA-256 in hex, or asterisks and its last 4 characters."""

    NULL = "null"
    SHA256 = "sha256"
    LAST4 = "last4"


class BodyMasks:
    """The masks of a layout.

    Args:
        masks: Fields with their masks. Names of nested fields are separated by dots; in arrays, each element is
            masked. A field whose own name has these dots is masked, too.
    """

    def __init__(self, masks: Iterable[tuple[str, Mask]]) -> None:
        self._paths: list[tuple[Path, Mask]] = []
        for field, mask in masks:
            self._paths += [(path, mask) for path in {(field,), parse_path(field)}]

    def masked(self, bodies: Iterable[bytes]) -> list[bytes]:
        """Return the bodies as JSON with masked fields."""
        return [self._masked(body) for body in bodies]

    def _masked(self, body: bytes) -> bytes:
        try:
            found = decode_object(body)
            for path, mask in self._paths:
                _apply(found, path, mask)
            # Also without the field: the body may have two members of a name, of which only the last one is decoded.
            return json_text(found).encode()
        except (ValueError, RecursionError):
            return b"withheld: %d bytes" % len(body)


def masks_of(layout: Layout) -> BodyMasks | None:
    """Return the masks of a layout; None: it has none."""
    return BodyMasks((field, Mask(mask)) for field, mask in layout.masks) if layout.masks else None


def _apply(value: Any, path: Sequence[str], mask: Mask) -> None:
    """Mask a field of an object, or of each object in an array."""
    if isinstance(value, list):
        for each in value:
            _apply(each, path, mask)
    elif isinstance(value, dict) and path[0] in value:
        name, *inner = path
        if inner:
            _apply(value[name], inner, mask)
        else:
            value[name] = _hidden(value[name], mask)


def _hidden(value: Any, mask: Mask) -> str | None:
    if value is None or mask is Mask.NULL:
        return None
    text = value if isinstance(value, str) else json_text(value)
    if mask is Mask.SHA256:
        return hashlib.sha256(text.encode()).hexdigest()
    is_plain = not isinstance(value, dict | list)
    return _HIDDEN + text[-_LAST:] if is_plain and len(text) > _LAST else _HIDDEN
