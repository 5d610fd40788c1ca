"""Definitions: topics, channels and settings as one file, which is downloaded, compared with the fleet, and applied."""

import base64
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import trio
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ....fleet.definitions.differences import Together, together
from ....fleet.definitions.document import matching, to_text
from ....fleet.definitions.model import DefinitionsError, Topics
from ....fleet.definitions.parsing import from_text
from ....fleet.definitions.wording import details_of
from ....protocol.limits import MIB
from ....text.wording import count_of
from ...access.viewer import require
from ...actions import commands, definitions, impact, targets
from ...actions.run import fleet_of, record_action
from ...console import console_of, snapshot_of, upstream_of
from ..confirming import TYPED, finished
from ..forms import Form, form, uploads, whole
from ..page import Page, View
from ..rendering import path_of

MAX_BYTES = 4 * MIB
"""Of a file: it is a field of the page that asks before it is applied. `qcli definitions apply` takes larger ones."""
_MAX_PROBLEMS = 50
_MAX_TEXT = 300
"""Of a problem, which may have a long name from the file."""
_MAX_ROWS = 500
_WORD = "delete"
"""To be typed if messages would go."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a form asks for.

    Attributes:
        packed: The file, compressed, for the hidden field of the next form.
        delete: Whether to delete what the file does not name.
    """

    wanted: Topics
    packed: str
    delete: bool


async def show(request: Request) -> View:
    """What the fleet has, and the forms."""
    return await _page(request)


async def download(request: Request) -> Response:
    """The document of the fleet, or of the topics that match `topic`."""
    require(request, "read")
    pattern = request.query_params.get("topic", "").strip()
    found, failing = await _together(request, pattern)
    if failing:
        address, why = next(iter(failing.items()))
        raise HTTPException(502, f"{address} does not answer, so the file would not be complete: {why}.")
    if problems := _unusable(found) or found.differences:
        raise HTTPException(409, " ".join(problems[:_MAX_PROBLEMS]))
    try:
        text = await trio.to_thread.run_sync(to_text, found.topics)
    except DefinitionsError as exc:
        raise HTTPException(409, " ".join(exc.problems[:_MAX_PROBLEMS])) from exc
    headers = {
        "Content-Disposition": 'attachment; filename="definitions.json"',
        "X-Content-Type-Options": "nosniff",
    }
    return Response(text, media_type="application/json", headers=headers)


async def apply(request: Request) -> View | Response:
    """Show what a file would change; apply it, if that is confirmed."""
    require(request, "read")
    sent = await form(request)
    try:
        asked = await _asked(sent, (await uploads(request)).get("file"))
    except DefinitionsError as exc:
        return await _page(request, exc.problems, sent)
    upstream = upstream_of(request)
    answering, failing = targets.reachable(snapshot_of(request))
    plans = await definitions.plan(upstream, answering, asked.wanted, delete=asked.delete)
    failures = {**failing, **{address: error.reason for address, error in plans.errors.items()}}
    is_confirmed = "plan" in sent
    if not is_confirmed or failures or not any(plans.values.values()):
        return await _plan_page(request, asked, plans.values, failures)
    require(request, "manage")
    total = _messages(plans.values)
    if sent["plan"] != await _fingerprint(plans.values) or impact.is_surprise(
        total, whole(sent.get("messages"))
    ):
        problem = "Nothing was changed: the brokers are not as they were when this was shown. Look again."
        return await _plan_page(request, asked, plans.values, failures, problem, 409)
    if total and sent.get(TYPED, "").strip() != _WORD:
        problem = f"Nothing was changed: type {_WORD} to confirm."
        return await _plan_page(request, asked, plans.values, failures, problem, 422)
    report, made = await definitions.apply(upstream, plans.values)
    record_action(request, "apply_definitions", report, count=made)
    await console_of(request).watcher.refresh()
    return finished(request, path_of(request, "definitions"), f"{count_of(made, 'change')} made", report)


# ---------------------------------------------------------------------- the file


async def _asked(sent: Form, file: bytes | None) -> _Asked:
    """Return what a form asks for. Raises DefinitionsError: it has no file, or one that is wrong."""
    packed = sent.get("packed", "")
    if file is None and not packed:
        raise DefinitionsError(["Select a file first."])
    if file == b"":
        raise DefinitionsError(["The file is empty."])
    try:
        text = _unpacked(packed) if file is None else file
    except (ValueError, zlib.error):
        raise DefinitionsError(["The form is not complete: select the file again."]) from None
    if len(text) > MAX_BYTES:
        size = MAX_BYTES // MIB
        raise DefinitionsError(
            [f"The file has more than {size} MiB. qcli definitions apply FILE takes larger ones."]
        )
    wanted = await trio.to_thread.run_sync(from_text, text)
    return _Asked(wanted, packed or await trio.to_thread.run_sync(_packed, text), bool(sent.get("delete")))


