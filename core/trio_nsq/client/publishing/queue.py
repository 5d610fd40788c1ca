"""The publish queue of one broker: commands that wait to be sent, and commands that wait for a reply. No IO.

Single messages to one topic are combined into one MPUB until the writer takes it. The broker replies in the order of
the commands, so a reply belongs to the oldest unacknowledged command.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from trio_nsq.protocol import MessageSet, NSQError, pack_messages
from trio_nsq.protocol.encode import encode_dpub, encode_hpub, encode_mpub, encode_pub
from trio_nsq.protocol.headers import MAX_HPUB_MESSAGES, split_prefix, split_prefixes
from trio_nsq.protocol.limits import KIB

from ...event_loop import runtime
from ..errors import AuthRefused, BrokerError, ConnectionFailed, ConnectionLost, PublishFailed

MPUB_TARGET_BYTES = 256 * KIB
"""The size at which an MPUB is full and lists are split. Large enough to make the cost per command negligible, small
enough to have several in flight."""

COUNT_BYTES = 4
SIZE_BYTES = 4
"""The size of the message count in an MPUB's body, and of the size field of each message."""

_TRIED_CODES = frozenset({"E_PUB_FAILED", "E_MPUB_FAILED", "E_DPUB_FAILED", "E_HPUB_FAILED"})
"""The broker accepted the command and failed to execute it. With all other codes it did not start to execute it."""

RETRIABLE_CODES = _TRIED_CODES | {"E_TOPIC_FULL"}
"""The command is valid: another broker, or the same one later, may accept it."""


def may_be_stored(error: BrokerError, *, atomic: bool) -> bool:
    """Whether some messages of a command that got this error may be stored.

    Args:
        atomic: The broker stores all messages of a command or none. nsqd does not: its MPUB keeps the messages before
            the one it could not write.
    """
    return error.code in _TRIED_CODES and not atomic and not accepts_no_publishes(error)


def accepts_no_publishes(error: BrokerError) -> bool:
    """Whether the broker refuses all publishes for now, and stored nothing of this one: it drains, or it stops."""
    return error.code in _TRIED_CODES and (
        "PUB failed DRAINING" in error.text or error.text.endswith("PUB failed exiting")
    )


def may_pass(error: PublishFailed) -> bool:
    """Whether the same messages may be accepted later: no broker answered, or one cannot store them now."""
    cause = error.__cause__
    if isinstance(cause, BrokerError):
        return cause.code in RETRIABLE_CODES
    return isinstance(cause, ConnectionFailed | ConnectionLost) and not isinstance(cause, AuthRefused)


class PublishAck(NamedTuple):
    """Where a message is stored.

    Attributes:
        nsqd_address: The broker that acknowledged it, `host:port`.
        number: The number of the message, or of the first one of several, in the topic of this broker. Only a producer
            with a `name` has numbers; None without one.
    """

    nsqd_address: str
    number: int | None


@dataclass(slots=True)
class PublishCounts:
    """How many messages were acknowledged, and how many were not."""

    stored: int = 0
    failed: int = 0


class PublishFuture:
    """The outcome of one publish.

    Attributes:
        command: The command with its messages.
        settled: Set when the command is acknowledged or has failed.
        failure: Once settled: the error to raise; None: acknowledged.
        number: Once acknowledged: the number of the first message; None: it has none.
    """

    __slots__ = ("command", "failure", "number", "settled")

    def __init__(self, command: "Command") -> None:
        self.command: Command = command
        self.settled: runtime.Event = runtime.Event()
        self.failure: PublishFailed | None = None
        self.number: int | None = None

    @property
    def ack(self) -> PublishAck:
        """Where the message is stored; it is acknowledged."""
        queue = self.command.queue
        assert queue is not None
        return queue.ack if self.number is None else PublishAck(queue.ack.nsqd_address, self.number)

    @property
    def is_stored(self) -> bool:
        """Whether the message is acknowledged."""
        return self.settled.is_set() and self.failure is None and not self.is_withdrawn

    @property
    def is_withdrawn(self) -> bool:
        """Whether it was settled without being sent."""
        return self not in self.command.futures

    def withdraw(self) -> bool:
        """Withdraw a message that was not written to a socket; return False if it is too late."""
        queue = self.command.queue
        return queue is not None and queue.withdraw(self)


