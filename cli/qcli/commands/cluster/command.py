"""`qcli cluster`: the members of a cluster, who leads it, and changes of both."""

import click

from ...framework.command import DocumentedGroup
from ...framework.errors import ExitCode
from .changes import promote, remove, switch
from .status import status
from .wait import wait


@click.group(
    "cluster",
    cls=DocumentedGroup,
    short_help="Show a cluster, and change who leads it.",
    examples={
        "show who leads, and which members are in sync": "qcli cluster status",
        "let another member lead": "qcli cluster switch",
        "wait until all members are in sync": "qcli cluster wait --timeout 5m",
    },
    exits={
        ExitCode.FAILURE: "A member is not in sync, or nothing was changed; see the commands.",
        ExitCode.UNREACHABLE: "There is no leader, or no member answers.",
    },
    synonyms={
        "failover": "switch",
        "handover": "switch",
        "transfer": "switch",
        "forget": "remove",
        "rm": "remove",
        "delete": "remove",
        "list": "status",
        "ls": "status",
        "members": "status",
        "show": "status",
    },
)
def command() -> None:
    """Show the members of a cluster, and change which of them leads.

    Members run with 'qcli serve --cluster NAME'. The leader serves clients, and an acknowledged message is on the disks
    of all members that are in sync; the others follow it.
    """


for _command in (status, switch, wait, promote, remove):
    command.add_command(_command)
