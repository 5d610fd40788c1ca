"""What a channel delivers next, from all brokers that have it. Nothing is taken."""

from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import trio

from ...api import broker as api
from ...bodies.reading import BodyReader, ReadsBody
from ..upstream.client import Upstream
from ..upstream.json_lines import read_lines
from .bodies import DECODING, PageBodies
from .paging import KEEP_BYTES, READ_BYTES

STATES = ("requeued", "fresh", "deferred")


@dataclass(frozen=True, slots=True)
class Waiting:
    """A message that waits in a channel, or one that cannot be read there.

    Attributes:
        broker: The HTTP address of its broker.
        state: `requeued`, `fresh` or `deferred`.
        attempts: How often the channel has delivered it.
        due_ns: Until when it is deferred, Unix nanoseconds; None: it is not.
        body: The body as it is shown, or its beginning.
        size: The size of the whole body as it was published.
        shown_size: The size of the whole body as it is shown.
        gap: Why it cannot be read: `damaged` or `discarded`; empty: it can. Then only `sequence` and `state` are known.
        headers: Values by names.
        formats, problem, is_masked: As those of `Message`.
    """

    broker: str
    sequence: int
    state: str
    id: str = ""
    timestamp_ns: int = 0
    attempts: int = 0
    due_ns: int | None = None
    body: bytes = b""
    size: int = 0
    shown_size: int = 0
    gap: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    formats: tuple[str, ...] = ()
    problem: str = ""
    is_masked: bool = False


@dataclass(frozen=True, slots=True)
class Peek:
    """The next messages of a channel.

    Attributes:
        waiting: By broker, in the order of delivery.
        errors: Why brokers did not answer.
    """

    waiting: Mapping[str, list[Waiting]]
    errors: Mapping[str, str]


async def peek(
    upstream: Upstream,
    topic: str,
    channel: str,
    brokers: Sequence[str],
    count: int,
    reader: BodyReader,
    *,
    states: Sequence[str] = STATES,
) -> Peek:
    """Ask each broker for the next `count` messages of a channel; `reader` reads their bodies."""
    request, page = api.peek(topic, channel, count, states), PageBodies()
    read = partial(page.read, reader)
    cut: dict[str, str] = {}

    async def ask(address: str) -> list[Waiting]:
        lines = await read_lines(upstream, address, request, at_most=count, max_bytes=READ_BYTES)
        if lines.is_cut and len(lines.objects) < count:
            cut[address] = f"its messages are large: the page has only the first {len(lines.objects)}"
        waiting = partial(_waiting_messages, address, lines.objects, read, states)
        return await trio.to_thread.run_sync(waiting, limiter=DECODING)

    results = await upstream.on_all(brokers, ask)
    return Peek(results.values, cut | {address: error.reason for address, error in results.errors.items()})


def _waiting_messages(
    broker: str, lines: Sequence[Mapping[str, Any]], read: ReadsBody, states: Sequence[str]
) -> list[Waiting]:
    return [_waiting(broker, line, read, states) for line in lines]


def _waiting(broker: str, found: Mapping[str, Any], read: ReadsBody, states: Sequence[str]) -> Waiting:
    if "gap" in found:
        return Waiting(broker, found["first_sequence"], found.get("state", states[0]), gap=found["gap"][:20])
    encoded = found.get("body_base64")
    body = b64decode(encoded) if encoded is not None else found["body"].encode()
    shown = read(body)
    return Waiting(
        broker,
        found["sequence"],
        found["state"],
        found["id"][:16],
        found["timestamp_ns"],
        found["attempts"],
        found["due_ns"],
        shown.content[:KEEP_BYTES],
        len(body),
        len(shown.content) + (not shown.is_complete),
        headers={str(name): str(value) for name, value in (found.get("headers") or {}).items()},
        formats=shown.formats,
        problem=shown.problem,
        is_masked=shown.is_masked,
    )
