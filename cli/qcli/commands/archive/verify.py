"""`qcli archive verify`: whether an archive is whole."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from ...framework.command import DocumentedCommand
from ...framework.errors import ExitCode
from ...framework.options import option, output_format
from ...framework.output import json_lines, size, write, write_lines
from ...records.files import ArchiveFindingRecord
from ...terminal.progress import byte_progress
from .places import BytesRead, archive_errors, storage_of

if TYPE_CHECKING:
    from trio_nsq.archive.examination import CheckpointExtent


@click.command(
    "verify",
    cls=DocumentedCommand,
    short_help="Check that nothing is missing in an archive.",
    examples={
        "check the newest checkpoint, and what is behind it": "qcli archive verify s3://bucket/nsq",
        "check all that can be restored": "qcli archive verify s3://bucket/nsq --all",
    },
    exits={
        ExitCode.OK: "All objects are there, and their checksums match.",
        ExitCode.FAILURE: "There is no archive, or it cannot be read.",
        ExitCode.DAMAGED: "Objects are missing or damaged; the output says which.",
    },
    details={
        "JSON": "One object per finding and line: checkpoint (a number: that needs the object, or is before it), what.",
    },
)
@click.argument("archive", metavar="ARCHIVE")
@option(
    "Checks",
    "--all",
    "all_checkpoints",
    is_flag=True,
    help="Check older checkpoints, too, and read all archived segments.",
)
@output_format(
    "text: a line per finding, and a summary. json: write an object per finding.",
    "text",
    "json",
    records=[ArchiveFindingRecord],
)
def command(archive: str, all_checkpoints: bool, form: str) -> int:
    """Read an archive, and check that all objects are there and intact.

    Without --all, it reads what a restore of the newest state reads. Of older segments, which only the archive has, it
    checks that they are there, and their sizes. A broker may be writing to the archive.
    """
    from trio_nsq.archive.examination import checkpoints_of, verify

    with archive_errors():
        storage = storage_of(archive)
        extents = checkpoints_of(storage)
        checked = extents if all_checkpoints else extents[-1:]
        with byte_progress(sum(map(_bytes_of, checked)), "Verifying") as progress:
            read = BytesRead(progress)
            findings = list(verify(storage, read, all_checkpoints=all_checkpoints))
    if form == "json":
        write(json_lines(map(asdict, findings)))
    else:
        write_lines(f"checkpoint {each.checkpoint}: {each.what}" for each in findings)
        what = f"{len(findings)} missing or damaged" if findings else "nothing is missing or damaged"
        write_lines([f"{storage.shown}: read {size(read.count)}, {what}"])
    return ExitCode.DAMAGED if findings else ExitCode.OK


def _bytes_of(extent: CheckpointExtent) -> int:
    return extent.checkpoint.size_bytes + extent.segment_bytes
