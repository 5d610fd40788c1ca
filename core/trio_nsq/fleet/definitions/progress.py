"""How far the changes of one broker have come. Pure: commands and the console make the requests."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .changes import DefinitionChange, rounds

AT_ONCE = 8
"""Changes of one broker: it syncs them together, which takes a fifth of the time of one after the other."""


@dataclass(slots=True)
class Progress:
    """The changes of one broker while they are made.

    Attributes:
        plan: The changes.
        done: The places of those in the plan that were made.
        is_lost: Whether the broker has not answered.
    """

    plan: Sequence[DefinitionChange]
    done: set[int] = field(default_factory=set)
    is_lost: bool = False
    _missing: set[str] = field(default_factory=set)

    def rounds(self) -> Iterator[list[int]]:
        """Yield the places of changes that can be made at the same time; note their results before the next round.

        After a failure, these are the changes that do not need what was refused; without an answer there is no further
        round.
        """
        for places in rounds(list(self.plan)):
            if self.is_lost:
                return
            yield [
                place
                for place in places
                if self._missing.isdisjoint((self.plan[place].topic, self.plan[place].name))
            ]

    def note_failure(self, place: int, *, no_answer: bool) -> bool:
        """Note that a change was not made; return whether its reason is to be told, and was not before."""
        is_news = not (no_answer and self.is_lost)
        self.is_lost |= no_answer
        if self.plan[place].verb == "create":
            self._missing.add(self.plan[place].name)
        return is_news
