"""What a consumer hands out: batches as they came off the wire, and single messages as views of them."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Protocol, TypeVar

from trio_nsq.protocol.frames import MessageRun

from ..errors import AlreadyAnswered

_Item = TypeVar("_Item")


class Acknowledger(Protocol):
    """What takes the answers to messages; see `Subscription`, which has all of this."""

    address: str
    msg_timeout_s: float
    last_message_at: float

    def hold(self, batch: "MessageBatch") -> None: ...

    def release(self, batch: "MessageBatch") -> None: ...

    def finish(self, ids: Sequence[bytes]) -> None: ...

    def finish_one(self, message_id: bytes) -> None: ...

    def requeue(
        self, ids: Sequence[bytes], attempts: Sequence[int], delay_ms: int | None, backoff: bool
    ) -> None: ...

    def touch(self, ids: Sequence[bytes]) -> None: ...


class MessageBatch:
    """Messages that arrived together on one connection: four lists of equal length, oldest first.

    Answer all of them with `finish` or `requeue`, or single ones by iterating; a whole-batch answer goes to those
    not yet answered. Answers are queued for the connection's next write, without waiting. Once the connection
    is lost, or the consumer closed, they have no effect: the broker delivers the messages again.

    Attributes:
        bodies: The messages.
        ids: 16 bytes each, ASCII hex digits.
        timestamps_ns: When each was published, Unix nanoseconds, by the broker's clock.
        attempts: How often each was delivered, this time included; 1 is the first.
        nsqd_address: The broker they came from, `host:port`; several, separated by commas, if it was combined.
    """

    __slots__ = (
        "_answered",
        "_done",
        "_received_at",
        "_source",
        "attempts",
        "bodies",
        "ids",
        "nsqd_address",
        "timestamps_ns",
    )

    def __init__(self, run: MessageRun, source: Acknowledger) -> None:
        self.bodies = run.bodies
        self.ids = run.ids
        self.timestamps_ns = run.timestamps_ns
        self.attempts = run.attempts
        self.nsqd_address = source.address
        self._source = source
        self._received_at = source.last_message_at
        self._answered: set[int] = set()  # indexes of the messages answered one by one, or split off
        self._done = False  # nothing is left to answer
        source.hold(self)

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator["Message"]:
        """Each message, answered or not."""
        return (Message(self, index) for index in range(len(self.ids)))

    def __repr__(self) -> str:
        return f"<MessageBatch of {len(self)} from {self.nsqd_address}>"

    def finish(self) -> None:
        """Finish (FIN) all messages not yet answered: they are done, for good.

        Raises:
            AlreadyAnswered: There are none.
        """
        self._source.finish(self._claim_rest())

    def requeue(self, delay_ms: int | None = None, *, backoff: bool = True) -> None:
        """Put all messages not yet answered back (REQ), to be delivered again, to any consumer of the channel.

        Args:
            delay_ms: Not before this many milliseconds have passed; 0: at once; None: the consumer's
                `default_requeue_delay_ms` times the attempts of each. The broker has a maximum (an hour, unless
                configured) and quietly uses it instead.
            backoff: They failed: the consumer backs off. False: it does not.

        Raises:
            AlreadyAnswered: There are none.
            ValueError: The delay is negative.
        """
        _check_delay(delay_ms)
        attempts = self._unanswered(self.attempts)
        self._source.requeue(self._claim_rest(), attempts, delay_ms, backoff)

    def touch(self) -> None:
        """Start the in-flight time of all messages not yet answered anew (TOUCH); see `Message.touch`."""
        self._source.touch(self.unanswered_ids())

    def unanswered_ids(self) -> list[bytes]:
        """The ids of the messages not yet answered, in order."""
        return self._unanswered(self.ids)

    @property
    def unanswered_count(self) -> int:
        """How many messages are not yet answered."""
        return 0 if self._done else len(self.ids) - len(self._answered)

    def _unanswered(self, items: list[_Item]) -> list[_Item]:
        """Those of one of the lists that belong to messages not yet answered."""
        if self._done:
            return []
        answered = self._answered
        if not answered:
            return items
        return [item for index, item in enumerate(items) if index not in answered]

    def _claim_rest(self) -> list[bytes]:
        ids = self.unanswered_ids()
        if not ids:
            raise AlreadyAnswered(f"all messages of {self!r} have been finished or requeued before")
        self._release()
        return ids

    def _release(self) -> None:
        self._done = True
        self._source.release(self)

    def _claim(self, index: int) -> bytes:
        """Mark the message at this index as answered, and return its id."""
        answered, ids = self._answered, self.ids
        if self._done or index in answered:
            raise AlreadyAnswered(f"message {ids[index].decode()} has been finished or requeued before")
        answered.add(index)
        if len(answered) == len(ids):
            self._release()
        return ids[index]

    def _is_answered(self, index: int) -> bool:
        return self._done or index in self._answered

    def _split_off(self, start: int, stop: int) -> "MessageBatch":
        """Make a batch of the messages from `start` to before `stop`, none of which is answered yet."""
        cut = slice(start, stop)
        run = MessageRun(self.ids[cut], self.bodies[cut], self.timestamps_ns[cut], self.attempts[cut])
        part = MessageBatch(run, self._source)
        part._received_at = self._received_at
        self._answered.update(range(start, stop))
        if len(self._answered) == len(self.ids):
            self._release()
        return part


class CombinedBatch(MessageBatch):
    """Several batches as one. Each part, none of whose messages is answered at first, keeps track of its answers."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[MessageBatch]) -> None:
        # Not what the base class does: the connections wait for answers to the parts.
        self.bodies = list(chain.from_iterable(part.bodies for part in parts))
        self.ids = list(chain.from_iterable(part.ids for part in parts))
        self.timestamps_ns = list(chain.from_iterable(part.timestamps_ns for part in parts))
        self.attempts = list(chain.from_iterable(part.attempts for part in parts))
        self.nsqd_address = ", ".join(dict.fromkeys(part.nsqd_address for part in parts))
        self._parts = parts

    def __iter__(self) -> Iterator["Message"]:
        return chain.from_iterable(self._parts)

    def finish(self) -> None:
        self._answer(lambda part: part.finish())

    def requeue(self, delay_ms: int | None = None, *, backoff: bool = True) -> None:
        self._answer(lambda part: part.requeue(delay_ms, backoff=backoff))

    def touch(self) -> None:
        for part in self._parts:
            part.touch()

    def unanswered_ids(self) -> list[bytes]:
        return list(chain.from_iterable(part.unanswered_ids() for part in self._parts))

    @property
    def unanswered_count(self) -> int:
        return sum(part.unanswered_count for part in self._parts)

    def _answer(self, answer: Callable[[MessageBatch], None]) -> None:
        unanswered = [part for part in self._parts if part.unanswered_count]
        if not unanswered:
            raise AlreadyAnswered(f"all messages of {self!r} have been finished or requeued before")
        for part in unanswered:
            answer(part)


