"""`qcli log dump`: prints messages of a data folder."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trio_nsq.protocol import message_json

from ...framework.errors import ExitCode
from ...framework.options import count_option, delimiter_of, delimiter_options, option, output_format
from ...framework.output import RawOutput, json_lines, print_diagnostic
from ...framework.positions import NOTHING_BETWEEN, Position, from_option, moment, position, to_option
from ...records.messages import LogMessageRecord, RecordBatchRecord
from ..shared.messages import log_records
from .findings import describe, shown
from .paths import NOT_A_LOG, PathCommand, Place, places

if TYPE_CHECKING:
    from trio_nsq.log import RecordBatch
    from trio_nsq.log.inspection.findings import Finding
    from trio_nsq.log.inspection.segments import ScannedRecord
    from trio_nsq.log.selection import Selection

    _RenderMessages = Callable[[Place, RecordBatch, range], bytes]
    _RenderHeader = Callable[[Place, ScannedRecord, bool], bytes]

OUTPUT, SELECTION = "Output", "Which messages"
_WRITE_BYTES = 256 * 1024


@click.command(
    "dump",
    cls=PathCommand,
    short_help="Print messages of a data folder.",
    examples={
        "print the messages of a topic": "qcli log dump ./data/topics/clicks.topic",
        "print ten messages from sequence 1000 on": "qcli log dump ./data/topics/clicks.topic --from 1000 -n 10",
        "print the last hour as JSON": "qcli log dump ./data/topics/clicks.topic --from 1h --format json",
        "publish a topic's log again": "qcli log dump -0 ./data/topics/clicks.topic | qcli pub -0 clicks2",
        "print the record batches of a segment": "qcli log dump --headers 00000000000000000000.log",
    },
    exits={
        ExitCode.OK: "The messages were written, or the reader of standard output closed it.",
        ExitCode.FAILURE: "The folder cannot be read, or standard output cannot be written.",
        ExitCode.USAGE: NOT_A_LOG,
        ExitCode.DAMAGED: "Damage was skipped; standard error says where.",
    },
    details={
        "Contents": "The log has more messages than the channels would deliver: a message stays in the log until every "
        "channel has finished it and its neighbours. Channels and their positions are in state.json. "
        "Unfinished messages of deleted segments come first: they are in the file stragglers of the topic's folder.",
        "Positions": "--from and --to take a sequence, such as 1000 (a topic's messages are counted from 0); a time, "
        "such as 2026-11-21T04:14 or 2026-11-21T04:14:05.5Z, local unless it has a zone, or @1700000000.5 in Unix "
        "seconds; or how long ago, such as 15m. Times are times of publishing.",
        "JSON": "One object per message: topic, id, timestamp_ns and timestamp (when it was published, in Unix "
        "nanoseconds and RFC 3339), attempts (always 0: the log has none), sequence, due_ns and due (when it may be "
        "delivered; null: at once), headers, an object, if it has some, and body, a string; if a body is not UTF-8, "
        "body_base64 replaces it; producer and number, if it was published with these. With --headers, one object per "
        "record batch: topic, file, offset, sequence, count, id (of the first message), timestamp_ns, timestamp, "
        "due_ns, due and bytes.",
    },
)
@click.argument("path", metavar="PATH", type=click.Path(exists=True, path_type=Path))
@from_option(SELECTION, "Begin at this position: a sequence, a time, or how long ago.", position)
@to_option(SELECTION, "End before this position.", position)
@count_option(SELECTION, "End after N messages (or record batches) over all topics.")
@output_format(
    "raw: write bodies unchanged. json: write an object per line.",
    "raw",
    "json",
    records=[LogMessageRecord, RecordBatchRecord],
)
@delimiter_options(OUTPUT, "Write this text after each body", "for xargs -0")
@option(OUTPUT, "--print-topic", is_flag=True, help="Write the topic and ' | ' before each body.")
@option(
    OUTPUT,
    "--headers",
    is_flag=True,
    help="Print record batches instead of messages, with their offset in the file. This does not check messages for "
    "damage: see 'qcli log verify'.",
)
def command(
    path: Path,
    first: Position | None,
    end: Position | None,
    count: int | None,
    form: str,
    separator: bytes,
    null: bool,
    print_topic: bool,
    headers: bool,
) -> int:
    """Print the messages of a data folder, of one topic's folder, or of one segment file.

    Messages are printed in the order of sequences, one topic after the other. Damage is skipped, with a note on
    standard error. The command only reads, and needs no broker; a broker may be running.
    """
    separator = delimiter_of(separator, null)
    if (form == "json" or headers) and (separator != b"\n" or print_topic):
        raise click.UsageError(
            "--null, --delimiter and --print-topic are for raw bodies: leave out --format json and --headers."
        )
    selection = _selection(first, end)
    sink = _Sink(count)
    for place in places(path):
        if headers:
            _dump_headers(place, selection, sink, _json_header if form == "json" else _header_line)
        elif form == "json":
            _dump_messages(place, selection, sink, _json_messages)
        else:
            prefix = f"{place.topic or shown(place.path)} | ".encode() if print_topic else b""
            _dump_messages(place, selection, sink, _bodies(prefix, separator))
        if not sink.left:
            break
    sink.flush()
    return ExitCode.DAMAGED if sink.damaged else ExitCode.OK


def _selection(first: Position | None, end: Position | None) -> Selection:
    """Return the selection. Raises UsageError if the range is always empty."""
    from trio_nsq.log.selection import Selection

    if first is not None and end is not None and first.is_time == end.is_time and first.value > end.value:
        raise click.UsageError(NOTHING_BETWEEN)
    bounds: dict[str, int] = {}
    if first is not None:
        bounds["first_ns" if first.is_time else "first_sequence"] = first.value
    if end is not None:
        bounds["end_ns" if end.is_time else "end_sequence"] = end.value
    return Selection(**bounds)


class _Sink:
    """Writes messages to standard output and findings to standard error.

    Args:
        count: The maximum of messages; None: all.

    Attributes:
        left: How many more messages to write.
        damaged: Whether a finding was damage.
    """

    def __init__(self, count: int | None) -> None:
        self.left = math.inf if count is None else count
        self.damaged = False
        self._output = RawOutput()
        self._parts: list[bytes] = []
        self._bytes = 0

    def take(self, text: bytes, count: int) -> None:
        """Write the text of this many messages, perhaps later, together with others."""
        self.left -= count
        self._parts.append(text)
        self._bytes += len(text)
        if self._bytes >= _WRITE_BYTES:
            self.flush()

    def flush(self) -> None:
        self._output.write(b"".join(self._parts))
        self._parts.clear()
        self._bytes = 0

    def report(self, finding: Finding) -> None:
        self.flush()  # so that a terminal shows it between the right messages
        print_diagnostic(f"{str(finding.kind).capitalize()}: {describe(finding)}")
        self.damaged = self.damaged or finding.kind == "damage"


def _dump_messages(place: Place, selection: Selection, sink: _Sink, render: _RenderMessages) -> None:
    from trio_nsq.log import Files
    from trio_nsq.log.inspection.findings import Finding
    from trio_nsq.log.inspection.selection import select_batches

    segments, findings = place.segments()
    for found in chain(findings, select_batches(segments, selection, Files(), place.folder)):
        if isinstance(found, Finding):
            sink.report(found)
            continue
        indexes = selection.indexes(found)
        indexes = indexes[: int(min(len(indexes), sink.left))]
        sink.take(render(place, found, indexes), len(indexes))
        if not sink.left:
            return


def _dump_headers(place: Place, selection: Selection, sink: _Sink, render: _RenderHeader) -> None:
    from trio_nsq.log import Files
    from trio_nsq.log.inspection.findings import Finding
    from trio_nsq.log.inspection.selection import select_records

    segments, findings = place.segments()
    path = None
    records = select_records(segments, selection, Files(), place.folder, payloads=False)
    for found in chain(findings, records):
        if isinstance(found, Finding):
            sink.report(found)
            continue
        sink.take(render(place, found, found.path != path), 1)
        path = found.path
        if not sink.left:
            return


def _bodies(prefix: bytes, separator: bytes) -> _RenderMessages:
    def render(_place: Place, batch: RecordBatch, indexes: range) -> bytes:
        bodies = batch.messages.bodies()[indexes.start : indexes.stop]
        # Also a separator after the last body.
        return prefix + (separator + prefix).join(bodies) + separator if bodies else b""

    return render


def _json_messages(place: Place, batch: RecordBatch, indexes: range) -> bytes:
    from trio_nsq.log.record_metadata import batch_number

    numbered = batch_number(batch.metadata)
    name: dict[str, object] = dict(zip(("producer", "number"), numbered, strict=True)) if numbered else {}
    records = (record | name for record in log_records(place.topic, batch, indexes))
    return message_json.json_lines(records).encode()


def _json_header(place: Place, found: ScannedRecord, _begins_file: bool) -> bytes:
    header = found.header
    record: RecordBatchRecord = {
        "topic": place.topic,
        "file": shown(found.path),
        "offset": found.offset,
        "sequence": header.base_sequence,
        "count": header.count,
        "id": f"{header.first_id:016x}",
        "timestamp_ns": header.timestamp_ns,
        "due_ns": header.due_ns or None,
        "bytes": header.record_bytes,
    }
    return json_lines([record]).encode()


def _header_line(_place: Place, found: ScannedRecord, begins_file: bool) -> bytes:
    header = found.header
    lines = ""
    if begins_file:
        lines = f"{shown(found.path)}\n{'OFFSET':>11} {'SEQUENCE':>12} {'COUNT':>7} {'BYTES':>9}  TIME\n"
    due = f"  due {moment(header.due_ns)}" if header.due_ns else ""
    time = moment(header.timestamp_ns)
    lines += f"{found.offset:>11} {header.base_sequence:>12} {header.count:>7} {header.record_bytes:>9}  {time}{due}\n"
    return lines.encode()
