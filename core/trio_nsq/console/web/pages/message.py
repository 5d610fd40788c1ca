"""One message of a topic, and its body for a download; with masked fields, for those who may see them."""

import logging
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...access.changes import note_change
from ...access.viewer import Forbidden, Viewer, require, viewer_of
from ...console import snapshot_of
from ...messages.bodies import WHOLE, TopicBodies
from ...messages.body_view import SHOWN_BYTES, View, body_view
from ...messages.command_lines import publish_with_curl, publish_with_qcli, read_with_curl, read_with_qcli
from ...messages.message import Message
from ...messages.reading import TopicLog
from ...messages.single import read_single
from ...record_files import file_name
from ..page import NotFound, Page
from ..page import View as PageView
from .message_brokers import is_sequence, log_of
from .shown_bodies import UNMASK, may_unmask, require_unmask, shown_bodies

logger = logging.getLogger("trio_nsq.console")

_VIEWS: tuple[View, ...] = ("auto", "json", "text", "hex")
_RAW = "raw"
"""The body as it was published, in hexadecimal digits."""


async def message(request: Request) -> PageView:
    topic, sequence = request.path_params["topic"], _sequence(request)
    viewer = require(request, "read", topic)
    return await _message_page(request, viewer, topic, sequence)


async def unmask(request: Request) -> PageView:
    """The page of a message with its masked fields, for the audit log. The next look at it masks them again."""
    topic, sequence = request.path_params["topic"], _sequence(request)
    viewer = require(request, "read", topic)
    require(request, UNMASK, topic)
    return await _message_page(request, viewer, topic, sequence, is_unmasked=True)


async def _message_page(
    request: Request, viewer: Viewer, topic: str, sequence: int, *, is_unmasked: bool = False
) -> PageView:
    log, brokers = await log_of(request, topic)
    single = await read_single(log, sequence, shown_bodies(request, topic, SHOWN_BYTES))
    row = single.row
    if row is None:
        raise NotFound(
            f"Topic {topic} on {log.address} ends before message {sequence}: its next message gets the sequence "
            f"{single.bounds.end}."
        )
    context: dict[str, Any] = {
        "topic": topic,
        "address": log.address,
        "row": row,
        "is_message": isinstance(row, Message),
        "bounds": single.bounds,
        "several": len(brokers.ours) > 1,
        "is_masked": False,
    }
    if isinstance(row, Message):
        context |= await _message_context(request, viewer, log, row, is_unmasked=is_unmasked)
    return PageView("message.html", context)


async def _message_context(
    request: Request, viewer: Viewer, log: TopicLog, masked: Message, *, is_unmasked: bool
) -> dict[str, Any]:
    """Return the variables of a page with a message; `masked` has its body as everybody sees it."""
    topic, view = log.topic, request.query_params.get("view", "auto")
    has_raw = bool(masked.formats) and not masked.is_masked
    row, is_raw = masked, has_raw and view == _RAW
    if is_unmasked:
        require_unmask(request, topic, masked)
        _note_unmasked(request, log, masked)
        row = await _again(log, masked, shown_bodies(request, topic, SHOWN_BYTES, masks=False))
    elif is_raw:
        row = await _again(log, masked, shown_bodies(request, topic, SHOWN_BYTES, as_published=True))
    as_: View = "hex" if is_raw else next((each for each in _VIEWS if each == view), "auto")
    found = body_view(row.body, row.shown_size, as_)
    state = snapshot_of(request).brokers.get(log.address)
    tcp_address = _tcp_address(log.address, state.info) if state is not None else ""
    is_changed = bool(masked.formats) or masked.is_masked
    command_body = b"" if is_changed else row.body  # the bytes are in a file
    publish = publish_with_curl(log.address, topic, command_body, row.size, row.headers)
    sequence = row.sequence
    return {
        "row": row,
        "body": found,
        "commands": {
            "Read it with curl": read_with_curl(log.address, topic, sequence, sequence + 1),
            "Read it with qcli": read_with_qcli(log.address, topic, sequence, sequence + 1),
            "Publish it again with curl": publish,
            "Publish it again with qcli": publish_with_qcli(log.address, tcp_address, topic, sequence),
        },
        "needs_file": "body.bin" in publish,
        "needs_token": viewer.token is not None,
        "views": [*_VIEWS[1:], *([_RAW] if has_raw else [])],
        "view": _RAW if is_raw else found.kind,
        "is_masked": masked.is_masked,
        "is_unmasked": is_unmasked,
        "may_unmask": masked.is_masked and may_unmask(request, topic, masked),
    }


async def _again(log: TopicLog, found: Message, shown: TopicBodies) -> Message:
    """Read a message again, with its body in another form. Raises NotFound: retention has dropped it."""
    row = (await read_single(log, found.sequence, shown)).row
    if not isinstance(row, Message):
        raise NotFound(f"Message {found.sequence} of topic {log.topic} is no longer kept on {log.address}.")
    return row


async def body(request: Request) -> Response:
    """The body of one message as it was published, for a download; if fields are masked, for the audit log."""
    topic, sequence = request.path_params["topic"], _sequence(request)
    require(request, "read", topic)
    if request.method == "POST":  # the button of a message with masked fields
        require(request, UNMASK, topic)
    log, _ = await log_of(request, topic)
    shown = shown_bodies(request, topic, WHOLE, as_published=True)
    single = await read_single(log, sequence, shown)
    if not isinstance(single.row, Message):
        raise NotFound(f"Topic {topic} on {log.address} has no message {sequence}.")
    origin = "" if single.row.origin is None else single.row.origin["topic"]
    if shown.reader(origin).is_masked:
        if request.method != "POST":
            raise Forbidden(
                f"Fields of the bodies of topic {topic} are masked. With the role {UNMASK}, the page of the message "
                "has a button for the body as it was published."
            )
        require_unmask(request, topic, single.row)
        _note_unmasked(request, log, single.row)
    headers = {
        "Content-Disposition": f'attachment; filename="{file_name(topic)}-{sequence}.bin"',
        "X-Content-Type-Options": "nosniff",
    }
    return Response(single.row.body, media_type="application/octet-stream", headers=headers)


def _note_unmasked(request: Request, log: TopicLog, found: Message) -> None:
    note_change(request, node=log.address, sequence=found.sequence)
    logger.info(
        "UNMASK: %s sees message %d of topic %s on %s",
        viewer_of(request).name or "an anonymous viewer",
        found.sequence,
        log.topic,
        log.address,
    )


def _sequence(request: Request) -> int:
    text = request.path_params["sequence"]
    if not is_sequence(text):
        raise NotFound(f"{text[:100]!r} is not the sequence of a message: use a number such as 1000.")
    return int(text)


def _tcp_address(address: str, info: Mapping[str, Any]) -> str:
    """Return a broker's TCP address at the host of its HTTP address; empty if that is not known."""
    port = info.get("tcp_port")
    if type(port) is not int or not 0 < port <= 65535 or address.startswith("/"):
        return ""
    host = address.partition("://")[2] or address
    return f"{host.rpartition(':')[0]}:{port}"


PAGES = [
    Page("/topics/{topic}/messages/{sequence}", "message", message),
    Page("/topics/{topic}/messages/{sequence}/body", "message_body", body, ("GET", "POST")),
    Page("/topics/{topic}/messages/{sequence}/unmask", "unmask_message", unmask, ("POST",)),
]
