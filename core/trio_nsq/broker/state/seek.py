"""What `Channel.peek` and `Channel.seek` tell."""

from typing import Literal, NamedTuple

from .batch import Batch

State = Literal["requeued", "fresh", "deferred"]
STATES: tuple[State, ...] = ("requeued", "fresh", "deferred")


class Waiting(NamedTuple):
    """A message that a channel is going to deliver.

    Attributes:
        state: `requeued`: it comes again, or its time has come; `fresh`: it was never delivered; `deferred`: it waits
            for its time.
        sequence: Its place in the topic.
        attempts: How often it was delivered so far.
        due_ns: When it may be delivered, Unix nanoseconds; 0: now.
        held: The batch that holds it, if nothing but memory has it.
    """

    state: State
    sequence: int
    attempts: int = 0
    due_ns: int = 0
    held: Batch | None = None


class Move(NamedTuple):
    """What moving a channel does.

    Attributes:
        from_sequence: Its cursor before.
        to_sequence: Where it begins again.
        delivered_again: Messages from there on that it was done with: finished, dropped or sampled out.
        skipped: Messages before it that it was not done with: ready, in flight or deferred.
        in_flight: Messages that consumers have now and cannot finish any more.
    """

    from_sequence: int
    to_sequence: int
    delivered_again: int
    skipped: int
    in_flight: int