def _packed(text: bytes) -> str:
    return base64.urlsafe_b64encode(zlib.compress(text)).decode()


def _unpacked(packed: str) -> bytes:
    """Return the file of a hidden field, or a bit more than may be. Raises ValueError, zlib.error."""
    return zlib.decompressobj().decompress(base64.urlsafe_b64decode(packed), MAX_BYTES + 1)


# ---------------------------------------------------------------------- pages


async def _page(request: Request, problems: list[str] | None = None, sent: Form | None = None) -> View:
    """Return the page; `problems` are those of a file that was sent."""
    viewer = require(request, "read")
    found, failing = await _together(request)
    channels = sum(len(topic.channels) for topic in found.topics.values())
    context: dict[str, Any] = {
        "summary": f"{count_of(len(found.topics), 'topic')} and {count_of(channels, 'channel')}",
        "failing": failing,
        "differences": (_unusable(found) or found.differences)[:_MAX_PROBLEMS],
        "lacking": found.lacking[:_MAX_PROBLEMS],
        "more_lacking": max(0, len(found.lacking) - _MAX_PROBLEMS),
        "problems": [_short(text) for text in (problems or [])[:_MAX_PROBLEMS]],
        "more_problems": max(0, len(problems or []) - _MAX_PROBLEMS),
        "delete": bool(sent and sent.get("delete")),
        "may_apply": viewer.allows("manage"),
        "max_bytes": MAX_BYTES,
        "command": commands.export_definitions(fleet_of(request)),
    }
    return View("definitions.html", context, 422 if problems else 200, only_asks=bool(problems))


async def _together(request: Request, pattern: str = "") -> tuple[Together, Mapping[str, str]]:
    """Return what the brokers have together, and why others do not tell it."""
    answering, failing = targets.reachable(snapshot_of(request))
    results = await definitions.read(upstream_of(request), answering)
    patterns = [pattern] if pattern else []
    topics = {address: matching(each, patterns) for address, each in results.values.items()}
    errors = {address: error.reason for address, error in results.errors.items()}
    return await trio.to_thread.run_sync(together, topics), {**failing, **errors}


def _short(text: str) -> str:
    half = _MAX_TEXT // 2
    return text if len(text) <= _MAX_TEXT else f"{text[:half]} … {text[-half:]}"


def _unusable(found: Together) -> list[str]:
    return [
        f"The topic {name} cannot be used: {each.unavailable}."
        for name, each in found.topics.items()
        if each.unavailable
    ]


async def _fingerprint(plans: Mapping[str, definitions.Plan]) -> str:
    return await trio.to_thread.run_sync(definitions.fingerprint, plans)  # a file may have very many names


def _messages(plans: Mapping[str, definitions.Plan]) -> int:
    return sum(change.messages for plan in plans.values() for change in plan)


async def _plan_page(
    request: Request,
    asked: _Asked,
    plans: Mapping[str, definitions.Plan],
    failures: Mapping[str, str],
    problem: str = "",
    status: int = 200,
) -> View:
    """Return what a file would change, and the form that applies it."""
    viewer = require(request, "read")
    changes = [(address, change) for address, plan in plans.items() for change in plan]
    rows = [(address, change, details_of(change)) for address, change in changes[:_MAX_ROWS]]
    total = _messages(plans)
    context: dict[str, Any] = {
        "rows": rows,
        "more": len(changes) - len(rows),
        "count": len(changes),
        "several": len(plans) > 1,
        "messages": total,
        "failures": failures,
        "problem": problem,
        "may_apply": viewer.allows("manage") and bool(rows) and not failures,
        "lacks_role": not viewer.allows("manage"),
        "delete": asked.delete,
        "word": _WORD if total else "",
        "fields": [
            ("packed", asked.packed),
            ("delete", "1" if asked.delete else ""),
            ("plan", await _fingerprint(plans)),
            ("messages", str(total)),
        ],
        "command": commands.apply_definitions(fleet_of(request), delete=asked.delete),
    }
    return View("definitions_plan.html", context, status, only_asks=not problem)


PAGES = [
    Page("/definitions", "definitions", show),
    Page("/definitions/file", "definitions_file", download),
    Page("/definitions/apply", "apply_definitions", apply, ("POST",), acts=True),
]
