"""Search the bodies of a topic's messages, with bounded work for each request."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import trio

from ...filters.bodies import compile_pattern
from ...filters.conditions import Condition, parse_condition
from ...filters.json_text import NotJSON, text_of, whole_object
from ..upstream.client import Upstream, UpstreamError
from .bodies import DECODING, TopicBodies
from .cursor import Cursor
from .message import Message, matching
from .paging import Start
from .reading import PIECE_MESSAGES, TopicLog, Walk

SEARCH_MESSAGES = 200_000
SEARCH_BYTES = 64 * 1024 * 1024
"""The most messages and bytes that one request searches, over all brokers, about."""
MAX_PATTERN = 1000
_DECODING_SHARE = 0.5
"""Of the limit of a request: then no more bodies are decoded, and the viewer can continue from there."""
Kind = Literal["text", "regex", "json"]
KINDS: tuple[Kind, ...] = ("text", "regex", "json")
Matches = Callable[[bytes], bool]


def compile_search(text: str, kind: str, *, ignore_case: bool = False) -> Matches:
    """Return a function that tells whether a body matches.

    Args:
        text: For `text`, what the body contains; for `regex`, a regular expression in the syntax of RE2; for `json`, a
            condition such as `user.age>=18`.
        ignore_case: Not for `json`. Only the letters A to Z.

    Raises:
        ValueError: The text does not say what to search for.
    """
    wanted = text.encode("utf-8", "surrogateescape")
    if not text or len(wanted) > MAX_PATTERN:
        raise ValueError(f"a search has 1 to {MAX_PATTERN} bytes")
    if kind == "json":
        return _meets(parse_condition(text))
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is not a kind of search: use text, regex or json")
    if kind == "text" and not ignore_case:
        return lambda body: wanted in body
    if kind == "text":
        low = wanted.lower()
        return lambda body: low in body.lower()
    pattern = compile_pattern(b"(?i)" + wanted if ignore_case else wanted)
    return lambda body: pattern.search(body) is not None


def is_comparison(text: str) -> bool:
    """Whether a text is a JSON condition that compares a field with a value, such as `level=error`."""
    try:
        return parse_condition(text).op not in ("exists", "absent")
    except ValueError:
        return False


def _meets(condition: Condition) -> Matches:
    def meets(body: bytes) -> bool:
        try:
            return condition.holds(whole_object(text_of(body)))
        except NotJSON:
            return False

    return meets


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a search came on a broker.

    Attributes:
        position: It continues here.
        searched: Sequences that it went through.
        left: Sequences that are left.
        time_ns: When the last message that it looked at was published; None: it looked at none.
    """

    position: int
    searched: int
    left: int
    time_ns: int | None


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search.

    Attributes:
        messages: In the order of the search, by time.
        progress: By broker.
        errors: Why brokers were not, or not completely, searched.
        rest: Where it continues; None: everything is searched.
    """

    messages: list[Message]
    progress: Mapping[str, Progress]
    errors: Mapping[str, str]
    rest: Cursor | None


async def search(
    upstream: Upstream,
    shown: TopicBodies,
    brokers: Sequence[str],
    start: Start,
    count: int,
    matches: Matches,
    *,
    deadline_s: float,
) -> Found:
    """Search until `count` messages are found, about, or the limits of a request are reached.

    Each broker is searched for itself, so that a slow one delays no other.

    Args:
        shown: The topic, and how its bodies are shown: a masked value is not found.
        brokers: Their HTTP addresses.
        matches: From `compile_search`.
        deadline_s: The limit for each broker.
    """
    errors: dict[str, str] = {}
    found: dict[str, list[Message]] = {}
    share = max(1, len(brokers))

    async def one(address: str) -> Progress:
        log = TopicLog(upstream, address, shown.topic)
        found[address] = []
        scan = _Scan(log, shown, start.backwards, matches, -(-count // share), found[address])
        return await scan.run(start, share, deadline_s, errors)

    results = await upstream.on_all(brokers, one)
    errors |= {address: error.reason for address, error in results.errors.items()}
    messages = [message for each in found.values() for message in each]
    messages.sort(key=lambda message: message.timestamp_ns, reverse=start.backwards)
    positions = dict(start.cursor.sequences) if start.cursor is not None else {}
    positions |= {address: progress.position for address, progress in results.values.items()}
    goes_on = any(progress.left for progress in results.values.values()) or bool(errors)
    time_ns = start.cursor.time_ns if start.cursor is not None else None
    return Found(messages, results.values, errors, Cursor(positions, time_ns) if goes_on else None)


@dataclass(slots=True)
class _Scan:
    """The search on one broker."""

    log: TopicLog
    shown: TopicBodies
    backwards: bool
    matches: Matches
    wanted: int
    found: list[Message]
    time_ns: int | None = None
    is_late: bool = False

    async def run(self, start: Start, share: int, deadline_s: float, errors: dict[str, str]) -> Progress:
        """Search. What fails after the beginning goes to `errors`. Raises UpstreamError."""
        address = self.log.address
        walk: Walk | None = None
        reached = 0
        decodes_until_s = time.monotonic() + deadline_s * _DECODING_SHARE
        with trio.move_on_after(deadline_s) as scope:
            try:
                bounds = await start.bounds(self.log)
                walk = Walk(self.log, bounds, bounds.at, backwards=self.backwards)
                reached = bounds.at
                while not walk.is_done and len(self.found) < self.wanted and not self.is_late:
                    if (
                        abs(reached - bounds.at) >= SEARCH_MESSAGES // share
                        or walk.size >= SEARCH_BYTES // share
                    ):
                        break
                    reached = await self._next(walk, decodes_until_s)
            except UpstreamError as exc:
                if walk is None:
                    raise
                errors[address] = exc.reason
        if walk is None:
            raise UpstreamError(address, f"no answer within {deadline_s:g} s")
        if scope.cancelled_caught and reached == bounds.at:
            errors[address] = f"no answer within {deadline_s:g} s"
        left = reached - bounds.first if self.backwards else bounds.end - reached
        return Progress(reached, abs(reached - bounds.at), max(0, left), self.time_ns)

    async def _next(self, walk: Walk, decodes_until_s: float) -> int:
        """Search the next piece, and return how far that came."""
        piece = await walk.next(PIECE_MESSAGES)
        search_piece = partial(
            matching,
            self.log.address,
            piece.records,
            piece.first,
            piece.end,
            self.shown,
            self.matches,
            backwards=self.backwards,
            goes_on=lambda: time.monotonic() < decodes_until_s,
        )
        hits, reached = await trio.to_thread.run_sync(search_piece, limiter=DECODING, abandon_on_cancel=True)
        self.is_late = reached != (piece.first if self.backwards else piece.end)
        if piece.records:
            self.time_ns = piece.records[0 if self.backwards else -1].timestamp_ns
        room = self.wanted - len(self.found)
        self.found += hits[:room]
        if len(hits) > room or (len(hits) == room and hits):
            last = hits[room - 1]
            self.time_ns = last.timestamp_ns
            return last.first_sequence if self.backwards else last.next_sequence
        return reached
