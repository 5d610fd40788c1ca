"""The error of schema documents."""

import json

from ...protocol.errors import NSQError


class SchemaError(NSQError):
    """A schema document cannot be used; the text has the place in it, and the reason."""


def shown(value: object) -> str:
    """Return the beginning of a part of a document, for messages."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:80]}..."
