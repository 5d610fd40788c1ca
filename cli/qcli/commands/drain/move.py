"""Moves what is left on a broker to another one, exactly once per channel.

The brokers know how far a move is (see `trio_nsq.broker.state.move`), so this program keeps no state: it may be killed
at any time, and the next one continues.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from trio_nsq.api import broker as api
from trio_nsq.api.answers import Move, MoveStream, Stats
from trio_nsq.client import BrokerUnreachable, RequestRefused

from ...broker.admin_client import AdminClient
from ...broker.failures import http_failure, not_a_broker
from ...framework.errors import ExitCode, Failure
from ...framework.output import print_diagnostic
from .advice import stop_command
from .remaining import Remaining
from .report import Progress, Show

_MAX_DIGITS = 20
Error = RequestRefused | BrokerUnreachable


@dataclass(frozen=True, slots=True)
class Batch:
    """The next messages of a stream.

    Attributes:
        through: The last sequence; None: the stream has ended.
    """

    body: bytes
    through: int | None
    messages: int
    damaged: int
    expired: int


def next_batch(
    source: AdminClient, topic: str, move: str, channel: str | None, moved: int | None, max_bytes: int
) -> Batch:
    """Confirm the messages up to `moved`, and return the next ones of a stream. Raises as `AdminClient.make`."""
    body, headers = source.make_with_headers(api.next_of_move(topic, move, channel, moved, max_bytes))

    def number(name: str) -> int:
        text = headers.get(f"NSQ-Move-{name}", "0")
        if not (text.isascii() and text.isdecimal() and len(text) < _MAX_DIGITS):
            raise not_a_broker(source.address)
        return int(text)

    through = number("Through") if "NSQ-Move-Through" in headers else None
    return Batch(body, through, number("Messages"), number("Damaged"), number("Expired"))


def code_of(error: Error) -> str:
    """Return the code of a refusal; empty for other errors."""
    return error.text.partition(":")[0] if isinstance(error, RequestRefused) else ""


def failure_of(error: Error) -> Failure:
    """Return the failure for an error. The texts of refusals to move are for the user."""
    if isinstance(error, RequestRefused) and error.status == 409:
        return Failure(f"{error.text.partition(': ')[2] or error.text}.")
    return http_failure(error)


PATIENCE_S = 30.0
"""A broker that does not answer, or that cannot store, gets this time to recover, as after a restart."""
_RETRY_S = 0.5
_SHOW_S = 0.2
_BATCH_BYTES = 1024 * 1024
_SMALLEST_BATCH = 1024
_SMALLEST_RETRY = 1
"""A topic with `max_messages` may take only a few at once: a batch has at least one message."""
_REMEMBERED_NS = 3600 * 1_000_000_000
"""A target remembers a stream for an hour after its last message, and then until 10,000 others are newer."""


class TimedOut(Exception):
    """The time of `--timeout` is over."""


@dataclass(slots=True)
class Mover:
    """Moves the messages of one broker.

    Attributes:
        force: Continue although it is not known whether the target has the last messages of a stream.
        deadline_s: By `time.monotonic`; None: no limit.
        begun: Topics whose move has begun and not ended.
        damaged, expired: Messages that were left out.
    """

    source: AdminClient
    target: AdminClient
    progress: Progress
    show: Show
    force: bool = False
    deadline_s: float | None = None
    begun: set[str] = field(default_factory=set)
    damaged: int = 0
    expired: int = 0
    _started: int | None = None
    _created: set[tuple[str, str | None]] = field(default_factory=set)
    _moved: dict[str, int | None] = field(default_factory=dict)
    _most_bytes: int = _BATCH_BYTES
    _batch_bytes: int = _BATCH_BYTES
    _failing_since_s: float | None = None
    _shown_s: float = 0.0

    def run(self) -> None:
        """Move until nothing is left that can be moved.

        Raises:
            Failure: A broker refused, or did not recover.
            TimedOut: The deadline has passed.
        """
        while True:
            try:
                if self._run_once():
                    return
            except (RequestRefused, BrokerUnreachable) as error:
                self._recover(error)

    def _run_once(self) -> bool:
        """Move what can be moved now. Returns whether nothing is left."""
        left = self._look()
        topics = dict.fromkeys([*left.topics, *sorted(self.begun)])
        if not topics:
            return True
        waits = list(filter(None, [self._move_topic(topic) for topic in topics]))
        self._failing_since_s = None
        self.progress.waits_for = "; ".join(waits)
        if waits:
            self._show(now=True)
            self._sleep()
        return False

    def _look(self) -> Remaining:
        stats = self.source.make(api.stats())
        if self._started != stats.get("start_time"):  # a restart ends the drain mode
            self._started = stats.get("start_time")
            self.source.make(api.set_draining(True))
            stats = self.source.make(api.stats())
        self.begun = set(moving_topics(stats))
        left = Remaining.of(stats)
        self.progress.update(left, time.monotonic())
        if left.rows:
            self._show()
        return left.durable

    # ------------------------------------------------------------------ topics and streams

    def _move_topic(self, topic: str) -> str:
        """Move a topic as far as possible. Returns what it waits for; empty: it is done."""
        try:
            status = self.source.make(api.begin_move(topic, self.target.address))
            self.begun.add(topic)
            waits = self._move_streams(topic, status)
            if waits:
                return waits
            self.source.make(api.end_move(topic, status["move"]))
        except RequestRefused as error:
            if (
                code_of(error) == "NOT_DRAINING"
                and self.source.make(api.stats()).get("start_time") != self._started
            ):
                return f"{self.source.address}: trying again"  # it was restarted
            if code_of(error) not in ("NOT_MOVED", "NO_SUCH_MOVE", "TOPIC_NOT_FOUND", "CHANNEL_NOT_FOUND"):
                raise
            # NOT_MOVED: a channel was created meanwhile. NO_SUCH_MOVE: another program has ended the move. Others: an
            # operator has deleted it.
            if code_of(error) == "TOPIC_NOT_FOUND" and error.address == self.source.address:
                self.begun.discard(topic)
            self._created.clear()
            return f"{topic}: trying again"
        self.begun.discard(topic)
        return ""

    def _move_streams(self, topic: str, status: Move) -> str:
        streams = status["streams"]
        self._create(topic, None)
        for stream in streams:
            if stream["channel"] is not None:
                self._create(topic, stream["channel"])
        waits = []
        # Messages that no channel has are the newest: they are last.
        for stream in sorted(streams, key=lambda each: each["channel"] is None):
            if stream["left"] and not self._move_stream(topic, status, stream):
                waits.append(self._what_holds(topic, stream))
        return "; ".join(waits)

    def _create(self, topic: str, channel: str | None) -> None:
        if (topic, channel) not in self._created:
            self.target.make(api.act("create", topic, channel))
            self._created.add((topic, channel))

    def _move_stream(self, topic: str, status: Move, stream: MoveStream) -> bool:
        """Move a stream. Returns False if it cannot begin yet."""
        producer, channel = stream["producer"], stream["channel"]
        if producer not in self._moved:
            number = self._stored(topic, producer)
            self._check_memory(topic, status, stream, number)
            self._moved[producer] = number
        while True:
            try:
                batch = next_batch(
                    self.source, topic, status["move"], channel, self._moved[producer], self._batch_bytes
                )
            except RequestRefused as error:
                if code_of(error) == "IN_FLIGHT":
                    return False
                raise
            self.damaged += batch.damaged
            self.expired += batch.expired
            if batch.through is None:
                return True
            if not batch.body or self._store(topic, producer, batch.body):
                self._moved[producer] = batch.through
                self._count(batch.messages)

    def _stored(self, topic: str, producer: str, body: bytes = b"") -> int | None:
        """Store a batch at the target, and return how far the stream is stored; None: no message of it is."""
        return self.target.make(api.store_moved(topic, producer, body=body))

    def _store(self, topic: str, producer: str, body: bytes) -> bool:
        """Store a batch. Returns False if the next one must be smaller, or begin elsewhere."""
        before = self._moved[producer]
        try:
            number = self._stored(topic, producer, body)
        except RequestRefused as error:
            if code_of(error) == "OVERLAP":  # another program moves the same stream
                self._moved[producer] = self._stored(topic, producer)
                return False
            if code_of(error) == "BODY_TOO_BIG" and self._batch_bytes > _SMALLEST_BATCH:
                self._most_bytes = self._batch_bytes = self._batch_bytes // 2
                return False
            if error.status == 503:  # perhaps a smaller batch finds room
                self._batch_bytes = max(self._batch_bytes // 4, _SMALLEST_RETRY)
            raise
        if number is None or (before is not None and number <= before):
            # The source would drop messages that no broker has.
            raise Failure(
                f"{self.target.address} does not confirm that it has stored messages of {topic}.",
                ExitCode.PARTIAL,
            )
        self._batch_bytes = min(2 * self._batch_bytes, self._most_bytes)
        return True

    def _check_memory(self, topic: str, status: Move, stream: MoveStream, number: int | None) -> None:
        """Raise Failure if the target may have forgotten the stream."""
        known: int | None = stream["moved"]
        is_old = stream["begun"] and time.time_ns() - status["began_ns"] > _REMEMBERED_NS
        if self.force:
            return
        name = topic if stream["channel"] is None else f"{topic}/{stream['channel']}"
        if number is None and (known is not None or is_old):
            raise Failure(
                f"{self.target.address} does not know how far the move of {name} is: its topic was deleted or restored "
                "from a backup, or the move has rested for more than an hour. The last messages may be there already. "
                "To continue all the same, and possibly store them twice, use --force.",
                ExitCode.PARTIAL,
            )
        # Messages that were left out count as moved: older than `ttl_ms`, or, which is rare, damaged.
        if number is not None and known is not None and number < known and not self._expires(topic):
            raise Failure(
                f"{self.target.address} had more messages of {name} than it has now: it was restored from a backup, or "
                "the address is of another broker now. The messages that it had are no longer on "
                f"{self.source.address}. To move the rest all the same, use --force.",
                ExitCode.PARTIAL,
            )

    def _expires(self, topic: str) -> bool:
        found = self.source.make(api.settings(topic))
        return bool(found.get("ttl_ms"))

    def _what_holds(self, topic: str, stream: MoveStream) -> str:
        """Return why a stream cannot begin: who has its messages in flight."""
        name = f"{topic}/{stream['channel']}"
        if stream["withdrawn"]:
            where = stream["dead_letter_topic"] or "no topic"
            return f"{name}: {stream['withdrawn']:,} on the way to dead-letter topic {where}"
        stats = self.source.make(api.stats(topic, stream["channel"], clients=True))
        channels = [channel for found in stats["topics"] for channel in found["channels"]]
        holders = [
            f"{client.get('client_id')} at {client.get('remote_address')}"
            for channel in channels
            for client in channel["clients"]
            if client.get("in_flight_count")
        ]
        count = sum(channel["in_flight_count"] for channel in channels)
        more = f" and {len(holders) - 2} more" if len(holders) > 2 else ""
        return f"{name}: {count:,} in flight to {', '.join(holders[:2])}{more}"

    # ------------------------------------------------------------------ time and errors

    def _count(self, messages: int) -> None:
        self.progress.record_moved(messages, time.monotonic())
        self._failing_since_s = None
        self._show()
        self._check_time()

    def _show(self, *, now: bool = False) -> None:
        now_s = time.monotonic()
        if now or now_s - self._shown_s >= _SHOW_S:
            self._shown_s = now_s
            self.show(self.progress)

    def _sleep(self) -> None:
        self._check_time()
        time.sleep(_RETRY_S)

    def _check_time(self) -> None:
        if self.deadline_s is not None and time.monotonic() >= self.deadline_s:
            raise TimedOut

    def _recover(self, error: Error) -> None:
        """Wait after an error that may pass, and ask both brokers again how far they are.

        Raises the failure if the error stays.
        """
        self._moved.clear()
        self._created.clear()
        passes = isinstance(error, BrokerUnreachable) or error.status == 503 or code_of(error) == "NO_CHANNEL"
        if self._failing_since_s is None:
            self._failing_since_s = time.monotonic()
        if not passes or time.monotonic() - self._failing_since_s > PATIENCE_S:
            failure = failure_of(error)
            if not self.begun:
                raise failure
            raise Failure(
                f"The move has stopped: {failure.brief} Nothing is lost: continue with the same command, or end the "
                f"move with {stop_command(self.source.address)}.",
                ExitCode.PARTIAL,
            )
        self.progress.waits_for = failure_of(error).brief.rstrip(".")
        self._show(now=True)
        self._sleep()


def moving_topics(stats: Stats) -> list[str]:
    """Return the topics whose moves have begun and not ended, from the source's `/stats`."""
    return [topic["topic_name"] for topic in stats["topics"] if topic.get("moving_to")]


