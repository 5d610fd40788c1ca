"""`qcli channel seek`: moves a channel to another place in its topic's log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from trio_nsq.wording import count_of

from ...broker.address_options import broker_http_options
from ...broker.fan_out import broker_suffix, change_each, with_broker
from ...broker.name_completion import complete_channel
from ...broker.position_options import NOTE as POSITIONS
from ...broker.position_options import BrokerPosition, refuse_sequence
from ...broker.topic_log import read_failure
from ...framework.command import DocumentedCommand, Example
from ...framework.exit_codes import ExitCode
from ...framework.options import option, output_format
from ...framework.output import json_lines, write
from ...framework.params import Source, channel_source
from ...terminal.confirm import confirm


@click.command(
    "seek",
    cls=DocumentedCommand,
    short_help="Move a channel back or forward in its topic.",
    examples=[
        Example("have the last two hours delivered again", "qcli channel seek clicks/archive --to 2h"),
        Example("how many messages is that?", "qcli channel seek clicks/archive --to 2h --dry-run"),
        Example("all that is kept", "qcli channel seek clicks/archive --to earliest"),
        Example("skip a backlog", "qcli channel seek clicks/archive --to latest --yes"),
        Example("look first what is there", "qcli peek clicks --from 2h -n 3"),
    ],
    exits={
        ExitCode.FAILURE: "It was not moved: no such channel, nobody agreed, or the broker refused.",
        ExitCode.UNREACHABLE: ExitCode.UNREACHABLE.meaning,
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
        "Positions": POSITIONS,
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
def command(
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
        _ask(wanted, nsqd_http_addresses, skipped)

    def move(address: str) -> None:
        moved = _seek(address, wanted, to, dry_run=dry_run)
        if form == "json":
            write(json_lines(with_broker([moved], address, nsqd_http_addresses)))
        else:
            write(_report(wanted, broker_suffix(address, nsqd_http_addresses), moved))

    change_each(nsqd_http_addresses, move)


def _seek(address: str, wanted: Source, to: str, *, dry_run: bool) -> dict[str, Any]:
    from ...broker.admin_client import AdminClient, Refused

    params = {"topic": wanted.topic, "channel": wanted.channel or "", "to": to}
    if dry_run:
        params["dry_run"] = "true"
    try:
        broker = AdminClient(address)
        answer: dict[str, Any] = broker.decoded(broker.post("/channel/seek", params))
    except Refused as error:
        raise read_failure(address, wanted, error.status, error.text) from error
    return answer


def _ask(wanted: Source, addresses: Sequence[str], skipped: int) -> None:
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
