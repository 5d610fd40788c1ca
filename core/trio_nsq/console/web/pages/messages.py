"""Look at the messages of a topic: the list with search, one message, downloads."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from ...access.viewer import Viewer, require
from ...console import console_of, snapshot_of, upstream_of
from ...messages.body_view import SHOWN_BYTES, View, body_view
from ...messages.command_lines import publish_with_curl, publish_with_qcli, read_with_curl, read_with_qcli
from ...messages.cursor import Cursor
from ...messages.download import download
from ...messages.message import Message, Row
from ...messages.paging import read_page
from ...messages.query import COUNTS, MessageQuery, parse_query
from ...messages.reading import TopicLog
from ...messages.search import Progress, compile_search, is_comparison, search
from ...messages.single import WHOLE, find_id, read_single
from ...upstream.client import Upstream, UpstreamError
from ..page import NotFound, Page
from ..page import View as PageView
from ..rendering import path_of
from ..streamed import Streamed
from .message_brokers import TopicBrokers, brokers_of
from .message_rows import ListedRow, listed_rows

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
        matches = (
            compile_search(wanted.q, wanted.kind, ignore_case=wanted.ignore_case)
            if wanted.q and wanted.kind != "id"
            else None
        )
    except ValueError as exc:
        problem = str(exc)
    brokers = await brokers_of(request, topic, selected=wanted.broker)
    console = console_of(request)
    limit_s = console.options.request_timeout_ms / 1000
    shown = MessageList([], "", "", {}, {})
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
                topic,
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
                topic,
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
    errors = {**brokers.errors, **shown.errors} if not wanted.broker else shown.errors
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
        "ranges": [] if wanted.q else _ranges(request, topic, shown.rows),
    }
    return PageView("messages.html", context, 400 if problem else 200)


async def message(request: Request) -> PageView:
    topic, sequence = request.path_params["topic"], _sequence(request)
    viewer = require(request, "read", topic)
    log, brokers = await _log(request, viewer, topic)
    single = await read_single(log, sequence, SHOWN_BYTES)
    if single.row is None:
        raise NotFound(
            f"Topic {topic} on {log.address} ends before message {sequence}: its next message gets the sequence "
            f"{single.bounds.end}."
        )
    view = request.query_params.get("view", "auto")
    row = single.row
    found = (
        body_view(row.body, row.size, next((each for each in _VIEWS if each == view), "auto"))
        if isinstance(row, Message)
        else None
    )
    snapshot = snapshot_of(request)
    state = snapshot.brokers.get(log.address)
    tcp_address = _tcp_address(log.address, state.info) if state is not None else ""
    commands = {}
    if isinstance(row, Message):
        commands = {
            "Read it with curl": read_with_curl(log.address, topic, sequence, sequence + 1),
            "Read it with qcli": read_with_qcli(log.address, topic, sequence, sequence + 1),
            "Publish it again with curl": publish_with_curl(
                log.address, topic, row.body, row.size, row.headers
            ),
            "Publish it again with qcli": publish_with_qcli(log.address, tcp_address, topic, sequence),
        }
    context = {
        "topic": topic,
        "address": log.address,
        "row": row,
        "is_message": isinstance(row, Message),
        "body": found,
        "bounds": single.bounds,
        "commands": commands,
        "needs_file": isinstance(row, Message) and "body.bin" in commands["Publish it again with curl"],
        "needs_token": viewer.token is not None,
        "several": len(brokers.ours) > 1,
        "views": _VIEWS[1:],
    }
    return PageView("message.html", context)


async def body(request: Request) -> Response:
    """The body of one message, for a download."""
    topic, sequence = request.path_params["topic"], _sequence(request)
    viewer = require(request, "read", topic)
    log, _ = await _log(request, viewer, topic)
    single = await read_single(log, sequence, WHOLE)
    if not isinstance(single.row, Message):
        raise NotFound(f"Topic {topic} on {log.address} has no message {sequence}.")
    headers = {
        "Content-Disposition": f'attachment; filename="{file_name(topic)}-{sequence}.bin"',
        "X-Content-Type-Options": "nosniff",
    }
    return Response(single.row.body, media_type="application/octet-stream", headers=headers)


async def range_of_messages(request: Request) -> Response:
    """A range of sequences of one broker as JSON lines, for a download."""
    topic = request.path_params["topic"]
    viewer = require(request, "read", topic)
    log, _ = await _log(request, viewer, topic)
    first, end = (request.query_params.get(name, "") for name in ("from", "until"))
    if not (_is_sequence(first) and _is_sequence(end)):
        raise HTTPException(400, "The address must have two sequences: ?from=FIRST&until=END")
    pieces = download(log.upstream, log.address, topic, int(first), int(end))
    await anext(pieces)  # the broker answers
    headers = {
        "Content-Type": "application/x-ndjson",
        "Content-Disposition": f'attachment; filename="{file_name(topic)}-{first}-{end}.ndjson"',
        "X-Content-Type-Options": "nosniff",
    }
    return Streamed(pieces, headers)


def file_name(topic: str) -> str:
    return "".join(char if char.isascii() and (char.isalnum() or char in "._-") else "_" for char in topic)


def _sequence(request: Request) -> int:
    text = request.path_params["sequence"]
    if not _is_sequence(text):
        raise NotFound(f"{text[:100]!r} is not the sequence of a message: use a number such as 1000.")
    return int(text)


def _is_sequence(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 19


async def _log(request: Request, viewer: Viewer, topic: str) -> tuple[TopicLog, TopicBrokers]:
    """Return the log that a request names, and the topic's brokers. Raises NotFound."""
    address = request.query_params.get("broker", "")
    brokers = await brokers_of(request, topic, selected=address)
    if not address and len(brokers.ours) == 1:
        address = brokers.ours[0]
    if address in brokers.errors:
        raise UpstreamError(address, brokers.errors[address])
    if address not in brokers.ours:
        raise NotFound(
            f"{address} is an nsqd: it keeps no log, so it cannot show messages."
            if address in brokers.nsqds
            else f"Topic {topic} is on several brokers: the address of the page must name one, as ?broker=HOST:PORT."
        )
    return TopicLog(upstream_of(request), address, topic), brokers


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


def _tcp_address(address: str, info: Mapping[str, Any]) -> str:
    """Return a broker's TCP address at the host of its HTTP address; empty if that is not known."""
    port = info.get("tcp_port")
    if type(port) is not int or not 0 < port <= 65535 or address.startswith("/"):
        return ""
    host = address.partition("://")[2] or address
    return f"{host.rpartition(':')[0]}:{port}"


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
    Page("/topics/{topic}/messages", "messages", messages),
    Page("/topics/{topic}/messages/{sequence}", "message", message),
    Page("/topics/{topic}/messages/{sequence}/body", "message_body", body),
]