def end_moves(
    source: AdminClient, connect: Callable[[str], AdminClient], topics: list[str], *, force: bool
) -> list[str]:
    """End the moves of these topics of the source: what a target does not have stays, and is delivered here again.

    Args:
        connect: Returns the client of a target.
        force: End a move also if its target does not answer: the last messages may be on both brokers.

    Returns:
        The topics whose moves were ended.

    Raises Failure: a target does not answer, or a broker refused.
    """
    ended = []
    for topic in topics:
        status = source.make(api.move_of(topic))
        if status is None:
            continue
        for stream in status["streams"]:
            try:
                target = connect(status["to"])
                number = target.make(api.store_moved(topic, stream["producer"], close=True))
            except (RequestRefused, BrokerUnreachable) as error:
                if code_of(error) == "TOPIC_NOT_FOUND":
                    continue  # it has no message
                if force:
                    print_diagnostic(f"Warning: {topic}: {failure_of(error).brief}")
                    continue
                raise Failure(
                    f"Topic {topic} is being moved to {status['to']}, which has to say what it has: "
                    f"{failure_of(error).brief} To end the move without it, and possibly deliver messages twice, use "
                    "--force.",
                    ExitCode.PARTIAL,
                ) from error
            if number is not None:
                next_batch(source, topic, status["move"], stream["channel"], number, 1)
        source.make(api.end_move(topic, status["move"], cancel=True))
        ended.append(topic)
    return ended
