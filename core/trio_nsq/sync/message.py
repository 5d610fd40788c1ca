"""The messages of a consumer for programs without async code.

An answer is claimed in the calling thread, so that a second one raises there. It is posted to the event loop's thread,
which alone changes the client's messages. Nobody waits for it.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NoReturn

from ..client.arguments import in_ms
from ..client.consuming import message as client_message
from ..client.errors import AlreadyAnswered
from .portal import Portal, mirrors


class MessageBatch:
    """Messages that arrived together: lists of equal length, oldest first.

    It is a `trio_nsq.MessageBatch` that may be answered in any thread. Answering a whole batch costs as much as
    answering one message.

    Attributes:
        bodies: The message bodies.
        ids: 16 bytes each, ASCII hex digits.
        timestamps_ns: When each was published, Unix nanoseconds, by the broker's clock.
        attempts: How often each was delivered, including this time; the first delivery is 1.
        nsqd_address: The broker, `host:port`; for a batch combined from several brokers: separated by commas.
    """

    __slots__ = (
        "_answered",
        "_batch",
        "_done",
        "_portal",
        "attempts",
        "bodies",
        "ids",
        "nsqd_address",
        "timestamps_ns",
    )

    def __init__(self, batch: client_message.MessageBatch, portal: Portal) -> None:
        self.bodies: list[bytes] = batch.bodies
        self.ids: list[bytes] = batch.ids
        self.timestamps_ns: list[int] = batch.timestamps_ns
        self.attempts: list[int] = batch.attempts
        self.nsqd_address: str = batch.nsqd_address
        self._batch = batch
        self._portal = portal
        # By their place in this batch: those answered one by one. A dictionary, for `setdefault`, which is atomic.
        self._answered: dict[int, object] = {}
        self._done = False  # all messages are answered

    def __reduce__(self) -> NoReturn:
        self._batch.__reduce__()

    def __repr__(self) -> str:
        return repr(self._batch)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    @mirrors(client_message.MessageBatch.headers)
    def headers(self) -> list[Mapping[str, str]]:
        return self._batch.headers

    @mirrors(client_message.MessageBatch.__iter__)
    def __iter__(self) -> Iterator["Message"]:
        return (
            Message(self, message._batch, message._index, place) for place, message in enumerate(self._batch)
        )

    @mirrors(client_message.MessageBatch.finish)
    def finish(self) -> None:
        self._claim_rest()
        self._portal.post(_answer, self._batch.finish)

    @mirrors(client_message.MessageBatch.requeue)
    def requeue(
        self,
        delay_ms: int | None = None,
        *,
        delay_s: float | None = None,
        backoff: bool = True,
        count_attempt: bool = True,
    ) -> None:
        delay_ms = in_ms("delay", delay_s, delay_ms)
        self._claim_rest()
        self._portal.post(_answer, partial(self._batch._requeue, delay_ms, backoff, count_attempt))

    @mirrors(client_message.MessageBatch.touch)
    def touch(self) -> None:
        self._portal.post(self._batch.touch)

    @mirrors(client_message.MessageBatch.unanswered_ids)
    def unanswered_ids(self) -> list[bytes]:
        if self._done:
            return []
        return [message_id for place, message_id in enumerate(self.ids) if place not in self._answered]

    @property
    @mirrors(client_message.MessageBatch.connected)
    def connected(self) -> bool:
        return self._batch.connected

    @property
    @mirrors(client_message.MessageBatch.unanswered_count)
    def unanswered_count(self) -> int:
        return 0 if self._done else len(self.ids) - len(self._answered)

    def _claim_rest(self) -> None:
        self._portal.check_process()
        if not self.unanswered_count:
            raise AlreadyAnswered(f"all messages of {self!r} have been finished or requeued before")
        self._done = True


class Message(client_message.Message):
    """One message. Answer it once, with `finish` or `requeue`; before that, `touch` extends its timeout.

    It is a `trio_nsq.Message` that may be answered in any thread. Answers are queued for the connection's next write;
    the methods do not wait for it. Once the connection is lost or the consumer is closed, answers have no effect: the
    broker delivers the message again.
    """

    __slots__ = ("_place", "_shared")

    def __init__(
        self, shared: MessageBatch, batch: client_message.MessageBatch, index: int, place: int
    ) -> None:
        self._batch = batch
        self._index = index
        self._shared = shared
        self._place = place  # in `shared`, which may combine several batches

    @property
    def received_at(self) -> float:
        """When the message arrived, in seconds; compare it with other messages of the same consumer only."""
        return super().received_at

    @property
    @mirrors(client_message.Message.answered)
    def answered(self) -> bool:
        shared = self._shared
        return shared._done or self._place in shared._answered or self._batch._is_answered(self._index)

    @mirrors(client_message.Message.finish)
    def finish(self) -> None:
        self._claim()
        self._shared._portal.post(_answer, super().finish)

    @mirrors(client_message.Message.requeue)
    def requeue(
        self,
        delay_ms: int | None = None,
        *,
        delay_s: float | None = None,
        backoff: bool = True,
        count_attempt: bool = True,
    ) -> None:
        delay_ms = in_ms("delay", delay_s, delay_ms)
        self._claim()
        self._shared._portal.post(_answer, partial(super()._requeue, delay_ms, backoff, count_attempt))

    @mirrors(client_message.Message.abandon)
    def abandon(self) -> None:
        self._claim()
        self._shared._portal.post(_answer, super().abandon)

    @mirrors(client_message.Message.touch)
    def touch(self) -> None:
        if not self.answered:
            self._shared._portal.post(self._batch._source.touch, [self.id])

    def _claim(self) -> None:
        shared = self._shared
        shared._portal.check_process()
        claim = object()
        if (
            shared._done
            or shared._answered.setdefault(self._place, claim) is not claim
            or self._batch._is_answered(self._index)
        ):
            raise AlreadyAnswered(f"message {self.id.decode()} has been finished or requeued before")


def _answer(answer: Callable[[], None]) -> None:
    try:
        answer()
    except AlreadyAnswered:
        pass  # two threads answered at the same time; the first answer holds
