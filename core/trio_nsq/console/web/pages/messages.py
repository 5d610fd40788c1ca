"""Look at the messages of a topic: the list with search, one message, downloads."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from ...access.viewer import require, viewer_of
from ...console import console_of, upstream_of
from ...messages.bodies import WHOLE
from ...messages.body_view import View
from ...messages.cursor import Cursor
from ...messages.download import download, download_shown
from ...messages.list_download import LIMITS
from ...messages.message import Row
from ...messages.paging import read_page
from ...messages.query import COUNTS, MessageQuery, parse_query
from ...messages.reading import TopicLog
from ...messages.search import Progress, is_comparison, search
from ...messages.single import find_id
from ...record_files import FORMATS, file_headers
from ...upstream.client import Upstream
from ..forms import form
from ..page import Page
from ..page import View as PageView
from ..rendering import path_of
from ..streamed import Streamed
from ..table_files import wanted_form
from .message_brokers import brokers_of, is_sequence, log_of
from .message_files import file_of_messages
from .message_rows import ListedRow, listed_rows
from .shown_bodies import UNMASK, shown_bodies

logger = logging.getLogger("trio_nsq.console")

_VIEWS: tuple[View, ...] = ("auto", "json", "text", "hex")


@dataclass(frozen=True, slots=True)
class MessageList:
    """What the list shows.

    Attributes:
        older, newer: The addresses of the pages with older and newer messages; empty: there are none.
        errors: Why brokers did not answer.
        progress: Of a search, by broker; empty without a search.
    """

    rows: Sequence[ListedRow[Row]]
    older: str
    newer: str
    errors: Mapping[str, str]
    progress: Mapping[str, Progress]


async def messages(request: Request) -> PageView | Response:
    topic = request.path_params["topic"]
    require(request, "read", topic)
    problem, wanted = "", MessageQuery()
    try:
        wanted = parse_query(request.query_params)
        start = wanted.start(time.time_ns())
        matches = wanted.matches()
    except ValueError as exc:
        problem = str(exc)
    brokers = await brokers_of(request, topic, selected=wanted.broker)
    console = console_of(request)
    limit_s = console.options.request_timeout_ms / 1000
    shown = MessageList([], "", "", {}, {})
    if (file_form := wanted_form(request)) and not problem:
        _require_list(wanted)
        return await file_of_messages(request, topic, brokers, start, matches, file_form)
    if not problem and brokers.asked:
        if wanted.q and wanted.kind == "id":
            found = await _with_id(upstream_of(request), topic, brokers.asked, wanted.q, limit_s)
            if isinstance(found, tuple):
                address, sequence = found
                link = path_of(request, "message", {"broker": address}, topic=topic, sequence=str(sequence))
                return RedirectResponse(link, 303)
            problem = found
        elif matches is not None:
            result = await search(
                upstream_of(request),
                shown_bodies(request, topic),
                brokers.asked,
                start,
                wanted.count,
                matches,
                deadline_s=limit_s,
            )
            rest = _link(request, topic, wanted, result.rest, backwards=start.backwards)
            older, newer = (rest, "") if start.backwards else ("", rest)
            shown = MessageList(
                listed_rows(request, topic, result.messages), older, newer, result.errors, result.progress
            )
        else:
            listing = await read_page(
                upstream_of(request),
                shown_bodies(request, topic),
                brokers.asked,
                start,
                wanted.count,
                deadline_s=limit_s,
            )
            rows = listing.page.rows
            if start.backwards != (wanted.order == "newest"):
                rows = rows[::-1]
            shown = MessageList(
                listed_rows(request, topic, rows),
                _link(request, topic, wanted, listing.page.older, backwards=True),
                _link(request, topic, wanted, listing.page.newer, backwards=False),
                listing.errors,
                {},
            )
    errors = {**brokers.missing, **shown.errors}
    is_masked = shown_bodies(request, topic).reader().is_masked
    context = {
        "topic": topic,
        "asked": wanted,
        "problem": problem,
        "brokers": brokers,
        "shown": shown,
        "errors": errors,
        "counts": COUNTS,
        "as_condition": path_of(request, "messages", wanted.query(kind="json"), topic=topic)
        if wanted.kind == "text" and not shown.rows and is_comparison(wanted.q)
        else "",
        "is_masked": is_masked,
        "may_unmask": is_masked and viewer_of(request).allows(UNMASK, topic),
        "files": wanted.query(before="", after="") if wanted.kind != "id" else None,
        "limits": LIMITS,
        "ranges": [] if wanted.q else _ranges(request, topic, shown.rows),
    }
    return PageView("messages.html", context, 400 if problem else 200)


def _require_list(wanted: MessageQuery) -> None:
    """Raises HTTPException: a search finds one message, not a list."""
    if wanted.q and wanted.kind == "id":
        raise HTTPException(400, "A search for an id finds one message: only lists are given as files.")


async def unmasked_file(request: Request) -> Response:
    """The messages of a list as a file with their masked fields, for the audit log."""
    topic = request.path_params["topic"]
    require(request, "read", topic)
    viewer = require(request, UNMASK, topic)
    try:
        wanted = parse_query(request.query_params)
        start, matches = wanted.start(time.time_ns()), wanted.matches()
    except ValueError as exc:
        raise HTTPException(400, f"{exc}.") from exc
    _require_list(wanted)
    sent = (await form(request)).get("format", "")
    brokers = await brokers_of(request, topic, selected=wanted.broker)
    logger.info("UNMASK: %s downloads messages of topic %s", viewer.name or "an anonymous viewer", topic)
    return await file_of_messages(
        request, topic, brokers, start, matches, sent if sent in FORMATS else "json", unmasks=True
    )


async def range_of_messages(request: Request) -> Response:
    """A range of sequences of one broker as JSON lines, for a download."""
    topic = request.path_params["topic"]
    require(request, "read", topic)
    log, _ = await log_of(request, topic)
    first, end = (request.query_params.get(name, "") for name in ("from", "until"))
    if not (is_sequence(first) and is_sequence(end)):
        raise HTTPException(400, "The address must have two sequences: ?from=FIRST&until=END")
    if console_of(request).bodies.readers.have_masks:
        pieces = download_shown(log, shown_bodies(request, topic, WHOLE), int(first), int(end))
    else:
        pieces = download(log.upstream, log.address, topic, int(first), int(end))
    await anext(pieces)  # the broker answers
    return Streamed(pieces, file_headers(f"{topic}-{first}-{end}", "json", "ndjson"))


async def _with_id(
    upstream: Upstream, topic: str, addresses: Sequence[str], message_id: str, limit_s: float
) -> tuple[str, int] | str:
    """Return the broker and the sequence of a message, or why it is not found."""

    async def find(address: str) -> int | None:
        return await find_id(TopicLog(upstream, address, topic), int(wanted, 16), limit_s)

    wanted = message_id.strip().lower()
    if len(wanted) != 16 or not set(wanted) <= set("0123456789abcdef"):
        return f"{message_id!r} is not a message id: 16 of the digits 0-9 and a-f."
    results = await upstream.on_all(addresses, find)
    for address, sequence in results.values.items():
        if sequence is not None:
            return address, sequence
    missing = "".join(
        f" {error.address} was not searched: {error.reason}." for error in results.errors.values()
    )
    return f"No message of topic {topic} has the id {wanted}, or it was dropped by retention.{missing}"


def _link(
    request: Request, topic: str, wanted: MessageQuery, cursor: Cursor | None, *, backwards: bool
) -> str:
    if cursor is None:
        return ""
    before, after = (str(cursor), "") if backwards else ("", str(cursor))
    return path_of(request, "messages", wanted.query(before=before, after=after), topic=topic)


def _ranges(request: Request, topic: str, rows: Sequence[ListedRow[Row]]) -> list[tuple[str, int, int, str]]:
    """Return the range of sequences of each broker on the page, and the link that downloads it."""
    ends: dict[str, tuple[int, int]] = {}
    for each in rows:
        row = each.row
        first, end = ends.get(row.broker, (row.first_sequence, row.next_sequence))
        ends[row.broker] = min(first, row.first_sequence), max(end, row.next_sequence)
    return [
        (
            address,
            first,
            end - 1,
            path_of(
                request, "messages_ndjson", {"broker": address, "from": first, "until": end}, topic=topic
            ),
        )
        for address, (first, end) in ends.items()
    ]


PAGES = [
    Page("/topics/{topic}/messages.ndjson", "messages_ndjson", range_of_messages),
    Page("/topics/{topic}/messages/unmasked", "unmasked_messages", unmasked_file, ("POST",)),
    Page("/topics/{topic}/messages", "messages", messages),
]
