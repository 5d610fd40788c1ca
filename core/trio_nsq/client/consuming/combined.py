"""A batch made of several that arrived one after the other, perhaps from different brokers."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from ..errors import AlreadyAnswered
from .message import Message, MessageBatch


class CombinedBatch(MessageBatch):
    """Several batches as one. Each part keeps track of its answers.

    Args:
        parts: At least one, none of their messages answered.
    """

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[MessageBatch]) -> None:
        # Not what the base class does: the connections wait for answers to the parts.
        self.bodies = list(chain.from_iterable(part.bodies for part in parts))
        self.ids = list(chain.from_iterable(part.ids for part in parts))
        self.timestamps_ns = list(chain.from_iterable(part.timestamps_ns for part in parts))
        self.attempts = list(chain.from_iterable(part.attempts for part in parts))
        self.nsqd_address = ", ".join(dict.fromkeys(part.nsqd_address for part in parts))
        self._parts = parts

    def __iter__(self) -> Iterator[Message]:
        return chain.from_iterable(self._parts)

    def finish(self) -> None:
        self._answer(lambda part: part.finish())

    def requeue(self, delay_ms: int | None = None, *, backoff: bool = True) -> None:
        self._answer(lambda part: part.requeue(delay_ms, backoff=backoff))

    def touch(self) -> None:
        for part in self._parts:
            part.touch()

    def unanswered_ids(self) -> list[bytes]:
        return list(chain.from_iterable(part.unanswered_ids() for part in self._parts))

    @property
    def unanswered_count(self) -> int:
        return sum(part.unanswered_count for part in self._parts)

    def _answer(self, answer: Callable[[MessageBatch], None]) -> None:
        unanswered = [part for part in self._parts if part.unanswered_count]
        if not unanswered:
            raise AlreadyAnswered(f"all messages of {self!r} have been finished or requeued before")
        for part in unanswered:
            answer(part)
