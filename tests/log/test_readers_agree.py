"""All readers of segments give the same, before and after recovery: a broker, an inspection, and exports without one.

The logs are damaged at random: bits, whole files, and ends.
"""

import itertools
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from log.support import FILE_HEADER_BYTES, HastyFiles, batch, contents, copied, link, numbered, segment_files
from soak import examples
from trio_nsq.log import DiskLog, Files, RecordBatch
from trio_nsq.log.errors import NotASegmentError
from trio_nsq.log.gaps import Span
from trio_nsq.log.inspection.findings import Finding
from trio_nsq.log.inspection.log import InspectedLog
from trio_nsq.log.inspection.segments import segment_paths
from trio_nsq.log.inspection.selection import select_batches
from trio_nsq.log.interface import sequence_at
from trio_nsq.log.records import encode_header
from trio_nsq.log.selection import Selection


def make_log(folder: Path, sizes: Sequence[int], segment_bytes: int) -> None:
    """Write groups of linked records, of these sizes in turn."""
    log = DiskLog(folder, segment_bytes=segment_bytes, files=HastyFiles())
    left = numbered(0, 14)
    for size in itertools.cycle(sizes):
        if not left:
            break
        log.append(link(left[:size]), sync=False)
        left = left[size:]
    log.close()


def inspected(folder: Path) -> InspectedLog:
    return InspectedLog(folder, Files(), segment_paths(folder, Files())[0], {})


def read(log: InspectedLog) -> list[RecordBatch]:
    return list(log.batches(Span(log.first_sequence, max(log.next_sequence, log.first_sequence + 1))))


def do_damage(folder: Path, kind: str, place: int) -> None:
    """Damage the log; `place` chooses where."""
    files = segment_files(folder)
    path = files[place % len(files)]
    place //= len(files)
    size = path.stat().st_size
    if kind == "bit":
        content = bytearray(path.read_bytes())
        if content:
            content[place % size] ^= 1 << place % 8
        path.write_bytes(content)
    elif kind == "end":
        os.truncate(files[-1], place % (files[-1].stat().st_size + 1))
    elif kind == "zeros":
        with path.open("ab") as file:
            file.write(bytes(1 + place % 200))
    elif kind == "header":
        path.write_bytes(bytes(FILE_HEADER_BYTES) + path.read_bytes()[FILE_HEADER_BYTES:])
    elif kind == "foreign":
        make_log(folder.with_name("other"), [1], 10**6)
        shutil.copy(segment_files(folder.with_name("other"))[0], path)
        shutil.rmtree(folder.with_name("other"))
    elif len(files) > 1:
        path.unlink()


@settings(max_examples=examples(150), deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    damage=st.lists(
        st.tuples(
            st.sampled_from(["bit", "bit", "bit", "end", "zeros", "header", "foreign", "missing"]),
            st.integers(0, 2**20),
        ),
        max_size=4,
    ),
    segment_bytes=st.sampled_from([1, 300, 700, 10**6]),
)
def test_readers_agree(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    damage: list[tuple[str, int]],
    segment_bytes: int,
) -> None:
    folder = tmp_path_factory.mktemp("readers") / "log"
    make_log(folder, sizes, segment_bytes)
    for kind, place in damage:
        do_damage(folder, kind, place)
    if check_same(folder):
        check_same(folder.with_name("log-recovered"))


def test_an_empty_last_segment_that_is_not_used(tmp_path: Path) -> None:
    """After a failed write, the segment before it was written to later."""
    folder = tmp_path / "log"
    make_log(folder, [1], 10**6)
    log = DiskLog(folder, files=HastyFiles())
    end = log.next_sequence
    log.rotate_unless_empty()
    log.close()
    check_same(folder)
    first, _ = segment_files(folder)
    more = batch(end, b"later")
    seed = int.from_bytes(first.read_bytes()[12:16], "big")
    with first.open("ab") as file:
        file.write(encode_header(more, seed) + more.messages.data)
    check_same(folder)
    assert inspected(folder).next_sequence == more.next_sequence


def check_same(folder: Path) -> bool:
    """Check that all readers give the same, and change nothing; return False if a broker does not serve the topic."""
    before = {path: path.read_bytes() for path in folder.iterdir()}
    try:
        log = DiskLog(copied(folder, folder.with_name(f"{folder.name}-recovered")), files=HastyFiles())
    except NotASegmentError:
        return False
    try:
        expected = contents(log)
        found = inspected(folder)
        assert found.first_sequence == log.first_sequence
        ends_alike = found.next_sequence == log.next_sequence
        if not ends_alike:  # before a record that is torn, with zeros behind it: a broker may cut it off
            assert found.next_sequence < log.next_sequence
            assert segment_files(folder)[-1].read_bytes().endswith(b"\0")
        assert read(found) == expected
        scanned = select_batches(segment_paths(log.folder, Files())[0], Selection(), Files())
        assert [each for each in scanned if not isinstance(each, Finding)] == expected
        for time_ns in {each.timestamp_ns + more for each in expected for more in (0, 1)}:
            if ends_alike:
                assert sequence_at(found, time_ns) == sequence_at(log, time_ns)
    finally:
        log.close()
    assert {path: path.read_bytes() for path in folder.iterdir()} == before, "a reader has changed the files"
    return True
