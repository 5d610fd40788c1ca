"""Tests for the spool: each message that is stored is exported once, whatever fails in between."""

import random
import resource
from array import array
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow.compute as pc
import pytest

from spark.support import HOUR_NS, NOON_NS, column, parquet_files, rows
from trio_nsq.log import LogWriteError
from trio_nsq.log.gaps import Gap, Span
from trio_nsq.spark.export.job import ExportJob, open_export
from trio_nsq.spark.export.layout import Layout, PartitionBy
from trio_nsq.spark.export.request import ExportRequest
from trio_nsq.spark.runtime.engine import Engine, run_inline
from trio_nsq.spark.spool.records import (
    InvalidMessageId,
    SpooledRows,
    parse_ids,
    read_spool,
    record_of,
    rows_of,
)
from trio_nsq.spark.spool.spool import Spool, SpoolError

NSQD = "127.0.0.1:4150"


@dataclass
class Batch:
    """A batch as a consumer receives it: messages with these numbers, published one second apart."""

    numbers: list[int]
    nsqd_address: str = NSQD
    bodies: list[bytes] = field(init=False)
    ids: list[bytes] = field(init=False)
    timestamps_ns: list[int] = field(init=False)
    attempts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.bodies = [b"\x00%d\xff" % number for number in self.numbers]
        self.ids = [b"%016x" % (7 << 60 | number) for number in self.numbers]
        self.timestamps_ns = [NOON_NS + number * 10**9 + 7 for number in self.numbers]
        self.attempts = [1 + number % 3 for number in self.numbers]

    def __len__(self) -> int:
        return len(self.numbers)


def batch(start: int, end: int, nsqd_address: str = NSQD) -> Batch:
    return Batch(list(range(start, end)), nsqd_address)


def bodies(*numbers: int) -> list[bytes]:
    return Batch(list(numbers)).bodies


def spool_of(folder: Path, window: int = 100) -> Spool:
    return Spool(folder, "t", "c", {}, window)


def request_for(folder: Path, spool: Path, partition: PartitionBy = PartitionBy.NONE) -> ExportRequest:
    return ExportRequest("t", str(folder), channel="c", layout=Layout(partition), spool=spool)


def export_all(job: ExportJob, engine: Engine = run_inline) -> None:
    assert job.spool is not None
    job.run(engine, job.plan(job.spool.places), lambda *_: None)


def test_record_round_trip() -> None:
    given = batch(0, 5)
    ids = parse_ids(given.ids)
    found = rows_of(record_of(70, ids, given.timestamps_ns, [1, 2, 65535, 4, 5], given.bodies))
    assert list(found.sequences) == [70, 71, 72, 73, 74]
    assert list(found.ids) == [int(each, 16) for each in given.ids]
    assert list(found.times_ns) == given.timestamps_ns
    assert list(found.attempts) == [1, 2, 65535, 4, 5]
    assert found.bodies == given.bodies
    record = record_of(70, ids, given.timestamps_ns, given.attempts, given.bodies)
    with pytest.raises(ValueError, match="has 3 bytes"):
        rows_of(replace(record, metadata=b"abc"))


@pytest.mark.parametrize("bad", [b"x" * 16, b"12 4567890abcdef", b"\xff" * 16])
def test_invalid_id_is_refused(bad: bytes) -> None:
    with pytest.raises(InvalidMessageId, match="16 hex digits"):
        parse_ids([b"0123456789abcdef", bad])


