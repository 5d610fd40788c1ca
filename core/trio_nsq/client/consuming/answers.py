"""The answers with which handlers of `Consumer.run` decide what happens to a message. Not compiled: see `arguments`."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from trio_nsq.protocol.limits import SECOND_MS
from trio_nsq.text.arguments import MAX_INT, check_seconds, check_type

from ..arguments import check_name
from .message import Message


@dataclass(frozen=True, slots=True)
class Finish:
    """Finish the message. A handler that returns None does the same."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Requeue the message: the broker delivers it again, to any consumer of the channel.

    Attributes:
        delay_s: The delay before the next delivery, in seconds; 0: no delay; None: the consumer's
            `default_requeue_delay_s` times the message's attempts. The broker silently caps it at its maximum (one
            hour by default).
        backoff: The message failed, so the consumer backs off. False: it does not.
        count_attempt: The delivery counts as an attempt. False: it does not, neither in the message's `attempts` nor
            for `max_attempts` of `Consumer.run` and of the channel. Needs `qcli serve`: an nsqd counts it, and a
            warning is logged.

    Raises:
        TypeError, ValueError: The delay is not a number of at least 0.
    """

    delay_s: float | None = None
    backoff: bool = True
    count_attempt: bool = True

    def __post_init__(self) -> None:
        if self.delay_s is not None:
            check_seconds("delay_s", self.delay_s)
        check_type("backoff", self.backoff, bool)
        check_type("count_attempt", self.count_attempt, bool)

    def apply_to(self, message: Message) -> None:
        """Requeue a message."""
        delay_s = None if self.delay_s is None else min(self.delay_s, MAX_INT // SECOND_MS)
        message.requeue(delay_s=delay_s, backoff=self.backoff, count_attempt=self.count_attempt)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Publish the message to another topic, on the broker that delivered it, and then finish it.

    If that broker drains, the message goes to another one to which the consumer is connected. If it cannot be
    published, it is requeued.

    Attributes:
        topic: The topic of dead letters, not the consumer's own; created if missing.
        reason: Why, for the log; may be empty.

    Raises:
        TypeError, ValueError: The topic or the reason is invalid.
    """

    topic: str
    reason: str = ""

    def __post_init__(self) -> None:
        check_name("topic", self.topic)
        check_type("reason", self.reason, str)


Answer: TypeAlias = Finish | Retry | DeadLetter
"""What a handler returns; None stands for `Finish()`."""
ANSWERS = (Finish, Retry, DeadLetter)

Handler: TypeAlias = Callable[[Message], Awaitable[object]]
"""An async function for a message. If it returns an `Answer`, that is done; all other results finish the message."""
GivenUp: TypeAlias = Callable[[Message, Exception], Awaitable[object]]
OnFailure: TypeAlias = Callable[[Message, Exception], Answer | Awaitable[Answer | None] | None]
"""A function, async or not, that decides what happens to a message that failed; None: what happens without it."""
