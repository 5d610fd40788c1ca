"""One broker of a producer: its publish queue and its connection, opened on demand."""

import logging
from typing import Protocol

from trio_nsq.protocol import FrameError, NSQError
from trio_nsq.protocol.frames import ErrorFrame, ResponseFrame
from trio_nsq.protocol.limits import KIB

from ...event_loop import runtime
from ..connection.connection import Connection, Event, connect
from ..errors import (
    AuthRefused,
    BrokerError,
    ConnectionFailed,
    ConnectionLost,
    HeadersRefused,
    ProducerFenced,
)
from .answer_watch import AnswerWatch
from .numbered_queue import NumberedQueue
from .options import ProducerSettings
from .queue import RETRIABLE_CODES, Command, PublishQueue, accepts_no_publishes, may_be_stored

MAX_ANSWER_BYTES = 64 * KIB
"""Replies to a producer are shorter than this."""
CHECKS = 8
"""How often to look for answers within a timeout."""

_OK = ResponseFrame(b"OK")
_logger = logging.getLogger("trio_nsq.client")


class LinkOwner(Protocol):
    """What a link tells its owner."""

    def connected(self, link: "BrokerLink") -> None:
        """A connection was opened."""

    def lost(self, link: "BrokerLink", reason: NSQError) -> float:
        """Connecting failed or the connection was lost, unless the broker closed it after a refusal.

        Returns how long to wait before the next attempt, in seconds.
        """

    def refuses(self, link: "BrokerLink", reason: BrokerError) -> None:
        """The broker accepts no publishes: it drains or stops."""

    def failed(self, link: "BrokerLink", command: Command, reason: NSQError) -> None:
        """A command was not acknowledged. Called after `lost` and `refuses`."""

    def fenced(self, reason: ProducerFenced) -> None:
        """Another producer of the same name publishes to a topic."""

    def move_unsent(self, link: "BrokerLink") -> None:
        """Send what waits and was never sent to other brokers, if any is available."""

    def silent(self, link: "BrokerLink") -> None:
        """Publishes are unanswered for `silence_timeout_s`; repeated while they are."""

    def answers(self, link: "BrokerLink") -> None:
        """The silence has ended."""