def test_messages_are_exported_and_removed(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    with open_export(request_for(folder, tmp_path / "s"), ()) as job:
        assert job.spool is not None
        assert job.spool.store([batch(0, 30), batch(30, 40), batch(0, 20, "other:4150")]) == 0
        assert (job.spool.messages, job.spool.labels) == (60, [NSQD, "other:4150"])
        export_all(job)
        assert (job.spool.messages, job.result.messages, job.result.skipped_messages) == (0, 60, 0)
        job.spool.store([batch(40, 50)])
        export_all(job)
        assert (job.spool.messages, job.result.messages, job.result.skipped_messages) == (0, 70, 0)
    found = rows(folder).filter(pc.field("broker") == NSQD)
    given = batch(0, 50)
    assert found["body"].to_pylist() == given.bodies
    assert found["seq"].to_pylist() == list(range(50))
    assert found["id"].to_pylist() == [each.decode() for each in given.ids]
    assert found["ts_ns"].to_pylist() == given.timestamps_ns
    assert found["attempts"].to_pylist() == given.attempts
    assert len(parquet_files(folder)) == 3
    assert sum(path.stat().st_size for path in (tmp_path / "s").rglob("*.log")) < 150


def test_redelivered_messages_are_left_out(tmp_path: Path) -> None:
    with spool_of(tmp_path) as spool:
        assert spool.store([batch(0, 50)]) == 0
        assert spool.store([Batch([49, 50, 3, 51]), Batch([51, 52])]) == 3
        assert spool.store([batch(0, 50, "other:4150")]) == 0  # ids are unique per nsqd only
    with spool_of(tmp_path) as spool:
        assert spool.store([batch(40, 55)]) == 13
        assert spool.messages == 105
        spool.log(NSQD).move_channel("c", 55)
        assert spool.messages == 50
    with spool_of(tmp_path) as spool:
        assert spool.store([batch(0, 56)]) == 55
        again = batch(0, 56)
        again.timestamps_ns[7] += 1
        assert spool.store([again]) == 55  # the same id with another time is another message
    found = list(read_spool(tmp_path / "127.0.0.1%3A4150", Span(55, 57)))
    assert [each.bodies for each in found if isinstance(each, SpooledRows)] == [bodies(55), bodies(7)]


def test_window_is_bounded_and_never_too_small(tmp_path: Path) -> None:
    with spool_of(tmp_path, window=10) as spool:
        for number in range(100):
            assert spool.store([Batch([number])]) == 0
            for before in range(max(0, number - 9), number):
                assert spool.store([Batch([before])]) == 1
        assert spool.store([batch(0, 80)]) == 0


def test_failed_store_is_not_recorded(tmp_path: Path) -> None:
    """If the disk is full (here: a file size limit), redelivered messages are not detected as stored."""
    with spool_of(tmp_path) as spool:
        spool.store([batch(0, 10)])
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (spool.size_bytes + 10, limits[1]))
        try:
            with pytest.raises(LogWriteError):
                spool.store([batch(10, 20)])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert spool.messages == 10
        assert spool.store([batch(10, 20)]) == 0
        assert spool.messages == 20


def test_partitions_by_hour(tmp_path: Path) -> None:
    numbers = list(range(0, 3 * 3600, 30))
    random.Random(3).shuffle(numbers)
    with open_export(request_for(tmp_path / "a", tmp_path / "s", PartitionBy.HOUR), ()) as job:
        assert job.spool is not None
        for start in range(0, len(numbers), 50):
            job.spool.store([Batch(numbers[start : start + 50])])
        export_all(job)
    assert len(parquet_files(tmp_path / "a")) == 3
    assert column(tmp_path / "a", "seq") == list(range(360))
    assert column(tmp_path / "a", "body") == bodies(*numbers)
    for row in rows(tmp_path / "a", "ts_ns", "hour").to_pylist():
        assert row["hour"] == 12 + (row["ts_ns"] - NOON_NS) // HOUR_NS


def test_any_span_can_be_read(tmp_path: Path) -> None:
    with spool_of(tmp_path) as spool:
        for start in range(0, 30, 10):
            spool.store([batch(start, start + 10)])
    folder = tmp_path / "127.0.0.1%3A4150"
    for first in range(30):
        for end in range(first + 1, 31, 4):
            found = [each for each in read_spool(folder, Span(first, end)) if isinstance(each, SpooledRows)]
            assert [sequence for each in found for sequence in each.sequences] == list(range(first, end))
            assert [body for each in found for body in each.bodies] == batch(first, end).bodies


