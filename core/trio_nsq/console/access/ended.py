"""Remembers what has ended before its time: sessions after a logout, and logins whose code was used. Pure."""

import math

MAX_ENDED = 10_000


class Ended:
    """The ids of what has ended, until it would have expired. Their number is limited."""

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}  # by id
        self._all_began_until_s = -math.inf

    def add(self, id_: str, expires_at_s: float, now_s: float) -> None:
        """Remember that something has ended, until it would have expired. Times are in Unix seconds."""
        if len(self._until_s) >= MAX_ENDED:
            self._until_s = {known: until_s for known, until_s in self._until_s.items() if until_s > now_s}
        if (
            len(self._until_s) >= MAX_ENDED
        ):  # then all have to begin again: nothing that has ended becomes valid
            self._until_s.clear()
            self._all_began_until_s = now_s
        self._until_s[id_] = expires_at_s

    def has(self, id_: str, began_at_s: float) -> bool:
        """Whether something has ended."""
        return id_ in self._until_s or began_at_s <= self._all_began_until_s
