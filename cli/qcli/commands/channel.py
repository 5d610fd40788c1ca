"""`qcli channel`: create, delete, empty, pause, unpause, seek and list channels, and disconnect their consumers."""

import click

from trio_nsq.api import broker as api
from trio_nsq.api.answers import Disconnected
from trio_nsq.api.answers import Seek as SeekAnswer
from trio_nsq.text.wording import count_of

from ..broker.brokers import Brokers, broker_http_options
from ..broker.failures import Refused
from ..broker.name_completion import complete_channel, complete_topic
from ..broker.refusals import NotFound, missing
from ..broker.requests import ask
from ..framework.command import DocumentedGroup
from ..framework.errors import ExitCode
from ..framework.options import option, output_format
from ..framework.output import json_lines, report_none, write, write_lines
from ..framework.params import Source, channel_source, topic_name
from ..framework.positions import POSITIONS_NOTE, BrokerPosition, refuse_sequence
from ..records.topics import ChannelRecord, DisconnectedRecord, SeekRecord
from ..terminal.confirm import UNCONFIRMED, confirm
from .shared.admin_action import Action, action_command
from .shared.stored_settings import settings_commands

_ACTIONS = [
    Action(
        "create",
        " created",
        {"create two channels": "qcli channel create clicks/archive clicks/alerts"},
        "Create channels.\n\nTheir topics must exist. Existing channels do not change. A topic's first channel "
        "gets the messages published so far; later channels get new messages only.",
        creates=True,
    ),
    Action(
        "delete",
        " deleted",
        {"delete without confirmation": "qcli channel delete --yes clicks/archive"},
        "Delete channels with their messages.\n\nAsks for confirmation on a terminal; elsewhere --yes is required. "
        "Consumers are disconnected. Without --everywhere, nsqlookupd keep the channel, and brokers that get its topic "
        "later create it again.",
        destroys=True,
        everywhere="Delete on all brokers that the nsqlookupd list and in the nsqlookupd, and check that the channel "
        "stays deleted.",
    ),
    Action(
        "empty",
        " emptied",
        {"delete a backlog": "qcli channel empty clicks/archive"},
        "Delete the messages of channels.\n\nThis includes messages in flight and deferred messages. Asks for "
        "confirmation on a terminal; elsewhere --yes is required.",
        destroys=True,
    ),
    Action(
        "pause",
        " paused",
        {"stop deliveries": "qcli channel pause clicks/archive"},
        "Stop delivering messages of channels to consumers.\n\nChannels still receive messages. "
        "The pause survives a restart of the broker.",
    ),
    Action(
        "unpause",
        " unpaused",
        {"resume deliveries": "qcli channel unpause clicks/archive"},
        "Deliver messages of channels to consumers again.",
    ),
]


@click.group(
    "channel",
    cls=DocumentedGroup,
    short_help="Create, delete, empty, pause, move or list channels; disconnect consumers.",
    examples={
        "list all channels": "qcli channel list",
        "create a channel": "qcli channel create clicks/archive",
        "stop deliveries": "qcli channel pause clicks/archive",
        "deliver the last two hours again": "qcli channel seek clicks/archive --to 2h",
    },
    exits={
        ExitCode.UNREACHABLE: ExitCode.UNREACHABLE.meaning,
        ExitCode.PARTIAL: "The command succeeded for some names or brokers only; standard error lists the others.",
    },
)
def command() -> None:
    """Create, delete, empty, pause, unpause, move and list channels, and disconnect their consumers."""


for _action in _ACTIONS:
    command.add_command(action_command("channel", _action))
for _command in settings_commands("channel"):
    command.add_command(_command)


