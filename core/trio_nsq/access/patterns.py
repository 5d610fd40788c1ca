"""Patterns for names of topics and channels."""

from collections.abc import Sequence
from typing import Protocol

ALL = "*"
MAX_PATTERN_CHARACTERS = 256


class Pattern(Protocol):
    """A compiled pattern. It matches whole names only."""

    def fullmatch(self, text: str, /) -> object | None: ...


class _Exact:
    """Matches one name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def fullmatch(self, text: str, /) -> bool | None:
        return text == self._name or None


class _Glob:
    """Matches the parts between asterisks in order: a search for each part, so the time is linear in both lengths."""

    def __init__(self, parts: Sequence[str]) -> None:
        self._first, *self._middle, self._last = parts

    def fullmatch(self, text: str, /) -> bool | None:
        begin, end = len(self._first), len(text) - len(self._last)
        if end < begin or not (text.startswith(self._first) and text.endswith(self._last)):
            return None
        for part in self._middle:
            at = text.find(part, begin, end)
            if at < 0:
                return None
            begin = at + len(part)
        return True


def compile_glob(text: str) -> Pattern:
    """Compile a pattern in which `*` stands for any characters, also none. All other characters stand for themselves.

    Regular expressions would be a trap: `.` is an ordinary character of topic names.

    Raises:
        ValueError: The pattern is empty or too long, or has a character that no name has.
    """
    if not text or len(text) > MAX_PATTERN_CHARACTERS:
        raise ValueError(f"a pattern has 1 to {MAX_PATTERN_CHARACTERS} characters")
    wrong = next((c for c in text if not (c.isascii() and (c.isalnum() or c in "._-#*"))), None)
    if wrong is not None:
        raise ValueError(f"{wrong!r} in {text!r}: names have only letters, digits and . _ - #")
    parts = text.split("*")
    return _Exact(text) if len(parts) == 1 else _Glob(parts)
