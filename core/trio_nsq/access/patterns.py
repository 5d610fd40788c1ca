"""Patterns for names of topics and channels: globs of auth files, and regular expressions of auth servers."""

import importlib
from typing import Any, Protocol

ALL = "*"
"""The glob that matches every name."""
ALL_REGEX = ".*"
"""The regular expression that matches every name."""
MAX_PATTERN_CHARACTERS = 256


class Pattern(Protocol):
    """A compiled pattern. It matches whole names only."""

    @property
    def pattern(self) -> str:
        """The text of the pattern."""

    def fullmatch(self, text: str, /) -> object | None: ...


class _Exact:
    """Matches one name."""

    def __init__(self, name: str) -> None:
        self.pattern = name

    def fullmatch(self, text: str, /) -> bool | None:
        return text == self.pattern or None


class _Glob:
    """Matches the parts between asterisks in order: a search for each part, so the time is linear in both lengths."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self._first, *self._middle, self._last = pattern.split("*")

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
    return _Glob(text) if "*" in text else _Exact(text)


def compile_regex(text: str) -> Pattern:
    """Compile a regular expression of an auth server.

    With RE2, not `re`: it has nsqd's syntax, and every pattern takes linear time on a name that a client chose. It
    caches compiled patterns.

    Raises:
        ValueError: The pattern is not valid. The text is RE2's reason.
        ModuleNotFoundError: The package google-re2 is not installed.
    """
    re2 = import_re2()
    options = re2.Options()
    options.log_errors = False  # RE2 would write them to stderr
    try:
        compiled: Pattern = re2.compile(text, options)
    except re2.error as exc:
        raise ValueError(exc.args[0].decode("utf-8", "replace")) from None
    return compiled


def import_re2() -> Any:  # the package has no type information
    """Return the module `re2`. Raises ModuleNotFoundError: the package google-re2 is not installed."""
    return importlib.import_module("re2")
