"""`qcli archive`: the archives of brokers, without a broker."""

import click

from ...framework.command import DocumentedGroup
from ...framework.errors import ExitCode
from .prune import command as prune
from .restore import command as restore
from .status import command as status
from .verify import command as verify


@click.group(
    "archive",
    cls=DocumentedGroup,
    short_help="Show, check, restore and prune the archive of a broker.",
    examples={
        "show what can be restored": "qcli archive status s3://bucket/nsq",
        "check that nothing is missing": "qcli archive verify s3://bucket/nsq",
        "remove what is older than a month": "qcli archive prune s3://bucket/nsq --keep 30d",
        "bring back a lost broker": "qcli archive restore s3://bucket/nsq --data-path ./data",
    },
    exits={
        ExitCode.USAGE: "The command line is wrong.",
        ExitCode.DAMAGED: "Objects are missing or damaged; the output says which.",
    },
)
def command() -> None:
    """Show, check, restore and prune the archive of a broker.

    A broker that runs with 'qcli serve --archive' writes all changes of its data folder into a folder or a bucket, a
    second behind. If its machine is lost, the archive has everything but the last second: topics, messages, channels
    with their positions, deferred messages and settings.
    """


for _command in (status, verify, restore, prune):
    command.add_command(_command)
