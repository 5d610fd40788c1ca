"""One broker of a producer: its publish queue and its connection, opened on demand."""

import logging
from collections.abc import Callable

import trio

from trio_nsq.protocol import FrameError, NSQError
from trio_nsq.protocol.frames import ErrorFrame, ResponseFrame
from trio_nsq.protocol.limits import KIB

from ..connection.connection import Connection, Event, connect
from ..connection.options import ConnectionSettings
from ..errors import BrokerError, ConnectionFailed
from .queue import RETRIABLE_CODES, Command, PublishQueue, may_be_stored

MAX_ANSWER_BYTES = 64 * KIB
"""Replies to a producer are shorter than this."""

_OK = ResponseFrame(b"OK")
_logger = logging.getLogger("trio_nsq.client")


class BrokerLink:
    """Publishes to one broker.

    Args:
        address: `host:port`.
        ordered: A refused publish also fails all later ones.
        on_lost: Called when connecting failed or the connection was lost, unless the broker closed it after a refusal.
        on_failed: Called after `on_lost` with each unacknowledged command and the reason.
    """

    def __init__(
        self,
        address: str,
        settings: ConnectionSettings,
        queue: PublishQueue,
        *,
        ordered: bool,
        on_connected: Callable[["BrokerLink"], None],
        on_lost: Callable[["BrokerLink", NSQError], None],
        on_failed: Callable[["BrokerLink", Command, NSQError], None],
    ) -> None:
        self.address = address
        self.queue = queue
        self._settings = settings
        self._ordered = ordered
        self._on_connected = on_connected
        self._on_lost = on_lost
        self._on_failed = on_failed
        self._connection: Connection | None = None
        self._wanted = trio.Event()
        self._refused = False  # the broker will close the connection

    def wake(self) -> None:
        """Send the queue; connect first if there is no connection."""
        self._wanted.set()
        if self._connection is not None:
            self._connection.wake()

    async def run(self) -> None:
        """Connect on demand and send the queue; runs until cancelled."""
        while True:
            await self._wanted.wait()
            try:
                connection = await connect(
                    self.address,
                    self._settings,
                    extensions=[] if self._ordered else ["survive_refusals"],
                    max_frame_bytes=MAX_ANSWER_BYTES,
                )
            except ConnectionFailed as error:
                self._wanted = trio.Event()
                self._give_up(error)
                continue
            self._connection = connection
            self._on_connected(self)
            connection.wake()
            try:
                await connection.run(self._handle, more=self._take, lost=self._lost)
            finally:
                self._connection = None
            if not self.queue:
                self._wanted = trio.Event()

    def _take(self) -> list[bytes]:
        return [] if self._connection is None else self.queue.take()

    def _handle(self, event: Event) -> None:
        if isinstance(event, ErrorFrame):
            self._refuse(BrokerError(self.address, event.code, event.text))
        elif not (event == _OK and self.queue.acknowledge()):
            raise FrameError(f"it sent an unexpected response: {event!r:.100}")
        if self.queue:
            self.wake()

    def _refuse(self, error: BrokerError) -> None:
        """Fail the oldest command in flight; raise the error unless the connection survives the refusal."""
        assert self._connection is not None
        command = self.queue.refuse()
        if command is None:
            raise error
        survives = self._connection.survives_refusals and error.code in RETRIABLE_CODES
        self._refused = not survives
        command.maybe_stored |= may_be_stored(error, atomic=self._connection.survives_refusals)
        self._on_failed(self, command, error)
        if not survives:
            raise error

    def _lost(self, reason: NSQError) -> None:
        """Handle the end of the connection; later publishes open the next one."""
        self._connection = None
        if not self._refused:
            self._give_up(reason)
            return
        _logger.warning("%s; reconnecting at the next publish", reason)
        self._refused = False
        # After an error the broker stops reading, so it never executes commands sent after the refused one.
        self.queue.put_back()
        if self._ordered:
            self._fail_all(reason)

    def _give_up(self, reason: NSQError) -> None:
        self._on_lost(self, reason)
        self._fail_all(reason)

    def _fail_all(self, reason: NSQError) -> None:
        for command in self.queue.clear():
            command.maybe_stored |= command.taken
            self._on_failed(self, command, reason)
