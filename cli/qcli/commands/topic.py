"""`qcli topic`: create, delete, empty, pause, unpause and list topics."""

from typing import Any

import click

from ..broker.address_options import broker_http_options
from ..broker.requests import channels_by_topic
from ..framework.command import DocumentedGroup
from ..framework.errors import ExitCode
from ..framework.options import output_format
from ..framework.output import json_lines, plain_table, write
from .shared.admin_action import Action, action_command
from .shared.stored_settings import settings_commands

_ACTIONS = [
    Action(
        "create",
        " created",
        {"two topics": "qcli topic create clicks orders"},
        "Create topics.\n\nA topic that exists already stays as it is.",
        creates=True,
    ),
    Action(
        "delete",
        " deleted",
        {"without being asked": "qcli topic delete --yes clicks"},
        "Delete topics, with their channels and all their messages.\n\nAsks first on a terminal; elsewhere it "
        "needs --yes. Consumers are disconnected. A later publish creates the topic anew.",
        destroys=True,
    ),
    Action(
        "empty",
        ": its own queue emptied; its channels keep their messages",
        {"drop what no channel has taken yet": "qcli topic empty clicks"},
        "Throw away the messages that wait in topics for a first channel.\n\nAsks first on a terminal; "
        "elsewhere it needs --yes. What the channels hold stays: see 'qcli channel empty'.",
        destroys=True,
    ),
    Action(
        "pause",
        " paused",
        {"hold the topic's messages back": "qcli topic pause clicks"},
        "Stop passing the messages of topics on to their channels.\n\nMessages are accepted and kept meanwhile. "
        "The pause outlasts a restart of the broker.",
    ),
    Action(
        "unpause",
        " unpaused",
        {"let them flow again": "qcli topic unpause clicks"},
        "Pass the messages of topics on to their channels again.",
    ),
]


@click.group(
    "topic",
    cls=DocumentedGroup,
    short_help="Create, delete, empty, pause or list topics.",
    examples={
        "what there is": "qcli topic list",
        "a new topic": "qcli topic create clicks",
        "away with it, without being asked": "qcli topic delete --yes clicks",
    },
    exits={
        ExitCode.UNREACHABLE: ExitCode.UNREACHABLE.meaning,
        ExitCode.PARTIAL: "It was done for some of the names or brokers only; the others are named on standard error.",
    },
)
def command() -> None:
    """Create, delete, empty, pause, unpause and list topics."""


for _action in _ACTIONS:
    command.add_command(action_command("topic", _action))
for _command in settings_commands("topic"):
    command.add_command(_command)


@command.command(
    "list",
    examples={
        "what there is": "qcli topic list",
        "the names of the topics alone": "qcli topic list | awk '{print $1}'",
        "the channels of one topic": "qcli channel list clicks",
    },
)
@broker_http_options
@output_format(
    "text: a topic per line, followed by its channels. json: an object per line, with the keys "
    "topic, channels (names) and paused (on one of the brokers at least).",
    "text",
    "json",
)
def list_topics(nsqd_http_addresses: tuple[str, ...], form: str) -> None:
    """List the topics of a broker, by name, with their channels.

    Of several brokers each topic is listed once, with the channels it has on any of them.
    """
    from ..broker.admin_client import AdminClient

    topics = [topic for address in nsqd_http_addresses for topic in AdminClient(address).stats()["topics"]]
    paused = {topic["topic_name"] for topic in topics if topic["paused"]}
    records: list[dict[str, Any]] = [
        {"topic": topic, "channels": channels, "paused": topic in paused}
        for topic, channels in channels_by_topic(topics).items()
    ]
    if form == "json":
        write(json_lines(records))
    else:
        write(plain_table([(each["topic"], " ".join(each["channels"])) for each in records], 2))
