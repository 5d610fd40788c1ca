"""Tests for the spool: each message that is stored is exported once, whatever fails in between."""

import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow.compute as pc
import pytest

from spark.support import NOON_NS, column, parquet_files, rows
from trio_nsq.log import LogWriteError, RecordBatch
from trio_nsq.log.gaps import Gap, Span
from trio_nsq.protocol.headers import Headers
from trio_nsq.spark.export.job import ExportJob, open_export
from trio_nsq.spark.export.layout import Layout, PartitionBy
from trio_nsq.spark.export.request import ExportRequest
from trio_nsq.spark.ranges import BrokerRanges
from trio_nsq.spark.runtime.engine import Engine, run_inline
from trio_nsq.spark.spool.records import HOUR_NS, InvalidMessageId, SpoolLog, columns_of
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
    headers: list[Headers] = field(init=False)

    def __post_init__(self) -> None:
        self.bodies = [b"\x00%d\xff" % number for number in self.numbers]
        self.ids = [b"%016x" % (7 << 60 | number) for number in self.numbers]
        self.timestamps_ns = [NOON_NS + number * 10**9 + 7 for number in self.numbers]
        self.attempts = [1 + number % 3 for number in self.numbers]
        self.headers = [{"n": str(number)} if number % 7 == 1 else {} for number in self.numbers]

    def __len__(self) -> int:
        return len(self.numbers)


def batch(start: int, end: int, nsqd_address: str = NSQD) -> Batch:
    return Batch(list(range(start, end)), nsqd_address)


def bodies(*numbers: int) -> list[bytes]:
    return Batch(list(numbers)).bodies


def spool_of(folder: Path, window: int = 100) -> Spool:
    return Spool(folder, "t", "c", {}, window)


def request_for(folder: Path, partition: PartitionBy = PartitionBy.NONE) -> ExportRequest:
    return ExportRequest("t", str(folder), layout=Layout(partition))


@contextmanager
def exporting(request: ExportRequest, folder: Path) -> Iterator[tuple[ExportJob, Spool]]:
    """Open an export and its spool, as the command does."""
    with open_export(request, ()) as job, Spool(folder, "t", "c", job.exported) as spool:
        yield job, spool


def export_all(job: ExportJob, spool: Spool, engine: Engine = run_inline) -> None:
    by_hour = job.request.layout.partition is not PartitionBy.NONE
    job.run(engine, job.plan(spool.places(by_hour=by_hour)), lambda *_: None)
    spool.discard(job.exported)


def log_of(folder: Path, *, by_hour: bool = False) -> SpoolLog:
    return SpoolLog(folder / "127.0.0.1%3A4150", by_hour=by_hour)


def sequences_in(log: SpoolLog, first: int, end: int) -> list[int]:
    """Return the sequences of the messages in a span, as they are read."""
    found = [each for each in log.read(Span(first, end)) if isinstance(each, RecordBatch)]
    return [sequence for each in found for sequence in range(each.base_sequence, each.next_sequence)]


@pytest.mark.parametrize("bad", [b"x" * 16, b"12 4567890abcdef", b"\xff" * 16])
def test_invalid_id_is_refused(tmp_path: Path, bad: bytes) -> None:
    given = batch(0, 2)
    given.ids[1] = bad
    with spool_of(tmp_path) as spool:
        with pytest.raises(InvalidMessageId, match="16 hex digits"):
            spool.store([given])
        assert spool.messages == 0


