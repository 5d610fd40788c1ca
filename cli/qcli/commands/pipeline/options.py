"""Options and texts that commands of `qcli pipeline` share."""

from collections.abc import Callable

import click

from ...framework import params
from ...framework.options import Decorator, option

TABLES = "Tables"
MONITORING = "Monitoring"
CHANNEL = "tables"
"""The default of `--channel`."""
NO_TABLE = "no topic declares a table: qcli topic set TOPIC table=delta:URL"


def _channel(text: str) -> str:
    channel = params.source(f"topic/{text}").channel
    if channel is None or channel.endswith("#ephemeral"):
        raise click.BadParameter(f"{text!r} is no durable channel: it would not keep messages.")
    return channel


channel_option = option(
    TABLES,
    "--channel",
    type=_channel,
    default=CHANNEL,
    metavar="NAME",
    help="The channel that keeps messages until they are in the table.",
)


def status_address_option(text: str, check: Callable[[str], str]) -> Decorator:
    return option(MONITORING, "--http-address", type=check, metavar="ADDRESS", help=text)
