"""Publishes batches to one broker, in order; retries, or moves batches to another broker, while it is unavailable."""

import random
from collections.abc import Callable

import trio

from trio_nsq.client import BrokerError, PublishFailed
from trio_nsq.client.publishing.queue import may_pass
from trio_nsq.event_loop.retries import Delays
from trio_nsq.text.wording import count_of

from ...framework.output import print_diagnostic
from .batches import Batch
from .results import BrokerResult
from .send import Sender

FIRST_DELAY_S, LONGEST_DELAY_S = 0.1, 5.0
"""The delays between two attempts at a broker that does not accept messages."""

TAKE_S = 1.0
"""How long a broker may take no batch before another one gets it."""


class Fallback:
    """Tells which broker gets the batches of an unavailable one: they wait for it, unless a strategy has another."""

    def other(self, publisher: "Publisher") -> "Publisher | None":
        """Return a broker that may accept messages now; None: batches wait for this broker."""
        return None

    def was_accepted(self, publisher: "Publisher") -> bool:
        """Return whether messages like those of this broker have been acknowledged."""
        return publisher.result.acknowledged > 0

    def meanwhile(self, publisher: "Publisher") -> str:
        """Return the end of the warning that a broker is unavailable."""
        return ""


class Publisher:
    """Publishes batches to one broker, in order, and calls `on_failure` after a permanent failure.

    If the broker is unreachable or cannot store messages, an outage begins. Batches go to the broker that `Fallback`
    names, or else are retried until the outage ends. A batch that may be stored, and whose repetition the broker would
    detect, stays here: at another broker it would be stored twice.

    Attributes:
        result: Up to date at any time.
    """

    def __init__(self, sender: Sender, address: str, retry: bool, on_failure: Callable[[], None]) -> None:
        self.result = BrokerResult(address)
        self._sender = sender
        self._moves = retry
        self._retry = retry
        self._on_failure = on_failure
        self._begun = 0  # batches taken so far
        # The unacknowledged batches, by number; True: it was given to the sender.
        self._unsettled: dict[int, bool] = {}
        self._slots = trio.Semaphore(sender.at_once)
        self._turns = trio.lowlevel.ParkingLot()  # tasks that wait for their turn
        self._outage: PublishFailed | None = None  # the failure of the last attempt
        self._retry_at = 0.0  # in an outage: when the next attempt may begin
        self._stalled = False  # took no batch for `TAKE_S`, and has acknowledged none since
        self._retrying = trio.CancelScope()
        self._delays = Delays(FIRST_DELAY_S, LONGEST_DELAY_S, random.random)
        self._in_doubt = 0  # messages sent more than once in this outage; some may have been stored before

    def begin(self, nursery: trio.Nursery, fallback: Fallback) -> None:
        """Publish in tasks of this nursery. Call this before `offer`."""
        self._nursery = nursery
        self._fallback = fallback

    @property
    def is_usable(self) -> bool:
        """Whether the broker may accept a batch now: it does, or it is time to try again."""
        if self.result.failure is not None:
            return False
        if self._outage is not None:
            return not self._unsettled and trio.current_time() >= self._retry_at
        return not self._stalled

    async def offer(self, batch: Batch, *, maybe_stored: bool = False) -> None:
        """Take a batch as soon as one more may be outstanding. If this is cancelled, the batch was not taken.

        Args:
            maybe_stored: Another broker may have stored the batch.
        """
        await self._slots.acquire()
        number = self._begun
        self._begun += 1
        self._unsettled[number] = False
        self._nursery.start_soon(self._settle, number, batch, maybe_stored)

    async def offer_briefly(self, batch: Batch, *, maybe_stored: bool = False) -> bool:
        """Call `offer`, for `TAKE_S` at most; return whether the batch was taken."""
        with trio.move_on_after(TAKE_S) as scope:
            await self.offer(batch, maybe_stored=maybe_stored)
        self._stalled = scope.cancelled_caught
        return not scope.cancelled_caught

    def stop_waiting(self) -> None:
        """Give up what fails from now on, and what is tried again now."""
        self._retry = False
        self._retrying.cancel()

    async def _settle(self, number: int, batch: Batch, maybe_stored: bool) -> None:
        try:
            await self._publish(number, batch, maybe_stored)
        finally:
            del self._unsettled[number]
            self._slots.release()
            self._turns.unpark_all()

    async def _publish(self, number: int, batch: Batch, elsewhere_in_doubt: bool) -> None:
        """Publish a batch, with retries, until it is acknowledged, fails permanently or another broker takes it."""
        maybe_stored = False  # here
        while True:
            bound = maybe_stored and not self._sender.may_repeat
            await self._wait_for_turn(number, bound)
            if self._is_leaving(bound) and (other := self._fallback.other(self)) is not None:
                in_doubt = maybe_stored or elsewhere_in_doubt
                if await other.offer_briefly(batch, maybe_stored=in_doubt):
                    if maybe_stored:
                        self._in_doubt -= len(batch.bodies)
                        self.result.moved_in_doubt += len(batch.bodies)
                    return
                continue
            if self.result.failure is not None:
                self._count_lost(len(batch.bodies), maybe_stored or elsewhere_in_doubt)
                return
            in_outage = self._outage is not None
            try:
                await self._attempt(number, batch)
            except PublishFailed as error:
                self._unsettled[number] = False
                self._acknowledged(batch.bodies[: error.acknowledged])
                batch = batch.part(slice(error.acknowledged, None))
                if error.maybe_stored and not maybe_stored:
                    maybe_stored = True
                    self._in_doubt += len(batch.bodies)
                bound = maybe_stored and not self._sender.may_repeat
                moves = (
                    self._moves and not bound and may_pass(error) and self._fallback.other(self) is not None
                )
                if not moves and not self._is_temporary(error):
                    self._count_lost(len(batch.bodies), maybe_stored or elsewhere_in_doubt)
                    self._give_up(error)
                    return
                if in_outage or self._outage is None:
                    self._retry_at = trio.current_time() + self._delays.next_s()
                self._begin_outage(error)
            else:
                self._acknowledged(batch.bodies)
                if self._outage is not None:
                    self._end_outage()
                return

    async def _wait_for_turn(self, number: int, bound: bool) -> None:
        """Wait until a batch may be sent: after all batches before it were sent, in an outage acknowledged.

        A batch that another broker can take does not wait.
        """
        while self.result.failure is None:
            before = (sent for other, sent in self._unsettled.items() if other < number)
            if not any(not sent or self._outage is not None for sent in before):
                break
            if self._is_leaving(bound) and self._fallback.other(self) is not None:
                break
            await self._turns.park()

    def _is_leaving(self, bound: bool) -> bool:
        """Return whether a batch should go to another broker, if there is one that takes it."""
        waits = self._outage is not None and trio.current_time() < self._retry_at
        return waits and self._moves and not bound

    async def _attempt(self, number: int, batch: Batch) -> None:
        """Send a batch; in an outage, when the next attempt may begin, and `stop_waiting` cancels both.

        Raises PublishFailed: this attempt failed. A batch whose sending was cancelled may be stored.
        """
        self._unsettled[number] = True
        outage = self._outage
        if outage is None:
            self._turns.unpark_all()
            await self._sender.send(batch)
            return
        sent = False
        with trio.CancelScope() as self._retrying:
            if not self._retry:
                self._retrying.cancel()
            await trio.sleep_until(self._retry_at)
            sent = True
            await self._sender.send(batch)
            return
        # A new failure: the outage's failure was counted before, perhaps for another batch.
        raise PublishFailed(outage.reason, maybe_stored=sent) from outage.__cause__

    def _is_temporary(self, error: PublishFailed) -> bool:
        """Return whether to retry after this error."""
        if not self._retry or not may_pass(error):
            return False
        cause = error.__cause__
        # Before the first acknowledgement, a refusal may be an error of the command line: report it at once.
        is_new = isinstance(cause, BrokerError) and not self._fallback.was_accepted(self)
        return not is_new or str(cause).endswith("exiting")

    def _begin_outage(self, error: PublishFailed) -> None:
        begins = self._outage is None
        self._outage = error
        if begins:
            self._turns.unpark_all()
            cause = error.__cause__
            if isinstance(cause, BrokerError):
                what = f"refused: {cause.text.partition(' failed ')[2] or cause.text}"
            else:
                what = f"is unreachable ({error.reason})"
            print_diagnostic(
                f"Warning: the broker at {self.result.address} {what}. Retrying until it accepts messages."
                f"{self._fallback.meanwhile(self)}"
            )

    def _end_outage(self) -> None:
        text = f"Note: the broker at {self.result.address} accepts messages again."
        if self._in_doubt and self._sender.may_repeat:
            text += f" Up to {count_of(self._in_doubt, 'message')} may be stored twice."
        print_diagnostic(text)
        self._outage, self._in_doubt = None, 0
        self._delays.reset()

    def _count_lost(self, count: int, maybe_stored: bool) -> None:
        if maybe_stored:
            self.result.maybe_stored += count
        else:
            self.result.not_stored += count

    def _give_up(self, error: PublishFailed) -> None:
        if self.result.failure is None:
            self.result.failure = error
            self._on_failure()

    def _acknowledged(self, bodies: list[bytes]) -> None:
        self._stalled = False
        self.result.acknowledged += len(bodies)
        self.result.acknowledged_bytes += sum(map(len, bodies))
