"""A producer's side of one broker: what it is to get, and the connection it gets it over, which is made when needed."""

import logging
from collections.abc import Callable

import trio

from trio_nsq.protocol import ErrorFrame, FrameError, NSQError, ResponseFrame
from trio_nsq.protocol.limits import KIB

from ..connection.connection import Connection, Event, connect
from ..connection.options import ConnectionSettings
from ..errors import BrokerError, ConnectionFailed
from .queue import PASSING_CODES, Command, Outbox, may_be_stored

MAX_ANSWER_BYTES = 64 * KIB
"""A broker sends a publisher nothing that is longer."""

_OK = ResponseFrame(b"OK")
_logger = logging.getLogger("trio_nsq.client")


class Link:
    """A broker to publish to.

    Args:
        address: `host:port`.
        settings: For its connections.
        outbox: For what it is to get.
        ordered: A publish that the broker refuses takes along those behind it.
        connected: Called when a connection was made.
        away: Called when none could be made, or it was lost; not if the broker ended it because it refused something.
        undone: Called after that for each command that the broker did not acknowledge, with the reason.
    """

    def __init__(
        self,
        address: str,
        settings: ConnectionSettings,
        outbox: Outbox,
        *,
        ordered: bool,
        connected: Callable[["Link"], None],
        away: Callable[["Link", NSQError], None],
        undone: Callable[["Link", Command, NSQError], None],
    ) -> None:
        self.address = address
        self.outbox = outbox
        self._settings = settings
        self._ordered = ordered
        self._connected = connected
        self._away = away
        self._undone = undone
        self._connection: Connection | None = None
        self._wanted = trio.Event()
        self._refused = False  # the broker is about to close the connection

    def want(self) -> None:
        """See to it that what is in the outbox is sent, and that there is a connection."""
        self._wanted.set()
        if self._connection is not None:
            self._connection.wake()

    async def run(self) -> None:
        """Connect whenever it is wanted, and send; runs until cancelled."""
        while True:
            await self._wanted.wait()
            try:
                connection = await connect(
                    self.address,
                    self._settings,
                    survive_refusals=not self._ordered,
                    max_frame_bytes=MAX_ANSWER_BYTES,
                )
            except ConnectionFailed as error:
                self._wanted = trio.Event()
                self._give_up(error)
                continue
            self._connection = connection
            self._connected(self)
            connection.wake()
            try:
                await connection.run(self._handle, more=self._take, lost=self._lost)
            finally:
                self._connection = None
            if not self.outbox:
                self._wanted = trio.Event()

    def _take(self) -> list[bytes]:
        return [] if self._connection is None else self.outbox.take()

    def _handle(self, event: Event) -> None:
        if isinstance(event, ErrorFrame):
            self._refuse(BrokerError(self.address, event.code, event.text))
        elif not (event == _OK and self.outbox.acknowledge()):
            raise FrameError(f"it sent what was not asked for: {event!r:.100}")
        if self.outbox:
            self.want()

    def _refuse(self, error: BrokerError) -> None:
        """The oldest command under way has failed; raises the error unless the connection survives that."""
        assert self._connection is not None
        command = self.outbox.refuse()
        if command is None:
            raise error
        survives = self._connection.survives_refusals and error.code in PASSING_CODES
        self._refused = not survives
        command.maybe_stored |= may_be_stored(error, atomic=self._connection.survives_refusals)
        self._undone(self, command, error)
        if not survives:
            raise error

    def _lost(self, reason: NSQError) -> None:
        """What is published from here on takes the next connection."""
        self._connection = None
        if not self._refused:
            self._give_up(reason)
            return
        _logger.warning("%s; connecting again at the next publish", reason)
        self._refused = False
        # After its answer the broker reads no further: what was sent behind the refused command is never executed.
        self.outbox.put_back()
        if self._ordered:
            self._fail_all(reason)

    def _give_up(self, reason: NSQError) -> None:
        self._away(self, reason)
        self._fail_all(reason)

    def _fail_all(self, reason: NSQError) -> None:
        for command in self.outbox.clear():
            command.maybe_stored |= command.taken
            self._undone(self, command, reason)
