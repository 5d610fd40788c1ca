"""Which command is legal when.

Two rules for this file: every legality of order lives here, and nothing here knows which side of the
connection we are on. The documentation's table is this table.
"""

from collections.abc import Mapping
from enum import IntEnum


class State(IntEnum):
    """The state of a connection, numbered as `/stats` shows it (1 and 2 never occur for V2 clients)."""

    INIT = 0
    SUBSCRIBED = 3
    CLOSING = 4


_ANY = frozenset(State)

LEGAL_STATES: Mapping[bytes, frozenset[State]] = {
    b"IDENTIFY": frozenset({State.INIT}),
    b"AUTH": frozenset({State.INIT}),
    b"SUB": frozenset({State.INIT}),
    b"PUB": _ANY,
    b"MPUB": _ANY,
    b"DPUB": _ANY,
    # A client in CLOSING may still send the RDY it had under way; it is ignored.
    b"RDY": frozenset({State.SUBSCRIBED, State.CLOSING}),
    b"FIN": frozenset({State.SUBSCRIBED, State.CLOSING}),
    b"REQ": frozenset({State.SUBSCRIBED, State.CLOSING}),
    b"TOUCH": frozenset({State.SUBSCRIBED, State.CLOSING}),
    b"CLS": frozenset({State.SUBSCRIBED}),
    b"NOP": _ANY,
}


def legality_table() -> str:
    """The table above as Markdown, one row per command: what `docs/protocol.md` shows."""
    rows = [
        ["command", *(f"{state.name.lower()} ({state:d})" for state in State)],
        ["---"] * (1 + len(State)),
    ]
    for verb, legal in LEGAL_STATES.items():
        rows.append([verb.decode(), *("yes" if state in legal else "" for state in State)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
