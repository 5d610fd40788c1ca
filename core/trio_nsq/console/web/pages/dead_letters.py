"""Dead letters: which topics have some, what failed where and why; requeue and drop."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import trio
from starlette.requests import Request
from starlette.responses import Response

from ....api import broker as api
from ....api.answers import LetterCount
from ....api.broker import DONE
from ....api.request import Request as BrokerRequest
from ....fleet.dead_letters import CHANNEL, REASONS, LetterCounts, LetterGroup, Moved
from ....fleet.stats import total as total_of
from ....text.wording import count_of
from ...access.changes import note_nothing_changed
from ...access.viewer import Forbidden, Viewer, may_send_to, require, viewer_of
from ...actions import commands, dead_letters, impact, targets
from ...actions.dead_letters import DeadLetter, Filter
from ...actions.report import Report
from ...actions.run import record_action
from ...console import console_of, snapshot_of, upstream_of
from ...messages.list_download import LIMITS, MAX_LINES
from ...notices import Continuation
from ...record_files import gaps
from ...upstream.client import Results
from ..confirming import Confirmation, finished, names_of, selected
from ..forms import Form, form, whole
from ..page import NotFound, Page, Table, View
from ..rendering import path_of
from ..table_files import wanted_form
from .message_files import file_of_dead_letters
from .shown_bodies import shown_bodies

_AT_ONCE = 20
"""Letters of each broker on a page."""
_MAX_RULES = 500


async def overview(request: Request) -> View:
    """The dead-letter topics, and the channels with a limit of attempts."""
    viewer, snapshot = viewer_of(request), snapshot_of(request)
    named = {
        name: parts for name, parts in dead_letters.topics_of(snapshot).items() if viewer.allows("read", name)
    }
    rows = [
        {"name": name, "parts": parts, "sum": total_of(list(parts.values()))} for name, parts in named.items()
    ]
    rules = [
        rule
        for address, broker in snapshot.brokers.items()
        if broker.reachable
        for rule in dead_letters.rules_of(address, broker.topics)
        if viewer.sees(rule.topic)
    ]
    nsqds = [address for address, broker in snapshot.brokers.items() if broker.is_nsqd]
    context = {
        "rows": rows,
        "rules": rules[:_MAX_RULES],
        "more_rules": max(0, len(rules) - _MAX_RULES),
        "nsqds": nsqds,
    }
    records = [
        {
            "topic": name,
            "broker": address,
            "dead_letters": queue.depth + queue.deferred,
            "in_flight": queue.in_flight,
        }
        for name, parts in named.items()
        for address, queue in parts.items()
    ]
    columns = ("topic", "broker", "dead_letters", "in_flight", "gap")
    table = Table("dead-letters", columns, chain(records, gaps(snapshot.silent_brokers)))
    return View("dead_letters.html", context, table=table)


async def topic_page(request: Request) -> View | Response:
    """The letters of one topic; requeue and drop."""
    topic, _ = names_of(request)
    found = targets.ours_with(snapshot_of(request), topic, CHANNEL)
    if request.method == "POST":
        return await _act(request, topic, found, await form(request))
    viewer = require(request, "read", topic)
    upstream, query = upstream_of(request), request.query_params
    chosen = Filter(query.get("origin", "")[:140], _reason(query.get("reason")))
    shown = shown_bodies(request, topic)
    only, start = query.get("broker", ""), whole(query.get("from"))
    asked = found
    if only:
        try:
            asked = found.only(only)
        except ValueError as exc:
            raise NotFound(f"Dead letters of topic {topic}: {exc}.") from exc
    if file_form := wanted_form(request):

        def lines(at: int) -> BrokerRequest[list[dict[str, Any]]]:
            return api.dead_letters(*chosen.of(topic), at or (start if only else 0), MAX_LINES)

        return await file_of_dead_letters(request, topic, asked.addresses, lines, file_form, asked.missing)
    counts: Results[LetterCounts] = Results()
    pages: Results[tuple[list[DeadLetter], bool]] = Results()

    async def read(address: str) -> tuple[list[DeadLetter], bool]:
        at = start if only else 0
        return await dead_letters.letters(upstream, address, shown, chosen, at, _AT_ONCE)

    async def count() -> None:
        every = await dead_letters.count(upstream, found.addresses, topic, Filter())
        counts.values.update(every.values)
        counts.errors.update(every.errors)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(count)
        pages = await upstream.on_all(asked.addresses, read)
    filters = {"origin": chosen.origin or None, "reason": chosen.reason or None}
    lists = [
        {
            "broker": address,
            "letters": letters,
            "next": {**filters, "broker": address, "from": letters[-1].message.sequence + 1}
            if more
            else None,
        }
        for address, (letters, more) in pages.values.items()
    ]
    context: dict[str, Any] = {
        "topic": topic,
        "here": path_of(request, "dead_letter_topic", topic=topic),
        "origins": _origins(counts.values),
        "in_flight": sum(each.in_flight for each in counts.values.values()),
        "is_complete": all(each.is_complete for each in counts.values.values()),
        "total": sum(each.total for each in counts.values.values()),
        "lists": lists,
        "chosen": chosen,
        "only": only,
        "start": start,
        "reasons": REASONS,
        "failures": found.failures(counts.errors, pages.errors),
        "left_out": found.left_out,
        "only_nsqd": found.only_nsqd,
        "is_there": bool(found.addresses or found.failing),
        "may_change": viewer.allows("manage", topic),
        "several": len(found.addresses) > 1,
        "files": {**filters, "broker": only or None},
        "limits": LIMITS,
    }
    return View("dead_letter_topic.html", context)


def _reason(text: str | None) -> str:
    return text if text in REASONS else ""


def _origins(counts: Mapping[str, LetterCounts]) -> list[dict[str, Any]]:
    """Return a row for each origin and reason, with its number on each broker; the most frequent first."""
    total: Counter[LetterGroup] = Counter()
    rows: dict[LetterGroup, list[LetterCount]] = {}
    for each in counts.values():
        for origin, row in each.rows.items():
            rows.setdefault(origin, []).append(row)
        total.update({origin: row["count"] for origin, row in each.rows.items()})
    return [
        {
            "origin": origin,
            "count": count,
            "brokers": {
                address: each.rows[origin]["count"] for address, each in counts.items() if origin in each.rows
            },
            "first_s": min(row["first_ns"] for row in rows[origin]) / 1e9,
            "last_s": max(row["last_ns"] for row in rows[origin]) / 1e9,
        }
        for origin, count in total.most_common(200)
    ]


async def _act(request: Request, topic: str, found: targets.Targets, sent: Form) -> View | Response:
    viewer = require(request, "manage", topic)
    upstream = upstream_of(request)
    verb, _, scope = sent.get("action", "").partition("-")
    if verb not in DONE or scope not in ("all", "selected"):
        raise Forbidden("The form has no such action.")
    ids = selected(sent.getlist("letter"), found.addresses) if scope == "selected" else None
    chosen = Filter(sent.get("origin", "")[:140], _reason(sent.get("reason")), ids)
    to = "topic" if sent.get("to") == "topic" else "channel"
    query = {"origin": chosen.origin or None, "reason": chosen.reason or None}
    back = path_of(request, "dead_letter_topic", query, topic=topic)
    if verb == "requeue" and viewer.token is None:
        await _check_origins(request, viewer, topic, found.addresses, chosen, to)
    starts = dict(_starts(sent.getlist("start"), found.addresses))
    addresses = list(ids) if ids is not None else list(starts) or found.addresses
    by_broker: dict[str, int] = {}
    failures = found.failures()
    if ids is not None:
        by_broker = {address: len(some) for address, some in ids.items()}
        if not by_broker:
            note_nothing_changed(request)
            return finished(
                request,
                back,
                "select dead letters first",
                Report(failed=found.failing, left_out=found.left_out),
            )
    elif not starts:  # otherwise it continues what was confirmed
        counts = await dead_letters.count(upstream, addresses, topic, chosen)
        by_broker = {address: each.total for address, each in counts.values.items()}
        failures = found.failures(counts.errors)
        addresses = list(counts.values)
    total = sum(by_broker.values())
    if not starts and (verb == "drop" or scope == "all"):
        page = _question(request, topic, verb, chosen, to, by_broker, failures, found)
        if "shown" not in sent:
            return page.view()
        if (refusal := page.refused(sent)) is not None:
            return refusal
        if impact.is_surprise(total, whole(sent.get("shown"))):
            return page.view("Nothing was changed: there are many more dead letters now. Look again.", 409)
    done, stopped = await dead_letters.move(upstream, addresses, topic, verb, chosen, to=to, starts=starts)
    report = _report(done, stopped, DONE[verb], failures, found.left_out)
    record_action(request, f"{verb}_dead_letters", report, topic=topic)
    await console_of(request).watcher.refresh()
    continuation = _continuation(
        done, stopped, verb, chosen, to, path_of(request, "dead_letter_topic", topic=topic)
    )
    count = sum(each.done for each in done.values())
    title = f"{count_of(count, 'dead letter')} of {topic} {DONE[verb]}"
    return finished(request, back, title, report, continuation)


async def _check_origins(
    request: Request, viewer: Viewer, topic: str, addresses: Sequence[str], chosen: Filter, to: str
) -> None:
    """Check that a viewer may send to the topics that the letters come from. Raises Forbidden.

    Brokers check the viewers whose token they get. Selected letters need it for all letters of the filter: which of
    them are selected is known to the broker only.
    """
    if viewer.allows("publish") or viewer.allows("manage"):
        return
    which = Filter(chosen.origin, chosen.reason)
    counts = await dead_letters.count(console_of(request).upstream, addresses, topic, which)
    for counted in counts.values.values():
        for origin in counted.rows:
            channel = "" if to == "topic" else origin.channel
            if origin.topic and not may_send_to(viewer, origin.topic, channel):
                raise Forbidden(
                    f"This needs the role publish or manage on topic {origin.topic}. Filter by origin."
                )
    if counts.errors or not all(each.is_complete for each in counts.values.values()):
        raise Forbidden("It is not known where all these dead letters come from. Filter by origin.")


def _question(
    request: Request,
    topic: str,
    verb: str,
    chosen: Filter,
    to: str,
    by_broker: Mapping[str, int],
    errors: Mapping[str, str],
    found: targets.Targets,
) -> Confirmation:
    total = sum(by_broker.values())
    here = path_of(request, "dead_letter_topic", topic=topic)
    ids = chosen.ids
    if ids is None:
        which = " ".join(
            filter(
                None,
                (chosen.origin and f"from {chosen.origin}", chosen.reason and f"with reason {chosen.reason}"),
            )
        )
        texts = [f"All dead letters of {topic}{' ' + which if which else ''}: {total:,}."]
    else:
        texts = [f"The selected dead letters of {topic}: {total:,}."]
    if verb == "drop":
        texts.append("They are deleted. Copies in other channels of the dead-letter topic stay.")
    elif to == "topic":
        texts.append(
            "Each one is published again to its topic of origin, for all channels, as a new message."
        )
    else:
        texts.append("Each one is delivered again to the channel that it comes from, as a new message.")
    fields = [("action", f"{verb}-{'all' if ids is None else 'selected'}"), ("to", to), ("shown", str(total))]
    fields += [("origin", chosen.origin), ("reason", chosen.reason)]
    fields += [("letter", f"{address} {each}") for address, some in (ids or {}).items() for each in some]
    return Confirmation(
        f"{verb.capitalize()} {count_of(total, 'dead letter')} of {topic}",
        texts,
        commands.dead_letters(
            found.addresses if ids is None else list(ids),
            verb,
            topic,
            origin=chosen.origin,
            reason=chosen.reason,
            ids=[each for some in (ids or {}).values() for each in some],
            to_topic=to == "topic",
        ),
        here,
        here,
        f"{verb.capitalize()} {count_of(total, 'dead letter')}",
        crumbs=[("Dead letters", path_of(request, "dead_letters")), (topic, here)],
        head=["Broker", "Dead letters"],
        rows=[[address, count] for address, count in by_broker.items()],
        total=["All brokers", total] if len(by_broker) > 1 else (),
        errors=errors,
        left_out=found.left_out,
        name=topic if verb == "drop" else "",
        fields=fields,
        is_destructive=verb == "drop",
    )


def _report(
    done: Mapping[str, Moved],
    stopped: Mapping[str, str],
    word: str,
    failures: Mapping[str, str],
    left_out: Mapping[str, str],
) -> Report:
    texts: dict[str, str] = {}
    failed: dict[str, str] = {**failures}
    for address, each in done.items():
        text = f"{each.done:,} {word}"
        why = "; ".join(f"{count:,} kept: {reason}" for reason, count in each.kept.most_common(5))
        if address in stopped:
            failed[address] = f"{text}; then: {stopped[address]}" if each.done else stopped[address]
        elif each.kept:
            failed[address] = f"{text}; {why}"
        else:
            texts[address] = text
    return Report(texts, failed, left_out)


def _continuation(
    done: Mapping[str, Moved], stopped: Mapping[str, str], verb: str, chosen: Filter, to: str, path: str
) -> Continuation | None:
    """Return the form that goes on where the time was over."""
    starts = [
        ("start", f"{address} {each.next_sequence}")
        for address, each in done.items()
        if each.next_sequence is not None and address not in stopped
    ]
    if not starts or chosen.ids is not None:
        return None
    fields = [("action", f"{verb}-all"), ("to", to), ("origin", chosen.origin), ("reason", chosen.reason)]
    return Continuation(path, "Continue with the rest", [*fields, *starts])


def _starts(values: Sequence[str], addresses: Sequence[str]) -> list[tuple[str, int]]:
    """Return the sequences to continue from, by broker."""
    parts = [value.rpartition(" ") for value in values]
    return [(address, whole(sequence)) for address, _, sequence in parts if address in addresses]


PAGES = [
    Page("/dead-letters", "dead_letters", overview),
    Page("/dead-letters/{topic}", "dead_letter_topic", topic_page, ("GET", "POST")),
]
