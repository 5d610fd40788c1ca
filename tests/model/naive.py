"""A naive reference model of a topic: NSQ's rules, applied to each message separately.

Each channel has a dict with a `Copy` of each message until it is finished or dropped. There is no cursor, log or batch:
counts, searches and due times iterate over all copies.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction

NOT_IN_FLIGHT = "ID not in flight"
NOT_OWNED = "client does not own message"


class Place(Enum):
    """The state of a copy."""

    READY = "ready"
    IN_FLIGHT = "in flight"
    DEFERRED = "deferred"
    GIVEN_UP = "given up"
    TAKEN = "taken"
    """Withdrawn by a mover, which then disposes of it or puts it back."""


@dataclass
class Copy:
    """One message in one channel.

    Attributes:
        attempts: How often it was sent, without the times that count as no attempt.
        fresh: It was never sent or deferred. Fresh messages are delivered in publish order.
        at_ns: When it times out, or is due.
        delivered_ns: When it was last sent.
        holder: The consumer that has it in flight.
        due_ns: The producer's due time of a ready copy, which the cursor defers when it gets there; 0: none.
        order: Ascends with each delivery of the channel.
        prefetched: How many of its deliveries ended with a lost connection whose client worked on another message.
        exhausted: It failed its last attempt.
        holds: It was delivered in the channel's order by key, and no other message of its key may be.
        in_order: Messages of its key with higher numbers come after it: it was not deferred, and not withdrawn.
    """

    place: Place = Place.READY
    attempts: int = 0
    fresh: bool = True
    at_ns: int = 0
    delivered_ns: int = 0
    holder: str = ""
    due_ns: int = 0
    order: int = 0
    prefetched: int = 0
    exhausted: bool = False
    holds: bool = False
    in_order: bool = True

    def give_back(self) -> None:
        """Make it ready again."""
        self.place, self.holder, self.exhausted = Place.READY, "", False


@dataclass
class NaiveConsumer:
    """A client of a channel."""

    timeout_ns: int
    ready_count: int = 0
    blocked: bool = False
    nearness: int = 2
    message_count: int = 0
    finish_count: int = 0
    requeue_count: int = 0


@dataclass
class NaiveChannel:
    """A channel: copies by the number of the message."""

    private: bool = False
    """It gets messages as they are published, and does not affect the topic."""
    paused: bool = False
    copies: dict[int, Copy] = field(default_factory=dict)
    consumers: dict[str, NaiveConsumer] = field(default_factory=dict)
    message_count: int = 0
    requeue_count: int = 0
    timeout_count: int = 0
    max_attempts: int = 0
    deliveries: int = 0
    dead_letters: bool = False
    """A dead-letter topic is set."""
    given_up_count: int = 0
    key_of: Callable[[int], object] | None = None
    """Returns the key of a message, None for no key; if the channel has an order by key."""
    rate_limit_per_s: int = 0
    sent_ns: list[int] = field(default_factory=list)
    """When each message was delivered, while there is a rate limit."""

    used_ns: int = 0
    """When the channel was last seen in use."""

    @property
    def is_used(self) -> bool:
        return bool(self.consumers or self.copies or self.paused)

    @property
    def burst(self) -> int:
        """The most deliveries at once: those of 50 ms."""
        return max(1, self.rate_limit_per_s // 20)

    def limit_rate(self, per_s: int) -> None:
        """Change the rate limit."""
        if per_s != self.rate_limit_per_s:
            self.rate_limit_per_s = per_s
            self.sent_ns.clear()

    def allowed(self, now_ns: int) -> Fraction:
        """Return how many messages may be delivered now; below 1: none."""
        left, before_ns = Fraction(self.burst), 0
        for at_ns in (*self.sent_ns, now_ns):
            left = (
                min(Fraction(self.burst), left + Fraction((at_ns - before_ns) * self.rate_limit_per_s, 10**9))
                - 1
            )
            before_ns = at_ns
        return left + 1

    def at(self, place: Place) -> dict[int, Copy]:
        """Return the copies in this state."""
        return {number: copy for number, copy in self.copies.items() if copy.place is place}

    def held_by(self, consumer: str) -> dict[int, Copy]:
        """Return the copies that a consumer has in flight."""
        return {number: copy for number, copy in self.at(Place.IN_FLIGHT).items() if copy.holder == consumer}

    def window(self, consumer: str) -> int:
        """Return how many messages a consumer may be sent."""
        known = self.consumers[consumer]
        return 0 if known.blocked or self.paused else known.ready_count - len(self.held_by(consumer))

    @property
    def nearest_ready(self) -> int | None:
        """How near the nearest consumer is that may be sent messages; None: there is none."""
        return min(
            (each.nearness for name, each in self.consumers.items() if self.window(name) > 0), default=None
        )

    def deliver(self, consumer: str, number: int, attempts: int, now_ns: int) -> None:
        """Check that a delivery was correct, and record it."""
        copy = self.copies.get(number)
        assert copy is not None, f"{number} is finished, dropped, or was never here"
        assert copy.place is Place.READY, f"{number} is {copy.place.value}"
        assert self.window(consumer) > 0, f"{consumer} may not be sent anything"
        if copy.fresh:
            first = min(n for n, other in self.at(Place.READY).items() if other.fresh)
            assert number == first, f"{number} came before {first}"
        assert attempts == copy.attempts + 1
        self.check_order(number, copy)
        if self.rate_limit_per_s:
            assert self.allowed(now_ns) >= 1, "the rate limit is exceeded"
            self.sent_ns.append(now_ns)
        known = self.consumers[consumer]
        known.message_count += 1
        self.deliveries += 1
        copy.order = self.deliveries
        copy.place, copy.attempts, copy.fresh = Place.IN_FLIGHT, attempts, False
        copy.holder, copy.delivered_ns, copy.at_ns = consumer, now_ns, now_ns + known.timeout_ns

    def of_its_key(self, number: int) -> dict[int, Copy]:
        """Return the other copies with the key of a message, if the channel has an order and the message a key."""
        key = self.key_of(number) if self.key_of is not None else None
        if key is None or self.key_of is None:
            return {}
        return {n: copy for n, copy in self.copies.items() if n != number and self.key_of(n) == key}

    def check_order(self, number: int, copy: Copy) -> None:
        """Check that a delivery keeps the order by key."""
        for n, other in self.of_its_key(number).items():
            assert not other.holds, f"{number} came while {n} had its key"
            if n < number and copy.in_order and not copy.holds:
                assert not other.in_order or other.place is not Place.READY, f"{number} came before {n}"
        copy.holds = self.key_of is not None and self.key_of(number) is not None

    def deliverable(self, fresh_too: bool) -> list[int]:
        """Return the ready messages that need not wait for their keys."""
        return [
            number
            for number, copy in self.at(Place.READY).items()
            if (fresh_too or not copy.fresh)
            and not any(other.holds for other in self.of_its_key(number).values())
        ]

    def set_order(self, key_of: Callable[[int], object] | None) -> None:
        """Change the order by key: it is about the messages that are ready now."""
        self.key_of = key_of
        ready = self.at(Place.READY)
        # Messages that were deferred do not wait for fresh ones.
        fresh = [number for number, copy in ready.items() if copy.fresh]
        for number, copy in self.copies.items():
            copy.holds = False
            copy.in_order = number in ready and (copy.fresh or not fresh or number < min(fresh))

    def why_not(self, consumer: str, number: int) -> str | None:
        """Return the error if a consumer answers a message that it does not have in flight."""
        copy = self.copies.get(number)
        if copy is None or copy.place is not Place.IN_FLIGHT:
            return NOT_IN_FLIGHT
        return None if copy.holder == consumer else NOT_OWNED

    def finish(self, consumer: str, number: int) -> str | None:
        """FIN."""
        if reason := self.why_not(consumer, number):
            return reason
        del self.copies[number]
        self.consumers[consumer].finish_count += 1
        return None

    def requeue(
        self, consumer: str, number: int, delay_ns: int, now_ns: int, *, counts: bool = True
    ) -> str | None:
        """REQ; it may count as no attempt."""
        if reason := self.why_not(consumer, number):
            return reason
        if counts:
            self.make_unfinished(number)
        else:
            self.copies[number].give_back()
            self.copies[number].attempts -= 1
        copy = self.copies.get(number)
        if delay_ns and copy is not None and copy.place is Place.READY:
            copy.place, copy.at_ns = Place.DEFERRED, now_ns + delay_ns
        self.consumers[consumer].requeue_count += 1
        self.requeue_count += 1
        return None

    def make_unfinished(self, number: int) -> None:
        """Make an unfinished message ready again, or exhausted."""
        copy = self.copies[number]
        copy.give_back()
        if 0 < self.max_attempts <= copy.attempts - copy.prefetched:
            copy.place, copy.exhausted = Place.GIVEN_UP, True
            if not self.dead_letters:
                del self.copies[number]
                self.given_up_count += 1

    def configure(self, max_attempts: int, dead_letters: bool) -> None:
        """Change the settings; they also apply to exhausted messages."""
        self.max_attempts, self.dead_letters = max_attempts, dead_letters
        for number in self.at(Place.GIVEN_UP):
            self.make_unfinished(number)

    def seek(self, to: int, due_ns: dict[int, int], first: int, now_ns: int) -> tuple[int, int]:
        """Move to `to`; returns how many messages are delivered again, and how many are skipped.

        Messages before `first` are no longer in the log. A channel that seeks to `first` or before keeps its copies of
        them.
        """
        before = self.copies
        self.copies = {}
        for number, copy in before.items():
            if number < to <= first:
                self.copies[number] = copy
                if copy.place is Place.IN_FLIGHT:
                    copy.give_back()
                copy.holds, copy.in_order = False, copy.place is Place.READY
            elif number >= to and copy.place is Place.DEFERRED and not copy.attempts and copy.at_ns > now_ns:
                self.copies[number] = copy
                copy.holds, copy.in_order = False, False
        for number in due_ns:
            if number >= to and number not in self.copies:
                self.copies[number] = Copy(due_ns=due_ns[number] if due_ns[number] > now_ns else 0)
        self.copies = dict(sorted(self.copies.items()))
        return len(self.copies.keys() - before.keys()), len(before.keys() - self.copies.keys())

    def come_to(self, cursor: int, now_ns: int) -> None:
        """Defer the fresh copies below the cursor that are not due. The others were sent, or wait for their keys."""
        for number, copy in self.copies.items():
            if copy.fresh and number < cursor and copy.due_ns > now_ns:
                copy.place, copy.fresh, copy.at_ns = Place.DEFERRED, False, copy.due_ns
                copy.in_order = False
            elif number < cursor and self.key_of is not None:
                copy.fresh = False

    def touch(self, consumer: str, number: int, now_ns: int, longest_ns: int) -> str | None:
        """TOUCH."""
        if reason := self.why_not(consumer, number):
            return reason
        copy = self.copies[number]
        latest_ns = copy.delivered_ns + longest_ns
        copy.at_ns = max(copy.at_ns, min(now_ns + self.consumers[consumer].timeout_ns, latest_ns))
        return None

    def leave(self, consumer: str) -> None:
        """Disconnect: the messages that the consumer has touched have failed, or else the one that it got first."""
        held, timeout_ns = self.held_by(consumer), self.consumers[consumer].timeout_ns
        touched = [n for n, copy in held.items() if copy.at_ns > copy.delivered_ns + timeout_ns]
        begun = touched or [
            n for n, copy in held.items() if copy.order == min(c.order for c in held.values())
        ]
        for number, copy in held.items():
            if number in begun:
                self.make_unfinished(number)
            else:
                copy.prefetched += bool(self.max_attempts)
                copy.give_back()
        del self.consumers[consumer]

    def tick(self, now_ns: int) -> None:
        """Release copies that are due, and time out those in flight."""
        for copy in self.at(Place.DEFERRED).values():
            if copy.at_ns <= now_ns:
                copy.give_back()
        for number, copy in self.at(Place.IN_FLIGHT).items():
            if copy.at_ns <= now_ns:
                self.timeout_count += 1
                self.make_unfinished(number)

    def next_deadline_ns(self) -> int | None:
        """Return when the next copy is due or times out."""
        waiting = self.at(Place.IN_FLIGHT) | self.at(Place.DEFERRED)
        return min((copy.at_ns for copy in waiting.values()), default=None)


@dataclass
class NaiveTopic:
    """A topic: messages are numbered as they are published."""

    paused: bool = False
    published: int = 0
    waiting: dict[int, int] = field(default_factory=dict)  # number -> due_ns, 0 if not deferred
    due_ns: dict[int, int] = field(default_factory=dict)  # the same for all distributed messages
    only: dict[int, str] = field(default_factory=dict)  # number -> the only channel that gets the message
    channels: dict[str, NaiveChannel] = field(default_factory=dict)

    @property
    def depth(self) -> int:
        """Number of messages that wait in the topic and are not deferred."""
        return sum(not due_ns for due_ns in self.waiting.values())

    def publish(self, count: int, due_ns: int, only: str | None) -> None:
        """PUB, MPUB, DPUB, or one of them for one channel only."""
        for _ in range(count):
            if only is not None:
                self.only[self.published] = only
            self.waiting[self.published] = due_ns
            for name, channel in self.channels.items():
                if channel.private:
                    self.give(name, self.published)
            self.published += 1
        self.distribute()

    def distribute(self) -> None:
        """Give every channel its copies of the waiting messages."""
        shared = [name for name, channel in self.channels.items() if not channel.private]
        if self.paused or not shared:
            return
        self.due_ns |= self.waiting
        for number in self.waiting:
            for name in shared:
                self.give(name, number)
        self.waiting.clear()

    def give(self, name: str, number: int) -> None:
        """Give a channel its copy of a waiting message, unless the message is for another channel."""
        if self.only.get(number, name) == name:
            channel, due_ns = self.channels[name], self.waiting[number]
            channel.message_count += 1
            deferred = Copy(Place.DEFERRED, fresh=False, at_ns=due_ns, in_order=False)
            channel.copies[number] = deferred if due_ns else Copy()

    def empty(self) -> None:
        """Drop the waiting messages."""
        self.due_ns |= self.waiting
        self.waiting.clear()

    def drop_below(self, first: int) -> None:
        """Drop waiting and fresh messages below `first`, which a bounded log has dropped."""
        self.waiting = {n: due_ns for n, due_ns in self.waiting.items() if due_ns or n >= first}
        for channel in self.channels.values():
            channel.copies = {n: copy for n, copy in channel.copies.items() if n >= first or not copy.fresh}

    def restarted(self) -> None:
        """Remove all consumers and ephemeral channels, and reset the counters."""
        self.channels = {
            name: channel for name, channel in self.channels.items() if not name.endswith("#ephemeral")
        }
        for channel in self.channels.values():
            channel.message_count = channel.requeue_count = channel.timeout_count = channel.given_up_count = 0
            channel.consumers.clear()
            channel.sent_ns.clear()
            for number, copy in list(channel.copies.items()):
                if copy.exhausted:
                    channel.make_unfinished(number)
                elif copy.place in (Place.IN_FLIGHT, Place.TAKEN) or (
                    copy.place is Place.DEFERRED and copy.attempts and channel.key_of is not None
                ):
                    copy.give_back()
            channel.set_order(channel.key_of)
