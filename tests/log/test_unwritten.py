"""Tests for power cuts that keep some pages of a log from the disk, and not later ones: no record counts as damaged."""

import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from log.support import FIRST, HastyFiles, batch, check_usable, contents, link, record_offsets
from soak import examples
from trio_nsq.log import DiskLog, RecordBatch
from trio_nsq.log.inspection.findings import Kind
from trio_nsq.log.inspection.verify import verify_log

PAGE = 4096
STABLE = 3
"""Sequences that were synced before the power cut."""


def records(sizes: Sequence[int], linked: bool) -> list[RecordBatch]:
    """Return three records that were synced, and one of each size that was not; the last two may be one MPUB."""
    bodies = [bytes([1 + size % 255]) * size for size in sizes]
    made = [batch(n, b"stable") for n in range(STABLE)] + [
        batch(STABLE + n, body) for n, body in enumerate(bodies)
    ]
    return [*made[:-2], *link(made[-2:])] if linked and len(sizes) > 1 else made


def write(folder: Path, made: Sequence[RecordBatch]) -> Path:
    """Write the records to a new log; returns its segment."""
    shutil.rmtree(folder, ignore_errors=True)
    log = DiskLog(folder, files=HastyFiles())
    log.append(made, sync=True)
    log.close()
    return folder / FIRST


def lose_pages(path: Path, from_byte: int, lost: set[int]) -> None:
    """Lose the unsynced bytes of these pages, which were never written: the file was extended by them."""
    data = bytearray(path.read_bytes())
    for page in lost:
        begin, end = max(from_byte, page * PAGE), min(len(data), (page + 1) * PAGE)
        if begin < end:
            data[begin:end] = bytes(end - begin)
    path.write_bytes(data)


def opened(folder: Path, stable_end: int) -> tuple[list[RecordBatch], int]:
    """Open a log, and return its records and the next sequence."""
    log = DiskLog(folder, files=HastyFiles(), stable_end=stable_end)
    found = contents(log, 10**6), log.next_sequence
    log.close()
    return found


@settings(deadline=None, max_examples=examples(60))
@given(
    sizes=st.lists(st.integers(1, 3 * PAGE), min_size=1, max_size=6),
    linked=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_pages_are_missing(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], linked: bool, seed: int
) -> None:
    folder = tmp_path_factory.getbasetemp() / "unwritten"
    made = records(sizes, linked)
    path = write(folder, made)
    stable_bytes = record_offsets(made)[STABLE]
    pages = range(stable_bytes // PAGE, path.stat().st_size // PAGE + 1)
    chance = random.Random(seed)
    lose_pages(path, stable_bytes, {page for page in pages if chance.random() < 0.4})
    report = verify_log(folder, stable_end=STABLE)
    assert {finding.kind for finding in report.findings} <= {Kind.TORN}
    found, following = opened(folder, STABLE)
    assert found == made[: len(found)]
    assert len(found) == following >= STABLE
    assert not (found and found[-1].has_next)
    assert not verify_log(folder).findings
    check_usable(folder, found)


@pytest.mark.parametrize("stable_end", [4, 5, 2**64])
def test_missing_page_before_the_stable_end_is_damage(tmp_path: Path, stable_end: int) -> None:
    made = records([2 * PAGE, PAGE, PAGE], linked=False)
    path = write(tmp_path / "log", made)
    lose_pages(path, record_offsets(made)[STABLE], {1})
    report = verify_log(tmp_path / "log", stable_end=stable_end)
    assert [finding.kind for finding in report.findings] == [Kind.DAMAGE]
    assert opened(tmp_path / "log", stable_end) == ([*made[:STABLE], *made[STABLE + 1 :]], len(made))


@pytest.mark.parametrize("at", [0, 20, 60, PAGE, 2 * PAGE])
def test_damaged_bytes_are_damage(tmp_path: Path, at: int) -> None:
    """They do not cost the records after them, which may have been acknowledged."""
    made = records([2 * PAGE, PAGE, PAGE], linked=False)
    path = write(tmp_path / "log", made)
    data = bytearray(path.read_bytes())
    for byte in range(16):
        data[record_offsets(made)[STABLE] + at + byte] ^= 0x55
    path.write_bytes(data)
    assert opened(tmp_path / "log", STABLE) == ([*made[:STABLE], *made[STABLE + 1 :]], len(made))


@pytest.mark.parametrize("age_s", [0, 3600])
def test_log_of_which_nothing_is_known(tmp_path: Path, age_s: int) -> None:
    """A new topic has no saved state. But if the state of an older one was lost, all may have been acknowledged."""
    made = records([2 * PAGE, PAGE, PAGE], linked=False)
    created_ns = made[0].timestamp_ns - age_s * 10**9
    log = DiskLog(tmp_path / "log", files=HastyFiles(), now_ns=lambda: created_ns)
    log.append(made, sync=True)
    log.close()
    lose_pages(tmp_path / "log" / FIRST, record_offsets(made)[STABLE], {1})
    found, following = opened(tmp_path / "log", 0)
    assert (len(found), following) == ((5, 6) if age_s else (3, 3))
