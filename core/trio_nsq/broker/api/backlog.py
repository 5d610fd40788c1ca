"""A channel's backlog: peek, list and cancel deferred messages, seek. nsqd does not have these endpoints.

See docs/how-to/read-and-replay.md and docs/how-to/deferred-messages.md.
"""

import re
import time
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from itertools import chain, islice

from ...http.messages import HTTPError, Request, Response, given
from ...log import RecordBatch
from ...log.gaps import Gap
from ...log.interface import READ_BYTES
from ...log.positions import EARLIEST, Position, parse_position
from ...log.record_metadata import headers_in, only_channel
from ...server.body_memory import PieceRoom
from ..server import Server
from ..state.batch import Batch
from ..state.channel import Channel
from ..state.channel_messages import STATES, PeekedMessage, State
from ..state.id_lookup import find_ids
from ..state.seek import SeekResult
from ..state.topic import Topic
from .json_lines import gap_line, message_line
from .read import NDJSON, PIECE_BYTES, PIECE_MESSAGES, held_as_json, position_given
from .targets import find_channel, find_topic_and_channel, is_set, whole_number

DEFAULT_PEEK_MESSAGES = 10
DEFAULT_DEFERRED_MESSAGES = 100
MAX_MESSAGES = 10_000
"""The messages to show are collected in one step, so that the answer is consistent. This bounds that step."""
MAX_IDS = 1000
MAX_TIMES = 200
_ID = re.compile(r"[0-9a-f]{16}", re.ASCII)
_INCARNATION = re.compile(r"[0-9a-f]{32}", re.ASCII)
_SCATTERED_READ_BYTES = 16 * 1024


async def peek(server: Server, request: Request) -> Response:
    """Return the next messages of a channel as JSON lines, without consuming them."""
    topic, channel = find_topic_and_channel(server, request)
    count = _count(request, DEFAULT_PEEK_MESSAGES)
    every = chain.from_iterable(map(channel.messages.peek, _states(request)))
    lines = _WaitingLines(server, request.room, topic, channel, list(islice(every, count)))
    return Response(body=lines.pieces(), content_type=NDJSON)


async def deferred(server: Server, request: Request) -> Response:
    """Return the next deferred messages of a channel as JSON lines, ordered by due time."""
    topic, channel = find_topic_and_channel(server, request)
    count = _count(request, DEFAULT_DEFERRED_MESSAGES)
    waiting = list(islice(channel.messages.peek("deferred"), count))
    lines = _WaitingLines(server, request.room, topic, channel, waiting)
    headers = {"X-NSQ-Deferred-Count": str(channel.deferred_count)}
    return Response(body=lines.pieces(), content_type=NDJSON, headers=headers)


async def deferred_counts(server: Server, request: Request) -> Response:
    """Return how many messages of a channel are deferred, and how many are due before each of some times."""
    topic, channel = find_topic_and_channel(server, request)
    messages, ahead_ns = channel.messages.deferred, server.clock.ahead_ns()
    times_ns = [time_ns - ahead_ns for time_ns in _times_given(request)]
    return Response.json(
        {
            "topic": topic.name,
            "channel": channel.name,
            "deferred_count": len(messages),
            "first_due_ns": _by_system_clock(messages.first_due_ns, ahead_ns),
            "last_due_ns": _by_system_clock(messages.last_due_ns, ahead_ns),
            "due_before": messages.counts_before(times_ns),
        }
    )


async def cancel(server: Server, request: Request) -> Response:
    """Drop deferred messages, durably. `id` has one or more ids, separated by commas."""
    topic, channel = find_topic_and_channel(server, request)
    topic.moving.refuse_changes()
    ids = ids_given(request)
    sequences = await find_sequences(server, topic, channel, ids)
    cancelled = set(await server.admin.cancel(channel, sequences.values()))
    return Response.json(
        {
            "cancelled": [each for each in ids if sequences.get(each) in cancelled],
            "not_deferred": [each for each in ids if sequences.get(each) not in cancelled],
        }
    )


