"""`qcli definitions`: topics, channels and their settings as one file."""

import click

from ...framework.command import DocumentedGroup
from ...framework.errors import ExitCode
from .apply import command as apply
from .export import command as export


@click.group(
    "definitions",
    cls=DocumentedGroup,
    short_help="Export and apply topics, channels and their settings.",
    examples={
        "write what a broker has to a file": "qcli definitions export > definitions.json",
        "show what applying it would change": "qcli definitions apply definitions.json --dry-run",
        "make the broker as the file says": "qcli definitions apply definitions.json",
    },
    exits={
        ExitCode.UNREACHABLE: ExitCode.UNREACHABLE.meaning,
    },
)
def command() -> None:
    """Export and apply topics, channels and their settings.

    A file of definitions says what brokers shall have. Keep it under version control, and apply it to one broker or
    to all brokers of a context: a second time, there is nothing to change.
    """


for _command in (export, apply):
    command.add_command(_command)
