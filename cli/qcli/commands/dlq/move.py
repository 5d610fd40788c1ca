"""`qcli dlq requeue` and `qcli dlq drop`: remove dead letters."""

from collections import Counter
from typing import Any

import click

from trio_nsq.api.broker import DONE
from trio_nsq.fleet.dead_letters import Moved, move

from ...broker.brokers import broker_http_options
from ...broker.requests import perform
from ...framework.command import DocumentedCommand
from ...framework.errors import ExitCode, Failure
from ...framework.options import option
from ...framework.output import print_diagnostic
from ...terminal.confirm import UNCONFIRMED, confirm
from .selection import Selection, at_most_option, selection_options, topic_argument


@click.command(
    "requeue",
    cls=DocumentedCommand,
    examples={
        "requeue all to the channels of their origin": "qcli dlq requeue clicks.dead",
        "requeue those of one channel": "qcli dlq requeue clicks.dead --origin clicks/archive",
        "try with one": "qcli dlq requeue clicks.dead -n 1",
        "publish them to all channels of their topics": "qcli dlq requeue clicks.dead --to-topic",
    },
    exits={
        ExitCode.FAILURE: "Nothing was requeued: there is no such dead-letter topic, the channels were deleted, or the "
        "broker refused.",
        ExitCode.PARTIAL: "Some were requeued; standard error says why others were not.",
    },
    details={
        "Effect": "The broker publishes each dead letter to its original topic as a new message, with a new id and "
        "attempts counted from 1, for its original channel only. Then it removes it from the dead-letter "
        "topic. Both are on disk when this command ends. If the broker fails in between, a message may be requeued "
        "and still be a dead letter. Dead letters that are in flight stay.",
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
    help="Publish to all channels of the original topic, not only to the original channel.",
)
def requeue(to_topic: bool, **selected: Any) -> None:
    """Return dead letters to the channels of their origin."""
    done, kept = _do_on_each(Selection(**selected), "requeue", to="topic" if to_topic else "channel")
    if kept:
        why = "; ".join(f"{number:,} because {reason}" for reason, number in kept.items())
        hint = ""
        if any("no origin" in reason for reason in kept):
            hint = " Consume those without an origin from a channel: qcli channel list names the channels of the topic."
        elif not to_topic:
            hint = " To publish them to all channels of their topics, use --to-topic."
        raise Failure(f"Not requeued: {why}.{hint}", ExitCode.PARTIAL if done else ExitCode.FAILURE)


@click.command(
    "drop",
    cls=DocumentedCommand,
    examples={
        "drop all of a topic": "qcli dlq drop clicks.dead",
        "drop those of one channel without confirmation": "qcli dlq drop clicks.dead --origin clicks/alerts --yes",
        "drop one": "qcli dlq drop clicks.dead --id 0cb2f1a3c9400001 --yes",
    },
    exits={
        ExitCode.FAILURE: "Nothing was dropped: there is no such dead-letter topic, you did not confirm, or the broker "
        "refused.",
        ExitCode.PARTIAL: "Some were dropped before a broker failed; standard error says which.",
        **UNCONFIRMED,
    },
)
@topic_argument
@broker_http_options
@selection_options
@at_most_option
@option("Options", "--yes", "-y", is_flag=True, help="Do not ask for confirmation.")
def drop(yes: bool, **selected: Any) -> None:
    """Delete dead letters.

    Asks for confirmation on a terminal; elsewhere --yes is required. Dead letters that are in flight stay, and so do
    copies in other channels of the dead-letter topic.
    """
    selection = Selection(**selected)
    if not yes:
        which = "the selected" if selection.is_narrow else "all"
        where = selection.brokers.names
        confirm(f"Drop {which} dead letters in {selection.topic} on {where}?", "'dlq drop' deletes messages")
    _do_on_each(selection, "drop")


def _do_on_each(selection: Selection, verb: str, to: str | None = None) -> tuple[int, Counter[str]]:
    """Requeue or drop on all brokers, and report. Returns the number, and the numbers of the others by reason.

    Raises Failure: a broker failed, or no broker has a dead letter with these ids.
    """
    topic, brokers = selection.topic, selection.brokers
    every: list[Moved] = []
    failures: dict[str, Failure] = {}

    def act(address: str) -> Moved | None:
        left = None
        if selection.count is not None:
            left = max(0, selection.count - sum(each.seen for each in every))
            if left == 0:
                return None  # no request to this broker, and no report
        moved = Moved()
        every.append(moved)
        try:
            perform(address, move(selection.chosen, verb, moved, to=to, ids=selection.ids, at_most=left))
        except Failure as error:
            if not moved.done:
                raise
            failures[address] = Failure(f"{moved.done:,} done; then: {error.message}", ExitCode.PARTIAL)
        return moved

    def report(address: str, moved: Moved | None) -> None:
        if moved is None:
            return
        if address in failures:
            raise failures[address]
        why = "" if selection.ids or moved.seen else selection.why_none()
        print_diagnostic(f"{topic}: {moved.done:,} {DONE[verb]}{why}{brokers.suffix(address)}")

    brokers.change(act, report, in_turn=selection.count is not None)  # the count is that of all brokers
    total = sum(moved.done for moved in every)
    kept = sum((moved.kept for moved in every), Counter())
    if selection.ids and not (total or kept):
        raise Failure(f"There are no such dead letters in {topic}.")
    return total, kept
