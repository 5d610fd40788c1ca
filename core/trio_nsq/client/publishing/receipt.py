"""What a producer tells of its messages."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ..errors import PublishFailed
from .queue import PublishAck, PublishFuture

PublishState: TypeAlias = Literal["waiting", "sent", "stored", "failed", "withdrawn"]


@dataclass(frozen=True, slots=True)
class ProducerStats:
    """Counts of messages, and of brokers, by what is known of them; see `Receipt.state`.

    Attributes:
        waiting: Messages that are not written to a socket now.
        sent: Messages that are written to a socket, and not acknowledged now.
        stored: Acknowledged messages, since the producer was opened.
        failed: Messages that were not acknowledged, since the producer was opened; some may be stored.
        connections: Brokers that are connected now.
    """

    waiting: int
    sent: int
    stored: int
    failed: int
    connections: int


class Receipt:
    """A message that was given to `Producer.submit`: tells what became of it, and waits for that."""

    __slots__ = ("_future",)

    def __init__(self, future: PublishFuture) -> None:
        self._future = future

    @property
    def state(self) -> PublishState:
        """What is known of the message.

        - `waiting`: It was not written to a socket.
        - `sent`: It was written to a socket, so it may be stored.
        - `stored`: A broker has acknowledged it.
        - `failed`: It was not acknowledged; `wait` raises the reason, which says whether it may be stored.
        - `withdrawn`: It was withdrawn, and is not stored.
        """
        future = self._future
        if future.is_withdrawn:
            return "withdrawn"
        if not future.settled.is_set():
            return "sent" if future.command.taken else "waiting"
        return "stored" if future.failure is None else "failed"

    async def wait(self) -> PublishAck:
        """Wait for the acknowledgement. If cancelled, the message is published nevertheless, unless it is withdrawn.

        Returns:
            Where it is stored.

        Raises:
            PublishFailed: The message was not acknowledged, or it was withdrawn.
        """
        await self._future.settled.wait()
        return self._check()

    def _check(self) -> PublishAck:
        if not self._future.settled.is_set():  # the thread of a synchronous producer has ended
            raise PublishFailed("the producer is closed", maybe_stored=self._future.command.taken)
        if self._future.is_withdrawn:
            raise PublishFailed("it was withdrawn", maybe_stored=False)
        if self._future.failure is not None:
            raise self._future.failure
        return self._future.ack

    def withdraw(self) -> bool:
        """Withdraw the message, unless it was written to a socket. Return whether it is withdrawn."""
        return self._future.withdraw() or self._future.is_withdrawn


def timed_out(
    pending: Iterable[PublishFuture], timeout_s: float | None, acknowledged: int = 0
) -> PublishFailed:
    """Return the error for publishes that are not all settled after a timeout; withdraw those that can be.

    Args:
        pending: The publishes, in order.
        acknowledged: How many messages before them are stored.
    """
    rest = deque(pending)
    while rest and rest[0].is_stored:
        acknowledged += len(rest.popleft().command)
    maybe_stored = False
    for future in rest:
        if future.withdraw() or future.is_withdrawn:
            maybe_stored |= future.command.maybe_stored
        else:
            maybe_stored |= future.failure is None or future.failure.maybe_stored
    reason = f"no acknowledgement within {timeout_s:g} s"
    failure = PublishFailed(reason, maybe_stored=maybe_stored, acknowledged=acknowledged)
    failure.__cause__ = TimeoutError(reason)
    return failure
