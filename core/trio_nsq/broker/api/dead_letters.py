"""`/dead_letters`: list, requeue and drop the messages of a dead-letter topic.

nsqd does not have these endpoints: see docs/how-to/dead-letters.md. They work on the topic's channel `dead-letters`,
which keeps a letter until an operator requeues or drops it. A request works for about a second, and returns the
sequence to continue from.
"""

import math
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from typing import Any, NamedTuple

import trio

from ...access.policy import Identity
from ...api.answers import Origin
from ...http.messages import HTTPError, Request, Response
from ...log import RecordBatch
from ...log.interface import READ_BYTES
from ...log.record_metadata import Reason, headers_in, metadata_for_channel, origins
from ...protocol import pack_messages
from ..dead_letters import DEAD_LETTERS
from ..errors import NoChannel, PublishRefused, SaveError
from ..ingest.publication import Publication, fit_with_headers
from ..server import Server
from ..state.channel import Channel
from ..state.topic import Topic
from ..state.withdrawn import WithdrawnMessage
from .backlog import find_sequences, ids_given
from .json_lines import message_line
from .read import NDJSON
from .targets import find_topic, may_send_to, whole_number

PATIENCE_S = 1.0


class DeadLetter(NamedTuple):
    """A message of a dead-letter topic.

    Attributes:
        sequence: Its sequence in the dead-letter topic.
        record: The record that holds it.
        place: Its index in the record.
        bodies: Returns all bodies of the record. The first call copies them.
        origin: Its topic and channel of origin; None if a producer published it to the dead-letter topic.
    """

    sequence: int
    record: RecordBatch
    place: int
    bodies: Callable[[], list[bytes]]
    origin: Origin | None

    @property
    def body(self) -> bytes:
        """The original body."""
        return self.bodies()[self.place]

    @property
    def headers(self) -> str:
        """The text of its headers, see `protocol/headers.py`."""
        texts = headers_in(self.record.metadata, self.record.count)
        return texts[self.place] if texts else ""

    @property
    def source(self) -> tuple[str | None, str | None]:
        """The topic and channel of origin."""
        return (self.origin["topic"], self.origin["channel"]) if self.origin is not None else (None, None)


@dataclass(frozen=True, slots=True)
class Selection:
    """A filter for letters. All conditions must hold.

    Attributes:
        topic, channel, reason: The required origin and reason; None for any.
        spans: Ranges of sequences [start, end), ascending.
    """

    topic: str | None
    channel: str | None
    reason: Reason | None
    spans: Sequence[tuple[int, int]]

    def has(self, origin: Origin | None) -> bool:
        """Whether letters of this origin are selected."""
        if origin is None:
            return self.topic is None and self.reason is None
        return (
            self.topic in (None, origin["topic"])
            and self.channel in (None, origin["channel"])
            and self.reason in (None, origin["reason"])
        )


# ---------------------------------------------------------------------- listing


async def overview(server: Server, request: Request) -> Response:
    """List the dead-letter topics; with `topic`, count the letters of that topic by origin and reason."""
    if "topic" not in request.query:
        named = sorted(server.broker.topics.items())
        found = [topic.channels[DEAD_LETTERS] for _, topic in named if DEAD_LETTERS in topic.channels]
        return Response.json({"topics": [_summary(channel) for channel in found]})
    topic, channel = _topic_and_channel(server, request)
    selection = await _selection(server, request, topic, channel)
    counts: Counter[tuple[Any, ...]] = Counter()
    span: dict[tuple[Any, ...], tuple[int, int]] = {}
    reader = _LetterReader(server, topic, selection)
    while reader.goes_on:
        for letter in await reader.next():
            key = (*letter.source, letter.origin["reason"] if letter.origin is not None else None)
            at_ns = letter.record.timestamp_ns
            counts[key] += 1
            span[key] = min(span.get(key, (at_ns, 0))[0], at_ns), max(span.get(key, (0, at_ns))[1], at_ns)
    rows = [
        {
            "topic": origin,
            "channel": name,
            "reason": reason,
            "count": counts[origin, name, reason],
            "first_ns": span[origin, name, reason][0],
            "last_ns": span[origin, name, reason][1],
        }
        for origin, name, reason in sorted(counts, key=str)
    ]
    return Response.json({**_summary(channel), "origins": rows, "next_sequence": reader.position})


