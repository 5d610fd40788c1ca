"""`qcli log`: reads, checks, archives and imports data folders."""

import click

from ...framework.command import DocumentedGroup
from ...framework.errors import ExitCode
from .archive import command as archive
from .dump import command as dump
from .import_nsqd import command as import_
from .verify import command as verify


@click.group(
    "log",
    cls=DocumentedGroup,
    short_help="Check, print, archive or import data folders without a broker.",
    examples={
        "check a data folder": "qcli log verify ./data",
        "print its messages": "qcli log dump ./data --format json | jq .",
        "copy its closed segments to a bucket": "qcli log archive ./data s3://bucket/segments",
        "import the data of an nsqd": "qcli log import /var/lib/nsqd --data-path ./data",
    },
    exits={
        ExitCode.USAGE: "The command line is wrong, or the path does not exist or is not a data folder.",
        ExitCode.DAMAGED: ExitCode.DAMAGED.meaning,
    },
)
def command() -> None:
    """Check, print, archive or import data folders without a broker.

    'qcli serve' keeps its messages in a data folder (--data-path). Each topic has a folder in it, topics/NAME.topic,
    with the segments of its log and the state of its channels.
    """


for _command in (verify, dump, archive, import_):
    command.add_command(_command)