@command.command(
    "list",
    examples={
        "list all channels": "qcli channel list",
        "list the channels of one topic": "qcli channel list clicks",
        "list paused channels": "qcli channel list --format json | jq 'select(.paused)'",
    },
    exits={
        ExitCode.FAILURE: "There is no such topic, or standard output cannot be written.",
    },
)
@click.argument("topic", metavar="[TOPIC]", required=False, type=topic_name, shell_complete=complete_topic)
@broker_http_options
@output_format(
    "text: TOPIC/CHANNEL per line. json: an object per line: topic, channel, paused (on at least one broker).",
    "text",
    "json",
    records=[ChannelRecord],
)
def list_channels(topic: str | None, brokers: Brokers, form: str) -> None:
    """List all channels, or those of a topic, by name.

    With several brokers, each channel is listed once.
    """
    from ..broker.admin_client import AdminClient, channels_by_topic

    answers = brokers.read(lambda address: AdminClient(address).stats(topic)["topics"])
    topics = [each for found in answers.results.values() for each in found]
    if topic is not None and not topics:
        answers.check()
        raise missing(Source(topic, None), *brokers.addresses)
    paused = {
        Source(each["topic_name"], channel["channel_name"])
        for each in topics
        for channel in each["channels"]
        if channel["paused"]
    }
    records: list[ChannelRecord] = [
        {"topic": name, "channel": channel, "paused": Source(name, channel) in paused}
        for name, channels in channels_by_topic(topics).items()
        for channel in channels
    ]
    if form == "json":
        write(json_lines(records))
    else:
        write_lines(str(Source(each["topic"], each["channel"])) for each in records)
    if not records:
        report_none("channels", topic or "")
    answers.check()


@command.command(
    "disconnect",
    short_help="Disconnect consumers of a channel.",
    examples={
        "disconnect a consumer by its address": "qcli channel disconnect clicks/archive --client 10.0.0.7:50312",
        "disconnect the consumers of a host": "qcli channel disconnect clicks/archive --client worker-7",
        "disconnect all consumers": "qcli channel disconnect clicks/archive --all",
        "list the consumers": "qcli clients clicks/archive",
        "keep them from getting messages": "qcli channel pause clicks/archive",
    },
    exits={
        ExitCode.FAILURE: "Nothing was done: there is no such channel or consumer, or the broker refused.",
        ExitCode.PARTIAL: "Some brokers failed; standard error says which, and why.",
    },
    details={
        "Effect": "The broker closes the connections. Messages in flight are requeued at once, and go to other "
        "consumers. A delivery that a consumer began counts as an attempt. Consumers usually connect again within "
        "seconds: pause the channel, or revoke their token, to keep them from getting messages.",
        "Consumers": "A consumer has an id, by default the name of its host, and an address: 'qcli clients' and the "
        "console show both. Several consumers may have the same id; all of them are disconnected.",
        "JSON": "An object for each consumer: topic, channel, address, client_id and, with several brokers, broker.",
    },
)
@click.argument("wanted", metavar="TOPIC/CHANNEL", type=channel_source, shell_complete=complete_channel)
@broker_http_options
@option("Options", "--client", metavar="ID", help="Disconnect the consumers with this id or address.")
@option("Options", "--all", "every", is_flag=True, help="Disconnect all consumers.")
@output_format(
    "text: for people. json: an object per consumer.", "text", "json", records=[DisconnectedRecord]
)
def disconnect(wanted: Source, brokers: Brokers, client: str | None, every: bool, form: str) -> None:
    """Disconnect consumers of a channel: those of --client, or --all."""
    if client is not None and every:
        raise click.UsageError("--client and --all exclude each other.")
    if client is None and not every:
        raise click.UsageError("Say which consumers: --client ID or --all.")

    def report(address: str, consumers: list[Disconnected]) -> None:
        if form == "json":
            records: list[DisconnectedRecord] = [
                {
                    "topic": wanted.topic,
                    "channel": wanted.channel or "",
                    "address": each["remote_address"],
                    "client_id": each["client_id"],
                }
                for each in consumers
            ]
            write(json_lines(brokers.records(records, address)))
            return
        names = ", ".join(f"{each['client_id']} ({each['remote_address']})" for each in consumers)
        done = f"{count_of(len(consumers), 'consumer')} disconnected"
        write_lines([f"channel {wanted}{brokers.suffix(address)}: {done}{f': {names}' if names else ''}"])

    brokers.change(lambda address: _disconnect(address, wanted, client), report)


def _disconnect(address: str, wanted: Source, client: str | None) -> list[Disconnected]:
    try:
        return ask(address, api.disconnect(wanted.topic, wanted.channel, client))
    except Refused as error:
        if error.text != "CLIENT_NOT_FOUND":
            raise
        brief = f'Channel "{wanted}" has no consumer "{client}" on {address}.'
        raise NotFound(f"{brief} 'qcli clients {wanted}' lists them.", brief=brief) from error


