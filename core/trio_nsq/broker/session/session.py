"""A session with one TCP client: executes its commands, and answers them in order."""

import logging
import socket
import time
from collections.abc import Callable, Sequence
from enum import Enum, auto
from random import random
from time import perf_counter
from typing import Final, NamedTuple, Protocol

from ...event_loop.reactor import IN_TASK, RECEIVE_BYTES, PolledEndpoint
from ...protocol import CommandError
from ...protocol.command_reader import CommandReader
from ...protocol.commands import (
    Auth,
    Claim,
    Command,
    Finish,
    Identify,
    Publish,
    Ready,
    Requeue,
    StartClose,
    Subscribe,
    Touch,
)
from ...protocol.frames import CLOSE_WAIT_FRAME, OK_FRAME, encode_error
from ...protocol.identify import IdentifySettings
from ...protocol.states import State
from ..errors import BatchRefused, PublishRefused, TopicFull
from ..ingest.idempotent import NamedProducer
from ..ingest.publication import Publication, fit_with_headers
from ..state.channel import Channel
from ..state.consumer import Consumer
from ..state.topic import Topic
from .authorizer import Authorizer
from .deps import SessionDeps
from .description import Description
from .finish_rate import FinishRate
from .handshake import Handshake
from .transport import LARGE_RECEIVE_BYTES, Transport

logger: logging.Logger = logging.getLogger("trio_nsq.broker")

_NS_PER_MS: Final = 1_000_000
_MORE_READS: Final = 3
"""Further reads of a large body in a turn: together with the first one, less than a millisecond."""


class StopReason(Enum):
    """Why `Session.execute_now` has stopped, and so what the client needs next."""

    IDLE = auto()
    """All commands read are executed: it sends the answers and waits for data."""
    STORING = auto()
    """The log stores `publishes`. They are then answered, and the client goes on."""
    BLOCKED = auto()
    """`publishes` wait for their topic or for a permission: the task waits for it, and stores them."""
    WAITING = auto()
    """`next` has to wait, an IDENTIFY, SUB or AUTH: the task executes it."""
    TURN_OVER = auto()
    """There are more commands: the task lets others run, and goes on."""


# Globals: an attribute lookup on the enum costs more than the comparison.
IDLE: Final = StopReason.IDLE
STORING: Final = StopReason.STORING
BLOCKED: Final = StopReason.BLOCKED
WAITING: Final = StopReason.WAITING
TURN_OVER: Final = StopReason.TURN_OVER


class WaitingPart(Protocol):
    """The part of a session that waits: `ClientTask`."""

    def start(self) -> None:
        """Have the client's task execute what was handed over."""

    def close(self) -> None:
        """Close the connection soon."""

    def apply_heartbeat_interval(self) -> None:
        """Begin to count the interval of the settings."""


class Subscription(NamedTuple):
    """A channel, and the client's consumer in it."""

    channel: Channel
    consumer: Consumer


class SubscriptionElsewhere(NamedTuple):
    """A subscription at all processes of a node, and what executes the client's commands after SUB."""

    topic: str
    channel: str
    execute: Callable[[Command], None]


