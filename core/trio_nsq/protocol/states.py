"""The states of a connection, and the commands that are legal in each.

It has all rules about the order of commands. `docs/reference/wire-protocol.md` has the same table.
"""

from collections.abc import Mapping
from enum import IntEnum
from typing import Final


class State(IntEnum):
    """The state of a connection, numbered as `/stats` shows it (1 and 2 never occur for V2 clients)."""

    INIT = 0
    SUBSCRIBED = 3
    CLOSING = 4


_ANY: Final = frozenset(State)

LEGAL_STATES: Mapping[bytes, frozenset[State]] = {
    b"IDENTIFY": frozenset({State.INIT}),
    b"AUTH": frozenset({State.INIT}),
    b"SUB": frozenset({State.INIT}),
    b"PUB": _ANY,
    b"MPUB": _ANY,
    b"DPUB": _ANY,
    b"PRODUCER": _ANY,  # not in nsqd
    b"HPUB": _ANY,
    # A client may send RDY before the answer to CLS arrives; it is ignored.
    b"RDY": frozenset({State.SUBSCRIBED, State.CLOSING}),
    b"FIN": frozenset({State.SUBSCRIBED, State.CLOSING}),
    b"REQ": frozenset({State.SUBSCRIBED, State.CLOSING}),
    b"TOUCH": frozenset({State.SUBSCRIBED, State.CLOSING}),
    b"CLS": frozenset({State.SUBSCRIBED}),
    b"NOP": _ANY,
}
