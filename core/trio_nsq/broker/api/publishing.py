"""`/pub`, `/mpub` and `/channel/pub`, with nsqd's parameters, status codes and error strings (NSQ's HTTP API).

Messages have the headers of the request that are for them. With `/hpub`, which nsqd does not have, each message has its
own.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from struct import Struct, error

import trio

from ...http.messages import HTTPError, Request, Response, given, valid_name
from ...log.record_metadata import metadata_for_channel
from ...log.records import MAX_RECORD_BYTES, MAX_RECORD_MESSAGES
from ...protocol import CommandError, MessageSet, pack_messages
from ...protocol.headers import MAX_HPUB_MESSAGES, MAX_PREFIX_BYTES, encode_headers, split_prefixes
from ...protocol.messages import walk_messages
from ...protocol.names import is_valid_producer
from ..errors import NoChannel, PublishRefused
from ..ingest.publication import Publication, SetsForRecords, fit_with_headers
from ..server import Server
from ..state.producers import BatchNumber
from .targets import FALSE, find_channel, producer_given

_INT32 = Struct(">i")
_NS_PER_MS = 1_000_000
_DIGITS = re.compile(r"[0-9]{1,19}", re.ASCII)
_NUMBERS = 2**63
_DECIMAL = re.compile(r"[+-]?0*([0-9]{1,19})", re.ASCII)
_OK = Response.text("OK")
_PUBLISHED = Response(body=b"OK", headers={"NSQ-Batch": "published"})
_REPEATED = Response(body=b"OK", headers={"NSQ-Batch": "repeated"})
_AT_ONCE_BYTES = 64 * 1024
_PIECE_BYTES = 32 * 1024
_PIECE_MESSAGES = 16 * 1024
"""A larger MPUB is parsed in pieces of some milliseconds each, however small its messages; then other tasks run."""
_HEADER_PREFIX = "x-nsq-header-"
_TRACE_HEADERS = frozenset(("traceparent", "tracestate"))
"""W3C Trace Context: instrumented HTTP clients send these."""
_MAX_TRACE_BYTES = 1024
"""More than the standard has programs pass on. Longer ones are ignored: no publish fails because of its trace."""
_MAX_REPEATED_BYTES = 64 * 1024 * 1024
"""Headers of a request times its messages: consumers get them with each message, so a small request could send them
gigabytes."""
_SLOW_PARAMETERS = frozenset(("defer", "producer", "number"))
"""Parameters that need a task."""


class Publishing:
    """The handlers for publishes. `begin_pub` and `begin_mpub` answer most of them without a task."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._idempotent = server.idempotent
        self._limits = server.options.limits

    async def pub(self, request: Request) -> Response:
        """Publish the body as one message; `defer` in milliseconds."""
        messages = _message(request)
        topic = valid_name(request, "topic", "INVALID_TOPIC")
        sets = [messages]
        return await self._publish(request, topic, sets, self._due_ns(request), _for_all(request, sets))

    def begin_pub(self, request: Request, on_response: Callable[[Response], None]) -> bool:
        """As `pub`, without a task. See `Begin`."""
        return self._begin(request, _message, on_response)

    async def mpub(self, request: Request) -> Response:
        """Publish many messages atomically: one per line, or with `binary` as `int32 count, (int32 size, bytes)*`."""
        topic = valid_name(request, "topic", "INVALID_TOPIC")
        # nsqd ignores `defer` here, and its clients may rely on that. Clients that number batches know this broker.
        due_ns = self._due_ns(request) if "producer" in request.query else 0
        gathered = SetsForRecords()
        for piece in self._pieces(request):
            gathered.add(piece)
            await trio.lowlevel.checkpoint()
        sets = gathered.take()
        return await self._publish(request, topic, sets, due_ns, _for_all(request, sets))

    async def hpub(self, request: Request) -> Response:
        """Publish many messages, each with its headers, atomically: the body and the limits of the command HPUB.

        `defer` in milliseconds.
        """
        topic = valid_name(request, "topic", "INVALID_TOPIC")
        pieces = list(self._binary(request.body, MAX_HPUB_MESSAGES, MAX_PREFIX_BYTES))
        try:
            messages, texts = split_prefixes(MessageSet.join(pieces), self._limits.max_msg_size)
        except CommandError as exc:
            raise HTTPError(400, f"BAD_MESSAGE: {exc.text}") from None
        sets, headers = fit_with_headers(messages, texts)
        return await self._publish(request, topic, sets, self._due_ns(request), headers)

    def begin_mpub(self, request: Request, on_response: Callable[[Response], None]) -> bool:
        """As `mpub`, without a task. See `Begin`."""
        return len(request.body) <= _AT_ONCE_BYTES and self._begin(request, self._messages, on_response)

    async def channel_pub(self, request: Request) -> Response:
        """Publish the body as one message to a single channel; `defer` in milliseconds. nsqd does not have this."""
        messages = _message(request)
        channel = find_channel(self._server, request)
        due_ns = self._due_ns(request) or self._server.clock.now_ns()
        headers = _for_all(request, [messages])
        publication = Publication([messages], due_ns, metadata_for_channel(channel.name), headers)
        try:
            await self._server.topics.publish(channel.topic.name, [publication], channels=[channel.name])
        except NoChannel as exc:
            raise HTTPError(404, "CHANNEL_NOT_FOUND") from exc
        return _OK

    # ------------------------------------------------------------------ storing

    def _begin(
        self, request: Request, read: Callable[[Request], MessageSet], on_response: Callable[[Response], None]
    ) -> bool:
        """Submit the messages of a request. Returns False if that needs a task. Raises HTTPError."""
        if not _SLOW_PARAMETERS.isdisjoint(request.query):
            return False
        try:
            topic = self._server.broker.publishable(request.query.get("topic", ""))
            if topic is None or not (messages := read(request)):
                return False

            def answer(error: PublishRefused | None) -> None:
                on_response(_OK if error is None else refusal(error).response())

            publication = Publication([messages])
            if headers := _for_all(request, [messages]):
                sets = messages.split(MAX_RECORD_MESSAGES, MAX_RECORD_BYTES)
                publication = Publication(sets, headers=list(headers) * len(sets))
            self._server.write_path.submit(topic, [publication], answer)
            return True
        except PublishRefused as exc:
            raise refusal(exc) from exc

    async def _publish(
        self,
        request: Request,
        topic: str,
        sets: Sequence[MessageSet],
        due_ns: int,
        headers: Sequence[Sequence[str]],
    ) -> Response:
        batch = _batch_given(request)
        if not sets:
            return _OK
        if batch is not None:
            is_new = await self._idempotent.publish(topic, batch, sets, due_ns, headers)
            return _PUBLISHED if is_new else _REPEATED
        await self._server.topics.publish(topic, [Publication(sets, due_ns, headers=headers)])
        return _OK

    # ------------------------------------------------------------------ reading requests

    def _due_ns(self, request: Request) -> int:
        """Return the due time of the messages, by `defer` in milliseconds; 0 without one. Raises HTTPError."""
        if "defer" not in request.query:
            return 0
        text = request.query["defer"]
        match = _DECIMAL.fullmatch(text)
        defer_ms = int(match[1]) if match else -1
        if not 0 <= defer_ms <= self._limits.max_defer_ms or (defer_ms and text.startswith("-")):
            raise HTTPError(400, "INVALID_DEFER")
        return self._server.clock.now_ns() + defer_ms * _NS_PER_MS if defer_ms else 0

    def _messages(self, request: Request) -> MessageSet:
        return MessageSet.join(list(self._pieces(request)))

    def _pieces(self, request: Request) -> Iterator[MessageSet]:
        """Yield the messages of a body in pieces, so that other tasks can run in between. Raises HTTPError."""
        if "binary" in request.query and request.query["binary"] not in FALSE:
            return self._binary(request.body)
        return self._lines(request.body)

    def _lines(self, body: bytes) -> Iterator[MessageSet]:
        start = 0
        while start < len(body):
            end = body.find(b"\n", start + _PIECE_BYTES) + 1 or len(body)
            bodies = [line for line in body[start:end].split(b"\n") if line]
            if max(map(len, bodies), default=0) > self._limits.max_msg_size:
                raise HTTPError(413, "MSG_TOO_BIG")
            yield pack_messages(bodies)
            start = end

    def _binary(self, body: bytes, most: int | None = None, more_bytes: int = 0) -> Iterator[MessageSet]:
        """Yield `int32 count, (int32 size, bytes)*`.

        Args:
            most: The most messages; None: as many as fit.
            more_bytes: How much longer a message may be than `max_msg_size`.
        """
        # nsqd answers malformed batches with 413, and clients may rely on it.
        try:
            (count,) = _INT32.unpack_from(body)
        except error:
            raise HTTPError(413, "BAD_BODY") from None
        if not 0 < count <= ((self._limits.max_body_size - 4) // 5 if most is None else most):
            raise HTTPError(413, "BAD_BODY")
        start = 4
        while count:
            sizes: list[int] = []
            some = min(count, _PIECE_MESSAGES)
            try:
                end = walk_messages(body, start, len(body), some, self._limits, sizes, more=more_bytes)
            except CommandError:
                raise HTTPError(413, "BAD_MESSAGE") from None
            if len(sizes) != some or end > len(body):
                raise HTTPError(413, "BAD_MESSAGE")
            yield MessageSet(body[start:end], sizes)
            start = end
            count -= some
        if start != len(body):
            raise HTTPError(413, "BAD_MESSAGE")


def _message(request: Request) -> MessageSet:
    if not request.body:
        raise HTTPError(400, "MSG_EMPTY")
    return MessageSet(_INT32.pack(len(request.body)) + request.body, [len(request.body)])


def _headers_given(request: Request) -> str:
    """Return the text of the headers that a request has for its messages; empty if it has none. Raises HTTPError.

    See `protocol/headers.py`.
    """
    found = {}
    for name, value in request.headers.items():
        if name.startswith(_HEADER_PREFIX):
            found[name.removeprefix(_HEADER_PREFIX)] = value
        elif name in _TRACE_HEADERS and len(value) <= _MAX_TRACE_BYTES and _is_plain(value):
            found.setdefault(name, value)  # a bad one is ignored, as the standard says
    if not found:
        return ""
    try:
        # HTTP's values are bytes; the parser makes a character of each.
        return encode_headers({name: value.encode("latin-1").decode() for name, value in found.items()})
    except ValueError as exc:
        raise HTTPError(400, f"INVALID_HEADER: {exc}") from None


def _is_plain(value: str) -> bool:
    return value.isascii() and value.isprintable()


def _for_all(request: Request, sets: Sequence[MessageSet]) -> Sequence[Sequence[str]]:
    """Return the headers for all messages of a request, which are in these sets. Raises HTTPError."""
    text = _headers_given(request)
    if not text:
        return ()
    if len(text) * sum(len(each) for each in sets) > _MAX_REPEATED_BYTES:
        if any(name.startswith(_HEADER_PREFIX) for name in request.headers):
            raise HTTPError(413, f"HEADERS_TOO_BIG: more than {_MAX_REPEATED_BYTES} bytes for all messages")
        return ()  # no publish fails because of its trace
    return [[text]] * len(sets)


def _batch_given(request: Request) -> BatchNumber | None:
    """Return the batch number of an idempotent publish; None for other publishes. Raises HTTPError."""
    if "producer" not in request.query and "number" not in request.query:
        return None
    producer, number = producer_given(request), _number_in(given(request, "number"), "NUMBER", _NUMBERS - 1)
    instance = request.query.get("instance", "")
    if instance and not is_valid_producer(instance):
        raise HTTPError(400, "INVALID_INSTANCE: not 1 to 64 of the characters A-Z a-z 0-9 . _ : -")
    if "first" not in request.query:
        return BatchNumber(producer, number, None, instance)
    return BatchNumber(producer, number, _number_in(request.query["first"], "FIRST", number), instance)


def _number_in(text: str, name: str, greatest: int) -> int:
    number = int(text) if _DIGITS.fullmatch(text) else _NUMBERS
    if number > greatest:
        raise HTTPError(400, f"INVALID_{name}: not a whole number from 0 to {greatest}")
    return number


def refusal(error: PublishRefused) -> HTTPError:
    """Return the answer to a refused publish, or a refused creation of a topic or channel."""
    # nsqd answers EXITING for every reason; the disk error is more helpful.
    return HTTPError(503, "EXITING" if str(error) == "exiting" else str(error))
