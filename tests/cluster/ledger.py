"""A ledger of what a cluster has acknowledged and delivered, as its clients saw it. It is outside the cluster.

Messages are numbered for each producer; a retry has new numbers, except a retry of an idempotent batch. What is
acknowledged is in a file before it counts. Memory is bounded by about 230 bytes for each message: a run may have ten
million of them.

Times are seconds of `time.monotonic`. No time is compared with a limit: the checks are about the order of events.
"""

import re
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from struct import Struct
from typing import NamedTuple

import trio

from faults.ledger import body_of

PRODUCER_NUMBERS = 10_000_000
"""How many messages one producer can send."""
_ENTRY = Struct(">QIdd")
_TURN = 2000
_ROOM = 1024
"""So many places for messages are added at a time."""


class Answer(NamedTuple):
    """An OK.

    Attributes:
        sent_s, at_s: When the command was sent, and when its OK was read.
        served_by: Returns the member that has answered; it may be known later only. Empty: unknown.
    """

    sent_s: float
    at_s: float
    served_by: Callable[[], str]

    @property
    def server(self) -> str:
        """The member that has answered."""
        return self.served_by()


@dataclass(slots=True, eq=False)
class Attachment:
    """A consumer's connection.

    Attributes:
        server: The member that serves it.
        ended_s: When it ended; None: it is open.
        read_until_s: The server has read all answers that were sent before this time; 0: unknown.
    """

    server: Callable[[], str]
    ended_s: float | None = None
    read_until_s: float = 0.0


@dataclass(slots=True)
class _Last:
    """The last delivery of a message in a channel, and its FIN."""

    by: Attachment
    at_s: float
    attempts: int
    finished_s: float | None = None
    is_requeued: bool = False


class _Again(NamedTuple):
    """A delivery of a message that had been delivered before.

    Attributes:
        is_durable: Its FIN was stored by all members in sync.
        before: The delivery before; None: it was finished, durably.
        ended_s: When the connection of that one had ended; None: it was open.
        now: The delivery.
    """

    number: int
    is_durable: bool
    before: _Last | None
    ended_s: float | None
    now: _Last

    def __str__(self) -> str:
        told = f"delivered by {self.now.by.server()} at {self.now.at_s:.3f} (attempt {self.now.attempts})"
        if self.before is None:
            return told
        finished = f"; FIN at {self.before.finished_s:.3f}" if self.before.finished_s is not None else ""
        ended = f"; its connection ended at {self.ended_s:.3f}" if self.ended_s is not None else ""
        return (
            f"{told}, before by {self.before.by.server()} at {self.before.at_s:.3f} (attempt {self.before.attempts})"
            f"{finished}{ended}"
        )


class LogEntry(NamedTuple):
    """A message in the log of a topic."""

    sequence: int
    id: str
    timestamp_ns: int
    body: bytes


