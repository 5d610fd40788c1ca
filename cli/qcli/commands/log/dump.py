"""`qcli log dump`: messages out of a data folder."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...framework.command import DocumentedCommand
from ...framework.errors import ExitCode
from ...framework.options import count_option, delimiter_of, delimiter_options, option, output_format
from ...framework.output import RawOutput, json_lines, print_diagnostic
from ...framework.positions import NOTHING_BETWEEN, Position, from_option, moment, position, to_option
from ..shared.messages import log_record
from .findings import describe, shown
from .paths import NOT_A_LOG, Place, places

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
    cls=DocumentedCommand,
    short_help="Print messages, also past damage.",
    examples={
        "the messages of a topic": "qcli log dump ./data/topics/clicks.topic",
        "ten of them, from sequence 1000 on": "qcli log dump ./data/topics/clicks.topic --from 1000 -n 10",
        "what was published in the last hour, as JSON": "qcli log dump ./data/topics/clicks.topic --from 1h "
        "--format json",
        "publish a topic's log again": "qcli log dump -0 ./data/topics/clicks.topic | qcli pub -0 clicks2",
        "where a segment's record batches lie": "qcli log dump --headers 00000000000000000000.log",
    },
    exits={
        ExitCode.OK: "What was asked for was written, or the reader of standard output went away.",
        ExitCode.FAILURE: "It cannot be read, or standard output cannot be written.",
        ExitCode.USAGE: NOT_A_LOG,
        ExitCode.DAMAGED: "Damage was passed over; standard error says where.",
    },
    notes={
        "What is printed": "What is in the log: a message stays there until every channel has finished it, and those "
        "beside it. So this is more than the channels would deliver. Channels and their positions are in state.json. "
        "Unfinished messages that were carried forward, so that the files around them could go, come first: they lie "
        "in the file stragglers of the topic's folder.",
        "Positions": "--from and --to take a sequence, such as 1000 (messages of a topic are counted from 0); a time, "
        "such as 2026-11-21T04:14 or 2026-11-21T04:14:05.5Z, local unless it says otherwise, or @1700000000.5, which "
        "is Unix seconds; or how long ago, such as 15m. A time is that of the publish.",
        "JSON": "One object per message: topic, id, timestamp_ns (when it was published), attempts (always 0: those "
        "are not in the log), sequence, due_ns (when it may be delivered; null: at once), and body, a string; for a "
        "body that is not UTF-8, body_base64 stands in its place; producer and number, if it was published with these. "
        "With --headers, one object per record batch: topic, file, offset, sequence, count, id (of the first message), "
        "timestamp_ns, due_ns and bytes.",
    },
)
@click.argument("path", metavar="PATH", type=click.Path(exists=True, path_type=Path))
@from_option(
    SELECTION, "Begin with the message of this sequence, or with those published at this time.", position
)
@to_option(
    SELECTION, "End before the message of this sequence, or before those published at this time.", position
)
@count_option(SELECTION, "End after N messages, or record batches, of all topics together.")
@output_format("raw: bodies as they are. json: an object per message and line, see below.", "raw", "json")
@delimiter_options(OUTPUT, "What follows each body", "for xargs -0")
@option(OUTPUT, "--print-topic", is_flag=True, help="Write the topic and ' | ' before each body.")
@option(
    OUTPUT,
    "--headers",
    is_flag=True,
    help="Record batches instead of messages: what was published together, and where in the file it lies. Messages "
    "are not read, and damage in them is not seen: 'qcli log verify' looks for it.",
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
    """Print the messages in a data folder, in one topic's folder, or in one segment file.

    In the order of their sequences, one topic after the other. Damage is passed over with a note on standard error.
    It writes nothing into the folder, needs no broker, and may be run beside one.
    """
    separator = delimiter_of(separator, null)
    if (form == "json" or headers) and (separator != b"\n" or print_topic):
        raise click.UsageError("--null, --delimiter and --print-topic are for bodies only.")
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
    """Raises UsageError if nothing can lie between them, whatever is in the log."""
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
    """Where messages and notes go.

    Args:
        count: How many messages are wanted; None: all.

    Attributes:
        left: How many more.
        damaged: Whether a finding was damage.
    """

    def __init__(self, count: int | None) -> None:
        self.left = math.inf if count is None else count
        self.damaged = False
        self._output = RawOutput()
        self._parts: list[bytes] = []
        self._bytes = 0

    def take(self, text: bytes, count: int) -> None:
        """Write the text of so many messages; it may be kept for a while to be written with others."""
        self.left -= count
        self._parts.append(text)
        self._bytes += len(text)
        if self._bytes >= _WRITE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what was kept."""
        self._output.write(b"".join(self._parts))
        self._parts.clear()
        self._bytes = 0

    def report(self, finding: Finding) -> None:
        """Print what was skipped."""
        self.flush()  # so that on a terminal it stands where it belongs
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
        # The empty string at the end puts a separator behind the last one too.
        return prefix + (separator + prefix).join(bodies) + separator if bodies else b""

    return render


def _json_messages(place: Place, batch: RecordBatch, indexes: range) -> bytes:
    from trio_nsq.broker.state.record_metadata import batch_number

    bodies, numbered = batch.messages.bodies(), batch_number(batch.metadata)
    name: dict[str, object] = dict(zip(("producer", "number"), numbered, strict=True)) if numbered else {}
    return json_lines(
        log_record(place.topic, batch, index, bodies[index]) | name for index in indexes
    ).encode()


def _json_header(place: Place, found: ScannedRecord, _begins_file: bool) -> bytes:
    header = found.header
    record = {
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
