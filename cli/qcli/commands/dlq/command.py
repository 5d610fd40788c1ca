"""`qcli dlq`: lists, shows, requeues and drops dead letters."""

from __future__ import annotations

import click

from ...framework.command import DocumentedGroup, Example
from ...framework.exit_codes import ExitCode
from .listing import command as list_command
from .move import drop, requeue
from .selection import NOTE
from .show import command as show_command


@click.group(
    "dlq",
    cls=DocumentedGroup,
    short_help="List, show, requeue or drop dead letters.",
    examples=[
        Example("what failed where, and how often", "qcli dlq list"),
        Example("a look at some", "qcli dlq show clicks.dead"),
        Example("try them again, once the consumer is mended", "qcli dlq requeue clicks.dead"),
        Example("forget them", "qcli dlq drop clicks.dead --yes"),
    ],
    exits={ExitCode.UNREACHABLE: ExitCode.UNREACHABLE.meaning},
    notes={"Dead letters": NOTE},
)
def command() -> None:
    """Look after dead letters: messages that consumers could not process in so many attempts."""


for _command in (list_command, show_command, requeue, drop):
    command.add_command(_command)
