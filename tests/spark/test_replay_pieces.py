"""Tests for pieces and batches of files: the split is deterministic, and each row is in one batch."""

import random
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.support import Cli
from spark.support import as_export, bodies_in, numbers, planned, write_parquet
from trio_nsq.spark.replay.files import (
    ReplayColumns,
    ReplayFile,
    ReplayFileError,
    ReplayFiles,
    RowGroup,
    open_files,
)
from trio_nsq.spark.replay.job import KEPT_S, open_job, remove_old_jobs
from trio_nsq.spark.replay.pieces import split_into_pieces
from trio_nsq.spark.replay.request import PieceResult, ReplayRequest
from trio_nsq.spark.replay.rows import RowReader, pack_bits, unpack_bits
from trio_nsq.spark.runtime.engine import run_inline
from trio_nsq.storage import ChangedMeanwhile, LocalStorage, StoredFile


@given(st.lists(st.booleans(), min_size=1, max_size=100), st.data())
def test_bitmaps(bits: list[bool], data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(bits) - 1))
    count = data.draw(st.integers(1, len(bits) - first))
    bitmap = sum(bit << index for index, bit in enumerate(bits)).to_bytes((len(bits) + 7) // 8, "little")
    found = unpack_bits(pack_bits(bitmap, first, count), first, count)
    assert found.to_pylist() == bits[first : first + count]


@st.composite
def sources(draw: st.DrawFn) -> ReplayFiles:
    """Return files with row groups of all sizes."""
    groups = st.tuples(st.integers(1, 50), st.integers(0, 100 * 1024 * 1024))
    files = draw(st.lists(st.lists(groups, max_size=8), max_size=8))
    made = tuple(
        ReplayFile(StoredFile(f"{n:02d}", 1, "1"), tuple(RowGroup(*each) for each in groups), frozenset())
        for n, groups in enumerate(files)
    )
    return ReplayFiles("/x", made, ReplayColumns("body"), frozenset())


@given(sources(), st.data())
def test_each_row_is_in_one_piece(source: ReplayFiles, data: st.DataObject) -> None:
    bits = None
    if data.draw(st.booleans()):
        some = {file.stamp.name: (file.rows, (file.rows + 7) // 8) for file in source.files}
        bits = {
            name: (data.draw(st.integers(0, 2**rows - 1)) if rows else 0).to_bytes(size, "little")
            for name, (rows, size) in some.items()
        }
        bits = {name: each for name, each in bits.items() if any(each)}
    pieces = split_into_pieces(source, bits, None, None, ordered=False)
    found = []
    for piece in pieces:
        for segment in piece:
            numbers = range(segment.first_row, segment.first_row + segment.rows)
            chosen = [True] * len(numbers)
            if segment.selected is not None:
                chosen = unpack_bits(segment.selected, segment.first_row, segment.rows).to_pylist()
            found += [(segment.stamp.name, n) for n, ok in zip(numbers, chosen, strict=True) if ok]
            assert segment.wanted == sum(chosen)
    expected = [
        (file.stamp.name, row)
        for file in source.files
        for row in range(file.rows)
        if bits is None or int.from_bytes(bits.get(file.stamp.name, b""), "little") >> row & 1
    ]
    assert found == expected  # in the same order


@pytest.mark.parametrize("chunk_bytes", [64, 1000, 10**6])
def test_batches_do_not_depend_on_chunk_sizes(tmp_path: Path, chunk_bytes: int) -> None:
    """Another version may read chunks of another size, but must send the same batches with the same numbers."""
    bodies = [b"x" * (n * 37 % 200 + 1) for n in range(500)]
    write_parquet(tmp_path / "a.parquet", {"body": bodies}, row_group_size=77)
    # 30 messages in 0.05 s.
    request = ReplayRequest(str(tmp_path / "a.parquet"), "t", "127.0.0.1:1", rate=600.0)
    (task,) = planned(request, tmp_path / "jobs").tasks(dry_run=True)
    found: list[int] = []
    task = replace(task, max_batch_bytes=2000, chunk_bytes=chunk_bytes)
    done = task.run(lambda count, _: found.append(count))
    assert done.complete
    expected, size, count = [], 0, 0
    for body in bodies:
        if count == 30 or size + len(body) > 2000:
            expected.append(count)
            size = count = 0
        size, count = size + len(body), count + 1
    assert found == [*expected, count]


def test_concurrent_attempts_publish_once(qcli: Cli, topic: str, tmp_path: Path) -> None:
    """Two attempts run at once, and later a third."""
    write_parquet(tmp_path / "a.parquet", {"body": numbers(3000)}, row_group_size=100)
    request = ReplayRequest(str(tmp_path / "a.parquet"), topic, qcli.http_address, rate=20_000.0)
    job = planned(request, tmp_path / "jobs")
    (task,) = job.tasks(save_results=False)
    threads = [threading.Thread(target=task.run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bodies_in(qcli.http_address, topic) == numbers(3000)
    done = task.run()
    assert (done.published, done.before, done.complete) == (0, 3000, True)
    assert bodies_in(qcli.http_address, topic) == numbers(3000)


@pytest.mark.parametrize("seed", range(4))
def test_row_groups_that_overlap_in_time_are_merged(tmp_path: Path, seed: int) -> None:
    """Also if row groups share a time at their boundary, and if the clock was set back."""
    chance = random.Random(seed)
    expected = []
    for broker in ("b", "a"):
        times = [(n // 5 - chance.randrange(3) // 2) * 10 for n in range(200)]
        columns = as_export([b"%s%d" % (broker.encode(), n) for n in range(200)], times, broker)
        write_parquet(tmp_path / f"{broker}.parquet", columns, row_group_size=chance.randrange(5, 30))
        expected += [(time_ns, broker, n, f"{broker}{n}".encode()) for n, time_ns in enumerate(times)]
    source = open_files(str(tmp_path))
    ((*segments,),) = split_into_pieces(source, None, None, None, ordered=True)
    reader = RowReader(source.place, source.columns, ordered=True)
    found = [body for rows in reader.read_in_order(segments) for body in rows.bodies]
    assert found == [body for *_, body in sorted(expected)]


def test_overlapping_row_groups_have_a_limit(tmp_path: Path) -> None:
    """Row groups that do not fit in memory for sorting are refused."""
    for times, fits in ((range(1000), True), ([n * 7 % 1000 for n in range(1000)], False)):
        path = write_parquet(
            tmp_path / "a.parquet", {"body": ["x" * 50] * 1000, "at": list(times)}, row_group_size=100
        )
        source = open_files(str(path), time="at")
        ((*segments,),) = split_into_pieces(source, None, None, None, ordered=True)
        reader = RowReader(source.place, source.columns, ordered=True, window_bytes=20_000)
        if fits:
            assert [time for rows in reader.read_in_order(segments) for time in rows.times_ns or ()] == list(
                times
            )
        else:
            with pytest.raises(ReplayFileError, match=r"overlap at 1970-01-01T00:00:00Z, too many to sort"):
                list(reader.read_in_order(segments))


def test_job_changed_by_another_process_is_not_overwritten(qcli: Cli, topic: str, tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", {"body": ["a"]})
    request = ReplayRequest(str(tmp_path / "a.parquet"), topic, qcli.http_address)
    file = tmp_path / "jobs" / "j" / "job.json"
    with open_job(tmp_path / "jobs", "j", request) as job:
        job.plan(None)
        other = file.read_bytes() + b" "
        file.write_bytes(other)
        with pytest.raises(ChangedMeanwhile, match="changed by another process"):
            job.run(run_inline, job.tasks(), lambda *_: None)
    assert file.read_bytes() == other


def test_attempt_that_got_further_is_not_overwritten(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    for furthest in (
        PieceResult(published=5, batches=2),
        PieceResult(published=9, batches=3),
        PieceResult(published=9, batches=3, complete=True),
    ):
        furthest.save(storage)
        PieceResult(before=2, batches=1).save(storage)
        assert PieceResult.load(storage, 0) == furthest
    PieceResult(published=9, batches=3).save(storage)
    assert PieceResult.load(storage, 0) == furthest


def test_hidden_files_are_named(tmp_path: Path) -> None:
    """A topic `..` would be a hidden folder or file to Spark, too."""
    write_parquet(tmp_path / "data" / "..-b-0.parquet", {"body": ["a"]})
    with pytest.raises(ReplayFileError, match=r"no Parquet files .*; \.\.-b-0\.parquet is ignored because"):
        open_files(str(tmp_path / "data"))
    (tmp_path / "none").mkdir()
    with pytest.raises(ReplayFileError, match=r"\(names that end in \.parquet\)$"):
        open_files(str(tmp_path / "none"))


def test_old_complete_jobs_are_removed(qcli: Cli, topic: str, tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", {"body": ["a"]})
    request = ReplayRequest(str(tmp_path / "a.parquet"), topic, qcli.http_address)
    jobs = tmp_path / "jobs"
    planned(request, jobs, "left")
    with open_job(jobs, "complete", request) as job:
        job.plan(None)
        job.run(run_inline, job.tasks(), lambda *_: None)
    (jobs / "something").mkdir()
    (jobs / "something" / "job.json").write_text("nonsense")
    now_s = (jobs / "complete" / "job.json").stat().st_mtime
    remove_old_jobs(jobs, now_s + KEPT_S - 1)
    assert Counter(path.name for path in jobs.iterdir()) == Counter(["left", "complete", "something"])
    remove_old_jobs(jobs, now_s + KEPT_S + 1)
    assert Counter(path.name for path in jobs.iterdir()) == Counter(["left", "something"])
