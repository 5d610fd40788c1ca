"""Publish messages from a form to one broker, and find out where they are."""

import secrets
from base64 import b64decode
from collections.abc import Sequence
from dataclasses import dataclass

from ...api import broker as api
from ...protocol.headers import Headers, check_hpub, encode_headers, with_prefixes
from ...protocol.messages import pack_messages
from ..upstream.client import Upstream, UpstreamError
from .reading import TopicLog

MAX_LINES = 10_000
_LOOK_MESSAGES = 20_000
_LOOK_BYTES = 16 * 1024 * 1024
FORMATS = ("text", "lines", "hex", "base64")


def bodies_of(text: str, form: str) -> list[bytes]:
    """Return the messages of a form's text.

    Args:
        form: `text`: one message, with line feeds as they were typed. `lines`: one message for each line that is not
            empty. `hex`, `base64`: one message, encoded.

    Raises:
        ValueError: The text is empty or not encoded like that.
    """
    plain = text.replace("\r\n", "\n")  # browsers send each line end of a form as CRLF
    if form == "text":
        bodies = [plain.encode("utf-8", "surrogatepass")]
    elif form == "lines":
        bodies = [line.encode("utf-8", "surrogatepass") for line in plain.split("\n") if line]
    elif form == "hex":
        try:
            bodies = [bytes.fromhex(text)]
        except ValueError:
            raise ValueError("the body is not hexadecimal: write pairs of the digits 0-9 and a-f") from None
    elif form == "base64":
        try:
            bodies = [b64decode("".join(text.split()), validate=True)]
        except ValueError:
            raise ValueError("the body is not Base64") from None
    else:
        raise ValueError(f"{form!r} is not a format: use text, lines, hex or base64")
    if not bodies or not all(bodies):
        raise ValueError("the body is empty: a message has at least 1 byte")
    if len(bodies) > MAX_LINES:
        raise ValueError(f"at most {MAX_LINES:,} lines at once: use qcli pub for more")
    return bodies


def headers_of(text: str) -> dict[str, str]:
    """Return the headers of a form's text, one on each line that is not empty: `name: value`. Raises ValueError."""
    headers: dict[str, str] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        name, colon, value = line.partition(":")
        name = name.rstrip()
        if not colon:
            raise ValueError(f"{line[:80]!r} is not a header such as tenant: 7")
        if name in headers:
            raise ValueError(f"the header {name!r} is there twice")
        headers[name] = value.strip()
    encode_headers(headers)
    return headers


@dataclass(frozen=True, slots=True)
class Published:
    """What was published.

    Attributes:
        count: Messages.
        first_sequence: The sequence of the first; the others follow. None: unknown.
    """

    count: int
    first_sequence: int | None


async def publish(
    upstream: Upstream,
    address: str,
    topic: str,
    bodies: Sequence[bytes],
    *,
    defer_ms: int = 0,
    is_nsqd: bool = False,
    may_read: bool = True,
    headers: Headers | None = None,
) -> Published:
    """Publish messages, all or none.

    Args:
        address: The broker's HTTP address.
        bodies: At least one.
        may_read: Whether to look for the messages in the log afterwards.
        headers: Those of each message.

    Raises:
        UpstreamError: They are not published; without an answer, they may be.
        ValueError: nsqd cannot defer several messages at once, and has no headers; or there are too many headers.
    """
    log = TopicLog(upstream, address, topic)
    before = None if is_nsqd or not may_read else await _end(log)
    if headers:
        if is_nsqd:
            raise ValueError("nsqd has no headers of messages")
        texts = [encode_headers(headers)] * len(bodies)
        check_hpub(texts)
        packed = len(bodies).to_bytes(4, "big") + with_prefixes(bodies, texts).data
        await upstream.ask(address, api.publish_with_headers(topic, defer_ms=defer_ms or None, body=packed))
    elif len(bodies) == 1:
        await upstream.ask(address, api.publish(topic, defer_ms or None, body=bodies[0]))
    else:
        if defer_ms and is_nsqd:
            raise ValueError("nsqd defers single messages only: publish one, or without a delay")
        packed = len(bodies).to_bytes(4, "big") + pack_messages(bodies).data
        producer = (
            f"console-{secrets.token_hex(8)}" if defer_ms else None
        )  # /mpub defers numbered batches only
        batch = api.publish_batch(
            topic, producer, True, None if producer is None else 0, defer_ms=defer_ms or None, body=packed
        )
        await upstream.ask(address, batch)
        if producer is not None:
            await _forget(log, producer)
    first = None if before is None else await _find(log, before, bodies)
    return Published(len(bodies), first)


async def _forget(log: TopicLog, producer: str) -> None:
    try:
        await log.upstream.ask(log.address, api.forget_producer(log.topic, producer))
    except UpstreamError:
        pass  # the broker forgets it some day by itself


async def _end(log: TopicLog) -> int | None:
    """Return the end of the log; 0 if there is no topic yet; None if it is unknown."""
    try:
        return (await log.bounds()).end
    except UpstreamError as exc:
        return 0 if exc.is_missing else None


async def _find(log: TopicLog, first: int, bodies: Sequence[bytes]) -> int | None:
    """Return the sequence of the first of these messages, published after `first`; None if it is not found."""
    wanted, seen, size = list(bodies), list[bytes](), 0
    start = first
    try:
        end = min((await log.bounds()).end, first + _LOOK_MESSAGES)
        while first < end and size < _LOOK_BYTES:
            piece = await log.read(first, end)
            for record in piece.records:
                if record.base_sequence != first:
                    seen, start = [], max(first, record.base_sequence)
                seen += record.messages.bodies()[max(0, first - record.base_sequence) :]
                first = record.next_sequence
            for at in range(len(seen) - len(wanted) + 1):
                if seen[at] == wanted[0] and seen[at : at + len(wanted)] == wanted:
                    return start + at
            first = piece.end
            size += piece.size
    except UpstreamError:
        pass  # they are published; only their place is unknown
    return None
