"""`qcli log import`: imports the queues of an nsqd into a data folder of `qcli serve`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...framework.command import DocumentedCommand
from ...framework.errors import ExitCode, Failure, translate
from ...framework.options import option, output_format
from ...framework.output import json_lines, plain_table, print_diagnostic, report_none, size, write
from ...records.files import ImportedRecord, ImportFindingsRecord
from ...terminal.progress import byte_progress
from .findings import finding_lines, finding_record
from .paths import is_data_folder

if TYPE_CHECKING:
    from trio_nsq.nsqd_import.importer import TopicReport
    from trio_nsq.nsqd_import.nsqd_folder import NsqdFolder

HEADINGS = ("TOPIC", "CHANNEL", "PAUSED", "OUTCOME", "MESSAGES", "ATTEMPTED", "SIZE")
_LEFT_COLUMNS = 4


@click.command(
    "import",
    cls=DocumentedCommand,
    short_help="Import the data folder of an nsqd.",
    examples={
        "list what would be imported": "qcli log import /var/lib/nsqd --data-path ./data --dry-run",
        "import it": "qcli log import /var/lib/nsqd --data-path ./data",
        "run a broker with the imported data": "qcli serve --data-path ./data",
        "import only topics that do not exist yet": "qcli log import /var/lib/nsqd --data-path ./data --if-exists skip",
    },
    exits={
        ExitCode.OK: "Everything was imported, or would be.",
        ExitCode.FAILURE: "Nothing was imported; the reason is on standard error.",
        ExitCode.USAGE: "The command line is wrong, or nsqd's folder does not exist or cannot be read.",
        ExitCode.PARTIAL: "It failed after some topics; the report lists the imported ones.",
        ExitCode.DAMAGED: "Files of nsqd are damaged; readable messages were imported. The report lists the damage.",
    },
    details={
        "Imported data": "Every topic and channel in nsqd.dat with its pause, and every message in their queues "
        "with its id, publish time, attempts and body. A message of several channels is stored once. Each "
        "channel gets its own messages; messages that wait in a topic stay there. Messages are delivered in the order "
        "of publishing, except that messages with earlier deliveries come first, as requeued ones; if a consumer does "
        "not take all of them at once, they alternate with the others. Messages that were deferred when nsqd stopped "
        "are delivered at once, as after a restart of nsqd, which does not store the delay. Queues that nsqd.dat does "
        "not list are reported and not imported.",
        "Damage": "A damaged file of nsqd is read up to the damage, then the next file, as in nsqd; the "
        "report says where. Files that nsqd has renamed to *.bad are reported and not imported.",
        "Interruption": "A topic is imported completely or not at all. After an interruption, a crash or a full disk, "
        "run the same command again: it skips imported topics, unless nsqd has changed them since.",
        "JSON": "One object per topic and line: topic, outcome (imported; planned, with --dry-run; imported earlier; "
        "skipped), paused, messages (each stored once), body_bytes, waiting (messages in no channel yet), channels: "
        "a list of objects with channel, paused, messages and attempted (delivered before); and findings, as in "
        "'qcli log verify'. A last object with the topic null has the findings that concern no topic, if any.",
    },
)
@click.argument(
    "nsqd_data_path",
    metavar="NSQD_DATA_PATH",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
)
@option(
    "Import",
    "--data-path",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    metavar="FOLDER",
    help="Import into this data folder of 'qcli serve'. It is created if it is missing; its parent must exist.",
)
@option(
    "Import",
    "--if-exists",
    "if_exists",
    type=click.Choice(["refuse", "skip", "replace"]),
    default="refuse",
    help="If topics exist that are not from this import: refuse: import nothing. skip: import the others. replace: "
    "delete them with their messages.",
)
@option("Import", "--dry-run", is_flag=True, help="Read everything and report, and change nothing.")
@output_format(
    "text: a table, and a line per finding. json: write an object per topic.",
    "text",
    "json",
    records=[ImportedRecord, ImportFindingsRecord],
)
def command(nsqd_data_path: Path, data_path: Path, if_exists: str, dry_run: bool, form: str) -> int:
    """Import the data folder of a stopped nsqd 1.3.0.

    nsqd's folder does not change. No nsqd and no broker may be running in the two folders.
    """
    from trio_nsq.nsqd_import.nsqd_folder import NsqdFolder

    _refuse_ours(nsqd_data_path)
    with closing(NsqdFolder(nsqd_data_path)) as source:
        reports, failure = _import(source, data_path, if_exists, dry_run)
        write(_json(source, reports) if form == "json" else _text(source, reports))
        if not reports and failure is None:
            report_none("topics", nsqd_data_path)
    if any(report.outcome in ("imported", "planned") and report.messages for report in reports):
        print_diagnostic(
            "Note: nsqd does not store the times of deferred messages: the broker delivers them at once."
        )
    if failure is not None:
        raise failure
    findings = [*source.findings, *(finding for report in reports for finding in report.findings)]
    return ExitCode.DAMAGED if any(finding.kind == "damage" for finding in findings) else ExitCode.OK


def _refuse_ours(path: Path) -> None:
    """Raises Failure if the folder is a data folder of `qcli serve`."""
    from trio_nsq.broker.storage.data_folder import BROKER_FILE, NSQD_FILE
    from trio_nsq.nsqd_import.nsqd_folder import lock
    from trio_nsq.nsqd_import.nsqd_metadata import ImportRefused

    if (path / NSQD_FILE).exists() or not ((path / BROKER_FILE).exists() or is_data_folder(path)):
        return
    try:
        os.close(lock(path, "a running broker"))
        state = ""
    except ImportRefused:
        state = ", in use by a running broker"
    raise Failure(
        f"{path} is a data folder of 'qcli serve'{state}, and not of an nsqd: there is nothing to import. To print its "
        "messages, see 'qcli log dump'."
    )


def _import(
    source: NsqdFolder, data_path: Path, if_exists: str, dry_run: bool
) -> tuple[list[TopicReport], Failure | None]:
    """Return the reports of topics, and the failure if not all were imported.

    Raises ImportRefused, StartupError, LogError or OSError before anything was imported.
    """
    from trio_nsq import NSQError
    from trio_nsq.nsqd_import.importer import IfExists, Outcome, import_topics, queue_bytes

    reports: list[TopicReport] = []
    with byte_progress(queue_bytes(source), "Reading" if dry_run else "Importing") as progress:
        try:
            for report in import_topics(
                source, data_path, if_exists=IfExists(if_exists), dry_run=dry_run, progress=progress
            ):
                reports.append(report)  # one by one: the next may fail
        except (NSQError, OSError) as exc:
            outcome = translate(exc)
            if not isinstance(outcome, Failure) or all(
                each.outcome is not Outcome.IMPORTED for each in reports
            ):
                raise
            left = len(source.topics) - len(reports)
            return reports, Failure(
                f"{outcome.message.rstrip('.')}. {left} of {len(source.topics)} topics were not imported. Fix the "
                "cause, then run the same command again.",
                ExitCode.PARTIAL,
            )
    return reports, None


def _json(source: NsqdFolder, reports: Sequence[TopicReport]) -> str:
    records: list[ImportedRecord | ImportFindingsRecord] = [
        {
            "topic": report.name,
            "outcome": report.outcome,
            "paused": report.paused,
            "messages": report.messages,
            "body_bytes": report.body_bytes,
            "waiting": report.waiting,
            "channels": [
                {
                    "channel": channel.name,
                    "paused": channel.paused,
                    "messages": channel.messages,
                    "attempted": channel.attempted,
                }
                for channel in report.channels
            ],
            "findings": [finding_record(finding) for finding in report.findings],
        }
        for report in reports
    ]
    if source.findings:
        records.append({"topic": None, "findings": [finding_record(finding) for finding in source.findings]})
    return json_lines(records)


def _text(source: NsqdFolder, reports: Sequence[TopicReport]) -> str:
    rows: list[tuple[str, ...]] = []
    for report in reports:
        counted = report.outcome in ("imported", "planned")
        sizes = (f"{report.messages:,}", "", size(report.body_bytes)) if counted else ("", "", "")
        rows.append((report.name, "", "paused" if report.paused else "", report.outcome, *sizes))
        if report.waiting:
            rows.append((report.name, "(in none yet)", "", "", f"{report.waiting:,}", "", ""))
        for channel in report.channels:
            counts = (f"{channel.messages:,}", f"{channel.attempted:,}", "")
            rows.append((report.name, channel.name, "paused" if channel.paused else "", "", *counts))
    table = plain_table([HEADINGS, *rows], _LEFT_COLUMNS) if rows else ""
    findings = [*source.findings, *(finding for report in reports for finding in report.findings)]
    return table + finding_lines(findings)
