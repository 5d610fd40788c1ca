"""`qcli log verify`: what is damaged in a data folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...framework.command import DocumentedCommand
from ...framework.errors import ExitCode
from ...framework.options import output_format
from ...framework.output import json_lines, plain_table, size, write
from ...terminal.progress import byte_progress
from .findings import finding_lines, finding_record, shown
from .paths import NOT_A_LOG, Place, is_data_folder, places

if TYPE_CHECKING:
    from trio_nsq.log.inspection.verify import LogReport, Progress

HEADINGS = ("TOPIC", "STATE", "SEGMENTS", "SIZE", "RECORDS", "MESSAGES", "FIRST", "NEXT", "LOST")
_LEFT_COLUMNS = 2


@click.command(
    "verify",
    cls=DocumentedCommand,
    short_help="Say what is damaged.",
    examples={
        "everything": "qcli log verify ./data",
        "one topic": "qcli log verify ./data/topics/clicks.topic",
        "what is damaged, for a script": "qcli log verify ./data --format json | jq .findings[]",
        "before a backup is trusted": "qcli log verify /backup/nsq > report.txt || mail -s damaged me < report.txt",
    },
    exits={
        ExitCode.OK: "Nothing is damaged. There may be what a crash leaves of a write that was under way.",
        ExitCode.FAILURE: "It could not be looked at; the reason is on standard error.",
        ExitCode.USAGE: NOT_A_LOG,
        ExitCode.DAMAGED: "Something is damaged; the report says what.",
    },
    notes={
        "Findings": "damage: messages that were stored cannot be read, or a broker would not serve the topic, or not "
        "start. torn: what "
        "a crash, or a broker that is writing this moment, leaves at the end of a log; nobody was told that it was "
        "stored, and the next start of the broker cuts it off. note: worth knowing, nothing lost. The number of "
        "messages lost is the most that it can be; a + behind it says that it is not known how many more there are.",
        "JSON": "One object per topic and line: topic, path, state (ok, torn or damaged), segments, size_bytes, "
        "records and messages (whole ones), first_sequence and next_sequence, lost_messages, and findings: a list of "
        "objects with kind, file, offset and end (bytes in the file), what, sequence (of the first message concerned, "
        "or null) and messages (how many it costs; null if that cannot be known).",
    },
)
@click.argument("path", metavar="PATH", type=click.Path(exists=True, path_type=Path))
@output_format("text: a table, and a line per finding. json: an object per topic, see below.", "text", "json")
def command(path: Path, form: str) -> int:
    """Check every header and checksum of a data folder, of one topic, or of one segment file.

    It also checks that no sequence is missing, and that what is saved of a topic's channels goes with its log. It
    writes nothing. It needs no broker, and may be run beside one that uses the folder.
    """
    found = places(path)
    with byte_progress(_total_bytes(found), "Verifying") as progress:
        reports = [(place.topic, _verify(place, progress)) for place in found]
    if is_data_folder(path):
        reports += _folder_reports(path)
    if form == "json":
        write(json_lines(_record(topic, report) for topic, report in reports))
    else:
        write(_text(reports))
    return ExitCode.DAMAGED if any(report.damaged for _, report in reports) else ExitCode.OK


def _total_bytes(found: Iterable[Place]) -> int:
    from trio_nsq.log.inspection.verify import segment_bytes

    return sum(segment_bytes(segment) for place in found for segment in place.segments()[0])


def _verify(place: Place, progress: Progress | None) -> LogReport:
    from trio_nsq.broker.storage.verify import verify_topic
    from trio_nsq.log.inspection.verify import verify_segment

    verify = verify_topic if place.folder is not None else verify_segment
    return verify(place.path, progress=progress)


def _folder_reports(path: Path) -> list[tuple[str | None, LogReport]]:
    """What is wrong with the folder itself, if anything is."""
    from trio_nsq.broker.storage.verify import verify_broker_file
    from trio_nsq.log.inspection.verify import LogReport

    findings = verify_broker_file(path)
    return [(None, LogReport(path, findings=findings))] if findings else []


def _state(report: LogReport) -> str:
    if report.damaged:
        return "damaged"
    return "torn" if any(finding.kind == "torn" for finding in report.findings) else "ok"


def _record(topic: str | None, report: LogReport) -> dict[str, Any]:
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
        return "There are no topics.\n"
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