async def messages(server: Server, request: Request) -> Response:
    """Return letters with their origins as JSON lines, by sequence."""
    topic, channel = _topic_and_channel(server, request)
    count = whole_number(request, "max_messages", least=1)
    selection = await _selection(server, request, topic, channel)
    lines = _lines(_LetterReader(server, topic, selection, count), channel.topic.name)
    return Response(body=lines, content_type=NDJSON)


# ---------------------------------------------------------------------- changing


async def requeue(server: Server, request: Request) -> Response:
    """Requeue letters to their channels of origin, or with `to=topic` to the topics of origin; durably."""
    topic, channel = _topic_and_channel(server, request)
    to = request.query.get("to", "channel")
    if to not in ("channel", "topic"):
        raise HTTPError(400, f"INVALID_TO: {to!r} is neither channel nor topic")
    server.topics.refuse_if_draining()
    topic.moving.refuse_changes()
    selection = await _selection(server, request, topic, channel)
    left = whole_number(request, "max_messages", least=1)
    reader = _LetterReader(server, topic, selection, left)
    done = 0
    kept: Counter[str] = Counter()
    error: str | None = None
    while reader.goes_on:
        letters = await reader.next()
        try:
            done += await _requeue(
                server, channel, letters, kept, request.identity, whole_topic=to == "topic"
            )
        except PublishRefused as exc:
            error = str(exc)
            break
    try:
        await server.checkpointer.save(topic)
    except SaveError as exc:
        what = "after a crash they are also dead letters again"
        raise HTTPError(503, f"{done} requeued, but that cannot be saved ({what}): {exc}") from exc
    if error is not None:
        raise HTTPError(503, f"{done} requeued, then: {error}")
    reasons = [{"why": why, "count": count} for why, count in sorted(kept.items())]
    return Response.json({"requeued": done, "kept": reasons, "next_sequence": reader.position})


async def drop(server: Server, request: Request) -> Response:
    """Drop letters, durably."""
    topic, channel = _topic_and_channel(server, request)
    selection = await _selection(server, request, topic, channel)
    left = whole_number(request, "max_messages", least=1)
    reader = _LetterReader(server, topic, selection, left)
    taken: list[WithdrawnMessage] = []
    try:
        while reader.goes_on:
            letters = await reader.next()
            topic.moving.refuse_changes()
            taken += channel.withdraw([letter.sequence for letter in letters])
    except BaseException:
        server.delivery.put_back(channel, taken)
        raise
    done = await server.admin.dispose(channel, taken)
    return Response.json({"dropped": done, "next_sequence": reader.position})


async def _requeue(
    server: Server,
    channel: Channel,
    letters: Sequence[DeadLetter],
    kept: Counter[str],
    identity: Identity | None,
    *,
    whole_topic: bool,
) -> int:
    """Requeue letters; returns their number. Counts in `kept` the reasons for the others. Raises PublishRefused."""
    done = 0
    for (topic, name), same in groupby(sorted(letters, key=_source), key=_source):
        group = list(same)
        target = server.broker.topics.get(topic)
        if not topic:
            kept["they have no origin: a producer published them to the dead-letter topic"] += len(group)
        elif not may_send_to(identity, topic, None if whole_topic else name):
            kept[f"this needs the role publish or manage on topic {topic}"] += len(group)
        elif not whole_topic and (target is None or name not in target.channels):
            kept[f"there is no channel {topic}/{name}"] += len(group)
        else:
            try:
                done += await _requeue_to(server, topic, None if whole_topic else name, channel, group)
            except NoChannel as exc:  # it was just deleted
                kept[str(exc)] += len(group)
    return done


async def _requeue_to(
    server: Server, topic: str, name: str | None, channel: Channel, letters: Sequence[DeadLetter]
) -> int:
    """Publish the letters that still exist to one channel of a topic, or to all channels. Raises PublishRefused."""
    if channel.stream is not None:
        raise PublishRefused("the topic is being moved to another broker")
    taken = {message.sequence: message for message in channel.withdraw([each.sequence for each in letters])}
    found = [letter for letter in letters if letter.sequence in taken]
    if not found:
        return 0
    bodies = pack_messages([letter.body for letter in found])
    sets, headers = fit_with_headers(bodies, [letter.headers for letter in found])
    due_ns, metadata = (server.clock.now_ns(), metadata_for_channel(name)) if name is not None else (0, b"")
    publication = Publication(sets, due_ns, metadata, headers)
    try:
        with trio.CancelScope(shield=True):  # waits only for the disk; stored letters must be dropped here
            await server.topics.publish_durably(topic, publication, channels=() if name is None else [name])
    except BaseException:
        server.delivery.put_back(channel, taken.values())
        raise
    return channel.dispose(taken.values())


