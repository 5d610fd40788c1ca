"""The broker's HTTP endpoints, with nsqd's parameters, status codes and error strings (NSQ's HTTP API)."""

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from struct import Struct, error
from typing import TYPE_CHECKING

import trio

from ...http import Handler, HTTPError, Request, Response, Route, Router
from ...listening import port_of
from ...log import LogError
from ...protocol import CommandError, MessageSet, pack_messages
from ...protocol.messages import walk_messages
from ..addresses import BoundAddresses, Broadcast
from ..errors import DeletedError, PublishRefused, SaveError
from ..ingest.idempotent import IdempotentPublisher
from ..ingest.publication import Publication, SetsForRecords
from ..monitoring.stats import broker_stats
from ..monitoring.stats_text import render_text
from .config import ConfigEndpoints
from .dead_letters import DeadLetterEndpoints
from .debug import DebugEndpoints
from .deferred import DeferredEndpoints
from .read import ReadEndpoints
from .seek import SeekEndpoints
from .settings import SettingsEndpoints
from .targets import (
    batch_given,
    channel_names,
    due_given,
    find_channel,
    find_topic,
    given,
    producer_given,
    valid_name,
)

if TYPE_CHECKING:
    from ..monitoring.metrics import MetricsExposition
    from ..server import Server

_INT32 = Struct(">i")
_NS_PER_MS = 1_000_000
_OK = Response.text("OK")
_PUBLISHED = Response(body=b"OK", headers={"NSQ-Batch": "published"})
_REPEATED = Response(body=b"OK", headers={"NSQ-Batch": "repeated"})
_EMPTY = Response.empty()
_FALSE = ("0", "false")
_AT_ONCE_BYTES = 64 * 1024
_PIECE_BYTES = 32 * 1024
_PIECE_MESSAGES = 16 * 1024
"""The pieces of a larger MPUB take some milliseconds each, however small its messages; then others have their turn."""
_MORE = frozenset(("defer", "producer", "number"))
"""What a publish may ask for besides being stored."""


