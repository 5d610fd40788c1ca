"""The HTTP API of a job that runs permanently: `/ping`, `/healthz`, `/metrics` and `/stats`."""

from collections.abc import Callable
from dataclasses import asdict

import trio

from ...access.policy import Rule
from ...http.limiting import AnswerLimiter
from ...http.messages import HTTPError, Request, Response
from ...http.routing import Route, Router
from .status import JobStatus

_OPEN = Rule(open=True)


def make_router(status: Callable[[], JobStatus]) -> Router:
    """Make the router of all endpoints.

    Args:
        status: Returns the current status, without waiting.
    """
    limiter = AnswerLimiter()

    async def ping(request: Request) -> Response:
        return Response.text("OK")

    async def healthz(request: Request) -> Response:
        problems = status().problems
        return Response.text("\n".join(problems) or "OK", 503 if problems else 200)

    async def metrics(request: Request) -> Response:
        from .metrics import scrape  # imports a library that most jobs do not need

        return await trio.to_thread.run_sync(scrape, request, status())

    async def stats(request: Request) -> Response:
        found = status()
        topics = found.topics
        if topic := request.query.get("topic"):
            topics = [each for each in topics if each.topic == topic]
            if not topics:
                raise HTTPError(404, "TOPIC_NOT_FOUND")
        about = {
            "kind": found.kind,
            "name": found.name,
            "started_at": found.started_at,
            "healthy": not found.problems,
            "problems": list(found.problems),
            "rounds": found.rounds,
            "written": found.written,
            "lag": found.lag,
            "lag_s": found.lag_s,
            "topics": [asdict(each) for each in topics],
        }
        return await trio.to_thread.run_sync(Response.json, about)

    return Router(
        [
            Route("GET", "/ping", ping, plain=True, rule=_OPEN),
            Route("GET", "/healthz", healthz, plain=True, rule=_OPEN),
            Route("GET", "/metrics", metrics, plain=True, rule=_OPEN, limiter=limiter),
            Route("GET", "/stats", stats, rule=_OPEN, limiter=limiter),
        ]
    )