@dataclass
class Epochs:
    """Who led which epoch, as the coordinator said.

    Attributes:
        leaders: The members that were said to lead each epoch; more than one is wrong.
        absent_s: When each epoch did not exist yet, for certain.
        seen_s: When each epoch was seen first.
        names: The members that have run on each data folder, by its id, if their names are not these ids.
        wrong: What contradicts the rules.
    """

    leaders: dict[int, set[str]] = field(default_factory=dict)
    absent_s: dict[int, float] = field(default_factory=dict)
    seen_s: dict[int, float] = field(default_factory=dict)
    names: dict[str, set[str]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    _highest: int = 0
    _asked_s: float = 0.0

    def see(self, epoch: int, leader: str, in_sync: Iterable[str], asked_s: float) -> None:
        """Record an answer of the coordinator to a question that was asked at a time."""
        if epoch < self._highest:
            self.wrong.append(f"epoch {epoch} follows epoch {self._highest}")
            return
        if leader not in in_sync:
            self.wrong.append(f"epoch {epoch}: the leader {leader} is not in sync")
        if epoch > self._highest:
            self.absent_s[epoch] = self._asked_s
            self.seen_s[epoch] = time.monotonic()
        self.leaders.setdefault(epoch, set()).add(leader)
        self._highest, self._asked_s = epoch, asked_s

    def judge(self, answers: Iterable[Answer]) -> list[str]:
        """Return what is wrong: two leaders of an epoch, or OKs of a member whose epoch was over.

        Each OK needs an epoch of its member, such that an OK that was asked for after another one has no earlier
        epoch. The lowest possible epochs are tried: if these do not fit, none do.
        """
        wrong = list(self.wrong)
        for epoch, members in self.leaders.items():
            if len(members) > 1:
                wrong.append(f"epoch {epoch} had the leaders {', '.join(sorted(members))}")
        led: dict[str, list[int]] = defaultdict(list)
        for epoch in sorted(self.leaders):
            for leader in self.leaders[epoch]:
                for name in self.names.get(leader, {leader}):
                    led[name].append(epoch)
        by_sent = sorted((each for each in answers if each.server), key=lambda each: each.sent_s)
        pending = sorted(by_sent, key=lambda each: each.at_s)
        assigned: dict[int, int] = {}
        floor, done = 0, 0
        for answer in by_sent:
            while done < len(pending) and pending[done].at_s < answer.sent_s:
                floor = max(floor, assigned.get(id(pending[done]), 0))
                done += 1
            possible = [
                epoch
                for epoch in led[answer.server]
                if epoch >= floor and self.absent_s.get(epoch, 0.0) <= answer.at_s
            ]
            if possible:
                assigned[id(answer)] = possible[0]
            else:
                wrong.append(
                    f"{answer.server} answered OK at {answer.at_s:.3f} to a publish of {answer.sent_s:.3f}, when epoch "
                    f"{floor} had answered already; it led {led[answer.server]}"
                )
        return wrong

    def began_between(self, from_s: float, until_s: float) -> bool:
        """Whether an epoch may have begun between two times."""
        return any(
            self.absent_s.get(epoch, 0.0) <= until_s and self.seen_s[epoch] >= from_s
            for epoch in self.leaders
        )


@dataclass
class Verdict:
    """The result of a run.

    Attributes:
        acknowledged, copies, lost: Messages; of these, copies in channels; and copies or messages that are missing.
        delivered: Copies that were delivered, each one counted once; also of messages without an OK.
        epochs: How many there were.
        durable: Copies whose FIN all members in sync had stored for certain, before a later fault.
        again: Deliveries after the first one.
        forgotten: Of these, after a FIN that a failover has undone.
        oldest_forgotten_s: The longest time between such a FIN and the end of the connection.
        wrong: All violated guarantees, as sentences.
    """

    acknowledged: int = 0
    copies: int = 0
    lost: int = 0
    delivered: int = 0
    epochs: int = 0
    durable: int = 0
    again: int = 0
    forgotten: int = 0
    oldest_forgotten_s: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def described(self) -> str:
        """Return what is wrong: some sentences of each kind, which are the same but for numbers and bodies."""
        kinds: dict[str, list[str]] = defaultdict(list)
        for sentence in self.wrong:
            kinds[re.sub(r"[0-9a-f]*\d[0-9a-f.]*|b'.*'", "_", sentence)].append(sentence)
        lines = [
            f"{len(found)} times:\n  " + "\n  ".join(each[:500] for each in found[:4])
            for found in kinds.values()
        ]
        return f"{len(self.wrong)} wrong:\n" + "\n".join(lines[:20])

    def __str__(self) -> str:
        return (
            f"{self.acknowledged:,} messages acknowledged, {self.copies:,} copies in channels: {self.lost:,} lost, "
            f"{self.delivered:,} delivered over {self.epochs} epochs, {self.again:,} delivered again, "
            f"{self.forgotten:,} of these after their FIN (oldest {self.oldest_forgotten_s:.2f} s before the end of "
            f"its connection); {self.durable:,} FINs were stored for certain"
        )


class Producer:
    """The numbers of one producer.

    Args:
        ledger: The ledger.
        number: Counts producers from 0.
        topic: The topic of all its messages.
        body: Returns the body of a message.
    """

    def __init__(self, ledger: "Ledger", number: int, topic: str, body: Callable[[int], bytes]) -> None:
        self._ledger = ledger
        self.index = number
        self.topic = topic
        self.body = body
        self.first = number * PRODUCER_NUMBERS
        self.sent = 0
        self.commands: array[int] = array("Q")  # where each command begins
        self.acknowledged = bytearray()
        self.acknowledged_count = 0

    def take(self, count: int) -> range:
        """Return new numbers, for one command."""
        assert self.sent + count <= PRODUCER_NUMBERS
        start = self.first + self.sent
        self.commands.append(start)
        self.sent += count
        self.acknowledged += bytes(count)
        self._ledger.notify()
        return range(start, start + count)

    def acknowledge(self, numbers: range, sent_s: float, served_by: Callable[[], str]) -> None:
        """Record an OK."""
        at_s = time.monotonic()
        self._ledger.store(_ENTRY.pack(numbers.start, len(numbers), sent_s, at_s))
        at = numbers.start - self.first
        self.acknowledged[at : at + len(numbers)] = b"\1" * len(numbers)
        self.acknowledged_count += len(numbers)
        self._ledger.add_answer(Answer(sent_s, at_s, served_by), len(numbers))


class Ledger:
    """All actions and observations of the clients.

    Args:
        file: Gets what is acknowledged, before it counts.

    Attributes:
        answers: All OKs.
        acknowledged: The number of messages.
        deliveries: How often each member has delivered.
        refusals: The refused publishes, by the error.
        topics: Whether each topic exists that was created or deleted; None: unknown.
    """

    def __init__(self, file: Path) -> None:
        self.answers: list[Answer] = []
        self.acknowledged = 0
        self.deliveries: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.topics: dict[str, bool | None] = {}
        self.producers: list[Producer] = []
        self.channels: dict[tuple[str, str], Channel] = {}
        self._file = file.open("ab", buffering=0)
        self._wrong: list[str] = []
        self._changed = trio.Event()

    def close(self) -> None:
        self._file.close()

    @property
    def sent(self) -> int:
        """The number of messages that were sent."""
        return sum(producer.sent for producer in self.producers)

    def new_producer(self, topic: str, body: Callable[[int], bytes] = body_of) -> Producer:
        producer = Producer(self, len(self.producers), topic, body)
        self.producers.append(producer)
        return producer

    def producers_of(self, topic: str) -> list[Producer]:
        """Return the producers of a topic."""
        return [producer for producer in self.producers if producer.topic == topic]

    def acknowledged_in(self, topic: str) -> int:
        """Return how many messages of a topic are acknowledged."""
        return sum(producer.acknowledged_count for producer in self.producers_of(topic))

    def channel(self, topic: str, name: str) -> "Channel":
        return self.channels.setdefault((topic, name), Channel(self, topic, name))

    def store(self, entry: bytes) -> None:
        self._file.write(entry)

    def add_answer(self, answer: Answer, messages: int) -> None:
        self.answers.append(answer)
        self.acknowledged += messages
        self.notify()

    def waiting_in(self, topic: str) -> int:
        """Return how many acknowledged messages of a topic the slowest channel has not delivered."""
        delivered = [channel.delivered for channel in self.channels.values() if channel.topic == topic]
        return self.acknowledged_in(topic) - min(delivered, default=0)

    def complain(self, sentence: str) -> None:
        """Record an error that is not about a message."""
        self._wrong.append(sentence)

    def delivered(self, by: Attachment, count: int) -> None:
        """Record how many messages came at once."""
        self.deliveries[by.server()] += count
        self.notify()

    def notify(self) -> None:
        """Wake up those that wait for something in the ledger."""
        changed, self._changed = self._changed, trio.Event()
        changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something holds; it may change with each OK and each delivery."""
        while not condition():
            await self._changed.wait()

    def find(self, topic: str, body: bytes) -> int:
        """Return the number of a message; -1 if no client has sent it to this topic."""
        try:
            number = int(body[:9])
        except ValueError:
            return -1
        index = number // PRODUCER_NUMBERS
        if not 0 <= index < len(self.producers):
            return -1
        producer = self.producers[index]
        is_sent = number - producer.first < producer.sent
        return number if is_sent and producer.topic == topic and body == producer.body(number) else -1

    # ------------------------------------------------------------------ judgement

    def judge(
        self,
        logs: Mapping[str, "Log"],
        epochs: Epochs | None,
        topics: Collection[str] | None = None,
    ) -> Verdict:
        """Return the verdict, after all channels are empty.

        Args:
            logs: The whole log of each topic, as the last leader has it; without those that do not keep it.
            epochs: None: unknown.
            topics: Those that exist; None: unknown.
        """
        verdict = Verdict(self.acknowledged)
        verdict.wrong += self._wrong
        if epochs is not None:
            verdict.epochs = len(epochs.leaders)
            verdict.wrong += epochs.judge(self.answers)
        for name, exists in self.topics.items() if topics is not None else ():
            if exists is not None and (name in (topics or ())) is not exists:
                verdict.wrong.append(
                    f"{name}: the topic was {'created' if exists else 'deleted'}, and is not"
                )
        for log in logs.values():
            log.judge(verdict)
        for channel in self.channels.values():
            channel.judge(verdict, logs.get(channel.topic), epochs)
        return verdict


class _Seen:
    """The ids and timestamps of the messages of a producer, by their place among its numbers; an id of 0: none."""

    def __init__(self) -> None:
        self.ids = array("Q")
        self.stamps = array("q")

    def widen(self, size: int) -> None:
        """Make room for the first numbers of the producer."""
        if size > len(self.ids):
            self.extend(max(size - len(self.ids), _ROOM))

    def extend(self, more: int) -> None:
        self.ids.frombytes(bytes(8 * more))
        self.stamps.frombytes(bytes(8 * more))


class _InLog(_Seen):
    """What the log of a topic has of a producer."""

    def __init__(self) -> None:
        super().__init__()
        self.sequences = array("Q")

    def extend(self, more: int) -> None:
        super().extend(more)
        self.sequences.frombytes(bytes(8 * more))


class Log:
    """The log of a topic, from its first entry to its last one.

    Args:
        ledger: Says which messages were published.
        topic: The topic.
    """

    def __init__(self, ledger: Ledger, topic: str) -> None:
        self.topic = topic
        self._ledger = ledger
        self._found: dict[int, _InLog] = defaultdict(_InLog)
        self._ids = array("Q")
        self._last: int | None = None
        self._wrong: list[str] = []

    def add(self, entries: Iterable[LogEntry]) -> None:
        """Take the next entries."""
        for entry in entries:
            if self._last is not None and entry.sequence != self._last + 1:
                self._wrong.append(f"{self.topic}: sequence {entry.sequence} follows {self._last}")
            self._last = entry.sequence
            message_id = int(entry.id, 16)
            self._ids.append(message_id)
            number = self._ledger.find(self.topic, entry.body)
            if number < 0:
                self._wrong.append(
                    f"{self.topic}: sequence {entry.sequence} has {entry.body!r}, which was not published"
                )
                continue
            index, at = divmod(number, PRODUCER_NUMBERS)
            found = self._found[index]
            found.widen(at + 1)
            if found.ids[at]:
                self._wrong.append(
                    f"{self.topic}: message {number} has the sequences {found.sequences[at]} and {entry.sequence}"
                )
            found.ids[at], found.stamps[at] = message_id, entry.timestamp_ns
            found.sequences[at] = entry.sequence

    def of(self, producer: Producer) -> _InLog:
        """Return what the log has of a producer."""
        found = self._found[producer.index]
        found.widen(producer.sent)
        return found

    def judge(self, verdict: Verdict) -> None:
        """Add what is wrong with the log itself."""
        verdict.wrong += self._wrong
        ids = sorted(self._ids)
        verdict.wrong += [
            f"{self.topic}: the log has the id {one:016x} twice"
            for one, other in pairwise(ids)
            if one == other
        ]
        for producer in self._ledger.producers_of(self.topic):
            self._judge_producer(verdict, producer)

    def _judge_producer(self, verdict: Verdict, producer: Producer) -> None:
        ids = self.of(producer).ids
        for at, is_acknowledged in enumerate(producer.acknowledged):
            if is_acknowledged and not ids[at]:
                verdict.lost += 1
                verdict.wrong.append(
                    f"{producer.topic}: message {producer.first + at} is lost: the log does not have it"
                )
        for start, end in pairwise([*producer.commands, producer.first + producer.sent]):
            missing = ids[start - producer.first : end - producer.first].count(0)
            if 0 < missing < end - start:
                verdict.wrong.append(
                    f"{producer.topic}: the log has {end - start - missing} of the {end - start} messages of one "
                    f"command from {start} on"
                )


class _Kept(_Seen):
    """What is kept for good about the messages of a producer in a channel."""

    def __init__(self) -> None:
        super().__init__()
        self.is_durable = bytearray()

    def extend(self, more: int) -> None:
        super().extend(more)
        self.is_durable += bytes(more)


class Channel:
    """The deliveries of a channel. Every message is finished by the consumers."""

    def __init__(self, ledger: Ledger, topic: str, name: str) -> None:
        self.topic, self.name = topic, name
        self.delivered = 0
        self._ledger = ledger
        self._kept: dict[int, _Kept] = defaultdict(_Kept)
        self._last: dict[int, _Last] = {}  # without those that are durable
        self._again: list[_Again] = []
        self._wrong: list[str] = []

    def deliver(self, body: bytes, message_id: bytes, attempts: int, stamp_ns: int, by: Attachment) -> int:
        """Record a delivery; returns the message's number, or -1 if no client has sent it."""
        number = self._ledger.find(self.topic, body)
        if number < 0:
            self._wrong.append(f"{self}: {body!r} was not published there")
            return number
        now = _Last(by, time.monotonic(), attempts)
        kept, at = self._place(number)
        found = int(message_id, 16), stamp_ns
        if not kept.ids[at]:
            self.delivered += 1
            kept.ids[at], kept.stamps[at] = found
        else:
            known = kept.ids[at], kept.stamps[at]
            if known != found:
                self._wrong.append(f"{self}: message {number}: id and timestamp were {known}, are {found}")
            before = self._last.get(number)
            ended_s = None if before is None else before.by.ended_s
            self._again.append(_Again(number, bool(kept.is_durable[at]), before, ended_s, now))
        self._last[number] = now
        return number

    def finish(self, number: int) -> None:
        """Record that a FIN is sent."""
        self._last[number].finished_s = time.monotonic()

    def requeue(self, number: int) -> None:
        """Record that a REQ is sent."""
        self._last[number].is_requeued = True

    async def settle(self, attachments: Collection[Attachment]) -> None:
        """Record that all members in sync have stored the FINs of these connections, which have ended.

        These must never be forgotten.
        """
        for count, (number, last) in enumerate(list(self._last.items())):
            if count % _TURN == 0:
                await trio.lowlevel.checkpoint()  # links must not stall meanwhile
            if self._last.get(number) is last and (
                last.finished_s is not None
                and last.by in attachments
                and last.finished_s <= last.by.read_until_s
            ):
                kept, at = self._place(number)
                kept.is_durable[at] = 1
                del self._last[number]

    def _place(self, number: int) -> tuple[_Kept, int]:
        index, at = divmod(number, PRODUCER_NUMBERS)
        kept = self._kept[index]
        kept.widen(at + 1)
        return kept, at

    def judge(self, verdict: Verdict, log: Log | None, epochs: Epochs | None) -> None:
        """Add what is wrong with this channel, after it is empty; None: the log was not kept."""
        verdict.delivered += self.delivered
        verdict.again += len(self._again)
        verdict.wrong += self._wrong
        for again in self._again:
            if reason := self._judge_again(verdict, again, epochs):
                verdict.wrong.append(f"{self}: message {again.number}, {again}: {reason}")
        verdict.copies += self._ledger.acknowledged_in(self.topic)
        for producer in self._ledger.producers_of(self.topic):
            self._judge_producer(verdict, producer, None if log is None else log.of(producer))

    def _judge_again(self, verdict: Verdict, again: _Again, epochs: Epochs | None) -> str:
        """Return why a message must not have been delivered again; empty: it is explained."""
        before, now = again.before, again.now
        if again.is_durable or before is None:
            return "all members in sync had stored its FIN"
        if before.is_requeued:
            return ""
        is_over = again.ended_s is not None
        failed_over = before.by.server() != now.by.server()
        if before.finished_s is None:
            return "" if is_over or failed_over else "its consumer was connected and had not answered"
        if not (is_over or failed_over):
            return "the connection had not ended"
        was_read = before.finished_s <= before.by.read_until_s and not failed_over
        if was_read and epochs is not None and not epochs.began_between(before.finished_s, now.at_s):
            return "the server had read its FIN, and led all the time"
        verdict.forgotten += 1
        age_s = (now.at_s if again.ended_s is None else again.ended_s) - before.finished_s
        verdict.oldest_forgotten_s = max(verdict.oldest_forgotten_s, age_s)
        return ""

    def _judge_producer(self, verdict: Verdict, producer: Producer, log: _InLog | None) -> None:
        kept = self._kept[producer.index]
        kept.widen(producer.sent)
        verdict.durable += kept.is_durable.count(1)
        for at, is_acknowledged in enumerate(producer.acknowledged):
            known = kept.ids[at], kept.stamps[at]
            stored = known if log is None else (log.ids[at], log.stamps[at])
            if not (stored[0] or (log is None and is_acknowledged)):
                if known[0]:
                    verdict.wrong.append(
                        f"{self}: message {producer.first + at} was delivered, and the log does not have it"
                    )
                continue
            number = producer.first + at
            last = self._last.get(number)
            if last.finished_s is None if last is not None else not kept.is_durable[at]:
                verdict.lost += 1
                what = "was not finished" if last is not None else "was never delivered"
                where = "" if log is None else f"; the log has {stored}"
                verdict.wrong.append(f"{self}: message {number} {what}{where}")
            elif known != stored:
                verdict.wrong.append(
                    f"{self}: message {number} was delivered as {known}; the log has {stored}"
                )

    def __str__(self) -> str:
        return f"{self.topic}/{self.name}"
