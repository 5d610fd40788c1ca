"""The HTTP API of a shared address: each process of a node answers for all.

Publishes are stored by the process that has the connection. Other requests are sent to the processes over unix sockets,
with the client's token, and their answers become one.
"""

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final, TypeVar
from urllib.parse import urlencode

import trio

from ...event_loop.pacing import Pacing
from ...http.client import HTTPClient, RequestFailed
from ...http.messages import HTTPError, Request, Response
from ...http.routing import Handler, Route, Router
from ...http.urls import URL
from ..addresses import BoundAddresses
from ..api.status import Status
from ..monitoring.stats_text import render_text
from ..server import Server
from ..siblings import Siblings
from .sums import Steps, encode_json, label_metrics, merge_definitions, merge_disconnected, sum_stats

_Result = TypeVar("_Result")
_CONNECT_S: Final = 2.0
_ANSWER_S: Final = 30.0
_PING_S: Final = 2.0
"""Those who ask for the health of a node do not wait as long as for other answers."""
_RESTART_S: Final = 1.0
"""A process that has ended is usually there again within this time."""
_POLL_S: Final = 0.05
_TURN_S: Final = Pacing().turn_s
_MOST_BYTES: Final = 256 * 1024 * 1024
_HOP_BY_HOP: Final = frozenset(
    (
        *("host", "connection", "content-length", "transfer-encoding", "keep-alive", "upgrade", "expect"),
        *("accept-encoding", "te", "trailer", "proxy-authorization"),
    )
)

_LOCAL = {
    ("POST", "/pub"),
    ("POST", "/mpub"),
    ("POST", "/hpub"),
    ("GET", "/access"),
    ("GET", "/config/{opt}"),
}
_ON_ALL = {
    *(("POST", f"/topic/{verb}") for verb in ("create", "delete", "empty", "pause", "unpause")),
    *(("POST", f"/channel/{verb}") for verb in ("create", "delete", "empty", "pause", "unpause")),
    *(("PUT", f"/{what}/settings") for what in ("topic", "channel")),
    ("PUT", "/config/{opt}"),
}
_CREATES = {
    ("POST", "/topic/pause"),
    ("POST", "/channel/create"),
    ("POST", "/channel/pause"),
    ("PUT", "/topic/settings"),
    ("PUT", "/channel/settings"),
}
"""Changes that must also hold for messages that a process gets later: if one process has the topic, all get it."""
_OF_FIRST = {("GET", "/topic/settings"), ("GET", "/channel/settings"), ("POST", "/channel/pub")}
"""Answered by any process that has the topic or channel."""
_OF_OWNER = {("GET", "/topic/producer"), ("POST", "/topic/producer/forget")}
_OF_PROCESS_0 = {("GET", "/jobs"), ("PUT", "/jobs/{id}")}