async def seek(server: Server, request: Request) -> Response:
    """Move a channel to a position in its topic's log, durably. With `dry_run`, only return the effect.

    With `incarnation`, only if the topic has this log.
    """
    channel = find_channel(server, request)
    given(request, "to")
    position = position_given(request, "to", EARLIEST)
    dry_run = is_set(request, "dry_run")
    incarnation = _incarnation_given(request)
    move, oldest = await server.admin.seek(channel, position, incarnation=incarnation, dry_run=dry_run)
    return Response.json(
        {
            "topic": channel.topic.name,
            "channel": channel.name,
            "from_sequence": move.from_sequence,
            "to_sequence": move.to_sequence,
            "delivered_again": move.delivered_again,
            "skipped": move.skipped,
            "in_flight": move.in_flight,
            "limited_by": _limit(position, move, oldest),
            "dry_run": dry_run,
        }
    )


def _incarnation_given(request: Request) -> bytes | None:
    """Return the identity of a log in a request; None: it has none. Raises HTTPError."""
    text = request.query.get("incarnation")
    if text is None:
        return None
    if not _INCARNATION.fullmatch(text):
        raise HTTPError(400, f"INVALID_INCARNATION: {text!r} is not 32 of the digits 0-9 a-f")
    return bytes.fromhex(text)


def _by_system_clock(due_ns: int | None, ahead_ns: int) -> int | None:
    """Return a due time, which is by `BrokerClock.now_ns`, as the clients' clocks show it; None for none."""
    return max(1, due_ns + ahead_ns) if due_ns else None


def ids_given(request: Request) -> list[str]:
    """Return the distinct ids in a request. Raises HTTPError."""
    ids = list(dict.fromkeys(given(request, "id").split(",")))
    for message_id in ids:
        if not _ID.fullmatch(message_id):
            raise HTTPError(400, f"INVALID_ID: {message_id!r} is not 16 of the digits 0-9 a-f")
    if len(ids) > MAX_IDS:
        raise HTTPError(400, f"INVALID_ID: at most {MAX_IDS} ids")
    return ids


def _times_given(request: Request) -> list[int]:
    """Return the times in `before`, Unix nanoseconds. Raises HTTPError."""
    texts = request.query["before"].split(",") if request.query.get("before") else []
    if len(texts) > MAX_TIMES:
        raise HTTPError(400, f"INVALID_BEFORE: at most {MAX_TIMES} times")
    times_ns = []
    for text in texts:
        try:
            position = parse_position(text, time.time_ns())
        except ValueError as exc:
            raise HTTPError(400, f"INVALID_BEFORE: {exc}") from exc
        if position.kind != "time":
            raise HTTPError(400, f"INVALID_BEFORE: {text!r} is not a time such as @1700000000")
        times_ns.append(position.value)
    return times_ns


async def find_sequences(server: Server, topic: Topic, channel: Channel, ids: list[str]) -> dict[str, int]:
    """Return the sequences of those of these messages that exist, by id. Raises HTTPError, LogReadError."""
    carried: list[int] = []
    if topic.log.has_carried_forward:
        carried = channel.messages.waiting_before(topic.log.first_sequence)
    work = partial(find_ids, topic.store, [int(message_id, 16) for message_id in ids], carried)
    found = await server.readers.call(topic, work)
    if not server.broker.serves_channel(channel):
        raise HTTPError(404, "CHANNEL_NOT_FOUND")
    return {f"{message_id:016x}": sequence for message_id, sequence in found.items()}


def _count(request: Request, default: int) -> int:
    count = whole_number(request, "max_messages", least=1) or default
    if count > MAX_MESSAGES:
        raise HTTPError(400, f"INVALID_MAX_MESSAGES: at most {MAX_MESSAGES}")
    return count


def _states(request: Request) -> list[State]:
    """Return the requested states, in the order in which a channel delivers."""
    text = request.query.get("state", ",".join(STATES))
    wanted = text.split(",")
    if not set(wanted) <= set(STATES):
        raise HTTPError(400, f"INVALID_STATE: {text!r} is not a comma-separated list of {', '.join(STATES)}")
    return [state for state in STATES if state in wanted]