@dataclass(slots=True)
class CommandGroup:
    """The commands of one list of messages: once one fails, those that are not sent yet fail too.

    Attributes:
        address: The broker for these commands while it is available; None: not chosen yet.
        failure: The first failure of a command; None: no command failed.
    """

    address: str | None = None
    failure: NSQError | None = None


class Command:
    """A PUB, DPUB, MPUB or HPUB that waits to be sent or for its reply.

    Attributes:
        messages: The packed messages of an MPUB or HPUB; None: `futures` has the messages.
        defer_ms: Above 0: a DPUB of one message, or an HPUB.
        has_headers: An HPUB: each message begins with its headers.
        headers_optional: A broker that knows no headers gets the messages without them.
        group: The list that the command belongs to; None: no list.
        size: All bodies with their size fields, in bytes, for the window.
        futures: The waiting callers, each with its message; several make an MPUB. With `messages`, a single future with
            an empty body. A dictionary, because thousands may be withdrawn at once.
        taken: The writer has taken the command, so it may be stored.
        failures: The error of each broker where the command failed, by address.
        maybe_stored: A broker may have stored some of the messages.
        first: Of a producer with a name: the number of the first message when it was sent last; -1: it was not sent.
        give_up_at: Of a producer with a name: when to give up, by the clock of the event loop.
        is_question: It has no message. It is settled when the broker has told what is stored in the topic.
    """

    __slots__ = (
        "defer_ms",
        "failures",
        "first",
        "futures",
        "give_up_at",
        "group",
        "has_headers",
        "headers_optional",
        "is_question",
        "maybe_stored",
        "messages",
        "queue",
        "size",
        "taken",
        "topic",
    )

    def __init__(
        self,
        topic: str,
        *,
        messages: MessageSet | None = None,
        body: bytes = b"",
        defer_ms: int = 0,
        group: CommandGroup | None = None,
        is_question: bool = False,
        has_headers: bool = False,
        headers_optional: bool = False,
    ) -> None:
        self.topic: str = topic
        self.has_headers: bool = has_headers
        self.headers_optional: bool = headers_optional
        self.messages: MessageSet | None = messages
        self.defer_ms: int = defer_ms
        self.group: CommandGroup | None = group
        self.size: int = SIZE_BYTES + len(body) if messages is None else len(messages.data)
        self.futures: dict[PublishFuture, bytes] = {PublishFuture(self): body}
        self.queue: PublishQueue | None = None
        self.taken: bool = False
        self.failures: dict[str, NSQError] = {}
        self.maybe_stored: bool = False
        self.first: int = -1
        self.give_up_at: float = inf
        self.is_question: bool = is_question

    def encode(self, first: int | None = None) -> bytes:
        """Return the bytes; `first` is the number of the first message, if it has one."""
        if self.has_headers:
            messages = self.messages or pack_messages(list(self.futures.values()))
            return encode_hpub(self.topic, messages, self.defer_ms, first)
        if self.messages is not None:
            return encode_mpub(self.topic, self.messages, first)
        bodies = list(self.futures.values())
        if len(bodies) > 1:
            return encode_mpub(self.topic, pack_messages(bodies), first)
        if self.defer_ms:
            return encode_dpub(self.topic, self.defer_ms, bodies[0], first)
        return encode_pub(self.topic, bodies[0], first)

    def give_up_headers(self) -> bool:
        """Drop headers that are optional; return whether the command has none now."""
        if self.has_headers and self.headers_optional:
            self.has_headers = False  # `size` stays: the owner subtracts what it has added
            if self.messages is not None:
                self.messages, _ = split_prefixes(self.messages, self.size)
            else:
                for future, message in self.futures.items():
                    self.futures[future] = message[split_prefix(message, 0, len(message))[1] :]
        return not self.has_headers

    def __len__(self) -> int:
        """How many messages the command has."""
        return len(self.futures) if self.messages is None else len(self.messages)

    def first_future(self) -> PublishFuture:
        """Return the oldest future; the only one unless messages were added."""
        return next(iter(self.futures))

    def join(self, body: bytes) -> PublishFuture:
        future = PublishFuture(self)
        self.futures[future] = body
        self.size += SIZE_BYTES + len(body)
        return future

    def settle(self) -> None:
        """Complete the futures: the command is acknowledged."""
        if (counts := self._counts()) is not None:
            counts.stored += len(self)
        if self.first >= 0:
            for number, future in enumerate(self.futures, self.first):
                future.number = number
        for future in self.futures:
            future.settled.set()

    def fail(self, cause: NSQError, *, maybe_stored: bool = False) -> None:
        """Complete the futures: the command failed with this cause, and with those in `failures`."""
        if (counts := self._counts()) is not None:
            counts.failed += len(self)
        self.maybe_stored |= maybe_stored
        reason = "; ".join(dict.fromkeys(map(str, (*self.failures.values(), cause))))
        if self.group is not None and self.group.failure is None:
            self.group.failure = cause
        for future in self.futures:
            # An error of its own for each future: raising stores a traceback in it.
            future.failure = PublishFailed(reason, maybe_stored=self.maybe_stored)
            future.failure.__cause__ = cause
            future.settled.set()

    def _counts(self) -> PublishCounts | None:
        """Return where to count the messages; None: they are counted already, or there are none."""
        if self.queue is None or self.is_question or self.first_future().settled.is_set():
            return None
        return self.queue.counts