class Session(PolledEndpoint):
    """The synchronous part of a client's session; `ClientTask` is the part that waits.

    It is the `Subscriber` of its consumer. `EndpointState` says what has the client: the poller, executing commands by
    `serve_data`, or the task, to which the poller hands it over. `StopReason` says why, and both act on it.

    Attributes:
        peer: The client's address.
        connected_s: Connect time, Unix seconds.
        pub_counts: Messages published, by topic.
        subscription: The subscribed channel; None before SUB.
        elsewhere: Instead of it, the subscription at all processes of a node.
        rested_s: When the broker last began to wait for the client, by trio's clock.
        handed: Data for the task to execute, or an exception for it to raise.
        publishes: Publishes to one topic, to be stored together.
        next: The command or error that follows the publishes.
        answered: The send buffer has an answer that must be flushed.
        waiting: The part that waits, while the connection is open.
        is_shared: The client has come by a shared port of a node: its task executes IDENTIFY and SUB.
        description: Of the last `/stats`; None: there was none since IDENTIFY.
    """

    def __init__(self, deps: SessionDeps, sock: socket.socket, peer: str, *, is_shared: bool = False) -> None:
        super().__init__(sock, deps.poller)
        self.peer = peer
        self.is_shared = is_shared
        self.connected_s: int = int(time.time())
        self.pub_counts: dict[str, int] = {}
        self.subscription: Subscription | None = None
        self.elsewhere: SubscriptionElsewhere | None = None
        self.authorizer: Authorizer = Authorizer(deps.access, peer)
        self.transport: Transport = Transport(sock)
        self.send_buffer = self.transport.send_buffer
        self.reader: CommandReader = CommandReader(deps.options.limits)
        self.reader.tls_required = deps.options.required_tls != "false"
        self.reader.auth_required = not self.authorizer.allows_all
        self.handshake: Handshake = Handshake(deps, self.reader, self.transport, self.authorizer.host)
        self.rested_s: float = 0.0
        self.handed: bytes | Exception | None = None
        self.publishes: list[Publish] = []
        self.next: Command | CommandError | None = None
        self.answered: bool = False
        self.waiting: WaitingPart | None = None
        self.description: Description | None = None
        self._deps = deps
        # Bound once: these are looked up for each publish.
        self._broker = deps.broker
        self._write_path = deps.write_path
        self._clock = deps.clock
        self._delivery = deps.delivery
        self._pacing = deps.options.pacing
        # Those of `publishes`, by index, that a producer with a name has stored before (None), or that are refused.
        self._not_stored: dict[int, PublishRefused | BatchRefused | None] = {}
        self._takes_room = False  # has a reservation in the broker's `BodyMemoryLimit`, or waits for one
        self._held_bytes = 0  # of messages in the send buffer that wait for further messages
        self._finish_rate = FinishRate(self._pacing.finishes_s)

    def close(self) -> None:
        """Close the connection soon."""
        if self.waiting is not None:
            self.waiting.close()

    # ------------------------------------------------------------------ reading

    def rest(self) -> None:
        """Return the client to the poller, and wait for its data."""
        PolledEndpoint.rest(self)
        self.rested_s = self._clock.clock_s()

    def serve_data(self, data: bytes | None) -> None:
        if not data and self.transport.bare and self.reader.is_empty:
            self._end_input(is_lost=data is None)
        elif data is None:
            self.send_buffer.abandon()
            self._hand_over(None)
        elif not data or not self.transport.bare or self.send_buffer.broken:
            self._hand_over(data)
        else:
            self.reader.receive_data(data)
            if self.reader.missing_bytes and self.is_unread:
                self._receive_more()
            else:
                self._go_on()

    def _end_input(self, *, is_lost: bool) -> None:
        """In the poller: end the session of a client that has ended its side, and whose commands are all executed."""
        try:
            if is_lost:
                self.send_buffer.abandon()
            self.leave_channel()
            self.send_buffer.flush()
            if self.send_buffer.full and not is_lost:
                self._hand_over(b"")  # the client may still read the answers: the task sends them
            else:
                self.close()
        except Exception as exc:
            self._hand_over(exc)

    def _receive_more(self) -> None:
        """In the poller: read more of a large body in this turn. A round costs about as much as such a read."""
        for _ in range(_MORE_READS):
            if not self.has_room():
                break
            data: bytes | None
            try:
                data = self.receive_now()
            except BlockingIOError:
                break
            except OSError:
                data = None
            if not data:
                self.serve_data(data)
                return
            self.reader.receive_data(data)
            if not (self.reader.missing_bytes and self.is_unread):
                break
        self._go_on()

    def _go_on(self) -> None:
        """In the poller: execute the commands read. Hand the client over if it needs the task."""
        try:
            reason = self.execute_now()
            if reason is IDLE:
                self._end_turn()
            elif reason is STORING:
                self.await_completion()
            else:
                self._hand_over(None)
        except Exception as exc:  # the task distinguishes the client's errors from bugs
            self._hand_over(exc)

    def _end_turn(self) -> None:
        """All commands read are executed: send the answers, and wait for more data."""
        waits_for_answer = self.answered
        if waits_for_answer:
            self.flush_answers()
        if self.send_buffer.congested or not self.has_room():
            self._hand_over(None)
            return
        self.rest()
        if self.subscription is not None:
            self._note_finishes(self.subscription.consumer, waits_for_answer=waits_for_answer)

    def _note_finishes(self, consumer: Consumer, *, waits_for_answer: bool) -> None:
        """Have the poller read the consumer later if it sends FINs quickly, one by one."""
        now_s = self._poller.clock_s()
        if waits_for_answer:
            self._finish_rate.note_answer(now_s)
        elif not self.is_unread and self._finish_rate.allows_wait(
            consumer.finish_count, consumer.in_flight.count, now_s
        ):
            self.read_later()

    def has_room(self) -> bool:
        """Whether the client may send the rest of a large body. Releases the room of a complete one."""
        missing = self.reader.missing_bytes
        # Read what the reader need not copy.
        self.read_bytes: int = (
            min(self.reader.next_bytes if self.transport.bare else 0, LARGE_RECEIVE_BYTES) or RECEIVE_BYTES
        )
        if not missing and not self._takes_room:
            return True
        self._takes_room = missing > 0
        return self._deps.bodies.admit(self, missing, self.reader.large_bodies)

    def _hand_over(self, what: bytes | Exception | None) -> None:
        """Wake the task: to execute this data, to raise this exception, or (None) to execute the commands read."""
        self.handed = what
        self.hand_over()
        if self.waiting is not None:
            self.waiting.start()

    # ------------------------------------------------------------------ sending

    def answer(self, frame: bytes) -> None:
        """Deliver waiting messages, then add an answer. The caller must flush it."""
        self._deliver_waiting()
        self.put_answer(frame)

    def put_answer(self, frame: bytes) -> None:
        """Add an answer, without delivering waiting messages before it."""
        self.send_buffer.put(frame)
        self.answered = True

    def _deliver_waiting(self) -> None:
        """Deliver the messages that output buffering holds back: as in nsqd, they precede any answer."""
        if self.subscription is not None:
            self._delivery.deliver_waiting(self.subscription.channel)

    def flush_answers(self) -> None:
        """Send the buffer if it has an answer."""
        if self.answered:
            self.answered = False
            if self.subscription is None:
                self.send_buffer.flush()
            else:
                self._deliver_waiting()  # includes messages it has published to its own channel
                self._flush_messages(self.subscription)

    # ------------------------------------------------------------------ messages

    def deliver(self, frames: bytes | memoryview) -> None:
        """Add message frames to the send buffer. The channel calls `send_delivered` afterwards."""
        self.send_buffer.put(frames)
        self._held_bytes += len(frames)

    def send_delivered(self) -> None:
        """Send the delivered messages, unless the client has negotiated output buffering without a timeout.

        In that case, as in nsqd, they are sent when the buffer is full, the client's RDY is used up, or with the next
        answer. With a timeout, messages wait in the channel: `Dispatcher.can_wait`.
        """
        settings, subscription = self.handshake.settings, self.subscription
        if not self._held_bytes or subscription is None:
            return
        waits = not settings.output_buffer_timeout_ms and self._held_bytes < settings.output_buffer_size
        if not (waits and _can_take_more(subscription)):
            self._flush_messages(subscription)

    def _flush_messages(self, subscription: Subscription) -> None:
        """Send the buffer. If the socket is full, stop deliveries to the client."""
        self._held_bytes = 0
        self.send_buffer.flush()
        if self.send_buffer.full:
            self._set_blocked(subscription, True)

    def _set_blocked(self, subscription: Subscription, blocked: bool) -> None:
        subscription.consumer.blocked = blocked
        subscription.channel.dispatcher.refresh(subscription.consumer)

    def unblock(self) -> None:
        """Resume deliveries after the socket has accepted all data."""
        if self.subscription is not None:
            self._set_blocked(self.subscription, False)
            self._delivery.deliver(self.subscription.channel)

    def _set_ready(self, subscription: Subscription, count: int) -> None:
        subscription.consumer.ready_count = count
        subscription.channel.dispatcher.refresh(subscription.consumer)
        if self._held_bytes and not _can_take_more(subscription):
            self._flush_messages(subscription)  # no further message will trigger the flush

    def leave_channel(self) -> None:
        """Unsubscribe: requeue the client's messages in flight, and deliver no more to it."""
        if self.subscription is not None:
            self._deps.topics.unsubscribe(*self.subscription)

    # ------------------------------------------------------------------ commands

    def execute_now(self) -> StopReason:
        """Execute the complete commands in order. Consecutive publishes to a topic are stored together.

        Raises CommandError: the next command violates the protocol; those before it are executed.
        """
        pacing = self._pacing
        left, over_s = pacing.commands_at_least, 0.0
        while True:
            command = self._next_command()
            if type(command) is Publish and (not self.publishes or self.publishes[-1].topic == command.topic):
                self.publishes.append(command)
                continue
            if self.publishes:  # before anything else: answers keep the order of the commands
                self.next = command
                if (reason := self.store()) is not IDLE:
                    return reason
            elif command is None:
                break
            elif isinstance(command, CommandError):
                raise command
            elif not self._execute(command):
                self.next = command
                return WAITING
            if not (left := left - 1):
                now_s = perf_counter()
                over_s = over_s or now_s + pacing.commands_s
                if now_s >= over_s:
                    return TURN_OVER
                left = pacing.commands_at_least
        if self.subscription is not None and self.subscription.channel.has_work:
            self._delivery.deliver(self.subscription.channel)
        return IDLE

    def _next_command(self) -> Command | CommandError | None:
        if self.next is not None:
            command, self.next = self.next, None
            return command
        try:
            return self.reader.next_command()
        except CommandError as exc:
            return exc

    def store(self) -> StopReason:
        """Have the log store the publishes: `STORING`, `BLOCKED`, or `IDLE` if they are refused, and answered."""
        self._deliver_waiting()  # now, because these publishes must be delivered after their answer
        name = self.publishes[0].topic
        topic = self._broker.publishable(name)
        if topic is None or not (self.authorizer.allows_all or self.authorizer.may_publish(name)):
            return BLOCKED
        if self.handshake.producer is not None:
            return self._store_numbered(topic, self.handshake.producer)
        try:
            self._write_path.submit(topic, self._publications(), self._complete_publishes)
        except PublishRefused as exc:
            self.answer_publishes(exc)
            return IDLE
        return STORING

    def _publications(self) -> list[Publication]:
        """Convert the publishes for the write path."""
        return [
            self._with_headers(p) if p.headers else Publication(p.sets, self._due_ns(p))
            for p in self.publishes
        ]

    def _due_ns(self, publish: Publish) -> int:
        return self._clock.now_ns() + publish.defer_ms * _NS_PER_MS if publish.defer_ms else 0

    def _store_numbered(self, topic: Topic, producer: NamedProducer) -> StopReason:
        """As `store`, for a client that numbers its publishes: store those that are not stored yet."""
        if producer.is_busy(topic.name):
            return BLOCKED
        publications: list[Publication] = []
        last = -1  # of the numbered batches in `publications`
        for index, publish in enumerate(self.publishes):
            metadata = b""
            if publish.first >= 0:
                count = publish.count
                try:
                    metadata = producer.metadata_if_new(topic.name, publish.first, count, last)
                except (PublishRefused, BatchRefused) as exc:
                    self._not_stored[index] = exc
                    continue
                if not metadata:
                    if last < 0:  # otherwise it may repeat one of these publications, and fails with it
                        self._not_stored[index] = None
                    continue
                last = publish.first + count - 1
            if publish.headers:
                publications.append(self._with_headers(publish, metadata))
            else:
                publications.append(Publication(publish.sets, self._due_ns(publish), metadata))
        if not publications:
            self.answer_publishes(None)
            return IDLE
        try:
            self._write_path.submit(topic, publications, self._complete_numbered)
        except PublishRefused as exc:
            self.answer_publishes(exc)
            return IDLE
        producer.begin_storing(topic.name)
        return STORING

    def _complete_numbered(self, error: PublishRefused | None) -> None:
        if self.handshake.producer is not None:
            self.handshake.producer.end_storing(self.publishes[0].topic, error)
        self._complete_publishes(error)

    def _with_headers(self, publish: Publish, metadata: bytes = b"") -> Publication:
        sets, headers = fit_with_headers(publish.messages, publish.headers)
        return Publication(sets, self._due_ns(publish), metadata, headers)

    def _complete_publishes(self, error: PublishRefused | None) -> None:
        """Answer the stored publishes, and continue: wake the task if it has the client, else execute on here."""
        self.answer_publishes(error)
        if self.state is IN_TASK:
            self.hand_over()
            return
        if self.next is None and self.subscription is None:
            self._end_turn()  # fast path: no further command, and no channel to serve
        else:
            self._go_on()
        self.poll_again()

    def answer_publishes(self, error: PublishRefused | None) -> None:
        """Answer the publishes with OK or this error, which ends the connection unless the client survives refusals.

        Those in `_not_stored` get their own answer.
        """
        publishes, self.publishes = self.publishes, []
        topic_name = publishes[0].topic
        if error is None and not self._not_stored:
            messages = commands = 0
            for publish in publishes:
                messages += publish.count
                commands += publish.commands
            self.pub_counts[topic_name] = self.pub_counts.get(topic_name, 0) + messages
            self.put_answer(OK_FRAME * commands)
            return
        not_stored, self._not_stored = self._not_stored, {}
        if self.handshake.producer is None and not self.handshake.identity.survive_refusals:
            assert error is not None
            self.next = _publish_refusal(publishes[0].verb, error)  # raised next, which ends the connection
            return
        told = False
        for index, publish in enumerate(publishes):
            reason = not_stored.get(index, error)
            if reason is not None:
                refusal = _publish_refusal(publish.verb, reason)
                if not told:
                    told = True
                    logger.error("[%s] - %s", self.peer, str(refusal))
                self.put_answer(encode_error(refusal.wire) * publish.commands)
            else:
                if index not in not_stored:
                    messages = self.pub_counts.get(topic_name, 0) + publish.count
                    self.pub_counts[topic_name] = messages
                self.put_answer(OK_FRAME * publish.commands)

    def _execute(self, command: Command) -> bool:
        """Execute a command other than a publish. If it has to wait, do nothing and return False."""
        if isinstance(command, Identify):
            return self._identify_now(command)
        if isinstance(command, Subscribe):
            return self._subscribe_now(command)
        if isinstance(command, Auth | Claim):
            return False
        if self.subscription is not None:  # the state table rejects these commands before SUB
            self._execute_for_consumer(command, self.subscription)
        elif self.elsewhere is not None:
            self.elsewhere.execute(command)
        return True

    def _identify_now(self, command: Identify) -> bool:
        before = self.handshake.settings
        if self.is_shared or not self.handshake.identify_now(command.body):
            return False
        self.end_identify(before)
        return True

    def end_identify(self, before: IdentifySettings) -> None:
        """Use the settings that IDENTIFY has negotiated; `before` are the earlier ones."""
        self.answered = True
        self.description = None
        if self.handshake.settings is not before and self.waiting is not None:
            self.waiting.apply_heartbeat_interval()

    def _subscribe_now(self, command: Subscribe) -> bool:
        if self.is_shared or not self.authorizer.allows_all or self.handshake.identity.private_channel:
            return False
        channel = self._deps.topics.channel_now(command.topic, command.channel)
        if channel is None:
            return False
        self.subscribe(channel)
        return True

    def subscribe(self, channel: Channel) -> None:
        """Become a consumer of a channel, and answer SUB. Raises CommandError."""
        handshake = self.handshake
        settings = handshake.settings
        rate = settings.sample_rate
        consumer = Consumer(
            settings.msg_timeout_ms,
            self,
            (lambda: 100 * random() < rate) if rate else None,  # nsqd delivers one percent more
            settings.output_buffer_size,
            settings.output_buffer_timeout_ms,
            wants_headers=handshake.identity.message_headers,
            nearness=handshake.nearness,
        )
        try:
            self._deps.topics.add_consumer(channel, consumer)
        except PublishRefused as exc:
            raise CommandError("E_SUB_FAILED", f"SUB failed {exc}") from exc
        self.subscription = Subscription(channel, consumer)
        self.reader.state = State.SUBSCRIBED
        self.reader.expected_answers = consumer.in_flight.expected_answers
        self.answer(OK_FRAME)

    def _execute_for_consumer(self, command: Command, subscription: Subscription) -> None:
        channel, consumer = subscription
        if isinstance(command, Finish):
            if failed := channel.finish(consumer, command.lines, time.time_ns()):
                self.answer(_failure_frames("FIN", failed))
        elif isinstance(command, Ready):
            self._set_ready(subscription, command.count)
        elif isinstance(command, Requeue):
            now_ns = self._clock.now_ns()
            if why_not := channel.requeue(
                consumer, command.id, command.delay_ms, now_ns, counts_attempt=command.counts_attempt
            ):
                self.answer(_failure_frames("REQ", [(command.id, why_not)]))
        elif isinstance(command, Touch):
            longest_ms = self._deps.options.limits.max_msg_timeout_ms
            if why_not := channel.touch(consumer, command.id, self._clock.now_ns(), longest_ms):
                self.answer(_failure_frames("TOUCH", [(command.id, why_not)]))
        elif isinstance(command, StartClose):
            self.reader.state = State.CLOSING
            consumer.closing = True
            self._set_ready(subscription, 0)
            self.answer(CLOSE_WAIT_FRAME)


