"""Format counts and untrusted text for people."""

from typing import Final

NAME_RULE: Final = "1 to 64 of the characters . _ - a-z A-Z 0-9, optionally with #ephemeral at the end"
"""What a name of a topic or channel is (`is_valid_name` in `protocol`), for errors."""


def count_of(count: int, what: str) -> str:
    """Format a count with its noun, such as `1 topic` or `1,234 topics`.

    Args:
        count: 0 or more.
        what: The singular noun.
    """
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def is_or_are(count: int) -> str:
    """Return the verb for so many things."""
    return "is" if count == 1 else "are"


def was_or_were(count: int) -> str:
    """Return the verb for so many things, in the past."""
    return "was" if count == 1 else "were"


def untrusted_certificate(verify_message: str) -> str:
    """Say that a peer's certificate is not trusted, for an error that names the peer.

    Args:
        verify_message: Why: `verify_message` of ssl's error.
    """
    reason = verify_message.removesuffix(".")
    return f"its certificate is not trusted: {reason}"


def printable(text: str, keep: str = "") -> str:
    """Escape control characters and line breaks, such as `\\x1b`, so that text cannot act on a terminal.

    Args:
        text: Any text; a byte that was not UTF-8 (surrogateescape) becomes `\\xff`.
        keep: Characters that are not escaped.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    byte = ord(char) - 0xDC00
    return f"\\x{byte:02x}" if 0x80 <= byte <= 0xFF else char.encode("unicode_escape").decode()