class BrokerLink:
    """Publishes to one broker.

    Args:
        address: `host:port`.

    Attributes:
        queue: The commands for the broker.
        has_ended: It was retired, and sends nothing any more.
    """

    def __init__(self, address: str, settings: ProducerSettings, owner: LinkOwner) -> None:
        self.address = address
        self.queue: PublishQueue | NumberedQueue = (
            PublishQueue(
                settings.max_in_flight_bytes, settings.part_bytes, ordered=settings.ordered, address=address
            )
            if settings.name is None
            else NumberedQueue(address, settings.name, settings.max_in_flight_bytes, settings.part_bytes)
        )
        self._settings = settings
        self._owner = owner
        self._connection: Connection | None = None
        self._receiving = runtime.cancel_scope()
        self._renews = False  # the connection may claim no more topics, and ends for the next one
        self._wanted = runtime.Event()
        self._refusal: BrokerError | None = None  # after which the broker closes the connection
        self.has_ended: bool = False
        self._retired = False
        self._failed_claim: str | None = None  # the topic, if the broker has refused to tell its last number
        self._nursery: runtime.Nursery | None = None
        self._busy = runtime.Event()  # there may be unanswered commands
        shortest_s = min(settings.silence_timeout_s, settings.publish_timeout_s or settings.silence_timeout_s)
        self._watch = AnswerWatch(shortest_s / CHECKS)

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    def wake(self) -> None:
        """Send the queue; connect first if there is no connection."""
        self._wanted.set()
        if self._connection is not None:
            self._connection.wake()

    def fail_topic(self, topic: str, reason: NSQError) -> None:
        """Fail all commands for a topic. Their answers, if they come, are dropped."""
        if isinstance(self.queue, NumberedQueue):
            self.queue.fail_topic(topic, reason)

    def retire(self) -> None:
        """Disconnect once all commands are settled: the owner adds no more."""
        self._retired = True
        self._busy.set()

    def keep(self) -> None:
        """Undo `retire`; it has not ended."""
        self._retired = False

    async def run(self) -> None:
        """Connect on demand and send the queue; runs until cancelled, or retired and settled."""
        async with runtime.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._send)
            await self._watch_answers()
            self.has_ended = True
            nursery.cancel_scope.cancel()

    async def _send(self) -> None:
        while True:
            await self._wanted.wait()
            self._busy.set()
            try:
                connection = await connect(
                    self.address,
                    self._settings,
                    extensions=["message_headers", *([] if self._settings.ordered else ["survive_refusals"])],
                    max_frame_bytes=MAX_ANSWER_BYTES,
                    waits_for_leader=True,
                    producer=self.queue.identity,
                )
            except ConnectionFailed as error:
                self._wanted = runtime.Event()
                self._give_up(error)
                continue
            self._connection = connection
            self._renews = False
            self._watch.restart()
            self._owner.connected(self)
            connection.wake()
            try:
                with runtime.cancel_scope() as self._receiving:
                    await connection.run(self._handle, more=self._take, lost=self._lost)
                if self._connection is None:
                    pass  # lost
                elif self._renews:  # what waits may have been withdrawn since
                    self.queue.put_back()
                else:  # given up by `_watch_answers`
                    timeout_s = self._settings.publish_timeout_s
                    self._lost(ConnectionLost(self.address, f"no answer to a publish for {timeout_s:g} s"))
            finally:
                self._connection = None
            if not self.queue:
                self._wanted = runtime.Event()

    async def _watch_answers(self) -> None:
        """Tell the owner when the broker falls silent and when it answers; give up the connection after the timeout."""
        silent = False
        settings, watch = self._settings, self._watch
        while True:
            await self._busy.wait()
            oldest = self.queue.oldest
            if oldest is None:
                if self._retired:
                    return
                self._busy = runtime.Event()
            silent_s = watch.observe(oldest, runtime.current_time())
            if silent_s >= settings.silence_timeout_s:
                silent = True
                self._owner.silent(self)
            elif silent:
                silent = False
                self._owner.answers(self)
            if settings.publish_timeout_s is not None and silent_s >= settings.publish_timeout_s:
                self._receiving.cancel()
            await runtime.sleep(watch.interval_s)

    def _take(self) -> list[bytes]:
        if self._connection is None:
            return []
        self._busy.set()
        if isinstance(self.queue, NumberedQueue) and self.queue.needs_new_connection:
            self._renews = True
            self._receiving.cancel()
            return []
        if self._connection.has_headers:
            return self.queue.take()
        refused: list[Command] = []
        pieces = self.queue.take(refused)
        for command in refused:
            self._owner.failed(self, command, HeadersRefused(self.address))
        return pieces

    def _handle(self, event: Event) -> None:
        if isinstance(event, ErrorFrame):
            self._refuse(BrokerError(self.address, event.code, event.text))
        elif isinstance(self.queue, NumberedQueue) and event != _OK and isinstance(event, ResponseFrame):
            try:
                self.queue.claimed(event.data)
            except ProducerFenced as fenced:
                self._owner.fenced(fenced)
        elif not (event == _OK and self.queue.acknowledge()):
            raise FrameError(f"it sent an unexpected response: {event!r:.100}")
        if self.queue:
            self.wake()

    def _refuse(self, error: BrokerError) -> None:
        """Fail the oldest command in flight; raise the error unless the connection survives the refusal."""
        assert self._connection is not None
        if isinstance(self.queue, NumberedQueue):
            self._refuse_numbered(self.queue, error)
        command = self.queue.refuse()
        if command is None:
            raise error
        survives = self._connection.survives_refusals and error.code in RETRIABLE_CODES
        self._refusal = None if survives else error
        command.maybe_stored |= may_be_stored(error, atomic=self._connection.survives_refusals)
        if accepts_no_publishes(error):
            self._owner.refuses(self, error)
        self._owner.failed(self, command, error)
        if not survives:
            raise error

    def _refuse_numbered(self, queue: NumberedQueue, error: BrokerError) -> None:
        """Raise the error, which ends the connection, if the refused command is to be sent again, or never.

        What follows the refused command is refused, too, so it is not worth to read on.
        """
        if queue.is_claim_refused(error.text):
            topic = queue.oldest_claim
        elif (command := queue.oldest_sent) is not None:
            topic = command.topic
        else:
            return
        if error.code == "E_PRODUCER_FENCED":
            self._owner.fenced(ProducerFenced(self.address, topic, self._settings.name or ""))
            raise error
        if queue.is_claim_refused(error.text):
            self._failed_claim = topic
            raise error
        if accepts_no_publishes(error):
            self._owner.refuses(self, error)
        if error.code in RETRIABLE_CODES or error.code.startswith("E_PRODUCER_"):
            raise error

    def _lost(self, reason: NSQError) -> None:
        """Handle the end of the connection; later publishes open the next one."""
        self._connection = None
        refusal, self._refusal = self._refusal, None
        if refusal is None:
            self._give_up(reason)
            return
        _logger.warning("%s; reconnecting at the next publish", reason)
        # After an error the broker stops reading, so it never executes commands sent after the refused one.
        self.queue.put_back()
        if self._settings.ordered:
            self._fail_all(reason)
        elif accepts_no_publishes(refusal):
            self._owner.refuses(self, refusal)

    def _give_up(self, reason: NSQError) -> None:
        delay_s = self._owner.lost(self, reason)
        if isinstance(self.queue, NumberedQueue) and not isinstance(reason, AuthRefused):
            self._try_again(self.queue, reason, delay_s)
        else:
            self._fail_all(reason)

    def _try_again(self, queue: NumberedQueue, reason: NSQError, delay_s: float) -> None:
        """Keep what may be stored here for the next connection, until it is overdue."""
        queue.put_back()
        failed = queue.take_overdue(runtime.current_time(), self._settings.patience_s)
        if self._failed_claim is not None:
            failed += queue.take_topics([self._failed_claim])
            self._failed_claim = None
        for command in failed:
            command.fail(reason)
        self._owner.move_unsent(self)
        if queue:
            self._wanted = runtime.Event()
            assert self._nursery is not None
            self._nursery.start_soon(self._wake_after, min(delay_s, self._settings.reconnect_max_s))

    async def _wake_after(self, delay_s: float) -> None:
        await runtime.sleep(delay_s)
        if self.queue:
            self.wake()

    def _fail_all(self, reason: NSQError) -> None:
        for command in self.queue.clear():
            command.maybe_stored |= command.taken
            self._owner.failed(self, command, reason)