class Front:
    """Answers requests to the shared address.

    Args:
        shared: The shared addresses.
    """

    def __init__(self, siblings: Siblings, server: Server, shared: BoundAddresses) -> None:
        self._siblings = siblings
        self._server = server
        self._status = Status(server, shared)
        self._client = HTTPClient(
            connect_timeout_s=_CONNECT_S, request_timeout_s=_ANSWER_S, max_answer_bytes=_MOST_BYTES
        )

    def router(self, routes: Iterable[Route]) -> Router:
        """Return the routes of the shared address, from those of the broker."""
        return Router(self._route(route) for route in routes if not route.upgrade)

    def _route(self, route: Route) -> Route:
        key = route.method, route.path
        sums: Mapping[str, Handler] = {
            "/ping": self.ping,
            "/info": self.info,
            "/stats": self.stats,
            "/metrics": self.metrics,
            "/definitions": self.definitions,
            "/channel/disconnect": self.disconnect,
        }
        if key in _LOCAL:
            return replace(route, handler=self._with_owner(route.handler))
        handler: Handler
        if route.path in sums:
            handler = sums[route.path]
        elif key in _ON_ALL:
            handler = self._change_on_all(creates=key in _CREATES)
        elif key in _OF_FIRST:
            handler = self._ask_first
        elif key in _OF_OWNER:
            handler = self._ask_owner
        elif key in _OF_PROCESS_0:
            handler = self._ask_process_0
        else:
            handler = self._refuse
        return replace(route, handler=handler, begin=None, pieces=None)

    # ------------------------------------------------------------------ sums

    async def ping(self, request: Request) -> Response:
        """Answer `OK` if all processes do; else 500, and the first reason."""
        for index, answer in enumerate(await self._ask_all(request, within_s=_PING_S)):
            if answer is None:
                return Response.text(f"NOK - process {index} does not answer", 500)
            if answer.status != 200:
                return answer
        return Response.text("OK")

    async def info(self, request: Request) -> Response:
        """Return the version and limits, the shared addresses, and those of the processes."""
        about = _decoded(await self._status.info(request))
        about["instance"] = self._siblings.instance
        about["processes"] = [
            {"tcp_address": tcp, "http_address": http}
            for tcp, http in zip(self._siblings.tcp_addresses, self._siblings.http_addresses, strict=True)
        ]
        return Response.json(about)

    async def stats(self, request: Request) -> Response:
        """Return the sum of the statistics of all processes: JSON with `format=json`, else text."""
        target = f"{request.path}?{urlencode({**request.query, 'format': 'json'})}"
        answers = await self._answers_of_all(request, target)
        stats = await _in_turns(sum_stats(await _all_decoded(answers)))
        if request.query.get("format") == "json":
            return Response.encoded(await _in_turns(encode_json(stats)))
        now_ns = time.time_ns()
        return Response.text(render_text(stats, now_ns, now_ns - stats["start_time"] * 1_000_000_000))

    async def metrics(self, request: Request) -> Response:
        """Return the metrics of all processes; each has the label `process`."""
        answers = await self._answers_of_all(request)
        parts = {index: _body(answer).decode() for index, answer in enumerate(answers)}
        return replace(answers[0], body=await _in_turns(label_metrics(parts)))

    async def definitions(self, request: Request) -> Response:
        """Return the topics and channels of all processes."""
        parts = await _all_decoded(await self._answers_of_all(request))
        merged = await _in_turns(merge_definitions(parts))
        return Response.encoded(await _in_turns(encode_json(merged)))

    async def disconnect(self, request: Request) -> Response:
        """Disconnect consumers; a client of the shared address is connected to several processes."""
        answers = await self._ask_all(request)
        joined = _joined(answers)
        if joined.status != 200:
            return joined
        done = [answer for answer in answers if answer is not None and answer.status == 200]
        return Response.json(merge_disconnected([_decoded(answer) for answer in done]))

    async def _answers_of_all(self, request: Request, target: str | None = None) -> list[Response]:
        """Return the answers of all processes. Raises HTTPError: one does not answer, or refuses."""
        found = []
        for index, answer in enumerate(await self._ask_all(request, target)):
            if answer is None:
                raise _no_answer(index)
            if answer.status != 200:
                raise HTTPError(answer.status, _message(answer))
            found.append(answer)
        return found

    # ------------------------------------------------------------------ changes

    def _change_on_all(self, *, creates: bool) -> Handler:
        async def change(request: Request) -> Response:
            answers = await self._ask_all(request)
            statuses = {answer.status for answer in answers if answer is not None}
            if creates and statuses >= {200, 404}:
                await self._create(request)
                answers = await self._ask_all(request)
            return _joined(answers)

        return change

    async def _create(self, request: Request) -> None:
        """Create the topic, and the channel, that some process lacks."""
        names = {name: request.query[name] for name in ("topic", "channel") if name in request.query}
        for kind in names:
            wanted = {"topic": names.get("topic", ""), kind: names[kind]}
            post = replace(request, method="POST", body=b"")
            await self._ask_all(post, f"/{kind}/create?{urlencode(wanted)}")

    # ------------------------------------------------------------------ one process

    def _with_owner(self, local: Handler) -> Handler:
        """Return a handler for requests that are answered here, unless another process has the producer's batches."""

        async def answer(request: Request) -> Response:
            producer = request.query.get("producer")
            if producer is None or self._siblings.owner_of(producer) == self._siblings.index:
                return await local(request)
            return await self._ask_owner(request)

        return answer

    async def _ask_owner(self, request: Request) -> Response:
        return await self._ask_one(self._siblings.owner_of(request.query.get("producer", "")), request)

    async def _ask_process_0(self, request: Request) -> Response:
        return await self._ask_one(0, request)

    async def _ask_one(self, index: int, request: Request) -> Response:
        answer = await self._ask(index, request)
        if answer is None:
            raise _no_answer(index)
        return answer

    async def _ask_first(self, request: Request) -> Response:
        """Ask one process after the other, this one first, until one knows the topic and the channel."""
        missing: Response | None = None
        for index in self._siblings.from_here():
            answer = await self._ask_one(index, request)
            if answer.status != 404:
                return answer
            missing = answer
        assert missing is not None
        return missing

    async def _refuse(self, request: Request) -> Response:
        places = ",".join(self._siblings.http_addresses)
        reason = f"{self._siblings.count} brokers share this address; use those of the brokers: {places}"
        raise HTTPError(400, f"ONE_PROCESS: {reason}")

    # ------------------------------------------------------------------ requests

    async def _ask_all(
        self, request: Request, target: str | None = None, *, within_s: float = math.inf
    ) -> list[Response | None]:
        """Send a request to all processes at the same time; None stands for one that does not answer."""
        answers: list[Response | None] = [None] * self._siblings.count

        async def ask(index: int) -> None:
            with trio.move_on_after(within_s):
                answers[index] = await self._ask(index, request, target)

        async with trio.open_nursery() as nursery:
            for index in range(self._siblings.count):
                nursery.start_soon(ask, index)
        return answers

    async def _ask(self, index: int, request: Request, target: str | None = None) -> Response | None:
        """Send a request to a process. Returns None if it does not answer, or has ended and does not start again."""
        answer: Response | None = None

        async def watch(asking: trio.CancelScope) -> None:
            while await self._until_ready(index):
                await trio.sleep(_POLL_S)
            asking.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch, nursery.cancel_scope)
            answer = await self._request(index, request, target or request.target)
            nursery.cancel_scope.cancel()
        return answer

    async def _until_ready(self, index: int) -> bool:
        """Wait a moment for a process that starts again. Returns False if it does not serve clients then."""
        with trio.move_on_after(_RESTART_S):
            while not self._siblings.is_ready(index):
                await trio.sleep(_POLL_S)
        return self._siblings.is_ready(index)

    async def _request(self, index: int, request: Request, target: str) -> Response | None:
        path = self._siblings.http_paths[index]
        headers = {name: value for name, value in request.headers.items() if name not in _HOP_BY_HOP}
        try:
            answer = await self._client.start(
                request.method, URL.at(path, target), headers, request.body, unix_path=path
            )
            async with aclosing(answer):
                with trio.fail_after(_ANSWER_S):
                    body = await self._client.read(answer)
        except (RequestFailed, trio.TooSlowError, ValueError):
            return None
        return Response(answer.status, body, answer.headers.get("content-type"))


