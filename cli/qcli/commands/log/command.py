"""`qcli log`: what can be done with data folders while no broker runs."""

import click

from ...framework.command import DocumentedGroup
from ...framework.errors import ExitCode
from .dump import command as dump
from .import_nsqd import command as import_
from .verify import command as verify


@click.group(
    "log",
    cls=DocumentedGroup,
    short_help="Check, print and import data folders, without a broker.",
    examples={
        "is anything damaged?": "qcli log verify ./data",
        "what is in it?": "qcli log dump ./data --format json | jq .",
        "come over from nsqd": "qcli log import /var/lib/nsqd --data-path ./data",
    },
    exits={
        ExitCode.USAGE: "The command line is wrong, or what it names is not there, or is something else.",
        ExitCode.DAMAGED: ExitCode.DAMAGED.meaning,
    },
)
def command() -> None:
    """Check, print and import data folders, without a broker.

    A data folder is what --data-path of 'qcli serve' names. Each of its topics has a folder in it, topics/NAME.topic,
    with the segments of its log and what is saved of its channels.
    """


for _command in (verify, dump, import_):
    command.add_command(_command)
