"""What a consumer hands out: batches as they came off the wire, and single messages as views of them."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trio_nsq.protocol import MessageRun

from .errors import AlreadyAnswered

if TYPE_CHECKING:
    from .feed import Feed


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
        nsqd_address: The broker they came from, `host:port`.
    """

    __slots__ = ("_answered", "_done", "_feed", "attempts", "bodies", "ids", "nsqd_address", "timestamps_ns")

    def __init__(self, run: MessageRun, feed: "Feed") -> None:
        self.bodies = run.bodies
        self.ids = run.ids
        self.timestamps_ns = run.timestamps_ns
        self.attempts = run.attempts
        self.nsqd_address = feed.address
        self._feed = feed
        self._answered: set[int] = set()  # places of those answered one by one, or carved out
        self._done = False  # nothing is left to answer
        feed.hold(self)

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator["Message"]:
        """Each message, answered or not."""
        return (Message(self, place) for place in range(len(self.ids)))

    def __repr__(self) -> str:
        return f"<MessageBatch of {len(self)} from {self.nsqd_address}>"

    def finish(self) -> None:
        """Finish (FIN) all messages not yet answered: they are done, for good.

        Raises:
            AlreadyAnswered: There are none.
        """
        self._feed.finish(self._claim_rest())

    def requeue(self, delay_ms: int = 0) -> None:
        """Put all messages not yet answered back (REQ), to be delivered again, to any consumer of the channel.

        Args:
            delay_ms: Not before this many milliseconds have passed; 0: at once. The broker has a maximum
                (an hour, unless configured) and quietly uses it instead.

        Raises:
            AlreadyAnswered: There are none.
            ValueError: The delay is negative.
        """
        _check_delay(delay_ms)
        self._feed.requeue(self._claim_rest(), delay_ms)

    def unanswered_ids(self) -> list[bytes]:
        """The ids of the messages not yet answered, in order."""
        if self._done:
            return []
        answered = self._answered
        if not answered:
            return self.ids
        return [message_id for place, message_id in enumerate(self.ids) if place not in answered]

    def _claim_rest(self) -> list[bytes]:
        ids = self.unanswered_ids()
        if not ids:
            raise AlreadyAnswered(f"all messages of {self!r} have been finished or requeued before")
        self._release()
        return ids

    def _release(self) -> None:
        self._done = True
        self._feed.release(self)

    def _claim(self, place: int) -> bytes:
        """Note that the message at this place is being answered, and return its id."""
        if self._is_answered(place):
            raise AlreadyAnswered(f"message {self.ids[place].decode()} has been finished or requeued before")
        self._answered.add(place)
        if len(self._answered) == len(self.ids):
            self._release()
        return self.ids[place]

    def _is_answered(self, place: int) -> bool:
        return self._done or place in self._answered

    def _carve(self, start: int, stop: int) -> "MessageBatch":
        """A batch of its own made of the messages from `start` to before `stop`, none of them answered yet."""
        cut = slice(start, stop)
        run = MessageRun(self.ids[cut], self.bodies[cut], self.timestamps_ns[cut], self.attempts[cut])
        part = MessageBatch(run, self._feed)
        self._answered.update(range(start, stop))
        if len(self._answered) == len(self.ids):
            self._release()
        return part


class Message:
    """One message. Answer it with `finish` or `requeue`, once; until then `touch` gives it more time.

    Answers are queued for the connection's next write, without waiting. Once the connection is lost, or the
    consumer closed, they have no effect: the broker delivers the message again.
    """

    __slots__ = ("_batch", "_place")

    def __init__(self, batch: MessageBatch, place: int) -> None:
        self._batch = batch
        self._place = place

    @property
    def id(self) -> bytes:
        """16 bytes, ASCII hex digits; the same at each delivery."""
        return self._batch.ids[self._place]

    @property
    def body(self) -> bytes:
        """What was published."""
        return self._batch.bodies[self._place]

    @property
    def timestamp_ns(self) -> int:
        """When it was published: Unix nanoseconds, by the broker's clock."""
        return self._batch.timestamps_ns[self._place]

    @property
    def attempts(self) -> int:
        """How often it was delivered, this time included; 1 is the first. Stops at 65535."""
        return self._batch.attempts[self._place]

    @property
    def nsqd_address(self) -> str:
        """The broker it came from, `host:port`."""
        return self._batch.nsqd_address

    @property
    def answered(self) -> bool:
        """Whether it was finished or requeued."""
        return self._batch._is_answered(self._place)

    def __repr__(self) -> str:
        return f"<Message {self.id.decode('ascii', 'replace')} from {self.nsqd_address}>"

    def finish(self) -> None:
        """Finish (FIN) the message: it is done, for good.

        Raises:
            AlreadyAnswered: It was finished or requeued before.
        """
        batch = self._batch
        batch._feed.finish([batch._claim(self._place)])

    def requeue(self, delay_ms: int = 0) -> None:
        """Put the message back (REQ), to be delivered again, to any consumer of the channel.

        Args:
            delay_ms: Not before this many milliseconds have passed; 0: at once. The broker has a maximum
                (an hour, unless configured) and quietly uses it instead.

        Raises:
            AlreadyAnswered: It was finished or requeued before.
            ValueError: The delay is negative.
        """
        _check_delay(delay_ms)
        batch = self._batch
        batch._feed.requeue([batch._claim(self._place)], delay_ms)

    def touch(self) -> None:
        """Start the message's in-flight time anew (TOUCH), up to the broker's maximum (15 minutes in all).

        Ignored once the message is answered, so that a task that touches need not be stopped first.
        """
        if not self.answered:
            self._batch._feed.touch(self.id)


def _check_delay(delay_ms: int) -> None:
    if delay_ms < 0:
        raise ValueError(f"a requeue delay of {delay_ms} ms; it must not be negative")
