"""Keys of messages, for `--strategy hash`."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from .batches import Batch

Keys = Sequence[bytes | None]
"""The key of each message of a batch; None: it has no key."""


def whole_bodies(batch: Batch) -> Keys:
    return batch.bodies


def matching(pattern: re.Pattern[bytes]) -> Callable[[Batch], Keys]:
    """Return a function for keys that a pattern finds: its first group, or the match if it has no group."""
    search, group = pattern.search, min(1, pattern.groups)

    def keys(batch: Batch) -> Keys:
        return [match and match[group] for match in map(search, batch.bodies)]

    return keys


def in_field(path: Sequence[str]) -> Callable[[Batch], Keys]:
    """Return a function for keys in a field of JSON messages, or of the records that had them."""

    def keys(batch: Batch) -> Keys:
        if batch.keys is not None:
            return batch.keys
        return [_key_of_json(body, path) for body in batch.bodies]

    return keys


def _key_of_json(body: bytes, path: Sequence[str]) -> bytes | None:
    try:
        return key_of(json.loads(body), path)
    except (ValueError, RecursionError):
        return None


def key_of(value: Any, path: Sequence[str]) -> bytes | None:
    """Return the key in a field of a decoded object, which `path` leads to; None: there is no such field, or null."""
    for name in path:
        if not isinstance(value, dict):
            return None
        value = value.get(name)
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text.encode("utf-8", "surrogatepass")
