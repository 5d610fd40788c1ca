"""`/api/graphite` and `/render`: figures and pictures of a Graphite."""

from starlette.requests import Request
from starlette.responses import Response

from ...http.client import HTTPClient, Reply, RequestFailed
from ...protocol.address import without_secrets
from ...protocol.limits import MIB
from ...protocol.untrusted_json import decode_json
from ..access.viewer import require
from ..console import console_of
from ..graphite import Graphite
from .answers import APIError, bare

_MAX_ANSWER_BYTES = 8 * MIB
_TYPES = ("image/png", "image/svg+xml", "application/json", "text/csv", "text/plain")
"""What Graphite draws. A page of HTML would be a page of the console."""
_SANDBOX = "default-src 'none'; style-src 'unsafe-inline'; sandbox"
"""For a picture that is opened as a page."""


async def show(request: Request) -> Response:
    """Show the rate of a figure."""
    require(request, "read")
    if request.query_params.get("metric") != "rate":
        raise APIError(400, "INVALID_ARG_METRIC")
    target = request.query_params.get("target")
    if target is None:
        raise APIError(400, "INVALID_ARG_TARGET")
    graphite = Graphite(console_of(request).options)
    reply = await _ask(request, graphite.rate_url(target))
    try:
        answer = decode_json(reply.body)
    except ValueError:
        raise APIError(502, "UPSTREAM_ERROR: Graphite's answer is not JSON") from None
    return bare({"rate": graphite.rate(answer)})


async def render(request: Request) -> Response:
    """Fetch a picture from Graphite."""
    require(request, "read")
    options = console_of(request).options
    if not options.proxy_graphite:
        raise APIError(404, "NOT_FOUND")
    reply = await _ask(request, Graphite(options).render_url(request.url.query))
    found = reply.headers.get("content-type", "").partition(";")[0].strip().lower()
    if found not in _TYPES:
        raise APIError(
            502, f"UPSTREAM_ERROR: Graphite's answer is neither a picture nor a table, but {found!a}"
        )
    headers = {"Content-Security-Policy": _SANDBOX, "Cache-Control": "private, max-age=10"}
    return Response(reply.body, 200, headers, found)


async def _ask(request: Request, url: str) -> Reply:
    options = console_of(request).options
    if not options.graphite_url:
        raise APIError(502, "UPSTREAM_ERROR: there is no --graphite-url")
    client = HTTPClient(
        connect_timeout_s=options.connect_timeout_ms / 1000,
        request_timeout_s=options.request_timeout_ms / 1000,
        max_answer_bytes=_MAX_ANSWER_BYTES,
    )
    try:
        reply = await client.request("GET", url)
    except RequestFailed as exc:
        raise APIError(502, f"UPSTREAM_ERROR: {without_secrets(options.graphite_url)}: {exc}") from None
    finally:
        await client.aclose()
    if reply.status != 200:
        raise APIError(502, f"UPSTREAM_ERROR: Graphite answered with status {reply.status}")
    return reply