@command.command(
    "seek",
    short_help="Move a channel back or forward in its topic.",
    examples={
        "deliver the last two hours again": "qcli channel seek clicks/archive --to 2h",
        "count the messages first": "qcli channel seek clicks/archive --to 2h --dry-run",
        "deliver all retained messages again": "qcli channel seek clicks/archive --to earliest",
        "skip the backlog": "qcli channel seek clicks/archive --to latest --yes",
        "look at the messages first": "qcli peek clicks --from 2h -n 3",
    },
    exits={
        ExitCode.FAILURE: "The channel was not moved: it does not exist, you did not confirm, or the broker refused.",
        ExitCode.PARTIAL: "The channel was moved on some brokers only; standard error says what failed on the others.",
        **UNCONFIRMED,
    },
    details={
        "Effect": "The channel restarts at the position. Other channels of the topic do not change. "
        "It delivers every message from there on, in order and with attempts counted from 1, whether the message is "
        "waiting, finished, requeued or emptied. It skips all messages before the position, also requeued and deferred "
        "ones; with --to earliest it skips none. Messages that were deferred when they were published "
        "still wait for their time. Consumers cannot finish messages that are in flight (E_FIN_FAILED), as after "
        "'qcli channel empty'.",
        "Limits": "The topic's retention limits how far back a channel can go; the earliest possible position is the "
        "oldest message. While the topic is paused, a channel cannot go past the messages that the topic has passed "
        "to it. The report says if a limit applied.",
        "Positions": POSITIONS_NOTE,
        "JSON": "One object: topic, channel, from_sequence and to_sequence (the old and the new position), "
        "delivered_again (finished messages after the new position), skipped (unfinished messages before it), "
        "in_flight, limited_by (earliest or latest if a limit applied; else null) and dry_run. With several "
        "brokers, one object each, with the key broker.",
    },
)
@click.argument("wanted", metavar="TOPIC/CHANNEL", type=channel_source, shell_complete=complete_channel)
@broker_http_options
@option(
    "Where to",
    "--to",
    "to",
    type=BrokerPosition(),
    required=True,
    metavar="POSITION",
    help="Move to this position: see 'qcli help positions'.",
)
@option("Where to", "--dry-run", is_flag=True, help="Only report the effect.")
@option("Where to", "--yes", "-y", is_flag=True, help="Skip messages without confirmation.")
@output_format("text: for people. json: write an object.", "text", "json", records=[SeekRecord])
def seek(
    wanted: Source,
    brokers: Brokers,
    to: str,
    dry_run: bool,
    yes: bool,
    form: str,
) -> None:
    """Move a channel to a sequence or time: back to deliver messages again, or forward to skip some.

    If messages would be skipped, asks for confirmation on a terminal; elsewhere --yes is required. When the command
    ends, the new position is on disk.
    """
    refuse_sequence(to, brokers.addresses)
    if not dry_run and not yes:
        effects = brokers.read(lambda address: _seek(address, wanted, to, dry_run=True))
        _ask_to_skip(wanted, brokers, sum(effect["skipped"] for effect in effects.results.values()))

    def report(address: str, moved: SeekAnswer) -> None:
        if form == "json":
            write(json_lines(brokers.records([dict(moved)], address)))
        else:
            write_lines(_report(wanted, brokers.suffix(address), moved))

    brokers.change(lambda address: _seek(address, wanted, to, dry_run=dry_run), report)


def _seek(address: str, wanted: Source, to: str, *, dry_run: bool) -> SeekAnswer:
    return ask(address, api.seek(wanted.topic, wanted.channel or "", to, dry_run=dry_run))


def _ask_to_skip(wanted: Source, brokers: Brokers, skipped: int) -> None:
    """Ask the user before messages are skipped; raises as `confirm`."""
    if skipped:
        messages = count_of(skipped, "message")
        confirm(
            f"Skip {messages} of channel {wanted} on {brokers.names}?",
            f"This would skip {messages}",
        )


def _report(wanted: Source, where: str, move: SeekAnswer) -> list[str]:
    would = "would move" if move["dry_run"] else "moved"
    again, skipped = count_of(move["delivered_again"], "message"), count_of(move["skipped"], "message")
    text = (
        f"channel {wanted}{where}: {would} from sequence {move['from_sequence']} to {move['to_sequence']}; "
        f"{again} delivered again, {skipped} skipped"
    )
    if move["in_flight"]:
        text += f"; {count_of(move['in_flight'], 'message')} in flight cannot be finished any more"
    if move["limited_by"] == "earliest":
        text += f"\nThe earliest message that is kept is {move['to_sequence']}."
    elif move["limited_by"] == "latest":
        text += f"\nThe channel's topic has passed on messages up to {move['to_sequence']} only."
    return text.split("\n")
