"""Subcommands of `topic` and `channel` that apply an action to several names over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from ...broker.address_options import broker_http_options
from ...broker.failures import Refused
from ...broker.name_completion import complete_channel, complete_topic
from ...broker.refusals import not_found
from ...broker.requests import broker_suffix, change_each
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
    """

    name: str
    done: str
    example: dict[str, str]
    help: str
    destroys: bool = False
    creates: bool = False


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

    def run(names: tuple[Source, ...], nsqd_http_addresses: tuple[str, ...], yes: bool = False) -> None:
        if action.destroys and not yes:
            _ask(kind, action, names, nsqd_http_addresses)

        def act(address: str) -> None:
            perform(address, kind, action, names, broker_suffix(address, nsqd_http_addresses))

        change_each(nsqd_http_addresses, act)

    options = [name_argument("names", kind, several=True), broker_http_options]
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


def perform(address: str, kind: str, action: Action, sources: Sequence[Source], where: str) -> None:
    """Apply the action to each name on one broker, also after an error. Raises Failure: some names failed."""
    from ...broker.admin_client import AdminClient

    done = 0
    complaints: list[str] = []
    broker = AdminClient(address)
    for source in sources:
        params = {"topic": source.topic}
        if source.channel is not None:
            params["channel"] = source.channel
        there = False
        try:
            # The broker's answer does not say whether it existed. Send the request in any case: another client may
            # delete it after this check.
            there = action.creates and _is_there(broker, source)
            broker.request("POST", f"/{kind}/{action.name}", params)
        except Refused as error:
            failure = not_found(address, source, error.text, creation=not action.destroys)
            complaints.append(failure.message if failure else f"{source}: {error.message}")
        except Failure as error:
            if not done:
                raise
            complaints.append(f"{source}: {error.message}")
            break
        else:
            done += 1
            print_diagnostic(f"{kind} {source}{' exists already' if there else action.done}{where}")
    if complaints:
        raise Failure(" ".join(complaints), ExitCode.PARTIAL if done else ExitCode.FAILURE)


def _is_there(broker: AdminClient, source: Source) -> bool:
    topics = broker.stats(source.topic, source.channel)["topics"]
    return any(
        source.channel is None
        or any(channel["channel_name"] == source.channel for channel in topic["channels"] or [])
        for topic in topics
        if topic["topic_name"] == source.topic
    )


def _ask(kind: str, action: Action, sources: Sequence[Source], addresses: Sequence[str]) -> None:
    """Ask the user; raises as `confirm`."""
    names = ", ".join(map(str, sources))
    plural = "s" if len(sources) > 1 else ""
    confirm(
        f"{action.name.capitalize()} {kind}{plural} {names} on {' and '.join(addresses)}?",
        f"'{kind} {action.name}' deletes messages",
    )
