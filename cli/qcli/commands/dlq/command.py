"""`qcli dlq`: dead letters, what they are, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import click

from ...broker.address_options import asks_broker
from ...broker.fan_out import by_broker, from_each, on_broker, on_each
from ...broker.json_api import get_json, get_json_lines, post_json
from ...broker.message_bodies import body_of, with_bodies
from ...broker.name_completion import complete_source, complete_topic_with
from ...framework.command import DocumentedCommand, DocumentedGroup, Example
from ...framework.errors import Failure, NotThere
from ...framework.exit_codes import ExitCode
from ...framework.options import option, output_format
from ...framework.output import RawOutput, json_lines, plain_table, talk, write
from ...framework.params import Source, message_id, source, topic_name
from ...framework.positions import moment
from ...terminal.confirm import make_sure

_F = TypeVar("_F", bound=Callable[..., Any])

REASONS = ("requeued", "timed_out", "connection_lost")
DEFAULT_COUNT = 10
OUTPUT, SELECTION = "Output", "Which letters"
_WHAT = "dead letters"
_CHANNEL = "dead-letters"
_complete_topic = complete_topic_with(_CHANNEL)
_IDS_AT_ONCE = 500
_PAGE = 1000
_DONE = {"requeue": "requeued", "drop": "dropped"}

_NOTE = (
    "A message that comes back from its channel's last attempt (see 'qcli channel set', max_attempts) goes to the "
    "channel's dead_letter_topic, with its body as it is. Such a topic is like any other, but that it has a channel "
    f"{_CHANNEL} from its first letter on. What waits there is what these commands are about. A consumer of that "
    "channel takes letters away by finishing them; any other channel gets copies."
)


@click.group(
    "dlq",
    cls=DocumentedGroup,
    short_help="List, show, requeue or drop dead letters.",
    examples=[
        Example("what failed where, and how often", "qcli dlq list"),
        Example("a look at some", "qcli dlq show clicks.dead"),
        Example("try them again, once the consumer is mended", "qcli dlq requeue clicks.dead"),
        Example("forget them", "qcli dlq drop clicks.dead --yes"),
    ],
    exits={ExitCode.UNREACHABLE: ExitCode.UNREACHABLE.meaning},
    notes={"Dead letters": _NOTE},
)
def command() -> None:
    """Look after dead letters: messages that consumers could not process in so many attempts."""


def _topic(function: _F) -> _F:
    make = click.argument("topic", metavar="TOPIC", type=topic_name, shell_complete=_complete_topic)
    return make(function)


def _selection(function: _F) -> _F:
    """The options that say which letters are meant."""
    function = option(
        SELECTION,
        "--id",
        "ids",
        type=message_id,
        metavar="ID",
        multiple=True,
        help="Only the letter with this id, its own one; may be given several times.",
    )(function)
    function = option(
        SELECTION,
        "--reason",
        type=click.Choice(REASONS),
        help="Only those that came back so from their last delivery.",
    )(function)
    return option(
        SELECTION,
        "--origin",
        type=source,
        metavar="TOPIC[/CHANNEL]",
        shell_complete=complete_source,
        help="Only those from this topic, or from this channel of it.",
    )(function)


def _selected(origin: Source | None, reason: str | None) -> dict[str, str]:
    params = {"origin": str(origin)} if origin is not None else {}
    return params | ({"reason": reason} if reason is not None else {})


def _why_none(origin: Source | None, reason: str | None) -> str:
    """What is added where no letter was found."""
    of_these = f" from {origin}" if origin is not None else ""
    of_these += f" with the reason {reason}" if reason is not None else ""
    return f": no letter{of_these} waits there"


def _pages(ids: Sequence[str]) -> Iterator[dict[str, str]]:
    """The ids as parameters, not too many at a time; without any one page for all letters."""
    if not ids:
        yield {}
    for start in range(0, len(ids), _IDS_AT_ONCE):
        yield {"id": ",".join(ids[start : start + _IDS_AT_ONCE])}


# ---------------------------------------------------------------------- list


_at_most = option(
    SELECTION,
    "-n",
    "--count",
    type=click.IntRange(min=1),
    metavar="N",
    help="No more than so many: the oldest. Not given: all.",
)


@command.command(
    "list",
    cls=DocumentedCommand,
    examples=[
        Example("all there are", "qcli dlq list"),
        Example("of one dead-letter topic", "qcli dlq list clicks.dead"),
        Example("how many", "qcli dlq list clicks.dead --format json | jq -s 'map(.count) | add'"),
    ],
    exits={
        ExitCode.OK: "They were listed; also if there are none.",
        ExitCode.FAILURE: "There is no such dead-letter topic, or standard output cannot be written.",
        ExitCode.UNREACHABLE: ExitCode.UNREACHABLE.meaning,
    },
    notes={
        "Dead letters": _NOTE,
        "JSON": "One object per origin and reason: dead_letter_topic; topic and channel that they come from, and "
        "reason (requeued, timed_out or connection_lost), null for what somebody published to the dead-letter topic; "
        "count; first_ns and last_ns, when the first and the last of them became a dead letter, Unix nanoseconds. "
        "Of several brokers also broker, its address.",
    },
)
@click.argument("topic", metavar="[TOPIC]", required=False, type=topic_name, shell_complete=_complete_topic)
@asks_broker
@output_format("table: for people. json: an object per line, see below.", "table", "json")
def list_letters(topic: str | None, nsqd_http_addresses: tuple[str, ...], form: str) -> None:
    """Count the dead letters that wait, by where they come from and why."""

    def count(address: str) -> list[dict[str, Any]]:
        topics = [topic] if topic is not None else _dead_letter_topics(address)
        return [record for name in topics for record in _count(address, name)]

    found = from_each(nsqd_http_addresses, count)
    records = [record for each in found for record in by_broker(found[each], each, nsqd_http_addresses)]
    if form == "json":
        write(json_lines(records))
    elif records:
        headings = ["TOPIC", "FROM", "REASON", "FIRST", "LAST", "LETTERS"]
        rows = [_row(record) for record in records]
        if "broker" in records[0]:
            headings.insert(0, "BROKER")
            rows = [(record["broker"], *row) for record, row in zip(records, rows, strict=True)]
        write(plain_table([headings, *rows], len(headings) - 1))
    if not records:
        talk(f"{topic or 'All topics'}{_why_none(None, None)}")


def _dead_letter_topics(address: str) -> list[str]:
    found = get_json(address, Source("", None), "/dead_letters", {}, _WHAT)
    return [each["topic"] for each in found["topics"]]


def _count(address: str, topic: str) -> list[dict[str, Any]]:
    counts: dict[tuple[Any, ...], dict[str, Any]] = {}
    start: int | None = 0
    while start is not None:
        answer = get_json(address, Source(topic, None), "/dead_letters", {"from": str(start)}, _WHAT)
        for row in answer["origins"]:
            known = counts.setdefault((row["topic"], row["channel"], row["reason"]), dict(row, count=0))
            known["count"] += row["count"]
            known["first_ns"] = min(known["first_ns"], row["first_ns"])
            known["last_ns"] = max(known["last_ns"], row["last_ns"])
        start = answer["next_sequence"]
    if answer["in_flight"]:
        talk(f"{topic}: {answer['in_flight']:,} more in flight with consumers of {topic}/{_CHANNEL}")
    return [{"dead_letter_topic": topic, **row} for row in counts.values()]


def _row(record: dict[str, Any]) -> tuple[str, ...]:
    times = moment(record["first_ns"]), moment(record["last_ns"])
    origin = "" if record["topic"] is None else str(Source(record["topic"], record["channel"]))
    return record["dead_letter_topic"], origin, record["reason"] or "", *times, f"{record['count']:,}"


# ---------------------------------------------------------------------- show


@command.command(
    "show",
    cls=DocumentedCommand,
    examples=[
        Example("the first ten", "qcli dlq show clicks.dead"),
        Example(
            "those of one channel that timed out",
            "qcli dlq show clicks.dead --origin clicks/archive --reason timed_out",
        ),
        Example("one body as it is", "qcli dlq show clicks.dead --id 0cb2f1a3c9400001 --format raw > body"),
        Example("all of it, for a program", "qcli dlq show clicks.dead -n 0 --format json | jq .origin.id"),
    ],
    exits={
        ExitCode.OK: "They were shown; also if there were none.",
        ExitCode.FAILURE: "There is no such dead-letter topic, or standard output cannot be written.",
        ExitCode.UNREACHABLE: ExitCode.UNREACHABLE.meaning,
    },
    notes={
        "Dead letters": _NOTE,
        "JSON": "One object per line: topic, id and sequence in the dead-letter topic; timestamp_ns, when it became a "
        "dead letter, Unix nanoseconds; origin: an object with topic, channel, id, sequence, attempts, timestamp_ns "
        "(when it was published) and reason, or null; and body, a string; for a body that is not UTF-8, body_base64 "
        "stands in its place.",
    },
)
@_topic
@asks_broker
@_selection
@option(
    SELECTION,
    "-n",
    "--count",
    type=click.IntRange(min=0),
    default=DEFAULT_COUNT,
    metavar="N",
    show_default=True,
    help="How many, at most: the oldest; 0: all.",
)
@output_format(
    "table: for people, bodies cut short. json: an object per line, see below. raw: bodies as they are, and a "
    "line feed after each.",
    "table",
    "json",
    "raw",
)
def show(
    topic: str,
    nsqd_http_addresses: tuple[str, ...],
    origin: Source | None,
    reason: str | None,
    ids: Sequence[str],
    count: int,
    form: str,
) -> None:
    """Show dead letters with where they come from, the oldest first, and take none of them.

    Of several brokers: those of one after those of the other.
    """
    begun = False
    for messages in _read_all(nsqd_http_addresses, topic, _selected(origin, reason), ids, count):
        if form == "raw":
            RawOutput().write(b"".join(body_of(message) + b"\n" for message in messages))
        elif form == "json":
            write(json_lines(messages))
        else:
            headings = ("ID", "FROM", "ATTEMPTS", "REASON", "PUBLISHED")
            rows = [_letter_row(message) for message in messages]
            table = plain_table(with_bodies(headings, rows, messages), 6)
            write(table.partition("\n")[2] if begun else table)
        begun = True
    if not begun:
        talk(f"{topic}{_why_none(origin, reason)}")


def _read_all(
    addresses: Sequence[str], topic: str, params: dict[str, str], ids: Sequence[str], count: int
) -> Iterator[list[dict[str, Any]]]:
    """The letters of one broker after the other, no more than `count` (0: all), some at a time, at least one."""
    missing: list[NotThere] = []
    left = count
    for address in addresses:
        try:
            for messages in _read(address, topic, params, ids, left):
                yield by_broker(messages, address, addresses)
                left -= len(messages) if count else 0
        except NotThere as error:
            missing.append(error)
        if count and not left:
            return
    if len(missing) == len(addresses):
        raise missing[0]


def _read(
    address: str, topic: str, params: dict[str, str], ids: Sequence[str], count: int
) -> Iterator[list[dict[str, Any]]]:
    """Letters, some at a time, at least one."""
    for page in _pages(ids):
        start = 0
        while True:
            wanted = min(_PAGE, count) if count else _PAGE
            more = {"from": str(start), "max_messages": str(wanted)}
            found = get_json_lines(
                address, Source(topic, None), "/dead_letters/messages", params | page | more, _WHAT
            )
            if found:
                yield found
            if count:
                count -= len(found)
                if not count:
                    return
            if len(found) < wanted:
                break
            start = found[-1]["sequence"] + 1


def _letter_row(message: dict[str, Any]) -> tuple[str, ...]:
    origin = message["origin"]
    if origin is None:
        return message["id"], "", "", "", moment(message["timestamp_ns"])
    where = str(Source(origin["topic"], origin["channel"]))
    published = moment(origin["timestamp_ns"])
    return message["id"], where, str(origin["attempts"]), origin["reason"], published


# ---------------------------------------------------------------------- requeue, drop


@command.command(
    "requeue",
    cls=DocumentedCommand,
    examples=[
        Example("all, to where they came from", "qcli dlq requeue clicks.dead"),
        Example("those of one channel", "qcli dlq requeue clicks.dead --origin clicks/archive"),
        Example("one, to see whether it goes well now", "qcli dlq requeue clicks.dead -n 1"),
        Example("to all channels of their topics", "qcli dlq requeue clicks.dead --to-topic"),
    ],
    exits={
        ExitCode.FAILURE: "None of them was requeued: no such dead-letter topic, their channels are gone, or the "
        "broker refused.",
        ExitCode.UNREACHABLE: ExitCode.UNREACHABLE.meaning,
        ExitCode.PARTIAL: "Some of them were requeued; standard error says why others were not.",
    },
    notes={
        "Dead letters": _NOTE,
        "What happens": "Each letter is published to the topic it comes from as a new message, with a new id and "
        "attempts counted from 1, for the channel it comes from and no other; then it is gone from the dead-letter "
        "topic. Both are on disk when this command ends. If the broker dies in between, a letter may be requeued and "
        "yet be there. Letters in flight with consumers stay.",
    },
)
@_topic
@asks_broker
@_selection
@_at_most
@option(
    "Where to",
    "--to-topic",
    is_flag=True,
    help="To all channels of the topic, not only to the one it comes from.",
)
def requeue(
    topic: str,
    nsqd_http_addresses: tuple[str, ...],
    origin: Source | None,
    reason: str | None,
    ids: Sequence[str],
    count: int | None,
    to_topic: bool,
) -> None:
    """Put dead letters back into the channels they come from."""
    params = _selected(origin, reason) | {"to": "topic" if to_topic else "channel"}
    kept: dict[str, int] = {}
    why_none = _why_none(origin, reason)
    done = _do_on_each(nsqd_http_addresses, topic, "requeue", params, ids, count, kept, why_none)
    if kept:
        why = "; ".join(f"{number:,} because {reason}" for reason, number in kept.items())
        hint = "" if to_topic else " Say --to-topic to publish them for all channels of their topics."
        raise Failure(f"Not requeued: {why}.{hint}", ExitCode.PARTIAL if done else ExitCode.FAILURE)


@command.command(
    "drop",
    cls=DocumentedCommand,
    examples=[
        Example("all of a topic", "qcli dlq drop clicks.dead"),
        Example(
            "those of one channel, without being asked",
            "qcli dlq drop clicks.dead --origin clicks/alerts --yes",
        ),
        Example("one", "qcli dlq drop clicks.dead --id 0cb2f1a3c9400001 --yes"),
    ],
    exits={
        ExitCode.FAILURE: "None of them was dropped: no such dead-letter topic, nobody agreed, or the broker refused.",
        ExitCode.UNREACHABLE: ExitCode.UNREACHABLE.meaning,
        ExitCode.PARTIAL: "Some of them were dropped, then a broker failed; standard error says which.",
    },
    notes={"Dead letters": _NOTE},
)
@_topic
@asks_broker
@_selection
@_at_most
@option("Options", "--yes", "-y", is_flag=True, help="Do it without asking.")
def drop(
    topic: str,
    nsqd_http_addresses: tuple[str, ...],
    origin: Source | None,
    reason: str | None,
    ids: Sequence[str],
    count: int | None,
    yes: bool,
) -> None:
    """Throw dead letters away.

    Asks first on a terminal; elsewhere it needs --yes. Letters in flight with consumers stay, and so do the copies
    that other channels of the dead-letter topic have.
    """
    if not yes:
        which = "the selected" if origin or reason or ids or count else "all"
        where = " and ".join(nsqd_http_addresses)
        make_sure(f"Drop {which} dead letters in {topic} on {where}?", "'dlq drop' throws messages away")
    params = _selected(origin, reason)
    _do_on_each(nsqd_http_addresses, topic, "drop", params, ids, count, {}, _why_none(origin, reason))


def _do_on_each(
    addresses: Sequence[str],
    topic: str,
    verb: str,
    params: dict[str, str],
    ids: Sequence[str],
    count: int | None,
    kept: dict[str, int],
    why_none: str,
) -> int:
    """Do something to letters, no more than `count` on all brokers together, and report it.

    Returns:
        To how many; `kept` then has why not to others.

    Raises:
        Failure: A broker failed, or none has a letter of these ids.
    """
    left = count
    total = 0

    def act(address: str) -> None:
        nonlocal left, total
        if left == 0:
            return  # this broker is not asked, so there is nothing to say of it
        before = sum(kept.values())
        done = _do(address, topic, verb, params, ids, left, kept)
        total += done
        if left is not None:
            left -= min(left, done + sum(kept.values()) - before)
        why = "" if ids or done or sum(kept.values()) > before else why_none
        talk(f"{topic}: {done:,} {_DONE[verb]}{why}{on_broker(address, addresses)}")

    on_each(addresses, act)
    if ids and not (total or kept):
        raise Failure(f"No such letter waits in {topic}.")
    return total


def _do(
    address: str,
    topic: str,
    verb: str,
    params: dict[str, str],
    ids: Sequence[str],
    count: int | None,
    kept: dict[str, int],
) -> int:
    """Do something to letters; returns to how many, and adds to `kept` why not to others."""
    done = 0
    for page in _pages(ids):
        start: int | None = 0
        while start is not None and count != 0:
            more = {"from": str(start)} | ({} if count is None else {"max_messages": str(count)})
            try:
                answer = post_json(
                    address, Source(topic, None), f"/dead_letters/{verb}", params | page | more, _WHAT
                )
            except Failure as error:
                if done:
                    raise Failure(f"{done:,} done; then: {error.message}", ExitCode.PARTIAL) from error
                raise
            now_done = answer[_DONE[verb]]
            done += now_done
            seen = now_done
            for row in answer.get("kept", []):
                kept[row["why"]] = kept.get(row["why"], 0) + row["count"]
                seen += row["count"]
            if count is not None:
                count -= min(count, seen)
            start = answer["next_sequence"]
    return done