def _joined(answers: Sequence[Response | None]) -> Response:
    """Return one answer to a change on all processes: the first failure; not that some did not have the topic."""
    for index, answer in enumerate(answers):
        if answer is None:
            raise _no_answer(index)
    done = [answer for answer in answers if answer is not None and answer.status == 200]
    failed = [answer for answer in answers if answer is not None and answer.status not in (200, 404)]
    return (failed or done or [answer for answer in answers if answer is not None])[0]


def _no_answer(index: int) -> HTTPError:
    return HTTPError(
        503, f"NO_ANSWER: process {index} does not answer; others may have done it; repeat the request"
    )


def _body(answer: Response) -> bytes:
    assert isinstance(answer.body, bytes)
    return answer.body


def _decoded(answer: Response) -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads(_body(answer))
    return decoded


async def _all_decoded(answers: Sequence[Response]) -> list[dict[str, Any]]:
    decoded = []
    for answer in answers:
        decoded.append(_decoded(answer))
        await trio.lowlevel.checkpoint()
    return decoded


async def _in_turns(steps: Steps[_Result]) -> _Result:
    """Do work of this process, which serves clients in between."""
    turn_over_s = time.perf_counter() + _TURN_S
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: _Result = end.value
            return result
        if time.perf_counter() > turn_over_s:
            await trio.lowlevel.checkpoint()
            turn_over_s = time.perf_counter() + _TURN_S


def _message(answer: Response) -> str:
    try:
        return str(_decoded(answer)["message"])
    except (ValueError, KeyError, TypeError):
        return _body(answer).decode(errors="replace")[:200]
