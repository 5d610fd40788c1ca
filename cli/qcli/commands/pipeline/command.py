"""`qcli pipeline`: keeps the tables that topics declare."""

import click

from ...framework.command import DocumentedGroup
from ...framework.errors import ExitCode
from .run import run
from .status import status


@click.group(
    "pipeline",
    cls=DocumentedGroup,
    short_help="Keep the tables that topics declare.",
    examples={
        "declare the table of a topic": "qcli topic set clicks table=delta:s3://bucket/clicks",
        "write the tables of all topics that declare one": "qcli pipeline run --http-address 127.0.0.1:9151",
        "show the tables, and how far they are": "qcli pipeline status --http-address 127.0.0.1:9151",
    },
    exits={ExitCode.FAILURE: "A table cannot be written; the output says which, and why."},
    synonyms={"start": "run", "serve": "run", "list": "status", "ls": "status", "show": "status"},
)
def command() -> None:
    """Keep the tables that topics declare.

    A topic declares its table with a setting: 'qcli topic set TOPIC table=delta:URL'. One process, 'qcli pipeline run',
    writes the tables of all topics.
    """


for _command in (run, status):
    command.add_command(_command)
