"""Tests for reading a part of a log's files: by sequence, by time, with damage."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from log.support import FIRST, HastyFiles, append_each, batch, record_offsets, segment_files
from trio_nsq.log import DiskLog, Files, RecordBatch
from trio_nsq.log.inspection.findings import Finding
from trio_nsq.log.inspection.segments import ScannedRecord, segment_paths
from trio_nsq.log.inspection.selection import select_batches, select_records
from trio_nsq.log.records import encode_header
from trio_nsq.log.selection import Selection
from trio_nsq.protocol import MessageSet

START_NS = 1_700_000_000_000_000_000
COUNTS = [3, 1, 4, 1, 5, 2]
"""Messages of each batch; a batch's time is START_NS plus its first sequence, see `batch`."""


def batches() -> list[RecordBatch]:
    made: list[RecordBatch] = []
    sequence = 0
    for count in COUNTS:
        made.append(batch(sequence, *(b"%d" % number for number in range(sequence, sequence + count))))
        sequence += count
    return made


def write(folder: Path, segment_bytes: int = 200) -> None:
    log = DiskLog(folder, segment_bytes=segment_bytes, files=HastyFiles())
    append_each(log, batches())
    log.close()


def select(folder: Path, selection: Selection) -> tuple[list[int], list[Finding]]:
    """Return the selected messages, whose bodies are their sequences, and the findings."""
    numbers: list[int] = []
    findings: list[Finding] = []
    for found in select_batches(segment_paths(folder, Files())[0], selection, Files()):
        if isinstance(found, Finding):
            findings.append(found)
        else:
            bodies = found.messages.bodies()
            indexes = selection.indexes(found)
            assert indexes
            numbers += [int(bodies[index]) for index in indexes]
            assert [found.base_sequence + index for index in indexes] == numbers[-len(indexes) :]
    return numbers, findings


def test_everything(tmp_path: Path) -> None:
    write(tmp_path)
    assert len(segment_files(tmp_path)) > 2
    assert select(tmp_path, Selection()) == (list(range(16)), [])


@given(first=st.integers(0, 20), end=st.integers(0, 20), segment_bytes=st.sampled_from([1, 200, 10**6]))
def test_by_sequence(
    tmp_path_factory: pytest.TempPathFactory, first: int, end: int, segment_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("log")
    write(folder, segment_bytes)
    numbers, findings = select(folder, Selection(first_sequence=first, end_sequence=end))
    assert (numbers, findings) == (list(range(first, min(end, 16))), [])


def test_by_time(tmp_path: Path) -> None:
    write(tmp_path)
    assert select(tmp_path, Selection(first_ns=START_NS + 4))[0] == list(range(4, 16))
    assert select(tmp_path, Selection(end_ns=START_NS + 4))[0] == list(range(4))
    assert select(tmp_path, Selection(first_ns=START_NS + 3, end_ns=START_NS + 8))[0] == [3, 4, 5, 6, 7]
    assert select(tmp_path, Selection(first_sequence=6, end_ns=START_NS + 9))[0] == [6, 7, 8]


def test_headers_only(tmp_path: Path) -> None:
    write(tmp_path, segment_bytes=10**6)
    paths, _ = segment_paths(tmp_path, Files())
    selection = Selection(first_sequence=3, end_sequence=9)
    found = list(select_records(paths, selection, Files(), payloads=False))
    offsets = record_offsets(batches())
    records = [each for each in found if isinstance(each, ScannedRecord)]
    assert [(each.offset, each.header.base_sequence, len(each.payload)) for each in records] == [
        (offsets[1], 3, 0),
        (offsets[2], 4, 0),
        (offsets[3], 8, 0),
    ]
    assert len(records) == len(found)


@pytest.mark.parametrize("at", [10, -1])
def test_damage_in_the_selection_is_skipped_and_reported(tmp_path: Path, at: int) -> None:
    write(tmp_path, segment_bytes=10**6)
    path = tmp_path / FIRST
    content = bytearray(path.read_bytes())
    start, end = record_offsets(batches())[2:4]  # the third: sequences 4 to 7
    content[range(start, end)[at]] ^= 1  # in its header, or its payload
    path.write_bytes(content)
    numbers, (finding,) = select(tmp_path, Selection(first_sequence=2))
    assert numbers == [2, 3, *range(8, 16)]
    assert (finding.sequence, finding.messages) == (4, 4)
    assert select(tmp_path, Selection(first_sequence=8)) == (list(range(8, 16)), [])
    assert select(tmp_path, Selection(end_sequence=4)) == (list(range(4)), [])
    assert len(select(tmp_path, Selection(first_sequence=5, end_sequence=6))[1]) == 1


def test_payload_that_is_not_a_set_of_messages(tmp_path: Path) -> None:
    """With valid checksums."""
    write(tmp_path, segment_bytes=10**6)
    path = tmp_path / FIRST
    seed = int.from_bytes(path.read_bytes()[12:16], "big")
    odd = RecordBatch(16, 1, START_NS, 0, MessageSet(b"\0\0\0\2a", [2]))
    with path.open("ab") as file:
        file.write(encode_header(odd, seed) + odd.messages.data)
    numbers, (finding,) = select(tmp_path, Selection())
    assert (numbers, finding.sequence, finding.messages) == (list(range(16)), 16, 1)
