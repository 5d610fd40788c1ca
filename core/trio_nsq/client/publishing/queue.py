"""The publish queue of one broker: the commands that are to be sent, and those that wait for a reply. No IO.

Single messages to one topic join an MPUB until the writer takes it. Replies carry no reference; the broker answers in
the order of the commands, so a reply belongs to the oldest command that is not acknowledged.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass

import trio

from trio_nsq.protocol import MessageSet, NSQError, pack_messages
from trio_nsq.protocol.encode import encode_dpub, encode_mpub, encode_pub
from trio_nsq.protocol.limits import KIB

from ..errors import BrokerError, PublishFailed

MPUB_TARGET_BYTES = 256 * KIB
"""Where single messages stop joining an MPUB, and lists are split. Large enough for the cost of a command to vanish,
and small enough that several are under way at once."""

COUNT_BYTES = 4
SIZE_BYTES = 4
"""What an MPUB's body has beside the messages: their count, and the size of each."""

_TRIED_CODES = frozenset({"E_PUB_FAILED", "E_MPUB_FAILED", "E_DPUB_FAILED"})
"""The broker accepted the command and then could not carry it out. All other codes refuse a command before that."""

RETRIABLE_CODES = _TRIED_CODES | {"E_TOPIC_FULL"}
"""The command itself is right: another broker, or the same later, may accept it."""


def may_be_stored(error: BrokerError, *, atomic: bool) -> bool:
    """Whether some messages of a command that was answered with this may be stored.

    Args:
        atomic: The broker is known to store all messages of a command or none. nsqd's MPUB keeps the messages before
            the one that it could not write.
    """
    return error.code in _TRIED_CODES and not atomic and not error.text.endswith("PUB failed exiting")


class PublishFuture:
    """The outcome of one publish, for the caller that waits for it.

    Attributes:
        command: The command its messages went into.
        settled: Set when the command is acknowledged, or has failed.
        failure: Once settled: what to raise; None: acknowledged.
    """

    __slots__ = ("command", "failure", "settled")

    def __init__(self, command: "Command") -> None:
        self.command = command
        self.settled = trio.Event()
        self.failure: PublishFailed | None = None


@dataclass(slots=True)
class CommandGroup:
    """The commands of one list of messages: once one has failed, those that are not sent yet fail, too.

    Attributes:
        address: The broker that gets them, as long as it can be reached; None: not chosen yet.
        failure: Why one of them failed; None: none has.
    """

    address: str | None = None
    failure: NSQError | None = None


class Command:
    """A PUB, DPUB or MPUB that is to be sent or waits for its reply.

    Attributes:
        messages: The messages of an MPUB that is given as a whole; None: `futures` has them.
        defer_ms: Above 0: a DPUB, of a single message.
        group: The list it is a part of; None: it stands alone.
        size: Bytes, for the window: all bodies with their size fields.
        futures: Who waits for it, each with its message, more than one of which make an MPUB; a single one, with
            nothing, for `messages`. A dictionary, as thousands may be withdrawn at once.
        taken: It was handed out to be written, so from here on it may be stored.
        failures: The error of each broker where it failed, by address.
        maybe_stored: One of them may have stored it, or a part.
    """

    __slots__ = (
        "defer_ms",
        "failures",
        "futures",
        "group",
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
    ) -> None:
        self.topic = topic
        self.messages = messages
        self.defer_ms = defer_ms
        self.group = group
        self.size = SIZE_BYTES + len(body) if messages is None else len(messages.data)
        self.futures: dict[PublishFuture, bytes] = {PublishFuture(self): body}
        self.queue: PublishQueue | None = None
        self.taken = False
        self.failures: dict[str, NSQError] = {}
        self.maybe_stored = False

    def encode(self) -> bytes:
        """The command as it is written."""
        if self.messages is not None:
            return encode_mpub(self.topic, self.messages)
        bodies = list(self.futures.values())
        if len(bodies) > 1:
            return encode_mpub(self.topic, pack_messages(bodies))
        if self.defer_ms:
            return encode_dpub(self.topic, self.defer_ms, bodies[0])
        return encode_pub(self.topic, bodies[0])

    def __len__(self) -> int:
        """How many messages it is of."""
        return len(self.futures) if self.messages is None else len(self.messages)

    def first_future(self) -> PublishFuture:
        """The oldest future; the only one, unless messages joined."""
        return next(iter(self.futures))

    def join(self, body: bytes) -> PublishFuture:
        """Add a message."""
        future = PublishFuture(self)
        self.futures[future] = body
        self.size += SIZE_BYTES + len(body)
        return future

    def settle(self) -> None:
        """Complete the futures: the command is acknowledged."""
        for future in self.futures:
            future.settled.set()

    def fail(self, cause: NSQError, *, maybe_stored: bool = False) -> None:
        """Complete the futures: the command failed for this cause, and for those in `failures`."""
        self.maybe_stored |= maybe_stored
        reason = "; ".join(dict.fromkeys(map(str, (*self.failures.values(), cause))))
        if self.group is not None and self.group.failure is None:
            self.group.failure = cause
        for future in self.futures:
            # One error for each, since raising writes a traceback into it.
            future.failure = PublishFailed(reason, maybe_stored=self.maybe_stored)
            future.failure.__cause__ = cause
            future.settled.set()


