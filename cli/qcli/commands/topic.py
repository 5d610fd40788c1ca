"""`qcli topic`: create, delete, empty, pause, unpause and list topics."""

import click

from ..broker.brokers import Brokers, broker_http_options
from ..framework.command import DocumentedGroup
from ..framework.errors import ExitCode
from ..framework.options import output_format
from ..framework.output import json_lines, plain_table, report_none, write
from ..records.topics import TopicRecord
from .shared.admin_action import Action, action_command
from .shared.stored_settings import settings_commands

_ACTIONS = [
    Action(
        "create",
        " created",
        {"create two topics": "qcli topic create clicks orders"},
        "Create topics.\n\nExisting topics do not change.",
        creates=True,
    ),
    Action(
        "delete",
        " deleted",
        {
            "delete without confirmation": "qcli topic delete --yes clicks",
            "delete in the whole cluster": "qcli topic delete --everywhere --yes clicks --lookupd-http-address "
            "127.0.0.1:4161",
        },
        "Delete topics with their channels and messages.\n\nAsks for confirmation on a terminal; elsewhere --yes "
        "is required. Consumers are disconnected. A later publish creates the topic again. Without --everywhere, "
        "nsqlookupd keep its name.",
        destroys=True,
        everywhere="Delete on all brokers that the nsqlookupd list and in the nsqlookupd, and check that the topic "
        "stays deleted.",
    ),
    Action(
        "empty",
        ": its own queue emptied; its channels keep their messages",
        {"delete the messages that no channel has taken yet": "qcli topic empty clicks"},
        "Delete the messages that wait in topics for a first channel.\n\nAsks for confirmation on a terminal; "
        "elsewhere --yes is required. Messages in channels stay: see 'qcli channel empty'.",
        destroys=True,
    ),
    Action(
        "pause",
        " paused",
        {"stop passing messages to the channels": "qcli topic pause clicks"},
        "Stop passing messages of topics to their channels.\n\nThe broker still accepts and stores messages. "
        "The pause survives a restart of the broker.",
    ),
    Action(
        "unpause",
        " unpaused",
        {"pass messages to the channels again": "qcli topic unpause clicks"},
        "Pass messages of topics to their channels again.",
    ),
]


@click.group(
    "topic",
    cls=DocumentedGroup,
    short_help="Create, delete, empty, pause or list topics.",
    examples={
        "list topics and their channels": "qcli topic list",
        "create a topic": "qcli topic create clicks",
        "delete a topic without confirmation": "qcli topic delete --yes clicks",
    },
    exits={
        ExitCode.UNREACHABLE: ExitCode.UNREACHABLE.meaning,
        ExitCode.PARTIAL: "The command succeeded for some names or brokers only; standard error lists the others.",
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
        "list topics and their channels": "qcli topic list",
        "list the names of topics only": "qcli topic list | awk '{print $1}'",
        "list the channels of one topic": "qcli channel list clicks",
    },
)
@broker_http_options
@output_format(
    "text: a topic and its channels per line. json: an object per line: topic, channels (names), paused (on at "
    "least one broker).",
    "text",
    "json",
    records=[TopicRecord],
)
def list_topics(brokers: Brokers, form: str) -> None:
    """List topics with their channels, by name.

    With several brokers, each topic is listed once, with the channels of all brokers.
    """
    from ..broker.admin_client import AdminClient, channels_by_topic

    answers = brokers.read(lambda address: AdminClient(address).stats()["topics"])
    topics = [topic for found in answers.results.values() for topic in found]
    paused = {topic["topic_name"] for topic in topics if topic["paused"]}
    records: list[TopicRecord] = [
        {"topic": topic, "channels": channels, "paused": topic in paused}
        for topic, channels in channels_by_topic(topics).items()
    ]
    if form == "json":
        write(json_lines(records))
    else:
        write(plain_table([(each["topic"], " ".join(each["channels"])) for each in records], 2))
    if not records:
        report_none("topics")
    answers.check()
