"""The logs that are being read: a log is read at one of its addresses."""

import logging
from collections.abc import AsyncIterator, Hashable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio

from ...client.errors import BrokerUnreachable, ConnectionLost, RequestRefused
from ...fleet.identity import BrokerIdentity
from ...fleet.log_identity import are_different
from ...protocol.errors import NSQError
from .log_source import FoundLog

logger: logging.Logger = logging.getLogger("trio_nsq.connectors")

CHECK_S = 5.0
"""How often to ask whether a log is still where it is being read, while it is also found elsewhere."""


@dataclass(slots=True, eq=False)
class _Holder:
    """A log that is being read, or was.

    Attributes:
        scope: Of the source; cancelled if the log is no longer at this address.
        released: Is set when the source is closed.
    """

    found: FoundLog
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    released: trio.Event = field(default_factory=trio.Event)


class LogTaken(NSQError):
    """The log is being read at another address, or was read there and has more messages there."""

    def __init__(self, found: FoundLog, holder: _Holder) -> None:
        super().__init__(f"topic {found.topic}: the log at {found.broker} is read at {holder.found.broker}")
        self._found = found
        self._holder = holder
        self._was_released = holder.released.is_set()

    async def can_be_read(self, *, waits: bool) -> bool:
        """Return whether to open the log here now: it is not being read at the other address any more.

        Reading there is ended if the other address does not have the log any more, or has a copy that lacks messages.

        Args:
            waits: Whether to wait for that.

        Raises:
            CopyDiffers: The other address has a copy, and both have got messages since.
            BrokerUnreachable, RequestRefused: This address cannot be asked; not if it waits.
        """
        other = self._holder
        while not other.released.is_set():
            if await self._missing_there(waits) != 0:
                logger.info(
                    "topic %s: the log that was read at %s is read at %s",
                    *(other.found.topic, other.found.broker, self._found.broker),
                )
                other.scope.cancel()
                await other.released.wait()
                return True
            if not waits:
                return False
            with trio.move_on_after(CHECK_S):
                await other.released.wait()
        if self._was_released and waits:
            await trio.sleep(CHECK_S)
        return waits or not self._was_released

    async def _missing_there(self, waits: bool) -> int | None:
        """See `LogRequests.missing_at`."""
        try:
            return await self._found.requests.missing_at(self._holder.found.requests)
        except (BrokerUnreachable, RequestRefused):
            if not waits:
                raise
            return 0  # nothing could be read here


class OpenLogs:
    """The logs that are being read or were read, by what identifies them."""

    def __init__(self) -> None:
        self._holders: dict[Hashable, _Holder] = {}

    @asynccontextmanager
    async def hold(self, found: FoundLog, broker: BrokerIdentity | None) -> AsyncIterator[None]:
        """Read a log inside the block, which is cancelled if the log is at another address.

        Raises:
            LogTaken: It is being read at another address, or was read there and has more messages there.
            CopyDiffers: It was read at another address, which has a copy, and both have got messages since.
            ConnectionLost: The block was cancelled.

        Args:
            broker: Identifies the log with its topic, while it has no messages and no incarnation; None: unknown.
        """
        names = frozenset((found.topic, name) for name in (found.incarnation, broker) if name is not None)
        compared: list[_Holder] = []
        while (other := self._other(found, names, compared)) is not None:
            if not other.released.is_set() or await _has_more(other.found, found):
                raise LogTaken(found, other)
            compared.append(other)
        holder = _Holder(found)
        self._holders |= dict.fromkeys(names, holder)
        try:
            with holder.scope:
                yield
            if holder.scope.cancelled_caught:
                raise ConnectionLost(found.broker, "its log is at another address now")
        finally:
            holder.released.set()

    def _other(
        self, found: FoundLog, names: frozenset[Hashable], compared: Sequence[_Holder]
    ) -> _Holder | None:
        """Return another reader of a log, or the last one at another address; None: there is none to compare with."""
        for name in names:
            other = self._holders.get(name)
            if other is None or other in compared:
                continue
            if are_different(found.incarnation, other.found.incarnation):
                continue  # the topic was deleted and recreated on the broker
            if not other.released.is_set() or other.found.broker != found.broker:
                return other
        return None

    def forget(self, topic: str) -> None:
        """Forget the logs of a deleted topic that are not being read."""
        for name, holder in list(self._holders.items()):
            if holder.found.topic == topic and holder.released.is_set():
                del self._holders[name]


async def _has_more(other: FoundLog, found: FoundLog) -> bool:
    """Whether the log still is at another address, where it has more messages. Raises CopyDiffers."""
    try:
        return bool(await other.requests.missing_at(found.requests))
    except (BrokerUnreachable, RequestRefused):
        return False
