"""The discovery service's HTTP API (NSQ: nsqlookupd, HTTP API)."""

import json
import logging
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import asdict
from itertools import groupby
from operator import itemgetter
from typing import Any

import trio

from ..._version import __version__
from ...access.audit import AuditLog
from ...access.description import describe
from ...access.policy import Rule
from ...http.auditing import audited
from ...http.limiting import AnswerLimiter
from ...http.messages import HTTPError, Request, Response, channel_names, compact_json, given, valid_name
from ...http.routing import Route, Router
from ...protocol.errors import quote
from .registry import Producer, Registry, TooMany

logger: logging.Logger = logging.getLogger("trio_nsq.lookup")

_PIECE_BYTES = 16 * 1024
"""Encoding these takes about a millisecond."""
_BYTES_PER_NAME = 8
_NS_PER_S = 1_000_000_000
_NEVER_NS = -6795364578871345152
"""Go's zero time, which nsqlookupd sends for an unset time."""

_OPEN, _ANY_ROLE, _ADMIN = Rule(open=True), Rule(), Rule("admin")
_SEEN = Rule(anonymous=True)
_MANAGE_TOPIC, _MANAGE_CHANNEL = Rule("manage", "topic"), Rule("manage", "channel")


def make_router(
    registry: Registry,
    audit: AuditLog,
    *,
    read_only: bool = False,
    unix_time_ns: Callable[[], int] = time.time_ns,
) -> Router:
    """Make the router of all endpoints.

    Args:
        read_only: What `/access` says; the guard refuses the requests.
        unix_time_ns: The clock for times in answers.
    """
    api, limiter = _API(registry, unix_time_ns, read_only), AnswerLimiter()
    return Router(
        audited(route, audit)
        for route in [
            Route("GET", "/ping", api.ping, plain=True, rule=_OPEN),
            Route("GET", "/info", api.info, rule=_ANY_ROLE),
            Route("GET", "/access", api.access, rule=_ANY_ROLE),
            Route("GET", "/topics", api.topics, rule=_ANY_ROLE, limiter=limiter),
            Route("GET", "/channels", api.channels, rule=_ANY_ROLE, limiter=limiter),
            Route("GET", "/lookup", api.lookup, rule=_SEEN, limiter=limiter),
            Route("GET", "/nodes", api.nodes, rule=_ANY_ROLE, limiter=limiter),
            Route("GET", "/debug", api.debug, rule=_ADMIN, limiter=limiter),
            Route("POST", "/topic/create", api.create_topic, rule=_MANAGE_TOPIC),
            Route("POST", "/topic/delete", api.delete_topic, rule=_MANAGE_TOPIC),
            Route("POST", "/topic/tombstone", api.tombstone, rule=_MANAGE_TOPIC),
            Route("POST", "/channel/create", api.create_channel, rule=_MANAGE_CHANNEL),
            Route("POST", "/channel/delete", api.delete_channel, rule=_MANAGE_CHANNEL),
        ]
    )