class Message:
    """One message. Answer it with `finish` or `requeue`, once; until then `touch` gives it more time.

    Answers are queued for the connection's next write, without waiting. Once the connection is lost, or the
    consumer closed, they have no effect: the broker delivers the message again.
    """

    __slots__ = ("_batch", "_index")

    def __init__(self, batch: MessageBatch, index: int) -> None:
        self._batch = batch
        self._index = index

    @property
    def id(self) -> bytes:
        """16 bytes, ASCII hex digits; the same at each delivery."""
        return self._batch.ids[self._index]

    @property
    def body(self) -> bytes:
        """What was published."""
        return self._batch.bodies[self._index]

    @property
    def timestamp_ns(self) -> int:
        """When it was published: Unix nanoseconds, by the broker's clock."""
        return self._batch.timestamps_ns[self._index]

    @property
    def attempts(self) -> int:
        """How often it was delivered, this time included; 1 is the first. Stops at 65535."""
        return self._batch.attempts[self._index]

    @property
    def nsqd_address(self) -> str:
        """The TCP address of the broker that sent it."""
        return self._batch.nsqd_address

    @property
    def received_at(self) -> float:
        """When it came, on trio's clock."""
        return self._batch._received_at

    @property
    def timeout_s(self) -> float:
        """How long the broker waits for an answer, from then on or from the last `touch`."""
        return self._batch._source.msg_timeout_s

    @property
    def answered(self) -> bool:
        """Whether it was finished or requeued."""
        return self._batch._is_answered(self._index)

    def __repr__(self) -> str:
        return f"<Message {self.id.decode('ascii', 'replace')} from {self.nsqd_address}>"

    def finish(self) -> None:
        """Finish (FIN) the message: it is done, for good.

        Raises:
            AlreadyAnswered: It was finished or requeued before.
        """
        batch = self._batch
        batch._source.finish_one(batch._claim(self._index))

    def requeue(self, delay_ms: int | None = None, *, backoff: bool = True) -> None:
        """Put the message back (REQ), to be delivered again, to any consumer of the channel.

        Args:
            delay_ms: Not before this many milliseconds have passed; 0: at once; None: the consumer's
                `default_requeue_delay_ms` times the message's attempts. The broker has a maximum (an hour, unless
                configured) and quietly uses it instead.
            backoff: It failed: the consumer backs off. False: it does not.

        Raises:
            AlreadyAnswered: It was finished or requeued before.
            ValueError: The delay is negative.
        """
        _check_delay(delay_ms)
        batch = self._batch
        batch._source.requeue([batch._claim(self._index)], [self.attempts], delay_ms, backoff)

    def touch(self) -> None:
        """Start the message's in-flight time anew (TOUCH), up to the broker's maximum (15 minutes in all).

        Ignored once the message is answered, so that a task that touches need not be stopped first.
        """
        if not self.answered:
            self._batch._source.touch([self.id])


def _check_delay(delay_ms: int | None) -> None:
    if delay_ms is not None and delay_ms < 0:
        raise ValueError(f"a requeue delay of {delay_ms} ms; it must not be negative")
