"""Tests for exports of messages that retention has deleted: each is in a file, or reported once as missing."""

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interop.peers import Broker, qcli_serve
from soak import examples
from spark.kills import Killed, KillingStorage
from spark.support import FIRST_ID, NOON_NS, ToParquet, cli_of, column, discard, numbers
from trio_nsq.client.reading.broker_log import BrokerLog
from trio_nsq.log import DiskLog, RecordBatch
from trio_nsq.protocol import pack_messages
from trio_nsq.spark.export.job import ExportJob, open_export
from trio_nsq.spark.export.request import ExportRequest
from trio_nsq.spark.logs import BrokerPlace
from trio_nsq.spark.runtime.engine import run_inline
from trio_nsq.spark.segments.places import parse_places
from trio_nsq.spark.tables.target import TableKind, TableTarget
from trio_nsq.storage import StorageError


@pytest.fixture(scope="module")
def small_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker whose retention deletes files of 100 kB."""
    with qcli_serve(tmp_path_factory.mktemp("small") / "data", "--max-bytes-per-file=100000") as broker:
        yield broker


@pytest.mark.parametrize("kind", ["files", "delta"])
def test_retention_between_two_runs(
    to_parquet: ToParquet, small_files: Broker, topic: str, tmp_path: Path, kind: str
) -> None:
    qcli = cli_of(small_files)
    qcli.publish(topic, numbers(10))
    words = [topic, tmp_path / "a", "--format", "json", *(["--delta"] if kind == "delta" else [])]
    assert to_parquet(*words, cli=qcli).records[0]["missing"] == 0
    first, end = discard(small_files, topic, 10)
    result = to_parquet(*words, cli=qcli)
    assert (result.code, result.records[0]["missing"], result.records[0]["messages"]) == (
        6,
        first - 10,
        end - first,
    )
    where = f"{topic} on {small_files.http_address}"
    assert f"Note: {where}: messages 10 to {first - 1} are no longer retained." in result.err
    assert column(tmp_path / "a", "seq") == [*range(10), *range(first, end)]
    again = to_parquet(*words, cli=qcli)
    assert (again.code, again.records[0]["missing"], again.err) == (0, 0, "")


def test_requested_messages_that_are_not_retained(
    to_parquet: ToParquet, small_files: Broker, topic: str, tmp_path: Path
) -> None:
    """A new folder has all that is retained; a range that was asked for is complete, or the exit code says so."""
    qcli = cli_of(small_files)
    first, end = discard(small_files, topic, 0)
    for name, words, missing, messages in (
        ("a", [], 0, end - first),
        ("b", ["--from", 0], first, end - first),
        ("c", ["--from", 0, "--to", 5], 5, 0),
        ("d", ["--from", 0, "--to", first + 1], first, 1),
    ):
        result = to_parquet(topic, tmp_path / name, "--format", "json", *words, cli=qcli)
        said = result.records[0]
        assert (result.code, said["missing"], said["messages"]) == (6 if missing else 0, missing, messages)
    whole = f"{topic}-whole"
    qcli.publish(whole, numbers(5))
    several = [topic, whole, tmp_path / "e", "--format", "json"]
    result = to_parquet(*several, "--from", 0, cli=qcli)
    assert (result.code, {each["topic"]: each["exit_code"] for each in result.records}) == (
        6,
        {topic: 6, whole: 0},
    )
    assert f"{topic} on {small_files.http_address}: messages 0 to {first - 1} are no longer" in result.err
    assert to_parquet(*several, cli=qcli).code == 0


def test_ranges_of_a_killed_run_that_retention_deletes(
    to_parquet: ToParquet, small_files: Broker, topic: str, tmp_path: Path
) -> None:
    qcli = cli_of(small_files)
    qcli.publish(topic, numbers(10))
    place = BrokerPlace(qcli.http_address, topic)
    with open_export(ExportRequest(topic, str(tmp_path / "a")), [place]) as job:
        assert len(job.plan([place])) == 1
    first, end = discard(small_files, topic, 10)
    result = to_parquet(topic, tmp_path / "a", "--format", "json", cli=qcli)
    assert (result.code, result.records[0]["missing"]) == (6, first)
    assert column(tmp_path / "a", "seq") == list(range(first, end))
    assert BrokerLog(qcli.http_address, topic).bounds().end == end


# ---------------------------------------------------------------------- any history


def append(folder: Path, count: int) -> None:
    """Append messages to a log whose segments are small."""
    folder.mkdir(parents=True, exist_ok=True)
    log = DiskLog(folder, segment_bytes=1000, now_ns=lambda: NOON_NS)
    for sequence in range(log.next_sequence, log.next_sequence + count):
        messages = pack_messages([b"%d" % sequence + b"x" * 200])
        log.append([RecordBatch(sequence, FIRST_ID + sequence, NOON_NS, 0, messages, b"")], sync=False)
    log.close()


STEP = st.one_of(
    st.tuples(st.just("publish"), st.integers(1, 12)),
    st.tuples(st.just("delete"), st.integers(1, 4)),
    st.tuples(st.just("export"), st.just(0)),
    st.tuples(st.just("killed export"), st.integers(0, 3)),
)


def missing_in(job: ExportJob) -> list[int]:
    return [sequence for _, first, end, _ in job.result.gaps for sequence in range(first, end)]


@pytest.mark.parametrize("table", [None, TableTarget(TableKind.DELTA)], ids=["files", "delta"])
@pytest.mark.parametrize("before", [True, False])
def test_a_killed_run_leaves_the_report_to_the_next(
    tmp_path: Path, before: bool, table: TableTarget | None
) -> None:
    """The run that finds messages missing is killed before or after each of its writes."""
    log, folder = tmp_path / "data" / "topics" / "t.topic", tmp_path / "a"
    append(log, 5)
    (place,) = parse_places([str(tmp_path / "data")], "t")

    def export(kill_at: int = 0) -> list[int]:
        """Export as the command does; return what a complete or killed run has reported."""
        told: list[int] = []
        storage = KillingStorage(folder, kill_at, before=before)
        with suppress(Killed), storage.hold("lock", StorageError) as lease:
            job = ExportJob(ExportRequest("t", str(folder), target_bytes=900, table=table), storage, lease)
            job.run(run_inline, job.plan([place]), lambda *_: None)
            told = missing_in(job)
            job.mark_reported(job.result)
            assert storage.calls < kill_at or not kill_at
            finished.append(kill_at)
        return told

    finished: list[int] = []
    assert export() == []
    folder.rename(tmp_path / "exported")
    append(log, 20)
    for path in sorted(log.glob("*.log"))[:4]:
        path.unlink()
    missing = list(range(5, place.open().bounds().first))
    assert missing
    finished.clear()
    for kill_at in range(1, 40):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "exported", folder)
        first = export(kill_at)
        if finished:
            break
        second = export()
        assert second == missing or (first == missing and second == []), kill_at
        assert export() == [], kill_at
        finished.clear()
    assert first == missing
    assert kill_at > 4


@settings(max_examples=examples(15), deadline=None)
@given(st.lists(STEP, min_size=1, max_size=12))
def test_each_message_is_in_a_file_or_missing(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    """Exports and retention in any order; a killed export may have planned ranges, and written some of them."""
    root = tmp_path_factory.mktemp("history")
    log, folder = root / "data" / "topics" / "t.topic", root / "a"
    append(log, 5)
    missing: list[int] = []
    oldest: int | None = None  # of the first plan
    for step, number in [*steps, ("export", 0)]:
        if step == "publish":
            append(log, number)
        elif step == "delete":
            for path in sorted(log.glob("*.log"))[:-1][:number]:
                path.unlink()
        else:
            (place,) = parse_places([str(root / "data")], "t")
            request = ExportRequest("t", str(folder), target_bytes=900)
            with open_export(request, [place]) as job:
                oldest = place.open().bounds().first if oldest is None else oldest
                tasks = job.plan([place])
                if step == "export":
                    job.run(run_inline, tasks, lambda *_: None)
                    missing += missing_in(job)
                    job.mark_reported(job.result)
                else:
                    for task in tasks[:number]:
                        task.run()
    end = place.open().bounds().end
    assert sorted(missing + column(folder, "seq")) == list(range(oldest or 0, end))
