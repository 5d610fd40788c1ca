"""`qcli archive status`: what can be restored from an archive."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ...framework.command import DocumentedCommand
from ...framework.errors import ExitCode
from ...framework.options import output_format
from ...framework.output import json_lines, plain_table, print_diagnostic, size, write
from ...records.files import CheckpointRecord
from .places import archive_errors, storage_of

if TYPE_CHECKING:
    from trio_nsq.archive.examination import CheckpointExtent

HEADINGS = ("CHECKPOINT", "FROM", "TO", "SIZE", "OBJECTS", "SEGMENTS", "SIZE")
_LEFT_COLUMNS = 3


@click.command(
    "status",
    cls=DocumentedCommand,
    short_help="Show what can be restored from an archive.",
    examples={
        "show what can be restored": "qcli archive status s3://bucket/nsq",
        "print the time of the newest state": "qcli archive status s3://bucket/nsq --format json | "
        "tail -n 1 | jq -r .until_time",
    },
    exits={
        ExitCode.OK: "Something can be restored.",
        ExitCode.FAILURE: "There is no archive, or it cannot be read.",
        ExitCode.DAMAGED: "The manifest, or the list of segments of a checkpoint, is missing or damaged. If it is "
        "the manifest, the table shows the checkpoints that have a record.",
    },
    details={
        "Columns": "A line for each checkpoint, a copy of the data folder. from and to: it can be restored as it was "
        "at any time between them. size: of the copy. objects: those with the operations behind it. "
        "segments, size: the archived segments that belong to it.",
        "JSON": "One object per checkpoint and line: checkpoint (a number), time and until (Unix seconds), size, "
        "objects, segments and segment_size (bytes).",
    },
)
@click.argument("archive", metavar="ARCHIVE")
@output_format(
    "text: a table. json: write an object per checkpoint.", "text", "json", records=[CheckpointRecord]
)
def command(archive: str, form: str) -> int:
    """Show the checkpoints of an archive, and between which times the broker can be restored.

    ARCHIVE is a folder, or a URL such as s3://bucket/nsq, as given to 'qcli serve --archive'.
    """
    from trio_nsq.archive.examination import checkpoints_of
    from trio_nsq.archive.manifest import begun_manifest

    with archive_errors():
        storage = storage_of(archive)
        damage = [begun_manifest(storage).damage]
        extents = checkpoints_of(storage)
        damage += [each.damage for each in extents]
    write(json_lines(map(_record, extents)) if form == "json" else _text(extents))
    for what in filter(None, damage):
        print_diagnostic(f"Error: {what}.")
    return ExitCode.DAMAGED if any(damage) else ExitCode.OK


def _record(extent: CheckpointExtent) -> CheckpointRecord:
    checkpoint = extent.checkpoint
    return {
        "checkpoint": checkpoint.id,
        "time": checkpoint.time_ms / 1000,
        "until": extent.until_ms / 1000,
        "size": checkpoint.size_bytes,
        "objects": extent.objects,
        "segments": extent.segments,
        "segment_size": extent.segment_bytes,
    }


def _text(extents: list[CheckpointExtent]) -> str:
    from trio_nsq.archive.restore import shown_time

    rows = [
        (
            str(each.checkpoint.id),
            shown_time(each.checkpoint.time_ms),
            shown_time(each.until_ms),
            size(each.checkpoint.size_bytes),
            f"{each.objects:,}",
            f"{each.segments:,}",
            size(each.segment_bytes),
        )
        for each in extents
    ]
    return plain_table([HEADINGS, *rows], _LEFT_COLUMNS)
