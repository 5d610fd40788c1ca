"""Read members of JSON objects without changing their text, so that numbers keep all digits.

The decoder of the standard library finds where a value ends; the value's text is a slice of the body.
"""

import json
import re

from ..protocol.go_json import refuse_constant

_SPACE = re.compile(r"[ \t\n\r]*", re.ASCII)
_NAME = r'"([^"\\\x00-\x1f]*(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*)*)"'
_MEMBER = re.compile(rf"[{{,][ \t\n\r]*{_NAME}[ \t\n\r]*:[ \t\n\r]*")
_EMPTY = re.compile(r"\{[ \t\n\r]*\}")
_scan_string = json.decoder.scanstring  # type: ignore[attr-defined]  # the type information lacks it


# Numbers stay text: an int of more than 4300 digits would raise an error, and a float loses digits.
_DECODER = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=refuse_constant)


class NotJSON(ValueError):
    """A text is not JSON, or not an object."""


def text_of(body: bytes) -> str:
    """Return the text of a body. Bytes that are not UTF-8 are kept; `body_of` restores them."""
    return body.decode("utf-8", "surrogateescape")


def body_of(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def whole_object(text: str) -> dict[str, str]:
    """Return the members of the JSON object that is the whole text: the text of each value, by name.

    Raises:
        NotJSON: The text is not one JSON object.
    """
    start = _skip_space(text, 0)
    found: dict[str, str] = {}
    try:
        end = _read_members(text, start, found)
    except (ValueError, RecursionError, IndexError):
        raise NotJSON from None
    if _skip_space(text, end) != len(text):
        raise NotJSON
    return found


def members_of(value: str) -> dict[str, str] | None:
    """Return the members of a value of `whole_object`; None if it is not an object."""
    if not value.startswith("{"):
        return None
    found: dict[str, str] = {}
    _read_members(value, 0, found)
    return found


def _read_members(text: str, start: int, found: dict[str, str]) -> int:
    """Read an object that begins at `start` into `found`, and return its end. Of equal names the last one counts.

    Raises:
        ValueError, RecursionError, IndexError: This is not a JSON object.
    """
    if text[start : start + 1] != "{":
        raise ValueError("not an object")
    decode = _DECODER.scan_once  # type: ignore[attr-defined]  # the type information lacks it
    match = _EMPTY.match(text, start)
    if match is not None:
        return match.end()
    at = start
    while True:
        match = _MEMBER.match(text, at)
        if match is None or text[at] != ("," if found else "{"):
            raise ValueError("not a member")
        name = match[1]
        if "\\" in name:
            name, _ = _scan_string(text, match.start(1), True)
        try:
            _, end = decode(text, match.end())
        except StopIteration:
            raise ValueError("not a value") from None
        found[name] = text[match.end() : end]
        at = end if text[end] in ",}" else _skip_space(text, end)
        if text[at] == "}":
            return at + 1


def _skip_space(text: str, at: int) -> int:
    if text[at : at + 1] not in " \t\n\r":  # mostly there is none
        return at
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]  # it always matches