def _limit(wanted: Position, move: SeekResult, oldest: int) -> str | None:
    """Return the end of the log that limited a move; None if the channel reached the wanted position."""
    if wanted.kind == "sequence":
        if wanted.value < oldest:
            return "earliest"
        return "latest" if wanted.value > move.to_sequence else None
    # The log may have had messages between that time and its oldest message.
    return "earliest" if wanted.kind == "time" and move.to_sequence == oldest > 0 else None


class _WaitingLines:
    """Generates the JSON lines of messages that wait in a channel, in the order given."""

    def __init__(
        self,
        server: Server,
        room: PieceRoom | None,
        topic: Topic,
        channel: Channel,
        waiting: Sequence[PeekedMessage],
    ) -> None:
        self._room = room
        self._readers = server.readers
        self._clock = server.clock
        self._ahead_ns = server.clock.ahead_ns()
        self._topic = topic
        self._channel = channel.name
        self._waiting = waiting
        self._records: Sequence[RecordBatch] = []  # the records of the last read
        self._record: RecordBatch | None = None  # the record of `_bodies`
        self._bodies: list[bytes] = []
        self._headers: Sequence[str] = ()

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield the lines, several in each piece."""
        lines: list[bytes] = []
        size = 0
        for each in self._waiting:
            lines.append(
                self._held_line(each, each.held) if each.held is not None else await self._line(each)
            )
            size += len(lines[-1])
            if size >= PIECE_BYTES or len(lines) >= PIECE_MESSAGES:
                yield b"".join(lines)
                lines, size = [], 0
        yield b"".join(lines)

    def _held_line(self, waiting: PeekedMessage, batch: Batch) -> bytes:
        index = waiting.sequence - batch.base_sequence
        return self._message_line(
            waiting,
            batch.id(index).decode(),
            batch.timestamp_ns(index),
            batch.body(index),
            batch.headers(index),
        )

    async def _line(self, waiting: PeekedMessage) -> bytes:
        sequence = waiting.sequence
        record = self._holding(sequence)
        if record is None:
            read_bytes = READ_BYTES if waiting.state == "fresh" else _SCATTERED_READ_BYTES
            work = partial(self._topic.store.read_scattered, sequence, read_bytes)
            read = partial(self._readers.read, self._topic, work)
            self._records = []
            self._records = await (read() if self._room is None else self._room.read(read, held_as_json))
            record = self._holding(sequence)
        if record is None:
            kept = sequence >= self._topic.log.first_sequence
            gap = Gap(sequence, sequence + 1, "damaged" if kept else "discarded")
            return gap_line(self._topic.name, gap, channel=self._channel, state=waiting.state)
        if record is not self._record:
            self._record, self._bodies = record, record.messages.bodies()
            self._headers = headers_in(record.metadata, record.count)
        if waiting.state == "fresh" and record.due_ns:  # the channel was moved back over it
            if only_channel(record.metadata) not in (None, self._channel):
                return b""
            due_ns = record.due_ns - self._ahead_ns
            waiting = waiting._replace(due_ns=due_ns if due_ns > self._clock.now_ns() else 0)
        index = sequence - record.base_sequence
        return self._message_line(
            waiting,
            f"{record.first_id + index:016x}",
            record.timestamp_ns,
            self._bodies[index],
            self._headers[index] if self._headers else "",
        )

    def _holding(self, sequence: int) -> RecordBatch | None:
        holding = (
            record for record in self._records if record.base_sequence <= sequence < record.next_sequence
        )
        return next(holding, None)

    def _message_line(
        self, waiting: PeekedMessage, message_id: str, timestamp_ns: int, body: bytes, headers: str
    ) -> bytes:
        return message_line(
            self._topic.name,
            message_id,
            timestamp_ns,
            waiting.attempts,
            waiting.sequence,
            _by_system_clock(waiting.due_ns, self._ahead_ns),
            body,
            headers,
            channel=self._channel,
            state=waiting.state,
        )
