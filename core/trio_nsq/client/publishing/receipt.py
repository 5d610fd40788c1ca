"""The receipt of a message that a producer was given."""

from typing import Literal, TypeAlias

from ..errors import PublishFailed
from .queue import PublishFuture

PublishState: TypeAlias = Literal["waiting", "sent", "stored", "failed", "withdrawn"]


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

    async def wait(self) -> None:
        """Wait for the acknowledgement. If cancelled, the message is published nevertheless, unless it is withdrawn.

        Raises:
            PublishFailed: The message was not acknowledged, or it was withdrawn.
        """
        await self._future.settled.wait()
        self._check()

    def _check(self) -> None:
        if not self._future.settled.is_set():  # the thread of a synchronous producer has ended
            raise PublishFailed("the producer is closed", maybe_stored=self._future.command.taken)
        if self._future.is_withdrawn:
            raise PublishFailed("it was withdrawn", maybe_stored=False)
        if self._future.failure is not None:
            raise self._future.failure

    def withdraw(self) -> bool:
        """Withdraw the message, unless it was written to a socket. Return whether it is withdrawn."""
        return self._future.withdraw() or self._future.is_withdrawn
