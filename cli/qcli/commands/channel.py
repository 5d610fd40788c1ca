"""`qcli channel`: create, delete, empty, pause, unpause, seek and list channels."""

from collections.abc import Sequence
from typing import Any

import click

from trio_nsq.wording import count_of

from ..broker.address_options import broker_http_options
from ..broker.failures import CANNOT_BE_READ
from ..broker.name_completion import complete_channel, complete_topic
from ..broker.requests import broker_suffix, change_each, channels_by_topic, request_json, with_broker
from ..framework.command import DocumentedGroup
from ..framework.errors import ExitCode, Failure
from ..framework.options import option, output_format
from ..framework.output import json_lines, write
from ..framework.params import Source, channel_source, topic_name
from ..framework.positions import POSITIONS_NOTE, BrokerPosition, refuse_sequence
from ..terminal.confirm import confirm
from .shared.admin_action import Action, action_command
from .shared.stored_settings import settings_commands

_ACTIONS = [
    Action(
        "create",
        " created",
        {"before anything is published": "qcli channel create clicks/archive clicks/alerts"},
        "Create channels.\n\nTheir topics have to exist. A channel that exists already stays as it is. The first "
        "channel of a topic gets what has been published so far, later ones what is published from now on.",
        creates=True,
    ),
    Action(
        "delete",
        " deleted",
        {"without being asked": "qcli channel delete --yes clicks/archive"},
        "Delete channels, with the messages they hold.\n\nAsks first on a terminal; elsewhere it needs --yes. "
        "Consumers are disconnected.",
        destroys=True,
    ),
    Action(
        "empty",
        " emptied",
        {"drop a backlog": "qcli channel empty clicks/archive"},
        "Throw away the messages of channels.\n\nThose in flight and deferred go too. Asks first on a terminal; "
        "elsewhere it needs --yes.",
        destroys=True,
    ),
    Action(
        "pause",
        " paused",
        {"hold deliveries back": "qcli channel pause clicks/archive"},
        "Stop delivering the messages of channels to consumers.\n\nMessages go on arriving in the channel. "
        "The pause outlasts a restart of the broker.",
    ),
    Action(
        "unpause",
        " unpaused",
        {"deliver again": "qcli channel unpause clicks/archive"},
        "Deliver the messages of channels to consumers again.",
    ),
]


@click.group(
    "channel",
    cls=DocumentedGroup,
    short_help="Create, delete, empty, pause, move or list channels.",
    examples={
        "what there is": "qcli channel list",
        "a new channel": "qcli channel create clicks/archive",
        "hold deliveries back, and let them go again": "qcli channel pause clicks/archive",
        "have the last two hours delivered again": "qcli channel seek clicks/archive --to 2h",
    },
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


@command.command(
    "list",
    examples={
        "all there are": "qcli channel list",
        "those of one topic": "qcli channel list clicks",
        "those that are paused": "qcli channel list --format json | jq 'select(.paused)'",
    },
    exits={
        ExitCode.FAILURE: "There is no such topic, or standard output cannot be written.",
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
    from ..broker.admin_client import AdminClient

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


@command.command(
    "seek",
    short_help="Move a channel back or forward in its topic.",
    examples={
        "have the last two hours delivered again": "qcli channel seek clicks/archive --to 2h",
        "how many messages is that?": "qcli channel seek clicks/archive --to 2h --dry-run",
        "all that is kept": "qcli channel seek clicks/archive --to earliest",
        "skip a backlog": "qcli channel seek clicks/archive --to latest --yes",
        "look first what is there": "qcli peek clicks --from 2h -n 3",
    },
    exits={
        ExitCode.FAILURE: "It was not moved: no such channel, nobody agreed, or the broker refused.",
        ExitCode.PARTIAL: "It was moved on some of the brokers only; standard error says what failed on the others.",
    },
    notes={
        "What happens": "The channel begins anew at that position, and the other channels of the topic do not notice. "
        "Every message from there on is delivered, in order and with attempts counted from 1, whatever has become of "
        "it: waiting, finished, requeued or emptied. Messages before it are skipped, also requeued and deferred "
        "ones; but back at the earliest message nothing is skipped. Those that were deferred when they were published "
        "still wait for their time. What consumers have in flight they cannot finish any more (E_FIN_FAILED), as after "
        "'qcli channel empty'.",
        "What there is": "A channel cannot go back to what is no longer kept, which is a matter of the topic's "
        "retention; then it goes to the earliest message there is. Nor can it go past what its topic has "
        "passed on to it, which is less than there is while the topic is paused. Both are told.",
        "Positions": POSITIONS_NOTE,
        "JSON": "One object: topic, channel, from_sequence and to_sequence (where it began to read before, and "
        "begins now), delivered_again (messages it was done with), skipped (messages it was not done with), in_flight, "
        "limited_by (earliest or latest if it could not go further; else null) and dry_run. Of several "
        "brokers an object each, with its address as broker.",
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
    help="The message of this sequence, or the first one published at this time.",
)
@option("Where to", "--dry-run", is_flag=True, help="Only say what it would do.")
@option("Where to", "--yes", "-y", is_flag=True, help="Skip messages without asking.")
@output_format("text: a line or two for people. json: an object, see below.", "text", "json")
def seek(
    wanted: Source,
    nsqd_http_addresses: tuple[str, ...],
    to: str,
    dry_run: bool,
    yes: bool,
    form: str,
) -> None:
    """Move one channel to a sequence or time: back, to have messages delivered again, or forward, to skip some.

    Asks first if it would skip messages, on a terminal; elsewhere that needs --yes. The move is on disk when this
    command ends.
    """
    refuse_sequence(to, nsqd_http_addresses)
    if not dry_run and not yes:
        skipped = sum(_seek(address, wanted, to, dry_run=True)["skipped"] for address in nsqd_http_addresses)
        _ask_to_skip(wanted, nsqd_http_addresses, skipped)

    def move(address: str) -> None:
        moved = _seek(address, wanted, to, dry_run=dry_run)
        if form == "json":
            write(json_lines(with_broker([moved], address, nsqd_http_addresses)))
        else:
            write(_report(wanted, broker_suffix(address, nsqd_http_addresses), moved))

    change_each(nsqd_http_addresses, move)


def _seek(address: str, wanted: Source, to: str, *, dry_run: bool) -> dict[str, Any]:
    params = {"to": to} | ({"dry_run": "true"} if dry_run else {})
    answer: dict[str, Any] = request_json("POST", address, wanted, "/channel/seek", params, CANNOT_BE_READ)
    return answer


def _ask_to_skip(wanted: Source, addresses: Sequence[str], skipped: int) -> None:
    """Let the user agree to skip so many messages; raises what `confirm` does."""
    if skipped:
        messages = count_of(skipped, "message")
        confirm(
            f"Skip {messages} of channel {wanted} on {' and '.join(addresses)}?",
            f"This would skip {messages}",
        )


def _report(wanted: Source, where: str, move: dict[str, Any]) -> str:
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
    return text + "\n"
