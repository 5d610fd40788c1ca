"""`qcli support`: collects what a bug report needs."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click

from ...broker.at_once import at_once
from ...broker.brokers import Brokers, broker_http_options
from ...broker.connection_options import ConnectOptions
from ...framework.command import DocumentedGroup
from ...framework.errors import ExitCode, Failure
from ...framework.options import option
from ...framework.output import print_diagnostic, write

_CONTENTS = (
    "Of this machine: the versions of qcli, Python, the system and the installed packages, variables of the "
    "environment whose names begin with QCLI_, and the contexts. Of each broker: info, statistics with clients, "
    "metrics, options (admin), jobs, and the tree of tasks (admin). If a broker does not answer or refuses, a file "
    ".error.txt has the reason. With --data-path: names, sizes and times of the files, no contents."
)
_REMOVED = (
    "Removed are: this command's secret, values of options, variables and fields whose names say that they are secret, "
    "values of such variables of the environment wherever they occur, users, passwords and queries in URLs, tokens, "
    "and commands that print a secret. Addresses, names and identities of clients are hashed, so that one client is "
    "recognized in this archive only. Not removed are: names of topics, channels, brokers and files. The archive has "
    "no messages."
)


@click.group(
    "support",
    cls=DocumentedGroup,
    short_help="Collect what a bug report needs.",
    examples={"write an archive for a bug report": "qcli support bundle report.tar.gz"},
)
def command() -> None:
    """Collect what a bug report needs."""


@command.command(
    "bundle",
    examples={
        "write an archive about the broker on this machine": "qcli support bundle",
        "about all brokers of a cluster": "qcli support bundle report.tar.gz --lookupd-http-address 127.0.0.1:4161",
        "with the list of a broker's files": "qcli support bundle report.tar.gz --data-path ./data",
        "look at it": "qcli support bundle report.tar.gz && tar -xzOf report.tar.gz | less",
    },
    exits={
        ExitCode.OK: "The archive is written, also if a broker does not answer: the archive says why.",
        ExitCode.FAILURE: "The archive exists, or cannot be written.",
    },
    details={"Contents": _CONTENTS, "Secrets": _REMOVED},
)
@click.argument(
    "file", metavar="[FILE.tar.gz]", required=False, type=click.Path(dir_okay=False, path_type=Path)
)
@broker_http_options
@option(
    "Options",
    "--data-path",
    metavar="FOLDER",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="List the files of this data folder, without their contents.",
)
def bundle(file: Path | None, brokers: Brokers, data_path: Path | None) -> None:
    """Write an archive to attach to a bug report, without secrets and messages.

    Look at it before you send it. Without FILE.tar.gz, its name has the time. Only you can read it.
    """
    from .archive import Bundle, write_archive
    from .collect import add_folder, add_machine, broker_answers
    from .redaction import Redactor

    file = file or Path(time.strftime("qcli-support-%Y%m%dT%H%M%SZ.tar.gz", time.gmtime()))
    secret = ConnectOptions.of_command().auth_secret
    parts = Bundle(Redactor(os.environ, [secret]))
    add_machine(parts)
    try:
        addresses = brokers.addresses
    except Failure as failure:
        addresses = ()
        parts.add_error("brokers", failure.message)
    found = at_once(addresses, broker_answers) if addresses else {}
    for number, (address, answers) in enumerate(found.items(), 1):
        parts.add_answers(f"broker-{number}", address, answers)
    if data_path is not None:
        add_folder(parts, data_path)
    write_archive(file, parts.files())
    write("".join(f"{name}\n" for name in parts.files()))
    print_diagnostic(
        f"{file} is written. Secrets are removed as far as qcli knows them; names of topics, channels, hosts and files "
        f"are in it. Look at it before you send it: tar -xzOf {file} | less"
    )
