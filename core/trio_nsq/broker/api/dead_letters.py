"""`/dead_letters`: what lies in a dead-letter topic, and what becomes of it.

Not endpoints of nsqd: see docs/how-to/dead-letters.md. They work on the channel `dead-letters` of the topic: it holds
the letters until they are requeued or dropped. A request works for about a second, and answers where to continue.
"""

import math
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import groupby
from typing import Any, NamedTuple

import trio

from ...http import HTTPError, Request, Response
from ...log import RecordBatch
from ...log.interface import READ_BYTES
from ...protocol import pack_messages
from ..dead_letters import DEAD_LETTERS
from ..errors import PublishRefused, SaveError
from ..ingest.publication import Publication
from ..server import Server
from ..state.channel import Channel
from ..state.record_metadata import Origin, Reason, metadata_for_channel, origins
from ..state.topic import Topic
from ..state.withdrawn import Withdrawn
from .backlog import find_sequences, ids_given
from .json_lines import message_line
from .read import NDJSON
from .targets import find_topic, whole_number

PATIENCE_S = 1.0


class Letter(NamedTuple):
    """A message of a dead-letter topic.

    Attributes:
        sequence: Its place there.
        record, place: Where it is in its record.
        bodies: Gives all bodies of this record, which are copied out if they are wanted.
        origin: Where it comes from; None if somebody published it there.
    """

    sequence: int
    record: RecordBatch
    place: int
    bodies: Callable[[], list[bytes]]
    origin: Origin | None

    @property
    def body(self) -> bytes:
        """As it was published first."""
        return self.bodies()[self.place]

    @property
    def source(self) -> tuple[str | None, str | None]:
        """The topic and the channel that it comes from."""
        return (self.origin.topic, self.origin.channel) if self.origin is not None else (None, None)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which letters are meant: those that meet all of this.

    Attributes:
        topic, channel, reason: Of their origin; None: any.
        spans: Where they may lie, [start, end), ascending.
    """

    topic: str | None
    channel: str | None
    reason: Reason | None
    spans: Sequence[tuple[int, int]]

    def has(self, origin: Origin | None) -> bool:
        """Whether letters from there are meant."""
        if origin is None:
            return self.topic is None and self.reason is None
        return (
            self.topic in (None, origin.topic)
            and self.channel in (None, origin.channel)
            and self.reason in (None, origin.reason)
        )


# ---------------------------------------------------------------------- looking


async def overview(server: Server, request: Request) -> Response:
    """Which topics have dead letters; or how many of which origin one of them has."""
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
            key = (*letter.source, letter.origin.reason if letter.origin is not None else None)
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
    """Letters, with where they come from, as JSON lines, by sequence."""
    topic, channel = _topic_and_channel(server, request)
    count = whole_number(request, "max_messages", least=1)
    selection = await _selection(server, request, topic, channel)
    lines = _lines(_LetterReader(server, topic, selection, count), channel.topic.name)
    return Response(body=lines, content_type=NDJSON)


# ---------------------------------------------------------------------- doing


async def requeue(server: Server, request: Request) -> Response:
    """Put letters back into the channels they come from, or with `to=topic` into the topics; durably."""
    topic, channel = _topic_and_channel(server, request)
    to = request.query.get("to", "channel")
    if to not in ("channel", "topic"):
        raise HTTPError(400, f"INVALID_TO: {to!r} is neither channel nor topic")
    selection = await _selection(server, request, topic, channel)
    left = whole_number(request, "max_messages", least=1)
    reader = _LetterReader(server, topic, selection, left)
    done = 0
    kept: Counter[str] = Counter()
    error: str | None = None
    while reader.goes_on:
        letters = await reader.next()
        try:
            done += await _requeue(server, channel, letters, kept, whole_topic=to == "topic")
        except PublishRefused as exc:
            error = str(exc)
            break
    try:
        await server.checkpointer.save(topic)
    except SaveError as exc:
        what = "after a crash they are here again, too"
        raise HTTPError(503, f"{done} requeued, but that cannot be saved ({what}): {exc}") from exc
    if error is not None:
        raise HTTPError(503, f"{done} requeued, then: {error}")
    reasons = [{"why": why, "count": count} for why, count in sorted(kept.items())]
    return Response.json({"requeued": done, "kept": reasons, "next_sequence": reader.position})


async def drop(server: Server, request: Request) -> Response:
    """Throw letters away, durably."""
    topic, channel = _topic_and_channel(server, request)
    selection = await _selection(server, request, topic, channel)
    left = whole_number(request, "max_messages", least=1)
    reader = _LetterReader(server, topic, selection, left)
    taken: list[Withdrawn] = []
    try:
        while reader.goes_on:
            letters = await reader.next()
            taken += channel.withdraw([letter.sequence for letter in letters])
    except BaseException:
        server.delivery.put_back(channel, taken)
        raise
    done = await server.admin.dispose(channel, taken)
    return Response.json({"dropped": done, "next_sequence": reader.position})


async def _requeue(
    server: Server, channel: Channel, letters: Sequence[Letter], kept: Counter[str], *, whole_topic: bool
) -> int:
    """Requeue letters, and count why others cannot be. Returns how many it was. Raises PublishRefused."""
    done = 0
    for (topic, name), same in groupby(sorted(letters, key=_source), key=_source):
        group = list(same)
        there = server.broker.topics.get(topic)
        if not topic:
            kept["they come from nowhere: somebody published them there"] += len(group)
        elif not whole_topic and (there is None or name not in there.channels):
            kept[f"there is no channel {topic}/{name}"] += len(group)
        else:
            done += await _requeue_to(server, topic, None if whole_topic else name, channel, group)
    return done


async def _requeue_to(
    server: Server, topic: str, name: str | None, channel: Channel, letters: Sequence[Letter]
) -> int:
    """Publish letters that are still there, to one channel of a topic or to all. Raises PublishRefused."""
    taken = {message.sequence: message for message in channel.withdraw([each.sequence for each in letters])}
    bodies = [letter.body for letter in letters if letter.sequence in taken]
    if not bodies:
        return 0
    publication = Publication([pack_messages(bodies)])
    if name is not None:
        publication = Publication(publication.sets, server.timers.now_ns(), metadata_for_channel(name))
    try:
        with trio.CancelScope(shield=True):  # bounded by the disk; once stored, they must be gone here
            await server.topics.publish_durably(topic, publication)
    except BaseException:
        server.delivery.put_back(channel, taken.values())
        raise
    return channel.dispose(taken.values())


# ---------------------------------------------------------------------- what is asked for


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
            await trio.lowlevel.checkpoint()  # others have their turns
    return Selection(topic or None, name or None, reason, spans)


def _summary(channel: Channel) -> dict[str, Any]:
    return {
        "topic": channel.topic.name,
        "waiting": channel.messages.ready_count + channel.deferred_count,
        "in_flight": channel.in_flight_count,
    }


def _source(letter: Letter) -> tuple[str, str]:
    topic, channel = letter.source
    return topic or "", channel or ""


class _LetterReader:
    """Goes through the letters of a dead-letter topic that are meant, or `at_most` so many of them."""

    def __init__(
        self, server: Server, topic: Topic, selection: Selection, at_most: int | None = None
    ) -> None:
        self._readers = server.readers
        self._topic = topic
        self._selection = selection
        self._spans = deque(selection.spans)
        self._left = math.inf if at_most is None else at_most
        self._until_s = math.inf  # there is time for one look at least

    @property
    def position(self) -> int | None:
        """Where to go on; None at the end."""
        return self._spans[0][0] if self._spans else None

    @property
    def full(self) -> bool:
        """Whether as many were found as were wanted."""
        return not self._left

    @property
    def goes_on(self) -> bool:
        """Whether there may be more, and there is time to look."""
        return bool(self._spans) and not self.full and trio.current_time() < self._until_s

    async def next(self) -> list[Letter]:
        """Some letters, possibly none; not at the end. Raises CutOff."""
        start, _ = self._spans[0]
        self._until_s = min(self._until_s, trio.current_time() + PATIENCE_S)
        work = partial(self._topic.store.read_scattered, start, READ_BYTES)
        records = await self._readers.read(self._topic, work)
        if not records:
            self._spans.popleft()  # damaged, or gone
        return [letter for record in records for letter in self._in_record(record)]

    def _in_record(self, record: RecordBatch) -> Iterator[Letter]:
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
                yield Letter(sequence, record, index, bodies, origin)
            if end > record.next_sequence:
                self._spans[0] = record.next_sequence, end
                return
            self._spans.popleft()


async def _lines(reader: _LetterReader, topic: str) -> AsyncGenerator[bytes, None]:
    while reader.position is not None and not reader.full:
        yield b"".join(map(partial(_line, topic), await reader.next()))


def _line(topic: str, letter: Letter) -> bytes:
    record = letter.record
    return message_line(
        topic,
        f"{record.first_id + letter.place:016x}",
        record.timestamp_ns,
        0,
        letter.sequence,
        None,
        letter.body,
        origin=asdict(letter.origin) if letter.origin is not None else None,
    )
