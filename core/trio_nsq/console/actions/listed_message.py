"""Messages in lists: what a broker's JSON says of them, with types checked, and a short text of the body. Pure."""

from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...bodies.reading import PLAIN, ReadsBody
from ...fleet.stats import number, text

_SHOWN_CHARACTERS = 2000
_SHOWN_BYTES = 256


@dataclass(frozen=True, slots=True)
class Body:
    """A message's body, cut off for a list.

    Attributes:
        text: The beginning; of one that is not UTF-8, in hexadecimal digits.
        is_binary: Whether it is not UTF-8.
        is_cut: Whether there is more.
    """

    text: str
    is_binary: bool = False
    is_cut: bool = False


def body_of(line: Mapping[str, Any], read: ReadsBody = PLAIN.read) -> Body:
    """Return the body of a message, as it is read, or of a gap."""
    data: bytes | None = None
    is_text = False
    if isinstance(found := line.get("body"), str):
        data, is_text = found.encode("utf-8", "replace"), True
    elif isinstance(encoded := line.get("body_base64"), str):
        try:
            data = b64decode(encoded)
        except ValueError:
            return Body("", is_binary=True)
    if data is not None:
        shown = read(data).content
        try:
            text = shown.decode()
        except UnicodeDecodeError:
            is_text = False
        else:
            if is_text or shown is not data:  # it is what was made of bytes
                return Body(text[:_SHOWN_CHARACTERS], is_cut=len(text) > _SHOWN_CHARACTERS)
        return Body(shown[:_SHOWN_BYTES].hex(" "), is_binary=True, is_cut=len(shown) > _SHOWN_BYTES)
    gap = line.get("gap")
    return Body(f"{'damaged or missing in the log' if gap == 'damaged' else 'no longer kept'}")


@dataclass(frozen=True, slots=True)
class ListedMessage:
    """A message in a list.

    Attributes:
        broker: Its broker's address.
        id: Empty if the message cannot be read.
        published_s, due_s: Unix seconds; `due_s` is 0 for one that is not deferred.
    """

    broker: str
    id: str
    sequence: int
    attempts: int
    published_s: float
    due_s: float
    body: Body


def listed_message(broker: str, line: Mapping[str, Any], read: ReadsBody = PLAIN.read) -> ListedMessage:
    """Return a line of a broker's answer, with the body as it is read."""
    sequence = number(line, "sequence") if "sequence" in line else number(line, "first_sequence")
    times = (number(line, "timestamp_ns") / 1e9, number(line, "due_ns") / 1e9)
    return ListedMessage(
        broker, text(line, "id")[:16], sequence, number(line, "attempts"), *times, body_of(line, read)
    )
