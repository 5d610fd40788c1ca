"""Positions in a topic's logs on several brokers, for the address of a page."""

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote, unquote

from ...log.positions import Position

MAX_TEXT = 16 * 1024
_LARGEST = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place between messages: on each broker before this sequence.

    Attributes:
        sequences: By the broker's HTTP address.
        time_ns: For other brokers: before the first message of this time, Unix nanoseconds; None: unknown.
    """

    sequences: Mapping[str, int]
    time_ns: int | None = None

    def __str__(self) -> str:
        """Return the text that `parse_cursor` reads, such as `127.0.0.1:4151~120,@1700000000000000000`."""
        parts = [
            f"{quote(address, safe=':/[].')}~{sequence}"
            for address, sequence in sorted(self.sequences.items())
        ]
        if self.time_ns is not None:
            parts.append(f"@{min(self.time_ns, _LARGEST)}")
        return ",".join(parts)

    def position(self, address: str) -> str | None:
        """Return the position of a broker, as the broker's HTTP API wants it; None: unknown."""
        if address in self.sequences:
            return str(self.sequences[address])
        return None if self.time_ns is None else str(Position("time", max(0, self.time_ns)))


def parse_cursor(text: str) -> Cursor:
    """Parse a cursor. Raises ValueError."""
    if len(text) > MAX_TEXT:
        raise ValueError("the position in the page's address is too long")
    sequences: dict[str, int] = {}
    time_ns = None
    for part in text.split(","):
        address, mark, sequence = part.rpartition("~")
        try:
            if mark and address:
                sequences[unquote(address)] = _number(sequence)
                continue
            if part.startswith("@"):
                time_ns = _number(part[1:])
                continue
        except ValueError:
            pass
        raise ValueError("the position in the page's address is not valid: open the topic's messages again")
    return Cursor(sequences, time_ns)


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 19):
        raise ValueError("not a sequence")
    return min(int(text), _LARGEST)
