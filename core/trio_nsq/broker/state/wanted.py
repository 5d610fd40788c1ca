"""What channels have to deliver and memory has not: asked for, and read somewhere else."""

from dataclasses import dataclass, field
from typing import NamedTuple

from ...log import LogReadError
from .batch import Batch


class Wanted(NamedTuple):
    """What a channel wants to be read before it can go on.

    Attributes:
        ahead: The sequence at its cursor, and what comes then; None: nothing.
        again: Messages that are to be delivered again.
        since_ns: It wants to know where messages begin that were published at this time, Unix nanoseconds, or later;
            None: it does not.
    """

    ahead: int | None
    again: tuple[int, ...] = ()
    since_ns: int | None = None


@dataclass(slots=True)
class Found:
    """What was read of that.

    Attributes:
        wanted: What was asked for.
        end: Where the log ended before.
        ahead: Batches from the cursor on; empty: nothing is left before `end`. None: not read.
        again: The batch that holds each message, None if it is damaged. Those that were not read are not there.
        since: The first sequence published then, or later. None: not read.
        error: What of it could not be read failed with this, or with others like it.
    """

    wanted: Wanted
    end: int
    ahead: list[Batch] | None = None
    again: dict[int, Batch | None] = field(default_factory=dict)
    since: int | None = None
    error: LogReadError | None = None
