"""When a leader whose disk is full or fails lets another member lead, and which one. Pure; time is a parameter."""

from collections.abc import Iterable
from typing import Final

from ..broker.replication import FollowerStatus
from ..event_loop.retries import doubled_s

ROOM_BYTES: Final = 64 * 1024 * 1024
"""A follower with less free space is full soon: its journal alone has up to 16 MiB."""
_FIRST_PATIENCE_S: Final = 5.0
"""The broker may free space itself meanwhile: it deletes files after a checkpoint."""
_LONGEST_PATIENCE_S: Final = 600.0


def with_room(
    followers: Iterable[FollowerStatus], able: frozenset[str], least: int, own_bytes: int
) -> str | None:
    """Return the member with the most free space that could lead; None: there is none.

    Args:
        able: The members that could be elected.
        least: So many members with room must be in sync, so that the next leader accepts publishes.
        own_bytes: Free space of the leader, on which small messages may still have room. Another one must have more:
            otherwise a client that publishes what is larger would make members of equal size lead in turn.
    """
    rooms = {each.member: each.free_bytes or 0 for each in followers if each.member in able}
    found = [member for member, free_bytes in rooms.items() if free_bytes >= own_bytes + ROOM_BYTES]
    return max(found, key=lambda member: (rooms[member], member)) if found and len(found) >= least else None


class FailingDisk:
    """Whether the leader's disk is full or fails, and how long.

    Args:
        times: How often this member has handed over because of that. Each time it is more patient.
    """

    def __init__(self, times: int) -> None:
        self._patience_s = doubled_s(_FIRST_PATIENCE_S, times, _LONGEST_PATIENCE_S)
        self._full_s = 0.0

    def look(self, elapsed_s: float, *, fails: bool) -> bool:
        """Return whether another member shall lead; call it regularly.

        A disk on which small messages still find room is full and not full in turn: it counts if it is mostly full.
        """
        self._full_s = max(0.0, self._full_s + (elapsed_s if fails else -elapsed_s))
        return fails and self._full_s >= self._patience_s