class _API:
    def __init__(self, registry: Registry, unix_time_ns: Callable[[], int], read_only: bool) -> None:
        self._registry = registry
        self._unix_time_ns = unix_time_ns
        self._read_only = read_only

    async def ping(self, request: Request) -> Response:
        return Response.text("OK")

    async def info(self, request: Request) -> Response:
        return Response.json({"version": __version__})

    async def access(self, request: Request) -> Response:
        return Response.json(describe(request.identity, read_only=self._read_only))

    # ------------------------------------------------------------------ queries

    async def topics(self, request: Request) -> Response:
        topics = [topic for topic in self._registry.topics() if _sees(request, topic)]
        return Response.json({"topics": topics})

    async def channels(self, request: Request) -> Response:
        topic = given(request, "topic")
        channels = self._registry.channels(topic) if _sees(request, topic) else []
        return Response.json({"channels": channels})

    async def lookup(self, request: Request) -> Response:
        topic = given(request, "topic")
        producers = self._registry.lookup(topic, trio.current_time())
        if producers is None or not _sees(request, topic):
            raise HTTPError(404, "TOPIC_NOT_FOUND")
        return Response.json(
            {
                "channels": self._registry.channels(topic),
                "producers": [_about(producer) for producer in producers],
            }
        )

    async def nodes(self, request: Request) -> Response:
        found = []
        for producer, topics in self._registry.nodes(trio.current_time()):
            seen = {topic: tombstoned for topic, tombstoned in topics.items() if _sees(request, topic)}
            if seen or _sees_brokers(request):
                found.append(
                    compact_json(_about(producer) | {"tombstones": [*seen.values()], "topics": [*seen]})
                )
            await trio.lowlevel.checkpoint()
        return Response.encoded(f'{{"producers":[{",".join(found)}]}}'.encode())

    async def debug(self, request: Request) -> Response:
        names = _BYTES_PER_NAME * self._registry.most_names
        return Response.encoded(self._debug_pieces(), held_bytes=names)

    async def _debug_pieces(self) -> AsyncGenerator[bytes, None]:
        """Encode in pieces: with thousands of topics it takes seconds, and brokers time out after one second."""
        piece = "{"
        separator = ""
        for key, registered in groupby(self._registry.registrations(), itemgetter(0)):
            about = [self._about_registration(producer, at) for _, producer, at in registered]
            piece += f"{separator}{json.dumps(key)}:{compact_json(about)}"
            separator = ","
            if len(piece) >= _PIECE_BYTES:
                yield piece.encode()
                piece = ""
                await trio.lowlevel.checkpoint()
        yield f"{piece}}}".encode()

    def _about_registration(self, producer: Producer, tombstoned_at: float | None) -> dict[str, Any]:
        about = {"id": producer.remote_address} | _about(producer)
        del about["remote_address"]
        return about | {
            "last_update": self._unix_ns(producer.last_seen),
            "tombstoned": tombstoned_at is not None,
            "tombstoned_at": _NEVER_NS if tombstoned_at is None else self._unix_ns(tombstoned_at),
        }

    def _unix_ns(self, then: float) -> int:
        return self._unix_time_ns() - round((trio.current_time() - then) * _NS_PER_S)

    # ------------------------------------------------------------------ changes

    async def create_topic(self, request: Request) -> Response:
        topic = valid_name(request, "topic", "INVALID_ARG_TOPIC")
        logger.info("DB: adding topic(%s)", topic)
        self._create(topic)
        return Response.empty()

    def _create(self, topic: str, channel: str | None = None) -> None:
        try:
            self._registry.create(topic, channel)
        except TooMany as exc:
            raise HTTPError(503, str(exc)) from exc

    async def delete_topic(self, request: Request) -> Response:
        topic = given(request, "topic")
        if self._registry.delete_topic(topic):
            logger.info("DB: removing topic(%s)", topic)
        return Response.empty()

    async def tombstone(self, request: Request) -> Response:
        topic, node = given(request, "topic"), given(request, "node")
        if self._registry.tombstone(topic, node, trio.current_time()):
            logger.info("DB: setting tombstone for producer@%s of topic(%s)", quote(node), topic)
        return Response.empty()

    async def create_channel(self, request: Request) -> Response:
        topic, channel = channel_names(request)
        logger.info("DB: adding channel(%s) in topic(%s)", channel, topic)
        self._create(topic, channel)
        return Response.empty()

    async def delete_channel(self, request: Request) -> Response:
        topic, channel = channel_names(request)
        if not self._registry.delete_channel(topic, channel):
            raise HTTPError(404, "CHANNEL_NOT_FOUND")
        logger.info("DB: removing channel(%s) from topic(%s)", channel, topic)
        return Response.empty()


def _sees(request: Request, topic: str) -> bool:
    """Whether the client may know that a topic exists; without authentication, every client may."""
    return request.identity is None or request.identity.sees(topic)


def _sees_brokers(request: Request) -> bool:
    """Whether the client may also know brokers without topics."""
    identity = request.identity
    return identity is None or any(grant.everywhere for grant in identity.grants)


def _about(producer: Producer) -> dict[str, Any]:
    """Describe a producer as nsqlookupd does; one that refuses publishes also has `draining`, a leader `cluster`."""
    about: dict[str, Any] = {
        "remote_address": producer.remote_address,
        "hostname": producer.info.hostname,
        "broadcast_address": producer.info.broadcast_address,
        "tcp_port": producer.info.tcp_port,
        "http_port": producer.info.http_port,
        "version": producer.info.version,
    }
    if producer.info.draining:
        about["draining"] = True
    if producer.info.cluster is not None:
        about["cluster"] = asdict(producer.info.cluster)
    return about