# ---------------------------------------------------------------------- parameters


def _topic_and_channel(server: Server, request: Request) -> tuple[Topic, Channel]:
    topic = find_topic(server, request)
    channel = topic.channels.get(DEAD_LETTERS)
    if channel is None:
        raise HTTPError(404, "CHANNEL_NOT_FOUND")
    return topic, channel


async def _selection(server: Server, request: Request, source: Topic, channel: Channel) -> Selection:
    topic, _, name = request.query.get("origin", "").partition("/")
    text = request.query.get("reason")
    try:
        reason = Reason(text) if text is not None else None
    except ValueError:
        known = ", ".join(each.value for each in Reason)
        raise HTTPError(400, f"INVALID_REASON: {text!r} is not one of {known}") from None
    start = whole_number(request, "from", least=0) or 0
    spans: deque[tuple[int, int]] = deque()
    if "id" in request.query:
        found = (await find_sequences(server, source, channel, ids_given(request))).values()
        spans.extend((sequence, sequence + 1) for sequence in sorted(found) if sequence >= start)
    else:
        for _ in channel.messages.find_waiting(start, spans):
            await trio.lowlevel.checkpoint()  # let other tasks run
    return Selection(topic or None, name or None, reason, spans)


def _summary(channel: Channel) -> dict[str, Any]:
    return {
        "topic": channel.topic.name,
        "waiting": channel.messages.ready_count + channel.deferred_count,
        "in_flight": channel.in_flight_count,
    }


def _source(letter: DeadLetter) -> tuple[str, str]:
    topic, channel = letter.source
    return topic or "", channel or ""


class _LetterReader:
    """Reads the selected letters of a dead-letter topic, at most `at_most` of them."""

    def __init__(
        self, server: Server, topic: Topic, selection: Selection, at_most: int | None = None
    ) -> None:
        self._readers = server.readers
        self._topic = topic
        self._selection = selection
        self._spans = deque(selection.spans)
        self._left = math.inf if at_most is None else at_most
        self._until_s = math.inf  # set by the first read, so that there is at least one

    @property
    def position(self) -> int | None:
        """The sequence to continue from; None at the end."""
        return self._spans[0][0] if self._spans else None

    @property
    def full(self) -> bool:
        """Whether `at_most` letters were found."""
        return not self._left

    @property
    def goes_on(self) -> bool:
        """Whether there may be more letters, and time is left."""
        return bool(self._spans) and not self.full and trio.current_time() < self._until_s

    async def next(self) -> list[DeadLetter]:
        """Read the next letters; may return an empty list. Must not be called at the end. Raises CutOff."""
        start, _ = self._spans[0]
        self._until_s = min(self._until_s, trio.current_time() + PATIENCE_S)
        work = partial(self._topic.store.read_scattered, start, READ_BYTES)
        records = await self._readers.read(self._topic, work)
        if not records:
            self._spans.popleft()  # damaged or deleted
        letters: list[DeadLetter] = []
        for record in records:
            letters += self._in_record(record)
            if self.position is not None and self.position < record.next_sequence:
                break  # the limit is reached: the next request continues in this record
        return letters

    def _in_record(self, record: RecordBatch) -> Iterator[DeadLetter]:
        found, bodies = origins(record.metadata), cache(record.messages.bodies)
        while self._spans and self._spans[0][0] < record.next_sequence:
            start, end = self._spans[0]
            for sequence in range(max(start, record.base_sequence), min(end, record.next_sequence)):
                index = sequence - record.base_sequence
                origin = found[index] if found else None
                if not self._selection.has(origin):
                    continue
                if not self._left:
                    self._spans[0] = sequence, end
                    return
                self._left -= 1
                yield DeadLetter(sequence, record, index, bodies, origin)
            if end > record.next_sequence:
                self._spans[0] = record.next_sequence, end
                return
            self._spans.popleft()


async def _lines(reader: _LetterReader, topic: str) -> AsyncGenerator[bytes, None]:
    while reader.position is not None and not reader.full:
        yield b"".join(map(partial(_line, topic), await reader.next()))


def _line(topic: str, letter: DeadLetter) -> bytes:
    record = letter.record
    return message_line(
        topic,
        f"{record.first_id + letter.place:016x}",
        record.timestamp_ns,
        0,
        letter.sequence,
        None,
        letter.body,
        letter.headers,
        origin=letter.origin,
    )
