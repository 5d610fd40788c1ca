"""The messages of a consumer: batches as they were received, and single messages as views of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NoReturn, Protocol, TypeVar

from trio_nsq.protocol.frames import MessageRun
from trio_nsq.protocol.headers import decode_headers

from ..arguments import in_ms
from ..errors import AlreadyAnswered

_Item = TypeVar("_Item")
_NOT_COPIED = "{!r} belongs to its connection and cannot be copied or pickled: pass its {}"


class Acknowledger(Protocol):
    """Accepts the answers to messages; implemented by `Subscription`."""

    address: str
    msg_timeout_s: float
    max_msg_timeout_s: float
    last_message_at: float
    live: bool

    def hold(self, batch: "MessageBatch") -> None: ...

    def release(self, batch: "MessageBatch") -> None: ...

    def finish(self, ids: Sequence[bytes]) -> None: ...

    def finish_one(self, message_id: bytes) -> None: ...

    def requeue(
        self,
        ids: Sequence[bytes],
        attempts: Sequence[int],
        delay_ms: int | None,
        backoff: bool,
        count_attempt: bool,
    ) -> None: ...

    def touch(self, ids: Sequence[bytes]) -> None: ...


class MessageBatch:
    """Messages that arrived together on one connection: lists of equal length, oldest first.

    Answer all messages with `finish` or `requeue` of the batch, or iterate and answer single ones. An answer to the
    batch applies to the messages that are not answered yet. Answers are queued for the connection's next write; the
    methods do not wait. Once the connection is lost or the consumer is closed, answers have no effect: the broker
    delivers the messages again.

    Attributes:
        bodies: The message bodies.
        ids: 16 bytes each, ASCII hex digits.
        timestamps_ns: When each was published, Unix nanoseconds, by the broker's clock.
        attempts: How often each was delivered, including this time; the first delivery is 1.
        nsqd_address: The broker, `host:port`; for a batch combined from several brokers: separated by commas.
    """

    __slots__ = (
        "_answered",
        "_done",
        "_headers",
        "_received_at",
        "_source",
        "attempts",
        "bodies",
        "ids",
        "nsqd_address",
        "timestamps_ns",
    )

    def __init__(self, run: MessageRun, source: Acknowledger) -> None:
        self.bodies: list[bytes] = run.bodies
        self.ids: list[bytes] = run.ids
        self.timestamps_ns: list[int] = run.timestamps_ns
        self.attempts: list[int] = run.attempts
        self.nsqd_address: str = source.address
        self._headers = run.headers  # the text of each; empty if none has headers
        self._source = source
        self._received_at = source.last_message_at
        self._answered: set[int] = set()  # indexes of the messages answered one by one, or split off
        self._done = False  # all messages are answered
        source.hold(self)

    def __reduce__(self) -> NoReturn:
        raise TypeError(_NOT_COPIED.format(self, "bodies"))

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def headers(self) -> list[Mapping[str, str]]:
        """The headers of each message; see `Message.headers`."""
        if not self._headers:
            return [{} for _ in self.ids]
        return [decode_headers(text) for text in self._headers]

    def __iter__(self) -> Iterator["Message"]:
        """Iterate over all messages, answered or not."""
        return (Message(self, index) for index in range(len(self.ids)))

    def __repr__(self) -> str:
        return f"<MessageBatch of {len(self)} from {self.nsqd_address}>"

    def finish(self) -> None:
        """Finish (FIN) all messages that are not answered: the broker does not deliver them again.

        Raises:
            AlreadyAnswered: All messages are answered.
        """
        self._source.finish(self._claim_rest())

    def requeue(
        self,
        delay_ms: int | None = None,
        *,
        delay_s: float | None = None,
        backoff: bool = True,
        count_attempt: bool = True,
    ) -> None:
        """Requeue (REQ) all messages that are not answered: the broker delivers them again, to any consumer.

        Args:
            delay_ms: Deprecated: `delay_s` in milliseconds.
            delay_s: The delay before the next delivery, in seconds; 0: no delay; None: the consumer's
                `default_requeue_delay_s` times the attempts of each. The broker silently caps it at its maximum (one
                hour by default).
            backoff: The messages failed, so the consumer backs off. False: it does not.
            count_attempt: The delivery counts as an attempt. False: it does not, so that `attempts` stays the same and
                `max_attempts` of the channel is not reached. Needs `qcli serve`: an nsqd counts it, and a warning is
                logged.

        Raises:
            AlreadyAnswered: All messages are answered.
            TypeError, ValueError: The delay is not a number, or is negative.
        """
        self._requeue(in_ms("delay", delay_s, delay_ms), backoff, count_attempt)

    def _requeue(self, delay_ms: int | None, backoff: bool, count_attempt: bool) -> None:
        attempts = self._unanswered(self.attempts)
        self._source.requeue(self._claim_rest(), attempts, delay_ms, backoff, count_attempt)

    def touch(self) -> None:
        """Restart the message timeout (TOUCH) of all messages that are not answered; see `Message.touch`."""
        self._source.touch(self.unanswered_ids())

    @property
    def connected(self) -> bool:
        """Whether an answer still has an effect: the connection is not lost, and the consumer is not closed."""
        return self._source.live

    def unanswered_ids(self) -> list[bytes]:
        """Return the ids of the messages that are not answered, in order."""
        return self._unanswered(self.ids)

    @property
    def unanswered_count(self) -> int:
        """How many messages are not answered."""
        return 0 if self._done else len(self.ids) - len(self._answered)

    def _unanswered(self, items: list[_Item]) -> list[_Item]:
        """Return the items of one of the lists whose messages are not answered."""
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

    def _replace_headers(self, texts: Mapping[int, str]) -> None:
        """Set the headers of some messages, by their places, from valid texts of headers."""
        headers = [*self._headers] or [""] * len(self.ids)
        for index, text in texts.items():
            headers[index] = text
        self._headers = headers

    def _split_off(self, start: int, stop: int) -> "MessageBatch":
        """Make a batch of the messages from `start` up to `stop`; none of them may be answered."""
        cut = slice(start, stop)
        run = MessageRun(
            self.ids[cut], self.bodies[cut], self.timestamps_ns[cut], self.attempts[cut], self._headers[cut]
        )
        part = MessageBatch(run, self._source)
        part._received_at = self._received_at
        self._answered.update(range(start, stop))
        if len(self._answered) == len(self.ids):
            self._release()
        return part


class CombinedBatch(MessageBatch):
    """Several batches as one. Each part, unanswered at first, tracks its own answers."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[MessageBatch]) -> None:
        # The base class is not initialized: the connections track the parts.
        self.bodies: list[bytes] = list(chain.from_iterable(part.bodies for part in parts))
        self.ids: list[bytes] = list(chain.from_iterable(part.ids for part in parts))
        self.timestamps_ns: list[int] = list(chain.from_iterable(part.timestamps_ns for part in parts))
        self.attempts: list[int] = list(chain.from_iterable(part.attempts for part in parts))
        self.nsqd_address: str = ", ".join(dict.fromkeys(part.nsqd_address for part in parts))
        self._headers = ()
        if any(part._headers for part in parts):
            texts = (part._headers or [""] * len(part.ids) for part in parts)
            self._headers = list(chain.from_iterable(texts))
        self._parts = parts

    def __iter__(self) -> Iterator["Message"]:
        return chain.from_iterable(self._parts)

    def finish(self) -> None:
        self._answer(lambda part: part.finish())

    def _requeue(self, delay_ms: int | None, backoff: bool, count_attempt: bool) -> None:
        self._answer(lambda part: part._requeue(delay_ms, backoff, count_attempt))

    def touch(self) -> None:
        for part in self._parts:
            part.touch()

    def unanswered_ids(self) -> list[bytes]:
        return list(chain.from_iterable(part.unanswered_ids() for part in self._parts))

    @property
    def connected(self) -> bool:
        return any(part.connected for part in self._parts)

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
    """One message. Answer it once, with `finish` or `requeue`; before that, `touch` extends its timeout.

    Answers are queued for the connection's next write; the methods do not wait. Once the connection is lost or the
    consumer is closed, answers have no effect: the broker delivers the message again.
    """

    __slots__ = ("_batch", "_index")

    def __init__(self, batch: MessageBatch, index: int) -> None:
        self._batch = batch
        self._index = index

    @property
    def id(self) -> bytes:
        """The id, 16 bytes of ASCII hex digits, the same at each delivery."""
        return self._batch.ids[self._index]

    @property
    def body(self) -> bytes:
        """The message body."""
        return self._batch.bodies[self._index]

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers of the message: values by names in lower case. Empty if it has none, or the broker knows none."""
        headers = self._batch._headers
        return decode_headers(headers[self._index]) if headers else {}

    @property
    def timestamp_ns(self) -> int:
        """When the message was published, Unix nanoseconds, by the broker's clock."""
        return self._batch.timestamps_ns[self._index]

    @property
    def attempts(self) -> int:
        """How often the message was delivered, including this time; the first delivery is 1. Stops at 65535."""
        return self._batch.attempts[self._index]

    @property
    def nsqd_address(self) -> str:
        """The TCP address of the broker that delivered the message."""
        return self._batch.nsqd_address

    @property
    def received_at(self) -> float:
        """When the message arrived, on the event loop's clock."""
        return self._batch._received_at

    @property
    def timeout_s(self) -> float:
        """How long the broker waits for an answer after the delivery or the last `touch`."""
        return self._batch._source.msg_timeout_s

    @property
    def max_timeout_s(self) -> float:
        """How long the broker waits for an answer after the delivery, however often the message is touched."""
        return self._batch._source.max_msg_timeout_s

    @property
    def connected(self) -> bool:
        """Whether an answer still has an effect; if not, the broker delivers the message again."""
        return self._batch.connected

    @property
    def answered(self) -> bool:
        """Whether the message was finished or requeued."""
        return self._batch._is_answered(self._index)

    def __reduce__(self) -> NoReturn:
        raise TypeError(_NOT_COPIED.format(self, "body"))

    def __repr__(self) -> str:
        return f"<Message {self.id.decode('ascii', 'replace')} from {self.nsqd_address}>"

    def finish(self) -> None:
        """Finish (FIN) the message: the broker does not deliver it again.

        Raises:
            AlreadyAnswered: The message was finished or requeued before.
        """
        batch = self._batch
        batch._source.finish_one(batch._claim(self._index))

    def requeue(
        self,
        delay_ms: int | None = None,
        *,
        delay_s: float | None = None,
        backoff: bool = True,
        count_attempt: bool = True,
    ) -> None:
        """Requeue (REQ) the message: the broker delivers it again, to any consumer of the channel.

        Args:
            delay_ms: Deprecated: `delay_s` in milliseconds.
            delay_s: The delay before the next delivery, in seconds; 0: no delay; None: the consumer's
                `default_requeue_delay_s` times the message's attempts. The broker silently caps it at its maximum (one
                hour by default).
            backoff: The message failed, so the consumer backs off. False: it does not.
            count_attempt: The delivery counts as an attempt. False: it does not, so that `attempts` stays the same and
                `max_attempts` of the channel is not reached. Needs `qcli serve`: an nsqd counts it, and a warning is
                logged.

        Raises:
            AlreadyAnswered: The message was finished or requeued before.
            TypeError, ValueError: The delay is not a number, or is negative.
        """
        self._requeue(in_ms("delay", delay_s, delay_ms), backoff, count_attempt)

    def _requeue(self, delay_ms: int | None, backoff: bool, count_attempt: bool) -> None:
        batch = self._batch
        ids = [batch._claim(self._index)]
        batch._source.requeue(ids, [self.attempts], delay_ms, backoff, count_attempt)

    def abandon(self) -> None:
        """Send no answer: the message has timed out, so the broker delivers it again and would refuse an answer.

        Raises:
            AlreadyAnswered: The message was finished or requeued before.
        """
        self._batch._claim(self._index)

    def touch(self) -> None:
        """Restart the message timeout (TOUCH), up to the broker's maximum (15 minutes in total by default).

        Does nothing once the message is answered, so a task that touches need not be stopped first.
        """
        if not self.answered:
            self._batch._source.touch([self.id])