def test_messages_are_exported_and_removed(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    with exporting(request_for(folder), tmp_path / "s") as (job, spool):
        assert spool.store([batch(0, 30), batch(30, 40), batch(0, 20, "other:4150")]) == 0
        assert (spool.messages, [each.label for each in spool.places()]) == (60, [NSQD, "other:4150"])
        export_all(job, spool)
        assert (spool.messages, job.result.messages, job.result.skipped_messages) == (0, 60, 0)
        spool.store([batch(40, 50)])
        export_all(job, spool)
        assert (spool.messages, job.result.messages, job.result.skipped_messages) == (0, 70, 0)
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
        spool.discard({NSQD: BrokerRanges({Span(0, 55): 55})})
        assert spool.messages == 50
    with spool_of(tmp_path) as spool:
        assert spool.store([batch(0, 56)]) == 55
        again = batch(0, 56)
        again.timestamps_ns[7] += 1
        assert spool.store([again]) == 55  # the same id with another time is another message
    found = [each for each in log_of(tmp_path).read(Span(55, 57)) if isinstance(each, RecordBatch)]
    assert [each.messages.bodies() for each in found] == [bodies(55), bodies(7)]


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
    with exporting(request_for(tmp_path / "a", PartitionBy.HOUR), tmp_path / "s") as (job, spool):
        for start in range(0, len(numbers), 50):
            spool.store([Batch(numbers[start : start + 50])])
        export_all(job, spool)
    assert len(parquet_files(tmp_path / "a")) == 3
    assert column(tmp_path / "a", "seq") == list(range(360))
    assert column(tmp_path / "a", "body") == bodies(*numbers)
    for row in rows(tmp_path / "a", "ts_ns", "hour").to_pylist():
        assert row["hour"] == 12 + (row["ts_ns"] - NOON_NS) // HOUR_NS


def test_any_span_can_be_read(tmp_path: Path) -> None:
    """With the values of each message, in order, and hour by hour."""
    numbers = [0, 1, 4000, 2, 4001, 4002, 3, 8000, 8001, 4, 4003, 5]
    with spool_of(tmp_path) as spool:
        for start in (0, 5, 10):
            spool.store([Batch(numbers[start : start + 5])])
    given = Batch(numbers)
    for first in range(12):
        for end in range(first + 1, 13):
            assert sequences_in(log_of(tmp_path), first, end) == list(range(first, end))
            hours = [(given.timestamps_ns[at] // HOUR_NS, at) for at in range(first, end)]
            assert sequences_in(log_of(tmp_path, by_hour=True), first, end) == [at for _, at in sorted(hours)]
            for found in log_of(tmp_path).read(Span(first, end)):
                assert isinstance(found, RecordBatch)
                part = slice(found.base_sequence, found.next_sequence)
                columns = columns_of(found)
                assert columns is not None
                assert [b"%016x" % each for each in columns.ids] == given.ids[part]
                assert list(columns.times_ns) == given.timestamps_ns[part]
                assert list(columns.attempts) == given.attempts[part]
                assert found.messages.bodies() == given.bodies[part]


@pytest.mark.parametrize("by_hour", [False, True])
def test_damage_is_reported(tmp_path: Path, by_hour: bool) -> None:
    with spool_of(tmp_path) as spool:
        for start in range(0, 30, 10):
            spool.store([batch(start, start + 10)])
    (path,) = tmp_path.rglob("*.log")
    data = bytearray(path.read_bytes())
    data[data.index(bodies(15)[0])] ^= 1
    path.write_bytes(data)
    found = list(log_of(tmp_path, by_hour=by_hour).read(Span(5, 25)))
    assert [each for each in found if isinstance(each, Gap)] == [Gap(10, 20, "damaged")]
    assert sum(each.count for each in found if isinstance(each, RecordBatch)) == 10


def test_exported_messages_are_not_exported_again(tmp_path: Path) -> None:
    """Killed between export and removal, or before the manifest was updated."""
    request = request_for(tmp_path / "a")
    with exporting(request, tmp_path / "s") as (job, spool):
        spool.store([batch(0, 20)])
        for task in job.plan(spool.places()):
            run_inline([task], lambda _: None, lambda *_: None)
    with exporting(request, tmp_path / "s") as (job, spool):
        spool.store([batch(20, 30)])
        export_all(job, spool)
        assert (job.result.messages, job.result.skipped_messages, spool.messages) == (10, 20, 0)
    assert column(tmp_path / "a", "seq") == list(range(30))


def test_removed_spool_continues_its_sequences(tmp_path: Path) -> None:
    for number, folder in enumerate(("s", "s2", "s3")):
        with exporting(request_for(tmp_path / "a"), tmp_path / folder) as (job, spool):
            spool.store([batch(10 * number, 10 * number + 10)])
            export_all(job, spool)
    assert column(tmp_path / "a", "seq") == list(range(30))
    with (
        pytest.raises(SpoolError, match=r"has messages of 127\.0\.0\.1:4150 from another spool"),
        exporting(request_for(tmp_path / "a"), tmp_path / "s"),
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
        (
            '{"version": 1, "topic": "t", "channel": "c"}',
            "has version 1, and this program supports version 2: empty",
        ),
        ("[]", "cannot be"),
    ):
        about.write_text(content)
        with pytest.raises(SpoolError, match=said):
            spool_of(tmp_path / "s")


@pytest.mark.slow
def test_spark_reads_a_spool_by_range(engine: Engine, tmp_path: Path) -> None:
    request = replace(request_for(tmp_path / "a"), min_ranges=4)
    with exporting(request, tmp_path / "s") as (job, spool):
        for start in range(0, 4000, 100):
            spool.store([batch(start, start + 100)])
        export_all(job, spool, engine)
        assert (job.result.files, spool.messages) == (4, 0)
    assert column(tmp_path / "a", "body") == batch(0, 4000).bodies
