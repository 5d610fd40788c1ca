"""`qcli channel`: create, delete, empty, pause, unpause, seek and list channels."""

from __future__ import annotations

from typing import Any

import click

from ...broker.address_options import broker_http_options
from ...broker.fan_out import channels_by_topic
from ...broker.name_completion import complete_topic
from ...framework.command import DocumentedCommand, DocumentedGroup, Example
from ...framework.errors import Failure
from ...framework.exit_codes import ExitCode
from ...framework.options import output_format
from ...framework.output import json_lines, write
from ...framework.params import Source, topic_name
from ..shared.admin_action import Action, action_command
from ..shared.stored_settings import settings_commands
from .seek import command as seek

_ACTIONS = [
    Action(
        "create",
        " created",
        Example("before anything is published", "qcli channel create clicks/archive clicks/alerts"),
        "Create channels.\n\nTheir topics have to exist. A channel that exists already stays as it is. The first "
        "channel of a topic gets what has been published so far, later ones what is published from now on.",
        creates=True,
    ),
    Action(
        "delete",
        " deleted",
        Example("without being asked", "qcli channel delete --yes clicks/archive"),
        "Delete channels, with the messages they hold.\n\nAsks first on a terminal; elsewhere it needs --yes. "
        "Consumers are disconnected.",
        destroys=True,
    ),
    Action(
        "empty",
        " emptied",
        Example("drop a backlog", "qcli channel empty clicks/archive"),
        "Throw away the messages of channels.\n\nThose in flight and deferred go too. Asks first on a terminal; "
        "elsewhere it needs --yes.",
        destroys=True,
    ),
    Action(
        "pause",
        " paused",
        Example("hold deliveries back", "qcli channel pause clicks/archive"),
        "Stop delivering the messages of channels to consumers.\n\nMessages go on arriving in the channel. "
        "The pause outlasts a restart of the broker.",
    ),
    Action(
        "unpause",
        " unpaused",
        Example("deliver again", "qcli channel unpause clicks/archive"),
        "Deliver the messages of channels to consumers again.",
    ),
]


@click.group(
    "channel",
    cls=DocumentedGroup,
    short_help="Create, delete, empty, pause, move or list channels.",
    examples=[
        Example("what there is", "qcli channel list"),
        Example("a new channel", "qcli channel create clicks/archive"),
        Example("hold deliveries back, and let them go again", "qcli channel pause clicks/archive"),
        Example("have the last two hours delivered again", "qcli channel seek clicks/archive --to 2h"),
    ],
    exits={
        ExitCode.UNREACHABLE: ExitCode.UNREACHABLE.meaning,
        ExitCode.PARTIAL: "It was done for some of the names or brokers only; the others are named on standard error.",
    },
)
def command() -> None:
    """Create, delete, empty, pause, unpause, move and list channels."""


for _action in _ACTIONS:
    command.add_command(action_command("channel", _action))
for _command in settings_commands("channel"):
    command.add_command(_command)
command.add_command(seek)


@command.command(
    "list",
    cls=DocumentedCommand,
    examples=[
        Example("all there are", "qcli channel list"),
        Example("those of one topic", "qcli channel list clicks"),
        Example("those that are paused", "qcli channel list --format json | jq 'select(.paused)'"),
    ],
    exits={
        ExitCode.FAILURE: "There is no such topic, or standard output cannot be written.",
        ExitCode.UNREACHABLE: ExitCode.UNREACHABLE.meaning,
    },
)
@click.argument("topic", metavar="[TOPIC]", required=False, type=topic_name, shell_complete=complete_topic)
@broker_http_options
@output_format(
    "text: TOPIC/CHANNEL per line. json: an object per line, with the keys topic, channel and paused "
    "(on one of the brokers at least).",
    "text",
    "json",
)
def list_channels(topic: str | None, nsqd_http_addresses: tuple[str, ...], form: str) -> None:
    """List the channels of a broker, or of a topic, by name.

    Of several brokers each channel is listed once.
    """
    from ...broker.admin_client import AdminClient

    topics = [each for address in nsqd_http_addresses for each in AdminClient(address).stats(topic)["topics"]]
    if topic is not None and not topics:
        raise Failure(f"There is no topic {topic} on {' or '.join(nsqd_http_addresses)}.")
    paused = {
        Source(each["topic_name"], channel["channel_name"])
        for each in topics
        for channel in each["channels"] or []
        if channel["paused"]
    }
    records: list[dict[str, Any]] = [
        {"topic": name, "channel": channel, "paused": Source(name, channel) in paused}
        for name, channels in channels_by_topic(topics).items()
        for channel in channels
    ]
    if form == "json":
        write(json_lines(records))
    else:
        write("".join(f"{Source(each['topic'], each['channel'])}\n" for each in records))
