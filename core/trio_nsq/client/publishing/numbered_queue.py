"""The publish queue of a producer with a name: it numbers messages, and learns which are stored. No IO.

See docs/decisions/0039. On each connection, the client claims a topic before it publishes to it. The answer is the last
number that the broker has stored. Commands up to that number are settled; the others are sent again.
"""

import os
from collections import OrderedDict
from collections.abc import Collection

from trio_nsq.protocol import FrameError, NSQError
from trio_nsq.protocol.encode import encode_claim

from ...protocol.limits import MAX_PRODUCER_TOPICS
from ...protocol.untrusted_json import decode_json
from ..errors import ConnectionLost, MessagesLost, ProducerFenced
from .queue import Command, PublishQueue

_HIGHEST = 2**63


class _Position:
    """What is known of this producer in a topic of the broker.

    Attributes:
        stored: The last number that is stored; -1: none.
        next: The number of the next message to be sent.
    """

    __slots__ = ("next", "stored")

    def __init__(self, stored: int) -> None:
        self.stored = stored
        self.next = stored + 1


class NumberedQueue(PublishQueue):
    """The commands for one broker.

    Commands that were sent and are put back stay `taken`: they may be stored, so they can neither be withdrawn nor go
    to another broker.

    Args:
        address: The broker, for errors and logs.
        name: The producer.
        max_in_flight_bytes, max_joined_bytes: As of `PublishQueue`.

    Attributes:
        instance: A random name of this run. Each queue has its own: two that reach the same broker by different
            addresses must not take the other's messages for their own.
    """

    def __init__(self, address: str, name: str, max_in_flight_bytes: int, max_joined_bytes: int) -> None:
        super().__init__(max_in_flight_bytes, max_joined_bytes, address=address)
        self._address = address
        self.name = name
        self.instance: str = os.urandom(8).hex()
        self._positions: dict[str, _Position] = {}
        self._claimed: set[str] = set()  # on this connection
        # Topics that were asked for on this connection, without an answer: an ordered set.
        self._claims: OrderedDict[str, None] = OrderedDict()

    @property
    def identity(self) -> tuple[str, str] | None:
        return self.name, self.instance

    def stored(self, topic: str) -> int | None:
        """Return the last number that is known to be stored; None: there is none, or the broker was not asked."""
        position = self._positions.get(topic)
        return None if position is None or position.stored < 0 else position.stored

    def take(self, refused: list[Command] | None = None) -> list[bytes]:
        pieces: list[bytes] = []
        while self._waiting and self._fits(command := next(iter(self._waiting))):
            if command.topic not in self._claimed:
                pieces += self._claim_all()
                break
            del self._waiting[command]
            self._close_to_joining(command)
            if command.group is not None and command.group.failure is not None and not command.taken:
                command.fail(command.group.failure)
            elif command.is_question:
                command.settle()
            elif refused is not None and not command.give_up_headers():
                refused.append(command)
            else:
                position = self._positions[command.topic]
                command.first = position.next
                position.next += len(command)
                command.taken = True
                self._unacknowledged.append(command)
                self._in_flight_bytes += command.size
                pieces.append(command.encode(command.first))
        return pieces

    def _claim_all(self) -> list[bytes]:
        """Claim the topics of all waiting commands, so that they wait once, and not one after the other."""
        topics = dict.fromkeys(command.topic for command in self._waiting)
        new = [topic for topic in topics if topic not in self._claimed and topic not in self._claims]
        del new[max(0, MAX_PRODUCER_TOPICS - len(self._claimed) - len(self._claims)) :]
        self._claims.update(dict.fromkeys(new))
        return [encode_claim(topic) for topic in new]

    @property
    def needs_new_connection(self) -> bool:
        """Whether this connection may claim no more topics, what was sent is answered, and more topics wait."""
        return (
            len(self._claimed) >= MAX_PRODUCER_TOPICS
            and not (self._unacknowledged or self._claims)
            and bool(self._waiting)
            and next(iter(self._waiting)).topic not in self._claimed
        )

    def claimed(self, answer: bytes) -> None:
        """Handle the answer to the oldest claim: settle the commands that are stored.

        Raises:
            FrameError: This is no such answer.
            ProducerFenced: Another run of the producer has published since. See `fence`.
        """
        if not self._claims:
            raise FrameError("it answered a PRODUCER that was not sent")
        topic, _ = self._claims.popitem(last=False)
        self._claimed.add(topic)  # the broker counts it, whatever it has stored
        stored, instance, is_unknown = _decoded(answer)
        position = self._positions.get(topic)
        if position is None:
            self._positions[topic] = _Position(stored)
        else:
            if instance != self.instance and stored > position.stored:
                raise ProducerFenced(self._address, topic, self.name)
            self._settle_stored(topic, stored, is_unknown=is_unknown)
            if stored < position.stored:
                lost = MessagesLost(self._address, topic, stored + 1, position.stored)
                for command in self._publishes_of(topic):
                    self._remove([command])
                    command.fail(lost, maybe_stored=False)
            position.stored, position.next = stored, stored + 1

    def _settle_stored(self, topic: str, stored: int, *, is_unknown: bool) -> None:
        for command in [each for each in self._publishes_of(topic) if each.taken]:
            if command.first + len(command) - 1 <= stored:
                del self._waiting[command]
                command.settle()
            elif is_unknown:
                del self._waiting[command]
                reason = f"the broker may have forgotten the numbers of producer {self.name}"
                command.fail(ConnectionLost(self._address, reason), maybe_stored=True)
            else:
                command.maybe_stored = False

    def _publishes_of(self, topic: str) -> list[Command]:
        return [each for each in self._waiting if each.topic == topic and not each.is_question]

    def is_claim_refused(self, text: str) -> bool:
        """Whether an error with this text answers a claim, and not a publish."""
        return bool(self._claims) and text.startswith(("PRODUCER ", "AUTH failed for PRODUCER "))

    @property
    def oldest_claim(self) -> str:
        """The topic of the oldest claim without an answer. There is one."""
        return next(iter(self._claims))

    def acknowledge(self) -> bool:
        command = self.refuse()
        if command is None:
            return False
        position = self._positions[command.topic]
        position.stored = max(position.stored, command.first + len(command) - 1)
        command.settle()
        return True

    @property
    def oldest_sent(self) -> Command | None:
        """The oldest command in flight; None if there is none."""
        return self._unacknowledged[0] if self._unacknowledged else None

    def put_back(self) -> None:
        """Queue the commands in flight again, after the connection was lost. They may be stored."""
        for command in reversed(self._unacknowledged):
            if command.first_future().settled.is_set():  # it has failed meanwhile
                continue
            command.maybe_stored = True
            self._waiting[command] = None
            self._waiting.move_to_end(command, last=False)
        self._unacknowledged.clear()
        self._in_flight_bytes = 0
        self._claimed.clear()
        self._claims.clear()

    def take_waiting(self) -> list[Command]:
        """Remove and return the commands that were never sent; only these may go to another broker."""
        commands = [command for command in self._waiting if not (command.taken or command.is_question)]
        self._remove(commands)
        return commands

    def take_overdue(self, now: float, patience_s: float) -> list[Command]:
        """Remove and return the commands that have been failing for too long; for the others, this failure counts."""
        overdue = []
        for command in self._waiting:
            command.give_up_at = min(command.give_up_at, now + patience_s)
            if command.give_up_at <= now:
                overdue.append(command)
        self._remove(overdue)
        return overdue

    def take_topics(self, topics: Collection[str]) -> list[Command]:
        """Remove and return the waiting commands for these topics."""
        commands = [command for command in self._waiting if command.topic in topics]
        self._remove(commands)
        return commands

    def fail_topic(self, topic: str, reason: NSQError) -> None:
        """Fail the commands for a topic. Those in flight stay until they are answered, or the connection ends."""
        for command in self._unacknowledged:
            if command.topic == topic:
                command.fail(reason, maybe_stored=True)
        for command in self.take_topics([topic]):
            command.fail(reason)

    def clear(self) -> list[Command]:
        self.put_back()
        commands = [*self._waiting]
        self._remove(commands)
        return commands

    def _remove(self, commands: Collection[Command]) -> None:
        for command in commands:
            del self._waiting[command]
            self._close_to_joining(command)


def _decoded(answer: bytes) -> tuple[int, str, bool]:
    """Return the last number (-1: none), its instance, and whether the number may be forgotten. Raises FrameError."""
    try:
        found = decode_json(answer)
        number = found.get("number")
        stored = -1 if number is None else number
        instance, is_unknown = found.get("instance", ""), found.get("may_be_forgotten") is True
    except (ValueError, AttributeError):
        stored, instance, is_unknown = None, "", False
    if type(stored) is not int or not -1 <= stored < _HIGHEST or not isinstance(instance, str):
        raise FrameError(f"it answered PRODUCER with {answer[:80]!r}")
    return stored, instance, is_unknown