class Endpoints:
    """The handlers.

    Args:
        server: Whose endpoints these are.
        bound: Where it listens, for `/info`.
    """

    def __init__(self, server: "Server", bound: BoundAddresses) -> None:
        self._server = server
        self._bound = bound
        self._idempotent = IdempotentPublisher(server.broker, server.topics)
        self._limits = server.options.limits
        self._metrics: MetricsExposition | None = None

    def routes(self) -> list[Route]:
        """All routes."""
        body = self._limits.max_body_size
        message = self._limits.max_msg_size
        return [
            Route("GET", "/ping", self.ping, plain=True),
            Route("GET", "/info", self.info),
            Route("GET", "/stats", self.stats),
            Route("GET", "/metrics", self.metrics, plain=True),
            Route("POST", "/pub", self.pub, message, "MSG_TOO_BIG", begin=self.begin_pub),
            Route("POST", "/mpub", self.mpub, body, "BODY_TOO_BIG", begin=self.begin_mpub),
            Route("GET", "/topic/producer", self.topic_producer),
            Route("POST", "/topic/producer/forget", self.forget_producer),
            Route("POST", "/topic/create", self.topic_create),
            Route("POST", "/topic/delete", self.topic_delete),
            Route("POST", "/topic/empty", self.topic_empty),
            Route("POST", "/topic/pause", self.topic_pause),
            Route("POST", "/topic/unpause", self.topic_unpause),
            Route("POST", "/channel/create", self.channel_create),
            Route("POST", "/channel/delete", self.channel_delete),
            Route("POST", "/channel/empty", self.channel_empty),
            Route("POST", "/channel/pause", self.channel_pause),
            Route("POST", "/channel/unpause", self.channel_unpause),
        ]

    # ------------------------------------------------------------------ looking

    async def ping(self, request: Request) -> Response:
        """`OK`, or 500 and the reason when the last write failed."""
        health = self._server.health
        return _OK if health == "OK" else Response.text(health, 500)

    async def info(self, request: Request) -> Response:
        """Version, addresses and limits."""
        return Response.json(
            {
                "version": self._server.version,
                "broadcast_address": Broadcast.of(self._server.options, self._bound).address,
                "hostname": socket.gethostname(),
                # Those bound, and not those others are told.
                "http_port": port_of(self._bound.http_address) or -1,
                "tcp_port": port_of(self._bound.tcp_address) or -1,
                "start_time": self._server.start_time_s,
                "max_heartbeat_interval": self._limits.max_heartbeat_interval_ms * _NS_PER_MS,
                "max_output_buffer_size": self._limits.max_output_buffer_size,
                "max_output_buffer_timeout": self._limits.max_output_buffer_timeout_ms * _NS_PER_MS,
                "max_deflate_level": self._limits.max_deflate_level,
            }
        )

    async def stats(self, request: Request) -> Response:
        """JSON with `format=json`, else text."""
        query, now_ns = request.query, time.time_ns()
        stats = broker_stats(
            self._server,
            now_ns,
            topic=query.get("topic", ""),
            channel=query.get("channel", ""),
            include_clients=query.get("include_clients", "true") not in _FALSE,
            include_mem=query.get("include_mem", "true") not in _FALSE,
        )
        if query.get("format") == "json":
            return Response.json(stats)
        uptime_ns = self._server.timers.now_ns() - self._server.start_time_ns
        return Response.text(render_text(stats, now_ns, uptime_ns))

    async def metrics(self, request: Request) -> Response:
        """For Prometheus."""
        if self._metrics is None:
            from ..monitoring.metrics import MetricsExposition  # with a library that few brokers need

            self._metrics = MetricsExposition(self._server)
        return await self._metrics.scrape(request)

    # ------------------------------------------------------------------ publishing

    async def pub(self, request: Request) -> Response:
        """One message, the body; `defer` in milliseconds."""
        messages = self._message(request)
        topic = valid_name(request, "topic", "INVALID_TOPIC")
        due_ns = due_given(request, self._server)
        return await self._publish(request, topic, [messages], due_ns)

    def begin_pub(self, request: Request, on_response: Callable[[Response], None]) -> bool:
        """As `pub`."""
        return self._begin(request, self._message, on_response)

    def _message(self, request: Request) -> MessageSet:
        if not request.body:
            raise HTTPError(400, "MSG_EMPTY")
        return MessageSet(_INT32.pack(len(request.body)) + request.body, [len(request.body)])

    async def mpub(self, request: Request) -> Response:
        """Many messages: one a line, or with `binary` as `int32 count, (int32 size, bytes)*`. All or nothing."""
        topic = valid_name(request, "topic", "INVALID_TOPIC")
        # nsqd takes no notice of `defer` here, and its clients may rely on that; those that number batches do not.
        due_ns = due_given(request, self._server) if "producer" in request.query else 0
        gathered = SetsForRecords()
        for piece in self._pieces(request):
            gathered.add(piece)
            await trio.lowlevel.checkpoint()
        return await self._publish(request, topic, gathered.take(), due_ns)

    def begin_mpub(self, request: Request, on_response: Callable[[Response], None]) -> bool:
        """As `mpub`."""
        return len(request.body) <= _AT_ONCE_BYTES and self._begin(request, self._messages, on_response)

    def _messages(self, request: Request) -> MessageSet:
        return MessageSet.join(list(self._pieces(request)))

    def _pieces(self, request: Request) -> Iterator[MessageSet]:
        """The messages of a body, some at a time, so that others can have their turn. Raises HTTPError."""
        if "binary" in request.query and request.query["binary"] not in _FALSE:
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

    def _binary(self, body: bytes) -> Iterator[MessageSet]:
        # Status 413 for malformed batches is nsqd's, and clients know it.
        try:
            (count,) = _INT32.unpack_from(body)
        except error:
            raise HTTPError(413, "BAD_BODY") from None
        if not 0 < count <= (self._limits.max_body_size - 4) // 5:
            raise HTTPError(413, "BAD_BODY")
        start = 4
        while count:
            sizes: list[int] = []
            some = min(count, _PIECE_MESSAGES)
            try:
                end = walk_messages(body, start, len(body), some, self._limits, sizes)
            except CommandError:
                raise HTTPError(413, "BAD_MESSAGE") from None
            if len(sizes) != some or end > len(body):
                raise HTTPError(413, "BAD_MESSAGE")
            yield MessageSet(body[start:end], sizes)
            start = end
            count -= some
        if start != len(body):
            raise HTTPError(413, "BAD_MESSAGE")

    def _begin(
        self, request: Request, read: Callable[[Request], MessageSet], on_response: Callable[[Response], None]
    ) -> bool:
        """Store what a request publishes; False if it asks for more than that, or has to be waited for.

        Raises:
            HTTPError: It is wrong, or refused.
        """
        if not _MORE.isdisjoint(request.query):
            return False
        try:
            name, messages = valid_name(request, "topic", "INVALID_TOPIC"), read(request)
            topic = self._server.broker.publishable.get(name)
            if topic is None or not messages:
                return False

            def answer(error: PublishRefused | None) -> None:
                on_response(_OK if error is None else _refusal(error).response())

            self._server.publisher.submit(topic, [Publication([messages])], answer)
            return True
        except PublishRefused as exc:
            raise _refusal(exc) from exc

    async def _publish(
        self, request: Request, topic: str, sets: Sequence[MessageSet], due_ns: int
    ) -> Response:
        batch = batch_given(request)
        if not sets:
            return _OK
        try:
            if batch is not None:
                return _PUBLISHED if await self._idempotent.publish(topic, batch, sets, due_ns) else _REPEATED
            await self._server.topics.publish(topic, [Publication(sets, due_ns)])
            return _OK
        except PublishRefused as exc:
            raise _refusal(exc) from exc

    # ------------------------------------------------------------------ topics

    async def topic_producer(self, request: Request) -> Response:
        """The greatest number that a producer has published."""
        topic, producer = find_topic(self._server, given(request, "topic")), producer_given(request)
        return Response.json({"producer": producer, "number": topic.producers.number_of(producer)})

    async def forget_producer(self, request: Request) -> Response:
        """Forget a producer that has published its last batch, durably."""
        topic, producer = find_topic(self._server, given(request, "topic")), producer_given(request)
        await self._server.admin.forget_producer(topic, producer)
        return Response()

    async def topic_create(self, request: Request) -> Response:
        """Make a topic, or leave it as it is."""
        await self._create(valid_name(request, "topic", "INVALID_TOPIC"))
        return _EMPTY

    async def topic_delete(self, request: Request) -> Response:
        """Delete a topic, its channels and its files."""
        name = given(request, "topic")
        try:
            if name in self._server.broker.unavailable:
                await self._server.topics.delete_unavailable(name)
            else:
                await self._server.topics.delete_topic(find_topic(self._server, name))
        except OSError as exc:
            raise HTTPError(503, f"cannot delete the files of topic {name}: {exc.strerror}") from exc
        return _EMPTY

    async def topic_empty(self, request: Request) -> Response:
        """Drop what waits in the topic itself; its channels keep theirs."""
        topic = find_topic(self._server, valid_name(request, "topic", "INVALID_TOPIC"))
        await self._server.admin.empty_topic(topic)
        return _EMPTY

    async def topic_pause(self, request: Request) -> Response:
        """Give nothing more to the channels."""
        topic = find_topic(self._server, given(request, "topic"))
        await self._server.admin.pause_topic(topic, True)
        return _EMPTY

    async def topic_unpause(self, request: Request) -> Response:
        """Go on."""
        topic = find_topic(self._server, given(request, "topic"))
        await self._server.admin.pause_topic(topic, False)
        return _EMPTY

    async def _create(self, topic: str, channel: str | None = None) -> None:
        try:
            await self._server.topics.create(topic, channel)
        except PublishRefused as exc:
            raise _refusal(exc) from exc
        except LogError as exc:
            raise HTTPError(503, str(exc)) from exc

    # ------------------------------------------------------------------ channels

    async def channel_create(self, request: Request) -> Response:
        """Make a channel of a topic that is there, or leave it as it is."""
        topic, channel = channel_names(request)
        find_topic(self._server, topic)
        await self._create(topic, channel)
        return _EMPTY

    async def channel_delete(self, request: Request) -> Response:
        """Delete a channel; its clients are disconnected."""
        await self._server.admin.delete_channel(find_channel(self._server, request))
        return _EMPTY

    async def channel_empty(self, request: Request) -> Response:
        """Drop everything the channel has: ready, in flight and deferred."""
        await self._server.admin.empty(find_channel(self._server, request))
        return _EMPTY

    async def channel_pause(self, request: Request) -> Response:
        """Send nothing more to its clients."""
        await self._server.admin.pause(find_channel(self._server, request), True)
        return _EMPTY

    async def channel_unpause(self, request: Request) -> Response:
        """Go on."""
        await self._server.admin.pause(find_channel(self._server, request), False)
        return _EMPTY


def _refusal(error: PublishRefused) -> HTTPError:
    # nsqd says EXITING for every reason; the disk's own words help more.
    return HTTPError(503, "EXITING" if str(error) == "exiting" else str(error))


def make_router(server: "Server", bound: BoundAddresses) -> Router:
    """The broker's routes."""
    parts = (
        Endpoints(server, bound),
        ConfigEndpoints(server, bound),
        DebugEndpoints(server),
        SettingsEndpoints(server),
        ReadEndpoints(server),
        SeekEndpoints(server),
        DeferredEndpoints(server),
        DeadLetterEndpoints(server),
    )
    routes = [route for part in parts for route in part.routes()]
    return Router(replace(route, handler=_telling_of_the_disk(route.handler)) for route in routes)


def _telling_of_the_disk(handler: Handler) -> Handler:
    """What cannot be saved is not done: 503, as for a publish."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except SaveError as exc:
            raise HTTPError(503, str(exc)) from exc
        except DeletedError as exc:
            what = "CHANNEL" if "channel" in request.query else "TOPIC"
            raise HTTPError(404, f"{what}_NOT_FOUND") from exc

    return handle
