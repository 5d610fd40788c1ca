"""`qcli log archive`: copies the closed segments of a data folder into an archive."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...framework.errors import ExitCode, Failure, translate
from ...framework.options import option, output_format
from ...framework.output import json_lines, plain_table, print_diagnostic, report_none, size, write
from ...records.files import ArchivedTopicRecord
from ...terminal.progress import byte_progress
from ..shared.engine import library_errors
from ..shared.places import without_secrets
from .findings import finding_lines, finding_record
from .paths import NOT_A_LOG, PathCommand, Place, places, total_bytes

if TYPE_CHECKING:
    from trio_nsq.spark.segments.writer import ArchivedTopic, TopicArchiver

HEADINGS = ("TOPIC", "INCARNATION", "COPIED", "SIZE", "PRESENT", "NEXT")
_LEFT_COLUMNS = 2


@click.command(
    "archive",
    cls=PathCommand,
    short_help="Copy closed segments of a data folder to a disk or a bucket.",
    examples={
        "archive all topics of a running broker": "qcli log archive ./data s3://bucket/segments",
        "archive one topic to a disk": "qcli log archive ./data/topics/clicks.topic /mnt/segments",
        "archive a broker that is stopped for good": "qcli log archive ./data s3://bucket/segments --tail",
        "export an archive to Parquet": "qcli to-parquet clicks ./parquet --from-segments s3://bucket/segments",
    },
    exits={
        ExitCode.OK: "The archive has all closed segments.",
        ExitCode.FAILURE: "Nothing was copied: the folder cannot be read, or the archive cannot be written.",
        ExitCode.USAGE: NOT_A_LOG,
        ExitCode.PARTIAL: "It failed after some segments. Run the same command again to continue.",
        ExitCode.DAMAGED: "Damaged segments were copied as they are, or segments cannot be copied; the report says "
        "which.",
    },
    details={
        "Archive": "A segment is copied when the broker has begun the next one, and never changes after that. Its name "
        "in the archive is TOPIC/INCARNATION/FIRST-LAST.seg: the incarnation of the topic (a topic that is deleted and "
        "created again has another one), and the sequences of its first and last message. Existing objects are never "
        "replaced, so the command may run again, for example every hour, on several brokers with one archive, and "
        "after it was killed. Nothing is deleted from the archive or from the data folder. Checksums are verified "
        "before a segment is copied.",
        "JSON": "One object per topic and line: topic, incarnation (32 hex digits), copied and copied_bytes (segments "
        "of this run), present (segments that the archive had before), next_sequence (the sequence after the last "
        "archived message) and findings, as in 'qcli log verify'.",
    },
)
@click.argument("path", metavar="PATH", type=click.Path(exists=True, path_type=Path))
@click.argument("archive", metavar="ARCHIVE")
@option(
    "Archive",
    "--tail",
    is_flag=True,
    help="Copy the last segment of each topic, too, up to its last message. Without this it is copied when the broker "
    "has begun another one.",
)
@output_format(
    "text: a table, and a line per finding. json: write an object per topic.",
    "text",
    "json",
    records=[ArchivedTopicRecord],
)
def command(path: Path, archive: str, tail: bool, form: str) -> int:
    """Copy the closed segments of a data folder, or of one topic, into an archive on a disk or in a bucket.

    ARCHIVE is a path, or a URL such as s3://bucket/segments. 'qcli to-parquet --from-segments' and the Spark data
    source read it without a broker. A broker may be running in the data folder.
    """
    found = places(path)
    for place in found:
        if place.folder is None or place.topic is None:
            raise click.UsageError(f"{path} is a segment: give the folder of its topic.")
        if set(place.topic) == {"."}:
            raise Failure(f"The topic {place.topic!r} cannot be archived: it is not a name for a folder.")
    archive = without_secrets(archive)
    _check_is_outside(archive, path)
    archivers = [_archiver(place, archive, tail) for place in found]
    failure = None
    with byte_progress(total_bytes(found), "Archiving") as progress:
        try:
            with library_errors():
                for archiver in archivers:
                    archiver.archive(progress)
        except Exception as error:
            shown = translate(error)
            if not isinstance(shown, Failure) or not any(each.report.copied for each in archivers):
                raise
            failure = Failure(
                f"{shown.message.rstrip('.')}. Run the same command again to continue.", ExitCode.PARTIAL
            )
    reports = [archiver.report for archiver in archivers]
    write(json_lines(map(_record, reports)) if form == "json" else _text(reports))
    if not reports and failure is None:
        report_none("topics", path)
    if failure is not None:
        raise failure
    if not tail and any(report.incarnation and not report.copied + report.present for report in reports):
        print_diagnostic(
            "Note: a topic's last segment is copied when the broker has begun another one; --tail copies it now."
        )
    damaged = any(finding.kind == "damage" for report in reports for finding in report.findings)
    return ExitCode.DAMAGED if damaged else ExitCode.OK


def _check_is_outside(archive: str, path: Path) -> None:
    """Raises UsageError if the archive is in the folder to copy: a broker would find foreign files in it."""
    from trio_nsq.storage import local_path

    local = local_path(archive)
    if local is not None and local.resolve().is_relative_to(path.resolve()):
        raise click.UsageError(f"the archive {archive} is in {path}, which it copies: choose another folder.")


def _archiver(place: Place, archive: str, tail: bool) -> TopicArchiver:
    from trio_nsq.spark.segments.places import storage_below
    from trio_nsq.spark.segments.writer import TopicArchiver

    assert place.topic is not None
    return TopicArchiver(place.topic, place.path, partial(storage_below, archive, place.topic), tail=tail)


def _record(report: ArchivedTopic) -> dict[str, Any]:
    return asdict(report) | {"findings": [finding_record(finding) for finding in report.findings]}


def _text(reports: list[ArchivedTopic]) -> str:
    if not reports:
        return ""
    rows = [
        (
            report.topic,
            report.incarnation or "-",
            f"{report.copied:,}",
            size(report.copied_bytes),
            f"{report.present:,}",
            str(report.next_sequence),
        )
        for report in reports
    ]
    lines = plain_table([HEADINGS, *rows], _LEFT_COLUMNS)
    return lines + finding_lines([finding for report in reports for finding in report.findings])
