"""`qcli dlq requeue` and `qcli dlq drop`: take dead letters away."""

from collections.abc import Iterator
from typing import Any

import click

from ...broker.address_options import broker_http_options
from ...broker.requests import broker_suffix, change_each, request_json
from ...framework.command import DocumentedCommand
from ...framework.errors import ExitCode, Failure
from ...framework.options import option
from ...framework.output import print_diagnostic
from ...framework.params import Source
from ...terminal.confirm import confirm
from .selection import NOTE, WHAT, Selection, at_most_option, selection_options, topic_argument

_DONE = {"requeue": "requeued", "drop": "dropped"}


@click.command(
    "requeue",
    cls=DocumentedCommand,
    examples={
        "all, to where they came from": "qcli dlq requeue clicks.dead",
        "those of one channel": "qcli dlq requeue clicks.dead --origin clicks/archive",
        "one, to see whether it goes well now": "qcli dlq requeue clicks.dead -n 1",
        "to all channels of their topics": "qcli dlq requeue clicks.dead --to-topic",
    },
    exits={
        ExitCode.FAILURE: "None of them was requeued: no such dead-letter topic, their channels are gone, or the "
        "broker refused.",
        ExitCode.PARTIAL: "Some of them were requeued; standard error says why others were not.",
    },
    notes={
        "Dead letters": NOTE,
        "What happens": "Each letter is published to the topic it comes from as a new message, with a new id and "
        "attempts counted from 1, for the channel it comes from and no other; then it is gone from the dead-letter "
        "topic. Both are on disk when this command ends. If the broker dies in between, a letter may be requeued and "
        "yet be there. Letters in flight with consumers stay.",
    },
)
@topic_argument
@broker_http_options
@selection_options
@at_most_option
@option(
    "Where to",
    "--to-topic",
    is_flag=True,
    help="To all channels of the topic, not only to the one it comes from.",
)
def requeue(to_topic: bool, **selected: Any) -> None:
    """Put dead letters back into the channels they come from."""
    done, kept = _do_on_each(Selection(**selected), "requeue", {"to": "topic" if to_topic else "channel"})
    if kept:
        why = "; ".join(f"{number:,} because {reason}" for reason, number in kept.items())
        hint = "" if to_topic else " Say --to-topic to publish them for all channels of their topics."
        raise Failure(f"Not requeued: {why}.{hint}", ExitCode.PARTIAL if done else ExitCode.FAILURE)


@click.command(
    "drop",
    cls=DocumentedCommand,
    examples={
        "all of a topic": "qcli dlq drop clicks.dead",
        "those of one channel, without being asked": "qcli dlq drop clicks.dead --origin clicks/alerts --yes",
        "one": "qcli dlq drop clicks.dead --id 0cb2f1a3c9400001 --yes",
    },
    exits={
        ExitCode.FAILURE: "None of them was dropped: no such dead-letter topic, nobody agreed, or the broker refused.",
        ExitCode.PARTIAL: "Some of them were dropped, then a broker failed; standard error says which.",
    },
    notes={"Dead letters": NOTE},
)
@topic_argument
@broker_http_options
@selection_options
@at_most_option
@option("Options", "--yes", "-y", is_flag=True, help="Do it without asking.")
def drop(yes: bool, **selected: Any) -> None:
    """Throw dead letters away.

    Asks first on a terminal; elsewhere it needs --yes. Letters in flight with consumers stay, and so do the copies
    that other channels of the dead-letter topic have.
    """
    selection = Selection(**selected)
    if not yes:
        which = "the selected" if selection.is_narrow else "all"
        where = " and ".join(selection.nsqd_http_addresses)
        confirm(
            f"Drop {which} dead letters in {selection.topic} on {where}?", "'dlq drop' throws messages away"
        )
    _do_on_each(selection, "drop", {})


def _do_on_each(selection: Selection, verb: str, params: dict[str, str]) -> tuple[int, dict[str, int]]:
    """Do something to letters on all brokers, and report it. Returns to how many, and why not to others.

    Raises Failure: a broker failed, or none has a letter of these ids.
    """
    topic, total = selection.topic, 0
    kept: dict[str, int] = {}

    def act(address: str) -> None:
        nonlocal total
        before = sum(kept.values())
        left = None if selection.count is None else max(0, selection.count - total - before)
        if left == 0:
            return  # this broker is not asked, so there is nothing to say of it
        done = 0
        try:
            for answer in _answers(selection, address, verb, params, left):
                done += answer[_DONE[verb]]
                for row in answer.get("kept", []):
                    kept[row["why"]] = kept.get(row["why"], 0) + row["count"]
        except Failure as error:
            if done:
                raise Failure(f"{done:,} done; then: {error.message}", ExitCode.PARTIAL) from error
            raise
        finally:
            total += done
        why = "" if selection.ids or done or sum(kept.values()) > before else selection.why_none()
        print_diagnostic(
            f"{topic}: {done:,} {_DONE[verb]}{why}{broker_suffix(address, selection.nsqd_http_addresses)}"
        )

    change_each(selection.nsqd_http_addresses, act)
    if selection.ids and not (total or kept):
        raise Failure(f"No such letter waits in {topic}.")
    return total, kept


def _answers(
    selection: Selection, address: str, verb: str, params: dict[str, str], count: int | None
) -> Iterator[dict[str, Any]]:
    """A broker's answers to requests that do something to letters, to no more than `count`; None: to all."""
    for page in selection.pages():
        start: int | None = 0
        while start is not None and count != 0:
            more = {"from": str(start)} | ({} if count is None else {"max_messages": str(count)})
            answer = request_json(
                "POST",
                address,
                Source(selection.topic, None),
                f"/dead_letters/{verb}",
                selection.params() | params | page | more,
                WHAT,
            )
            yield answer
            if count is not None:
                seen = answer[_DONE[verb]] + sum(row["count"] for row in answer.get("kept", []))
                count -= min(count, seen)
            start = answer["next_sequence"]
