"""`qcli definitions apply`: makes brokers as a document says."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

import click

from trio_nsq.text.wording import count_of

from ...broker.brokers import Brokers, broker_http_options, combined
from ...framework.command import DocumentedCommand
from ...framework.errors import ExitCode, Failure, reason_of
from ...framework.options import option, output_format
from ...framework.output import json_lines, plain_table, print_diagnostic, write
from ...records.topics import DefinitionChangeRecord
from ...terminal.confirm import UNCONFIRMED, confirm

if TYPE_CHECKING:
    from trio_nsq.fleet.definitions.changes import DefinitionChange
    from trio_nsq.fleet.definitions.model import Topics
    from trio_nsq.fleet.definitions.progress import Progress

_MOST_BYTES = 64 * 1024 * 1024


@click.command(
    "apply",
    cls=DocumentedCommand,
    short_help="Create topics and channels, and change their settings, as a file says.",
    examples={
        "create and change what differs": "qcli definitions apply definitions.json",
        "make the brokers of a context as the file says": "qcli definitions apply definitions.json --context prod",
        "also delete what the file does not name": "qcli definitions apply definitions.json --delete --dry-run",
        "check in CI that brokers are as the file says": "qcli definitions apply definitions.json --dry-run",
    },
    exits={
        ExitCode.OK: "The brokers are as the file says; there may have been nothing to change.",
        ExitCode.FAILURE: "Nothing was changed: the file is wrong, a broker refused or did not answer, or you did not "
        "confirm.",
        ExitCode.UNREACHABLE: ExitCode.UNREACHABLE.meaning,
        ExitCode.PARTIAL: "A part was changed; standard error says what failed. Repeat the command.",
        ExitCode.CHANGES: "With --dry-run: there is something to change, and the output says what.",
        **UNCONFIRMED,
    },
    details={
        "Effect": "Missing topics and channels are created, and settings that differ are set. What the file does not "
        "name stays as it is: topics, channels, settings, and whether they are paused. The value default sets a "
        "setting back to the broker's default.",
        "Checks": "The whole file is checked, and each broker is asked, before anything is changed: a bad name or "
        "setting, a cycle of dead-letter topics, or a broker that does not answer changes nothing.",
        "Deletions": "With --delete, topics and channels that the file does not name are deleted, with their messages. "
        "Dead-letter topics of channels in the file, and ephemeral topics and channels, stay. nsqlookupd keep the "
        "names of deleted topics: see 'qcli topic delete --everywhere'.",
        "Interruptions": "If the command is interrupted, or a broker fails, repeat it: it makes the changes that are "
        "left.",
        "JSON": "An object for each change: action (create, set, pause, unpause or delete), topic, channel (null for "
        "the topic itself), settings (for set: by name, the objects from and to), messages (how many are deleted or "
        "dropped) and done. With several brokers, also broker.",
    },
)
@click.argument("file", metavar="FILE", type=click.Path(readable=False, allow_dash=True))
@broker_http_options
@option("Options", "--dry-run", is_flag=True, help="Only show the changes.")
@option("Options", "--delete", is_flag=True, help="Delete topics and channels that the file does not name.")
@option("Options", "--yes", "-y", is_flag=True, help="Delete and drop messages without confirmation.")
@output_format(
    "text: a change per line. json: an object per line.", "text", "json", records=[DefinitionChangeRecord]
)
def command(file: str, brokers: Brokers, dry_run: bool, delete: bool, yes: bool, form: str) -> ExitCode:
    """Make brokers as a file of definitions says, or as standard input says if FILE is -.

    'qcli definitions export' writes such a file. If messages would be deleted or dropped, asks for confirmation on a
    terminal; elsewhere --yes is required.
    """
    from trio_nsq.fleet.definitions.progress import Progress

    wanted = _read(file)
    answers = brokers.ask(partial(_plan, wanted=wanted, delete=delete))
    if answers.failures:
        raise _unchanged(combined(answers.failures.values(), partial=False))
    plans = answers.results
    if not any(plans.values()):
        print_diagnostic("Nothing to change.")
        return ExitCode.OK
    if form == "text":
        write(_table(plans, brokers))
    if dry_run:
        if form == "json":
            _write_json({address: Progress(plan) for address, plan in plans.items()}, brokers)
        return ExitCode.CHANGES
    if not yes:
        _ask(plans)
    outcomes = brokers.ask(lambda address: _make(address, plans[address])).results
    if form == "json":
        _write_json({address: each.progress for address, each in outcomes.items()}, brokers)
    failures = [
        brokers.named(address, failure)
        for address, outcome in outcomes.items()
        for failure in outcome.failures
    ]
    done = sum(len(outcome.progress.done) for outcome in outcomes.values())
    if done:
        print_diagnostic(f"{count_of(done, 'change')} made.")
    if failures:
        raise combined(failures, partial=bool(done))
    return ExitCode.OK


def _read(path: str) -> Topics:
    """Return what a file, or standard input, wants. Raises Failure: it cannot be read, or is wrong."""
    from trio_nsq.fleet.definitions.model import DefinitionsError
    from trio_nsq.fleet.definitions.parsing import from_text

    name = "standard input" if path == "-" else path or "''"
    try:
        with click.open_file(path, "rb") as file:
            text = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise Failure(f"{name}: {reason_of(error)}.") from error
    if len(text) > _MOST_BYTES:
        raise Failure(f"{name}: the file has more than {_MOST_BYTES // 1024**2} MiB.")
    try:
        return from_text(text)
    except DefinitionsError as error:
        raise Failure("\n  ".join([f"{name}: nothing was changed:", *error.problems])) from error


def _plan(address: str, wanted: Topics, delete: bool) -> list[DefinitionChange]:
    """Return the changes of a broker. Raises Failure: it does not answer, or refuses one."""
    from trio_nsq.api.request import run
    from trio_nsq.fleet.definitions.changes import changes_to, effects_of
    from trio_nsq.fleet.definitions.model import DefinitionsError

    from ...broker.admin_client import AdminClient
    from ...broker.requests import ask_client
    from .reading import definitions_of

    with closing(AdminClient(address, is_patient=True)) as broker:
        found = definitions_of(broker)
        try:
            changes = changes_to(wanted, found.topics, delete=delete)
        except DefinitionsError as error:
            raise Failure("\n  ".join(error.problems)) from error
        if found.unsupported is not None and any(each.verb == "set" for each in changes):
            raise found.unsupported
        return run(effects_of(changes, found.topics), partial(ask_client, broker))


def _unchanged(failure: Failure) -> Failure:
    return Failure(f"Nothing was changed. {failure.message}", failure.exit_code, brief=failure.brief)


def _ask(plans: Mapping[str, list[DefinitionChange]]) -> None:
    """Ask the user if messages are deleted or dropped; raises as `confirm`."""
    lossy = [(address, change) for address, plan in plans.items() for change in plan if change.messages]
    if total := sum(change.messages for _, change in lossy):
        names = ", ".join(dict.fromkeys(f"{change.kind} {change.name}" for _, change in lossy))
        where = " and ".join(dict.fromkeys(address for address, _ in lossy))
        messages = count_of(total, "message")
        confirm(f"Delete {messages} of {names} on {where}?", f"This would delete {messages}")


# ---------------------------------------------------------------------- changes


@dataclass(slots=True)
class _Outcome:
    """What one broker did, and why it did not do the rest."""

    progress: Progress
    failures: list[Failure] = field(default_factory=list)


def _make(address: str, plan: list[DefinitionChange]) -> _Outcome:
    """Make the changes of a broker; after a refusal, those that do not need what was refused."""
    from trio_nsq.event_loop.fan_out import start_all
    from trio_nsq.fleet.definitions.progress import AT_ONCE, Progress

    from ...broker.admin_client import AdminClient
    from ...broker.at_once import in_context
    from ...broker.requests import ask_client

    outcome = _Outcome(Progress(plan))
    progress = outcome.progress
    with ExitStack() as stack:
        free = SimpleQueue[AdminClient]()
        for _ in range(min(AT_ONCE, len(plan))):
            free.put(stack.enter_context(closing(AdminClient(address, is_patient=True))))

        def make(place: int) -> None:
            client = free.get()
            try:
                ask_client(client, plan[place].request())
            finally:
                free.put(client)

        for places in progress.rounds():
            for place, future in start_all(in_context(make), places, at_most=AT_ONCE).items():
                try:
                    future.result()
                except Failure as error:
                    no_answer = error.exit_code == ExitCode.UNREACHABLE
                    if progress.note_failure(place, no_answer=no_answer):
                        text = f"{plan[place].name}: {error.message}"
                        outcome.failures.append(Failure(text, error.exit_code))
                else:
                    progress.done.add(place)
    return outcome


# ---------------------------------------------------------------------- output


def _table(plans: Mapping[str, list[DefinitionChange]], brokers: Brokers) -> str:
    from trio_nsq.fleet.definitions.wording import details_of

    rows = [
        (change.verb, change.name, details_of(change), *([address] if brokers.is_fleet else []))
        for address, plan in plans.items()
        for change in plan
    ]
    return plain_table(rows, len(rows[0]))


def _write_json(made: Mapping[str, Progress], brokers: Brokers) -> None:
    from trio_nsq.fleet.definitions.wording import shown_settings

    for address, progress in made.items():
        records: list[DefinitionChangeRecord] = [
            {
                "action": change.verb,
                "topic": change.topic,
                "channel": change.channel or None,
                "settings": shown_settings(change),
                "messages": change.messages,
                "done": place in progress.done,
            }
            for place, change in enumerate(progress.plan)
        ]
        write(json_lines(brokers.records(records, address)))