class PublishQueue:
    """The commands for one broker. The messages of a topic are sent in the order in which they were added.

    Args:
        max_in_flight_bytes: The limit of unacknowledged bytes; one command is always allowed.
        max_joined_bytes: Combine single messages into an MPUB up to this size.
        ordered: Do not add a message to an MPUB if another command, also for another topic, was queued after it.
        address: The broker, `host:port`.

    Attributes:
        ack: For messages without numbers.
        counts: Of the messages that are settled. The owner may have several queues share them.
    """

    def __init__(
        self, max_in_flight_bytes: int, max_joined_bytes: int, *, ordered: bool = False, address: str = ""
    ) -> None:
        self.ack: PublishAck = PublishAck(address, None)
        self.counts: PublishCounts = PublishCounts()
        self._max_in_flight_bytes = max_in_flight_bytes
        self._max_joined_bytes = max_joined_bytes
        self._ordered = ordered
        self._waiting: OrderedDict[Command, None] = OrderedDict()  # an ordered set; any can be removed
        # By topic: its last command in `_waiting`, if that accepts more single messages of its kind.
        self._joinable: dict[str, Command] = {}
        self._unacknowledged: deque[Command] = deque()
        self._in_flight_bytes = 0

    def add_message(self, topic: str, body: bytes) -> PublishFuture:
        """Queue a message for the next write, combined with others for its topic."""
        command = self._joinable.get(topic)
        if (
            command is not None
            and not command.has_headers
            and command.size + SIZE_BYTES + len(body) <= self._max_joined_bytes
        ):
            return command.join(body)
        future = self.add(Command(topic, body=body))
        self._joinable[topic] = future.command
        return future

    def add_message_with_headers(
        self, topic: str, message: bytes, *, optional: bool = False
    ) -> PublishFuture:
        """As `add_message`, for a message that begins with its headers; combined with others that do."""
        command = self._joinable.get(topic)
        if (
            command is not None
            and command.has_headers
            and command.headers_optional is optional
            and len(command.futures) < MAX_HPUB_MESSAGES
            and command.size + SIZE_BYTES + len(message) <= self._max_joined_bytes
        ):
            return command.join(message)
        future = self.add(Command(topic, body=message, has_headers=True, headers_optional=optional))
        self._joinable[topic] = future.command
        return future

    def add(self, command: Command) -> PublishFuture:
        if self._ordered:
            self._joinable.clear()
        else:
            self._joinable.pop(command.topic, None)  # a later message that joined would overtake this command
        command.queue = self
        command.taken = False
        self._waiting[command] = None
        return command.first_future()

    def withdraw(self, future: PublishFuture) -> bool:
        """Withdraw a message that the writer has not taken; return False if it is too late."""
        command = future.command
        if command.taken or future.settled.is_set():
            return False
        body = command.futures.pop(future)
        command.size -= SIZE_BYTES + len(body)
        if not command.futures:
            del self._waiting[command]
            self._close_to_joining(command)
        future.settled.set()  # other tasks may wait for it
        return True

    def take(self, refused: list[Command] | None = None) -> list[bytes]:
        """Take the commands that fit the window; return their bytes. They now wait for acknowledgement.

        Args:
            refused: The broker knows no headers: gets the commands that have some, which are not sent, unless they
                are optional. None: it knows them.
        """
        pieces = []
        while self._waiting and self._fits(command := next(iter(self._waiting))):
            del self._waiting[command]
            self._close_to_joining(command)
            if command.group is not None and command.group.failure is not None:
                command.fail(command.group.failure)
                continue
            if refused is not None and not command.give_up_headers():
                refused.append(command)
                continue
            command.taken = True
            self._unacknowledged.append(command)
            self._in_flight_bytes += command.size
            pieces.append(command.encode())
        return pieces

    def _fits(self, command: Command) -> bool:
        return not self._unacknowledged or self._in_flight_bytes + command.size <= self._max_in_flight_bytes

    def _close_to_joining(self, command: Command) -> None:
        if self._joinable.get(command.topic) is command:
            del self._joinable[command.topic]

    def acknowledge(self) -> bool:
        """Settle the oldest command in flight; return False if there is none."""
        command = self.refuse()
        if command is None:
            return False
        command.settle()
        return True

    def refuse(self) -> Command | None:
        """Remove and return the oldest command in flight, which has failed; None if there is none."""
        if not self._unacknowledged:
            return None
        command = self._unacknowledged.popleft()
        self._in_flight_bytes -= command.size
        return command

    @property
    def oldest(self) -> Command | None:
        """The oldest command that is not acknowledged, sent or not; None if there is none."""
        return next(iter(self._unacknowledged or self._waiting), None)

    def take_waiting(self) -> list[Command]:
        """Remove and return the commands that wait to be sent."""
        commands = [*self._waiting]
        self._waiting.clear()
        self._joinable.clear()
        return commands

    def put_back(self) -> None:
        """Queue the commands in flight again: the broker did not and will not execute them."""
        for command in reversed(self._unacknowledged):
            command.taken = False
            self._waiting[command] = None
            self._waiting.move_to_end(command, last=False)
        self._unacknowledged.clear()
        self._in_flight_bytes = 0

    def clear(self) -> list[Command]:
        """Remove and return all commands, in order; those with `taken` were in flight."""
        commands = [*self._unacknowledged, *self.take_waiting()]
        self._unacknowledged.clear()
        self._in_flight_bytes = 0
        return commands

    @property
    def identity(self) -> tuple[str, str] | None:
        """The name of the producer, and this run of it; None without a name."""
        return None

    def stored(self, topic: str) -> int | None:
        """Return the number of the last message that is known to be stored; None without numbers."""
        return None

    def futures(self) -> list[PublishFuture]:
        return [
            future
            for commands in (self._unacknowledged, self._waiting)
            for c in commands
            for future in c.futures
        ]

    def unsettled(self) -> tuple[int, int]:
        """Return how many messages wait to be sent, and how many were sent and are not acknowledged."""
        publishes = [each for each in (*self._waiting, *self._unacknowledged) if not each.is_question]
        sent = sum(len(each) for each in publishes if each.taken)
        return sum(map(len, publishes)) - sent, sent

    def __len__(self) -> int:
        """How many commands wait to be sent."""
        return len(self._waiting)
