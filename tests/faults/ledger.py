"""A ledger of a broker's acknowledgements and deliveries, as its clients saw them, and the comparison of both.

The ledger is outside the broker and survives it. Times are Unix nanoseconds, by the broker's clock.
A *life* is a run of the broker, counted from 0.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

MS = 1_000_000
SECOND = 1000 * MS

_CLOCK_TOLERANCE_NS = 5 * MS
_SAVING_TAKES_NS = 2 * SECOND
"""Maximum delay, on a busy machine, of the checkpoint that includes a FIN."""
_FILLING = bytes(range(256)) * 4
_MAX_BODY_BYTES = 600


def body_of(number: int) -> bytes:
    """Return the body of a message by its number, which also determines its size of 10 to 600 bytes."""
    size = 10 + number * 7919 % (_MAX_BODY_BYTES - 10)
    start = number % 256
    return (b"%09d " % number + _FILLING[start : start + size])[:size]


class ChannelName(NamedTuple):
    """A channel and its topic."""

    topic: str
    channel: str


@dataclass(slots=True)
class Published:
    """A message that a client sent.

    Attributes:
        number: See `body_of`.
        sent_ns: Before the first byte was sent.
        due_ns: The earliest delivery; 0 is at once.
        command: All messages of one command have the same; they are stored all or none.
        acknowledged_ns: When the OK was read; None if it was not.
    """

    number: int
    topic: str
    sent_ns: int
    due_ns: int
    command: int
    acknowledged_ns: int | None = None


class Act(Enum):
    """The events of a message in a channel."""

    DELIVERED = auto()
    FINISHED = auto()
    REQUEUED = auto()
    REFUSED = auto()
    """The broker refused a FIN, REQ or TOUCH that was too late."""
    LEFT = auto()
    """The consumer that held it disconnected, or the broker stopped."""


@dataclass(slots=True)
class Event:
    """An event of a message in a channel.

    Attributes:
        due_ns: The earliest redelivery of a requeued message.
        sent_ns: The earliest time at which the broker can have sent a delivered message.
    """

    act: Act
    at_ns: int
    life: int
    attempts: int = 0
    due_ns: int = 0
    sent_ns: int = 0


@dataclass(slots=True)
class Drop:
    """A request that drops a channel's messages: emptying or deleting the channel or its topic.

    Attributes:
        sent_ns: Before the request.
        done_ns: When the answer was read; None if there was none: then its effect is unknown.
    """

    sent_ns: int
    done_ns: int | None = None


@dataclass(slots=True)
class Setting:
    """A state (exists, is paused): the last known value, and a requested one.

    Attributes:
        value: The last acknowledged value.
        asked: The value of an unanswered request; None if there is none.
    """

    value: bool
    asked: bool | None = None

    def allows(self, value: bool) -> bool:
        """Whether a broker may report this value now."""
        return value == self.value or value == self.asked


@dataclass(slots=True)
class Verdict:
    """The result of a run.

    Attributes:
        kills: Lives that did not end cleanly.
        acknowledged: Messages.
        copies: Of acknowledged messages, one for each channel that had to deliver it.
        lost: Copies that were not delivered, or not redelivered after a consumer had not finished them.
        again: Copies that were delivered again after their FIN.
        again_unexplained: Those of them that neither a crash shortly after the FIN nor a late FIN explains.
        early: Deliveries of deferred or requeued messages before their time.
        wrong: All violated guarantees, as sentences.
    """

    kills: int
    acknowledged: int = 0
    copies: int = 0
    lost: int = 0
    again: int = 0
    again_unexplained: int = 0
    early: int = 0
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.kills} kills: {self.acknowledged:,} messages acknowledged, {self.copies:,} copies in channels: "
            f"{self.lost:,} lost, {self.again:,} delivered again after their FIN, {self.early:,} before their time"
        )


class Ledger:
    """All actions and observations of the clients.

    Args:
        checkpoint_interval_ns: Messages finished within this time before a crash may be delivered again.
        msg_timeout_ns: The consumers' message timeout.

    Attributes:
        published: By number.
        channels: The time from which a channel must get published messages: 0: from the beginning of its
            topic.
        topics, paused: Expected topics and paused states after a restart.
        kills: When each life ended; None for a clean end.
    """

    def __init__(self, checkpoint_interval_ns: int, msg_timeout_ns: int) -> None:
        self.published: dict[int, Published] = {}
        self.channels: dict[ChannelName, int] = {}
        self.topics: dict[str, Setting] = {}
        self.paused: dict[ChannelName, Setting] = {}
        self.drops: dict[ChannelName, list[Drop]] = defaultdict(list)
        self.kills: list[int | None] = []
        self.acknowledged = 0
        self._window_ns = checkpoint_interval_ns + _SAVING_TAKES_NS
        self._msg_timeout_ns = msg_timeout_ns
        self._events: dict[ChannelName, dict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
        self._departures: dict[ChannelName, list[int]] = defaultdict(list)
        self._ids: dict[bytes, int] = {}
        self._numbers: dict[
            tuple[str, bytes], int
        ] = {}  # the same for a broker whose ids repeat between topics
        self._seen: dict[int, tuple[bytes, int]] = {}  # id and timestamp, by number
        self._commands = 0
        self._wrong: list[str] = []

    @property
    def life(self) -> int:
        """The current life."""
        return len(self.kills)

    # ------------------------------------------------------------------ entries

    def send(self, topic: str, count: int, sent_ns: int, defer_ns: int = 0) -> list[Published]:
        """Record the new messages of one command."""
        self._commands += 1
        start = len(self.published)
        due_ns = sent_ns + defer_ns if defer_ns else 0
        new = [Published(start + n, topic, sent_ns, due_ns, self._commands) for n in range(count)]
        self.published.update((one.number, one) for one in new)
        return new

    def acknowledge(self, messages: Iterable[Published], at_ns: int) -> None:
        """Record an OK."""
        for message in messages:
            message.acknowledged_ns = at_ns
            self.acknowledged += 1

    def deliver(
        self,
        name: ChannelName,
        body: bytes,
        message_id: bytes,
        attempts: int,
        stamp_ns: int,
        *,
        sent_ns: int,
        at_ns: int,
    ) -> int:
        """Record a delivery; returns the message's number, or -1 if no client has sent it.

        Args:
            sent_ns: When the consumer had last read everything that was sent to it. On a busy machine that is long
                before `at_ns`: then messages are sent again before their answers arrive.
        """
        number = int(body[:9]) if body[:9].isdigit() else -1
        message = self.published.get(number)
        if message is None or body != body_of(number) or message.topic != name.topic:
            self._wrong.append(f"{name}: {body!r} was not published there")
            return -1
        known = self._seen.setdefault(number, (message_id, stamp_ns))
        if known != (message_id, stamp_ns):
            self._wrong.append(
                f"message {number}: id and timestamp were {known}, are {(message_id, stamp_ns)}"
            )
        self._numbers[name.topic, message_id] = number
        if self._ids.setdefault(message_id, number) != number:
            self._wrong.append(f"id {message_id!r} is of messages {self._ids[message_id]} and {number}")
        self._note(name, number, Event(Act.DELIVERED, at_ns, self.life, attempts, sent_ns=sent_ns))
        return number

    def answer(self, name: ChannelName, number: int, act: Act, at_ns: int, delay_ns: int = 0) -> None:
        """Record a consumer's answer, a refused answer, or a disconnect with the message in flight."""
        self._note(name, number, Event(act, at_ns, self.life, due_ns=at_ns + delay_ns if delay_ns else 0))

    def depart(self, name: ChannelName, held: Iterable[int], at_ns: int) -> None:
        """Record that a consumer disconnected with these messages unanswered."""
        self._departures[name].append(at_ns)
        for number in held:
            self.answer(name, number, Act.LEFT, at_ns)

    def number_of(self, name: ChannelName, message_id: bytes) -> int:
        """Return the number of the message with this id, which was delivered before."""
        return self._numbers[name.topic, message_id]

    def _note(self, name: ChannelName, number: int, event: Event) -> None:
        self._events[name][number].append(event)

    def complain(self, sentence: str) -> None:
        """Record an error that is not about a message."""
        self._wrong.append(f"life {self.life}: {sentence}")

    # ------------------------------------------------------------------ judgement

    def judge(self, *, ids_unique: bool = True) -> Verdict:
        """Return the verdict after every channel has been drained.

        Args:
            ids_unique: Whether ids and timestamps are checked; not for nsqd, whose ids repeat between topics.
        """
        verdict = Verdict(sum(killed is not None for killed in self.kills), self.acknowledged)
        verdict.wrong += [
            text for text in self._wrong if ids_unique or not text.startswith(("id ", "message "))
        ]
        by_topic: dict[str, list[Published]] = defaultdict(list)
        for message in self.published.values():
            by_topic[message.topic].append(message)
        for name, since_ns in self.channels.items():
            commands: dict[int, list[Published]] = defaultdict(list)
            for message in by_topic[name.topic]:
                if self._excused(name, message, since_ns):
                    continue
                commands[message.command].append(message)
                if message.acknowledged_ns is not None:
                    verdict.copies += 1
                    self._judge_loss(verdict, name, message)
            for together in commands.values():
                came = [message for message in together if message.number in self._events[name]]
                if 0 < len(came) < len(together):
                    verdict.wrong.append(f"{name}: {len(came)} of {len(together)} messages of one MPUB came")
        for name, histories in self._events.items():
            for number, events in histories.items():
                self._judge_history(verdict, name, self.published[number], events)
        return verdict

    def _excused(self, name: ChannelName, message: Published, since_ns: int) -> bool:
        """Whether the channel may omit the message: published before the channel, or dropped on request."""
        if message.sent_ns < since_ns:
            return True
        return any(drop.done_ns is None or message.sent_ns <= drop.done_ns for drop in self.drops[name])

    def _judge_loss(self, verdict: Verdict, name: ChannelName, message: Published) -> None:
        events = self._events[name].get(message.number, [])
        if not any(event.act is Act.FINISHED for event in events):
            verdict.lost += 1
            verdict.wrong.append(f"{name}: {message} is lost; {self._told(events)}")

    def _judge_history(
        self, verdict: Verdict, name: ChannelName, message: Published, events: list[Event]
    ) -> None:
        def wrong(what: str) -> None:
            verdict.wrong.append(f"{name}: {what}: {message}; {self._told(events)}")

        deliveries = [index for index, event in enumerate(events) if event.act is Act.DELIVERED]
        for count, index in enumerate(deliveries, 1):
            event = events[index]
            if event.at_ns < message.due_ns - _CLOCK_TOLERANCE_NS:
                verdict.early += 1
                wrong("deferred, and came early")
            for drop in self.drops[name]:
                acknowledged = message.acknowledged_ns is not None and message.acknowledged_ns < drop.sent_ns
                if acknowledged and drop.done_ns is not None and drop.done_ns < event.at_ns:
                    wrong("dropped on request, and delivered again")
            hidden = sum(
                self._unread(message, events, at_ns)
                for at_ns in self._departures[name]
                if at_ns <= event.at_ns
            )
            if not 1 <= event.attempts <= count + hidden:
                wrong(f"attempts of {event.attempts}")
            if count > 1:
                before = events[deliveries[count - 2]]
                if before.life == event.life and before.attempts >= event.attempts:
                    wrong("attempts do not rise")
                answers = events[deliveries[count - 2] + 1 : index]
                self._judge_repetition(verdict, before, answers, event, events, wrong)

    def _unread(self, message: Published, events: list[Event], departed_ns: int) -> int:
        """How often a broker may have sent a message that the departing consumer had not read.

        A consumer on a busy machine reads so late that the message was sent again each time its time was out.
        """
        known_ns = max([message.sent_ns, *(each.at_ns for each in events if each.at_ns < departed_ns)])
        return 1 + max(0, departed_ns - known_ns) // self._msg_timeout_ns

    def _judge_repetition(
        self,
        verdict: Verdict,
        before: Event,
        answers: list[Event],
        event: Event,
        events: list[Event],
        wrong: Callable[[str], None],
    ) -> None:
        finished = [answer for answer in answers if answer.act is Act.FINISHED]
        refused = any(answer.act is Act.REFUSED for answer in events)

        def explained(answer: Event) -> bool:
            late = answer.at_ns - before.sent_ns > self._msg_timeout_ns / 2
            return late or refused or self._forgotten(answer, event)

        for answer in answers:
            early = answer.act is Act.REQUEUED and event.at_ns < answer.due_ns - _CLOCK_TOLERANCE_NS
            if early and not explained(answer):
                verdict.early += 1
                wrong("requeued with a delay, and came early")
        if finished:
            verdict.again += 1
            if not explained(finished[0]):
                verdict.again_unexplained += 1
                wrong("finished, and came again")
        elif not answers and event.at_ns - before.sent_ns < self._msg_timeout_ns / 10:
            wrong("came again before its time was out")

    def _forgotten(self, answer: Event, later: Event) -> bool:
        """Whether a crash followed the answer so soon that a checkpoint may not include it."""
        killed_ns = self.kills[answer.life] if answer.life < later.life else None
        return killed_ns is not None and killed_ns - answer.at_ns <= self._window_ns

    def _told(self, events: list[Event]) -> str:
        return ", ".join(self._tell(events)) or "it never came"

    def _tell(self, events: list[Event]) -> Iterator[str]:
        for event in events:
            attempts = f" ({event.attempts})" if event.attempts else ""
            yield f"{event.act.name.lower()}{attempts} in life {event.life} at {event.at_ns / SECOND:.3f}"
        killed = [f"{at_ns / SECOND:.3f}" for at_ns in self.kills if at_ns is not None]
        yield f"killed at {' '.join(killed)}"
