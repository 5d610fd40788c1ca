"""Subcommands of `topic` and `channel` that apply an action to several names over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import click

from trio_nsq.api import broker as api

from ...broker.address_options import LOOKUPD_OPTION
from ...broker.brokers import Brokers, broker_http_options, combined
from ...broker.failures import Refused
from ...broker.name_completion import complete_channel, complete_topic
from ...broker.refusals import NotFound, missing, not_found
from ...framework.command import DocumentedCommand
from ...framework.errors import ExitCode, Failure
from ...framework.options import Decorator, all_of, option
from ...framework.output import print_diagnostic
from ...framework.params import Source, channel_source, topic_source
from ...terminal.confirm import UNCONFIRMED, confirm

if TYPE_CHECKING:
    from ...broker.admin_client import AdminClient


@dataclass(frozen=True, slots=True)
class Action:
    """A subcommand of `topic` or `channel`.

    Attributes:
        name: The subcommand, and the last part of the HTTP path.
        done: The end of the report for each name, after kind and name.
        example: The example in its help.
        help: The description.
        destroys: Whether it deletes messages, so that the user must confirm.
        creates: Whether it has no effect if the topic or channel exists.
        everywhere: The help of `--everywhere`; empty: there is no such option.
    """

    name: api.Action
    done: str
    example: dict[str, str]
    help: str
    destroys: bool = False
    creates: bool = False
    everywhere: str = ""


def name_argument(name: str, kind: str, *, several: bool = False) -> Decorator:
    """Return the argument for topics or channels, by `kind`: a `Source`, or a tuple of several."""
    is_topic = kind == "topic"
    return click.argument(
        name,
        metavar=("TOPIC" if is_topic else "TOPIC/CHANNEL") + ("..." if several else ""),
        nargs=-1 if several else 1,
        required=True,
        type=topic_source if is_topic else channel_source,
        shell_complete=complete_topic if is_topic else complete_channel,
    )


def action_command(kind: str, action: Action) -> DocumentedCommand:
    """Make a subcommand of `qcli topic` or `qcli channel`, as `kind` says."""

    def run(names: tuple[Source, ...], brokers: Brokers, yes: bool = False, everywhere: bool = False) -> None:
        if everywhere and not brokers.lookupds:
            raise click.UsageError(
                f"--everywhere also deletes the {kind} in discovery services: name them with {LOOKUPD_OPTION}."
            )
        if action.destroys and not yes:
            _ask(kind, action, names, brokers)
        if everywhere:
            from .delete_everywhere import delete_everywhere

            delete_everywhere(kind, names, brokers)
        else:
            perform(brokers, kind, action, names)

    options = [name_argument("names", kind, several=True), broker_http_options]
    if action.everywhere:
        options.append(option("Options", "--everywhere", is_flag=True, help=action.everywhere))
    if action.destroys:
        options.append(option("Options", "--yes", "-y", is_flag=True, help="Do not ask for confirmation."))
    exits = {
        ExitCode.FAILURE: f"Nothing was done: there is no such {kind}, "
        f"{'you did not confirm, ' if action.destroys else ''}or the broker refused.",
        ExitCode.PARTIAL: "The command succeeded for some names or brokers only; standard error lists the others.",
        **(UNCONFIRMED if action.destroys else {}),
    }
    make = click.command(
        action.name, cls=DocumentedCommand, help=action.help, examples=action.example, exits=exits
    )
    return make(all_of(*options)(run))


@dataclass(slots=True)
class _Outcome:
    """What one broker did.

    Attributes:
        done: The end of the report for each name.
        lacking: The names that the broker does not have.
        failures: Why other names failed.
    """

    done: dict[Source, str] = field(default_factory=dict)
    lacking: dict[Source, NotFound] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def perform(brokers: Brokers, kind: str, action: Action, names: Sequence[Source]) -> None:
    """Apply the action to each name on every broker, also after an error.

    A name that one broker does not have is noted if another broker has it.

    Raises Failure: a broker failed, or no broker has a name.
    """
    answers = brokers.ask(lambda address: _perform(address, action, names))
    outcomes = answers.results
    for address, outcome in outcomes.items():
        for name, done in outcome.done.items():
            print_diagnostic(f"{kind} {name}{done}{brokers.suffix(address)}")
    known = {name for outcome in outcomes.values() for name in outcome.done}
    failures = dict(answers.failures)
    for address, outcome in outcomes.items():
        complaints = outcome.failures
        for name, failure in outcome.lacking.items():
            if name in known or (brokers.is_fleet and answers.failures):
                print_diagnostic(f"Note: {failure.brief}")
            elif len(outcomes) == 1:
                complaints.append(failure.message)
        if complaints:
            failures[address] = brokers.named(address, Failure(" ".join(complaints)))
    if len(outcomes) > 1 and not answers.failures:
        for name in dict.fromkeys(names):
            if all(name in outcome.lacking for outcome in outcomes.values()):
                first = next(iter(outcomes.values())).lacking[name]
                failures[str(name)] = missing(name, *outcomes, creation=first.creation)
    if failures:
        raise combined(failures.values(), partial=bool(known))


def _perform(address: str, action: Action, names: Sequence[Source]) -> _Outcome:
    """Apply the action to each name on one broker. Raises Failure: the broker does not answer the first request."""
    from ...broker.admin_client import AdminClient

    outcome = _Outcome()
    broker = AdminClient(address)
    for source in names:
        there = False
        try:
            # The broker's answer does not say whether it existed. Send the request in any case: another client may
            # delete it after this check.
            there = action.creates and _is_there(broker, source)
            broker.ask(api.act(action.name, *source))
        except Refused as error:
            failure = not_found(address, source, error.text, creation=not action.destroys)
            if failure is not None:
                outcome.lacking[source] = failure
            else:
                outcome.failures.append(f"{source}: {error.message}")
        except Failure as error:
            if not outcome.done:
                raise
            outcome.failures.append(f"{source}: {error.message}")
            break
        else:
            outcome.done[source] = " exists already" if there else action.done
    return outcome


def _is_there(broker: AdminClient, source: Source) -> bool:
    from ...broker.admin_client import channels_by_topic

    channels = channels_by_topic(broker.stats(*source)["topics"]).get(source.topic)
    return channels is not None and (source.channel is None or source.channel in channels)


def _ask(kind: str, action: Action, sources: Sequence[Source], brokers: Brokers) -> None:
    """Ask the user; raises as `confirm`."""
    names = ", ".join(map(str, sources))
    plural = "s" if len(sources) > 1 else ""
    confirm(
        f"{action.name.capitalize()} {kind}{plural} {names}{_content(action, sources, brokers)} on {brokers.names}?",
        f"'{kind} {action.name}' deletes messages",
    )


def _content(action: Action, sources: Sequence[Source], brokers: Brokers) -> str:
    """Return what goes, as far as the brokers answer, such as ` with 2 channels and 30 messages`."""
    from trio_nsq.fleet.changes import Change, removed_by
    from trio_nsq.fleet.stats import parse_topics
    from trio_nsq.text.wording import count_of

    from ...broker.admin_client import AdminClient

    def count(address: str) -> tuple[set[tuple[str, str]], int]:
        found, messages = set(), 0
        for source in sources:
            topic = parse_topics(AdminClient(address).stats(*source)).get(source.topic)
            change = Change(action.name, source.topic, source.channel or "")
            if topic is not None and (removed := removed_by(change, topic)) is not None:
                found |= {(source.topic, channel) for channel in topic.channels}
                messages += removed.messages
        return found, messages

    counts = brokers.ask(count).results.values()
    if not counts:
        return ""
    channels = len(set().union(*(found for found, _ in counts)))
    is_whole = action.name == "delete" and not all(each.channel for each in sources)
    of_channels = "" if not is_whole else f"{count_of(channels, 'channel')} and "
    return f" with {of_channels}{count_of(sum(number for _, number in counts), 'message')}"
