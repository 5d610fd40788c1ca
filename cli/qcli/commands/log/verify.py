"""`qcli log verify`: checks a data folder for damage."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from ...framework.errors import ExitCode
from ...framework.options import output_format
from ...framework.output import json_lines, plain_table, report_none, size, write
from ...records.files import VerifiedRecord
from ...terminal.progress import byte_progress
from .findings import finding_lines, finding_record, shown
from .paths import NOT_A_LOG, PathCommand, Place, is_data_folder, places, total_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trio_nsq.log import Files
    from trio_nsq.log.inspection.verify import LogReport, Progress

HEADINGS = ("TOPIC", "STATE", "SEGMENTS", "SIZE", "RECORDS", "MESSAGES", "FIRST", "NEXT", "LOST")
_LEFT_COLUMNS = 2


@click.command(
    "verify",
    cls=PathCommand,
    short_help="Check a data folder for damage.",
    examples={
        "check a data folder": "qcli log verify ./data",
        "check one topic": "qcli log verify ./data/topics/clicks.topic",
        "list the damage as JSON": "qcli log verify ./data --format json | jq .findings[]",
        "check a backup": "qcli log verify /backup/nsq > report.txt || mail -s damaged me < report.txt",
    },
    exits={
        ExitCode.OK: "Nothing is damaged. There may be an incomplete write at the end of a log, as after a crash.",
        ExitCode.FAILURE: "The folder cannot be read; the reason is on standard error.",
        ExitCode.USAGE: NOT_A_LOG,
        ExitCode.DAMAGED: "Something is damaged; the report says what.",
    },
    details={
        "Findings": "damage: stored messages cannot be read, or a broker would not serve the topic or not start. torn: "
        "an incomplete write at the end of a log, from a crash or from a running broker; it was never acknowledged, "
        "and the next start of the broker removes it. note: no data is lost. The number of "
        "lost messages is an upper limit; with a + it is a lower limit.",
        "JSON": "One object per topic and line: topic, path, state (ok, torn or damaged), segments, size_bytes, "
        "records and messages (whole ones), first_sequence and next_sequence, lost_messages, and findings: a list of "
        "objects with kind, file, offset and end (bytes in the file), what, sequence (of the first affected message, "
        "or null) and messages (the number of lost messages; null: unknown).",
    },
)
@click.argument("path", metavar="PATH", type=click.Path(exists=True, path_type=Path))
@output_format(
    "text: a table, and a line per finding. json: write an object per topic.",
    "text",
    "json",
    records=[VerifiedRecord],
)
def command(path: Path, form: str) -> int:
    """Check every header and checksum of a data folder, of one topic, or of one segment file.

    The command also checks that no sequence is missing, and that the saved state of channels matches the log. It only
    reads, and needs no broker; a broker may be running in the folder. What a power cut left only in the write-ahead log
    counts as stored: the next start of the broker writes it to the topic.
    """
    from trio_nsq.log.write_ahead.replay import replayed_files

    found = places(path)
    above = (folder for folder in [path, *path.resolve().parents][:4] if is_data_folder(folder))
    files, problems = replayed_files(next(above, path.parent))
    with byte_progress(total_bytes(found), "Verifying") as progress:
        reports = [(place.topic, _verify(place, files, progress)) for place in found]
    if is_data_folder(path):
        reports += _folder_reports(path, problems)
    if form == "json":
        write(json_lines(_record(topic, report) for topic, report in reports))
    else:
        write(_text(reports))
    if not reports:
        report_none("topics", path)
    return ExitCode.DAMAGED if any(report.damaged for _, report in reports) else ExitCode.OK


def _verify(place: Place, files: Files, progress: Progress | None) -> LogReport:
    from trio_nsq.broker.storage.verify import verify_topic
    from trio_nsq.log.inspection.verify import verify_segment

    verify = verify_topic if place.folder is not None else verify_segment
    return verify(place.path, files=files, progress=progress)


def _folder_reports(path: Path, problems: Sequence[tuple[Path, str]]) -> list[tuple[str | None, LogReport]]:
    """Return the damage of the folder itself, if any, with that of the write-ahead log."""
    from trio_nsq.broker.storage.verify import verify_broker_file
    from trio_nsq.log.inspection.findings import Finding, Kind
    from trio_nsq.log.inspection.verify import LogReport

    findings = verify_broker_file(path)
    findings += [Finding(Kind.DAMAGE, file, 0, 0, what, None, None) for file, what in problems]
    return [(None, LogReport(path, findings=findings))] if findings else []


def _state(report: LogReport) -> Literal["ok", "torn", "damaged"]:
    if report.damaged:
        return "damaged"
    return "torn" if any(finding.kind == "torn" for finding in report.findings) else "ok"


def _record(topic: str | None, report: LogReport) -> VerifiedRecord:
    return {
        "topic": topic,
        "path": shown(report.path),
        "state": _state(report),
        "segments": report.segments,
        "size_bytes": report.size_bytes,
        "records": report.records,
        "messages": report.messages,
        "first_sequence": report.first_sequence,
        "next_sequence": report.next_sequence,
        "lost_messages": report.lost_messages,
        "findings": [finding_record(finding) for finding in report.findings],
    }


def _text(reports: list[tuple[str | None, LogReport]]) -> str:
    if not reports:
        return ""
    rows = [
        (
            topic or shown(report.path),
            _state(report),
            f"{report.segments:,}",
            size(report.size_bytes),
            f"{report.records:,}",
            f"{report.messages:,}",
            str(report.first_sequence),
            str(report.next_sequence),
            _lost(report),
        )
        for topic, report in reports
    ]
    lines = plain_table([HEADINGS, *rows], _LEFT_COLUMNS)
    return lines + finding_lines([finding for _, report in reports for finding in report.findings])


def _lost(report: LogReport) -> str:
    unknown = any(finding.messages is None for finding in report.findings)
    return f"{report.lost_messages:,}{'+' if unknown else ''}"