def _can_take_more(subscription: Subscription) -> bool:
    """Whether further messages will come without an answer of the client. With an order, their keys may be held."""
    channel = subscription.channel
    ordered = channel.messages.order is not None
    return subscription.consumer.window > 0 and not ordered and not channel.dispatcher.suspended


def _failure_frames(verb: str, failed: Sequence[tuple[bytes, str]]) -> bytes:
    """Encode the error frames of a FIN, REQ or TOUCH that failed; `failed` has pairs of message id and reason.

    All frames are one bytes object: a client can send thousands of unknown ids at once.
    """
    before = f"E_{verb}_FAILED {verb} ".encode()
    return b"".join(
        [
            encode_error(b"%s%s failed %s" % (before, message_id, reason.encode()))
            for message_id, reason in failed
        ]
    )


def _publish_refusal(verb: str, reason: PublishRefused | BatchRefused) -> CommandError:
    """Return the error of a refused PUB, MPUB, DPUB or HPUB."""
    if isinstance(reason, BatchRefused):
        return CommandError(f"E_PRODUCER_{reason.code}", f"{verb} failed {reason}")
    # Not nsqd's code: nsqd may have stored some messages when it sends that one.
    code = "E_TOPIC_FULL" if isinstance(reason, TopicFull) else f"E_{verb}_FAILED"
    return CommandError(code, f"{verb} failed {reason}")