class PublishQueue:
    """The commands for one broker.

    Args:
        max_in_flight_bytes: Hand out no more than this many bytes without an acknowledgement, but always one command.
        max_joined_bytes: Join single messages up to this size of an MPUB.
        ordered: No message joins others past a command that was added between, be it for another topic.
    """

    def __init__(self, max_in_flight_bytes: int, max_joined_bytes: int, *, ordered: bool = False) -> None:
        self._max_in_flight_bytes = max_in_flight_bytes
        self._max_joined_bytes = max_joined_bytes
        self._ordered = ordered
        self._waiting: OrderedDict[Command, None] = OrderedDict()  # ordered; any can be removed
        self._joinable: dict[str, Command] = {}  # by topic: those in `_waiting` that still take messages in
        self._unacknowledged: deque[Command] = deque()
        self._in_flight_bytes = 0

    def add_message(self, topic: str, body: bytes) -> PublishFuture:
        """Publish a message in the next write, with others."""
        command = self._joinable.get(topic)
        if command is not None and command.size + SIZE_BYTES + len(body) <= self._max_joined_bytes:
            return command.join(body)
        future = self.add(Command(topic, body=body))
        self._joinable[topic] = future.command
        return future

    def add(self, command: Command) -> PublishFuture:
        """Send a command in the next write."""
        if self._ordered:
            self._joinable.clear()
        command.queue = self
        command.taken = False
        self._waiting[command] = None
        return command.first_future()

    def withdraw(self, future: PublishFuture) -> bool:
        """Withdraw a message that the writer has not taken yet; return whether that was in time."""
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

    def take(self) -> list[bytes]:
        """What to write now, as far as the window allows; from here on it waits for acknowledgement."""
        pieces = []
        while self._waiting and self._fits(command := next(iter(self._waiting))):
            del self._waiting[command]
            self._close_to_joining(command)
            if command.group is not None and command.group.failure is not None:
                command.fail(command.group.failure)
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
        """Settle the oldest command under way; say whether there was one."""
        command = self.refuse()
        if command is None:
            return False
        command.settle()
        return True

    def refuse(self) -> Command | None:
        """Take out the oldest command under way, if there is one: it has failed."""
        if not self._unacknowledged:
            return None
        command = self._unacknowledged.popleft()
        self._in_flight_bytes -= command.size
        return command

    def put_back(self) -> None:
        """Send the commands under way once more: the broker has executed none of them, and never will."""
        for command in reversed(self._unacknowledged):
            command.taken = False
            self._waiting[command] = None
            self._waiting.move_to_end(command, last=False)
        self._unacknowledged.clear()
        self._in_flight_bytes = 0

    def clear(self) -> list[Command]:
        """Take out all commands, in order; those that are `taken` were under way."""
        commands = [*self._unacknowledged, *self._waiting]
        self._unacknowledged.clear()
        self._waiting.clear()
        self._joinable.clear()
        self._in_flight_bytes = 0
        return commands

    def futures(self) -> list[PublishFuture]:
        """The futures of all commands."""
        return [
            future
            for commands in (self._unacknowledged, self._waiting)
            for c in commands
            for future in c.futures
        ]

    def __len__(self) -> int:
        """How many commands wait to be sent."""
        return len(self._waiting)
