"""`/channel/peek` and `/channel/seek`: what a channel delivers next, and moving it; not endpoints of nsqd's.

See docs/reading.md.
"""

import time
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING

from ...http import CutOff, HTTPError, Request, Response, Route
from ...log import LogReadError, RecordBatch
from ...log.gaps import Gap
from ...log.interface import READ_BYTES
from ...protocol.frames import MESSAGE_FRAME_BYTES
from ..positions import EARLIEST, Position
from ..readers import Readers
from ..state.batch import Batch
from ..state.channel import Channel
from ..state.channel_messages import STATES, State, Waiting
from ..state.record_metadata import only_channel
from ..state.seek import Move
from ..state.topic import Topic
from .json_lines import gap_line, message_line
from .read import NDJSON, PIECE_BYTES, PIECE_MESSAGES, position_given
from .targets import find_channel, find_topic_and_channel, given, is_dry_run, whole_number

if TYPE_CHECKING:
    from ..server import Server

DEFAULT_PEEK_MESSAGES = 10
MAX_PEEK_MESSAGES = 10_000
"""What is to be shown is noted in one go, so that the answer is about one moment."""
_SCATTERED_READ_BYTES = 16 * 1024


class SeekEndpoints:
    """The handlers.

    Args:
        server: Whose channels these are.
    """

    def __init__(self, server: "Server") -> None:
        self._server = server

    def routes(self) -> list[Route]:
        """All routes."""
        return [
            Route("GET", "/channel/peek", self.peek),
            Route("POST", "/channel/seek", self.seek),
        ]

    async def peek(self, request: Request) -> Response:
        """The next messages of a channel, without taking them, as JSON lines."""
        topic, channel = find_topic_and_channel(self._server, request)
        count = whole_number(request, "max_messages", least=1) or DEFAULT_PEEK_MESSAGES
        if count > MAX_PEEK_MESSAGES:
            raise HTTPError(400, f"INVALID_MAX_MESSAGES: {MAX_PEEK_MESSAGES} is the most")
        every = chain.from_iterable(map(channel.messages.peek, _states(request)))
        lines = WaitingLines(self._server.readers, topic, channel, list(islice(every, count)))
        return Response(body=lines.pieces(), content_type=NDJSON)

    async def seek(self, request: Request) -> Response:
        """Move a channel to a place in its topic's log, durably; with `dry_run` only say what that would do."""
        channel = find_channel(self._server, request)
        given(request, "to")
        position = position_given(request, "to", EARLIEST)
        dry_run = is_dry_run(request)
        try:
            move, oldest = await self._server.admin.seek(channel, position, dry_run=dry_run)
        except LogReadError as exc:
            raise HTTPError(503, str(exc)) from exc
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


def _states(request: Request) -> list[State]:
    """The states asked for, in the order in which a channel delivers."""
    text = request.query.get("state", ",".join(STATES))
    wanted = text.split(",")
    if not set(wanted) <= set(STATES):
        raise HTTPError(
            400, f"INVALID_STATE: {text!r} is not one or more, with commas, of {', '.join(STATES)}"
        )
    return [state for state in STATES if state in wanted]


def _limit(wanted: Position, move: Move, oldest: int) -> str | None:
    """Which end of the log kept the channel from being moved further, if one did."""
    if wanted.kind == "sequence":
        if wanted.value < oldest:
            return "earliest"
        return "latest" if wanted.value > move.to_sequence else None
    # Whether anything was published between that time and the oldest message, nobody knows any more.
    return "earliest" if wanted.kind == "time" and move.to_sequence == oldest > 0 else None


class WaitingLines:
    """Makes the lines of `/channel/peek`, and the like.

    Args:
        readers: See there.
        topic, channel: Whose messages they are.
        waiting: In this order.
    """

    def __init__(self, readers: Readers, topic: Topic, channel: Channel, waiting: Sequence[Waiting]) -> None:
        self._readers = readers
        self._topic = topic
        self._channel = channel.name
        self._waiting = waiting
        self._records: list[RecordBatch] = []  # neighbours, of those read last
        self._record: RecordBatch | None = None  # the one of them that was last looked into
        self._bodies: list[bytes] = []

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """The lines, some at a time."""
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

    def _held_line(self, waiting: Waiting, batch: Batch) -> bytes:
        index = waiting.sequence - batch.base_sequence
        message_id, frame = batch.frame(index, 1)
        return self._message_line(
            waiting, message_id.decode(), batch.timestamp_ns(index), frame[MESSAGE_FRAME_BYTES:]
        )

    async def _line(self, waiting: Waiting) -> bytes:
        sequence = waiting.sequence
        record = self._holding(sequence)
        if record is None:
            at_a_time = READ_BYTES if waiting.state == "fresh" else _SCATTERED_READ_BYTES
            try:
                self._records = await self._readers.call(
                    self._topic, partial(self._topic.store.read_scattered, sequence, at_a_time)
                )
            except LogReadError as exc:
                raise CutOff(str(exc)) from exc
            self._readers.check(self._topic)
            record = self._holding(sequence)
        if record is None:
            kept = sequence >= self._topic.log.first_sequence
            gap = Gap(sequence, sequence + 1, "damaged" if kept else "discarded")
            return gap_line(self._topic.name, gap, channel=self._channel, state=waiting.state)
        if record is not self._record:
            self._record, self._bodies = record, record.messages.bodies()
        if waiting.state == "fresh" and record.due_ns:  # the channel was moved back to before it
            if only_channel(record.metadata) not in (None, self._channel):
                return b""
            waiting = waiting._replace(due_ns=record.due_ns if record.due_ns > time.time_ns() else 0)
        index = sequence - record.base_sequence
        return self._message_line(
            waiting, f"{record.first_id + index:016x}", record.timestamp_ns, self._bodies[index]
        )

    def _holding(self, sequence: int) -> RecordBatch | None:
        holding = (
            record for record in self._records if record.base_sequence <= sequence < record.next_sequence
        )
        return next(holding, None)

    def _message_line(self, waiting: Waiting, message_id: str, timestamp_ns: int, body: bytes) -> bytes:
        return message_line(
            self._topic.name,
            message_id,
            timestamp_ns,
            waiting.attempts,
            waiting.sequence,
            waiting.due_ns or None,
            body,
            channel=self._channel,
            state=waiting.state,
        )