def test_damage_is_reported(tmp_path: Path) -> None:
    with spool_of(tmp_path) as spool:
        for start in range(0, 30, 10):
            spool.store([batch(start, start + 10)])
    (path,) = tmp_path.rglob("*.log")
    data = bytearray(path.read_bytes())
    data[data.index(bodies(15)[0])] ^= 1
    path.write_bytes(data)
    found = list(read_spool(path.parent, Span(5, 25)))
    assert [each for each in found if isinstance(each, Gap)] == [Gap(10, 20, "damaged")]
    assert sum(len(each) for each in found if isinstance(each, SpooledRows)) == 10


def test_exported_messages_are_not_exported_again(tmp_path: Path) -> None:
    """Killed between export and removal, or before the manifest was updated."""
    request = request_for(tmp_path / "a", tmp_path / "s")
    with open_export(request, ()) as job:
        assert job.spool is not None
        job.spool.store([batch(0, 20)])
        for task in job.plan(job.spool.places):
            run_inline([task], lambda _: None, lambda *_: None)
    with open_export(request, ()) as job:
        assert job.spool is not None
        job.spool.store([batch(20, 30)])
        export_all(job)
        assert (job.result.messages, job.result.skipped_messages, job.spool.messages) == (10, 20, 0)
    assert column(tmp_path / "a", "seq") == list(range(30))


def test_removed_spool_continues_its_sequences(tmp_path: Path) -> None:
    for number, spool in enumerate(("s", "s2", "s3")):
        with open_export(request_for(tmp_path / "a", tmp_path / spool), ()) as job:
            assert job.spool is not None
            job.spool.store([batch(10 * number, 10 * number + 10)])
            export_all(job)
    assert column(tmp_path / "a", "seq") == list(range(30))
    with (
        pytest.raises(SpoolError, match=r"has messages of 127\.0\.0\.1:4150 from another spool"),
        open_export(request_for(tmp_path / "a", tmp_path / "s"), ()),
    ):
        pass


def test_spool_is_for_one_channel_and_one_process(tmp_path: Path) -> None:
    with spool_of(tmp_path / "s"), pytest.raises(SpoolError, match="is used by another export"):
        spool_of(tmp_path / "s")
    with pytest.raises(SpoolError, match="is for t/c, not for t/other"):
        Spool(tmp_path / "s", "t", "other", {})
    (tmp_path / "other" / "x").mkdir(parents=True)
    with pytest.raises(SpoolError, match="is not a spool and not empty"):
        spool_of(tmp_path / "other")
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["x"]
    about = tmp_path / "s" / "spool.json"
    for content, said in (
        ('{"version": 2, "topic": "t", "channel": "c"}', "has version 2"),
        ("[]", "cannot be"),
    ):
        about.write_text(content)
        with pytest.raises(SpoolError, match=said):
            spool_of(tmp_path / "s")


@pytest.mark.slow
def test_spark_reads_a_spool_by_range(engine: Engine, tmp_path: Path) -> None:
    request = replace(request_for(tmp_path / "a", tmp_path / "s"), min_ranges=4)
    with open_export(request, ()) as job:
        assert job.spool is not None
        for start in range(0, 4000, 100):
            job.spool.store([batch(start, start + 100)])
        export_all(job, engine)
        assert (job.result.files, job.spool.messages) == (4, 0)
    assert column(tmp_path / "a", "body") == batch(0, 4000).bodies


def test_take_keeps_columns() -> None:
    """`take` returns the same object if it takes everything, and the same types otherwise."""
    found = SpooledRows(
        array("q", [1, 2]), array("Q", [3, 4]), array("q", [5, 6]), array("H", [7, 8]), [b"a", b"b"]
    )
    assert found.take(range(2)) is found
    part = found.take([1])
    assert [column.typecode for column in (part.sequences, part.ids, part.times_ns, part.attempts)] == list(
        "qQqH"
    )
    assert (list(part.sequences), part.bodies) == ([2], [b"b"])
