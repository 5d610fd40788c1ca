"""Tests for archives and data folders in buckets: the same rows as from a disk, also after lost answers and kills."""

import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql.datasource import CaseInsensitiveDict

from cli.support import Cli, Result
from log.support import HastyFiles, append_each, link, numbered, segment_files
from soak import in_soak
from spark.support import export, rows, run_in_process
from storage.stores import Fault, Proxy, Store, proxy
from trio_nsq.log import DiskLog
from trio_nsq.log.gaps import Span
from trio_nsq.spark.data_source import NsqDataSource
from trio_nsq.spark.places import storage_at
from trio_nsq.spark.segments.places import parse_places

OFFLINE = Cli("", "")
MANIFEST = "/%40archive.json"
WORKER = """
import pickle, sys
reader, partitions = pickle.load(sys.stdin.buffer)
print(sum(len(batch) for each in partitions for batch in reader.read(each)))
"""


@pytest.fixture(scope="module")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with a topic of several segments."""
    data = tmp_path_factory.mktemp("small")
    folder = data / "topics" / "t.topic"
    folder.mkdir(parents=True)
    log = DiskLog(folder, segment_bytes=400_000, files=HastyFiles())
    append_each(log, numbered(0, 1000, size=1500))
    log.close()
    return data


@pytest.fixture(scope="module")
def data(small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same and more segments, larger than what a request reads."""
    data = tmp_path_factory.mktemp("data") / "data"
    shutil.copytree(small_data, data)
    folder = data / "topics" / "t.topic"
    log = DiskLog(folder, segment_bytes=17_500_000, files=HastyFiles())
    for _ in range(62):
        log.append(link(numbered(log.next_sequence, 3, size=100_000)), sync=False)
    log.close()
    return data


@pytest.fixture(scope="module")
def on_disk(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of the data folder."""
    folder = tmp_path_factory.mktemp("disk")
    export(OFFLINE, "t", folder, "--from-segments", f"b={data}")
    return folder


@pytest.fixture(params=["s3", *in_soak("moto_s3"), "azure"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    found: Store = request.getfixturevalue(request.param)
    with found.here():
        yield found


def archive(data: Path, place: str) -> Result:
    return run_in_process(OFFLINE, "log", "archive", str(data), place, "--tail", "--format", "json")


def test_archive_in_a_bucket(store: Store, data: Path, on_disk: Path, tmp_path: Path) -> None:
    place = store.new_place()
    result = archive(data, place)
    assert result.code == 0, result.err
    count = len(segment_files(data / "topics" / "t.topic"))
    assert (result.records[0]["copied"], result.records[0]["present"]) == (count, 0)
    again = archive(data, place)
    assert (again.records[0]["copied"], again.records[0]["present"]) == (0, count)
    incarnation = f"{place}/t/{result.records[0]['incarnation']}"
    export(OFFLINE, "t", tmp_path, "--from-segments", f"b={incarnation}")
    assert rows(tmp_path).equals(rows(on_disk))


def test_data_folder_in_a_bucket(store: Store, data: Path, on_disk: Path, tmp_path: Path) -> None:
    place = store.new_place()
    storage = storage_at(place)
    for path in data.rglob("*"):
        if path.is_file():
            assert storage.put_new(path.relative_to(data).as_posix(), path.read_bytes())
    export(OFFLINE, "t", tmp_path, "--from-segments", f"b={place}", "--target-file-size", "4MiB")
    assert rows(tmp_path).equals(rows(on_disk))


def test_lost_answers(s3: Store, small_data: Path, tmp_path: Path) -> None:
    """Each request fails once: it is applied without an answer, refused, or not applied, in turn."""
    seen: dict[str, int] = {}

    def judge(method: str, path: str) -> Fault | None:
        number = len(seen)
        if seen.setdefault(f"{method} {path}", number) != number:
            return None
        return (Fault(is_sent=True), Fault(status=503), Fault())[number % 3]

    with proxy(s3) as between:
        store = s3.behind(between.endpoint)
        with store.here():
            between.judge = judge
            place = store.new_place()
            result = archive(small_data, place)
            assert result.code == 0, result.err
            (found,) = result.records
            count = len(segment_files(small_data / "topics" / "t.topic"))
            assert found["copied"] + found["present"] == count
            seen.clear()
            incarnation = f"{place}/t/{found['incarnation']}"
            export(OFFLINE, "t", tmp_path / "a", "--from-segments", f"b={incarnation}")
    assert seen
    export(OFFLINE, "t", tmp_path / "b", "--from-segments", f"b={small_data}")
    assert rows(tmp_path / "a").equals(rows(tmp_path / "b"))


def test_requests_of_a_task(s3: Store, data: Path) -> None:
    """A segment is read in a few large requests, and only by tasks that need it; a bound needs none."""
    with proxy(s3) as between, s3.behind(between.endpoint).here():
        place = s3.new_place()
        archive(data, place)
        between.requests.clear()
        (found,) = parse_places([place], "t")
        log = found.open()
        log.bounds()
        assert not reads(between)
        *_, first, end = log.starts()
        list(log.read(Span(first, end)))
        size = (data / "topics" / "t.topic" / f"{first:020d}.log").stat().st_size
        assert size > 16 * 1024 * 1024
        assert len(reads(between)) <= size // (8 * 1024 * 1024) + 3
        assert all(f"{first:020d}-" in path or path.endswith("/incarnation") for path in reads(between))


def test_tasks_get_the_credentials(s3: Store, small_data: Path) -> None:
    with s3.here():
        place = s3.new_place()
        archive(small_data, place)
        source = NsqDataSource(CaseInsensitiveDict({"topic": "t", "segments": place}))
        reader = source.reader(source.schema())
        partitions = reader.partitions()
        assert s3.env["AWS_SECRET_ACCESS_KEY"] not in repr(partitions)
        task = pickle.dumps((reader, partitions))
        # As in a worker, whose environment has no credentials.
        environment = {name: value for name, value in os.environ.items() if name not in s3.env}
    done = subprocess.run(
        [sys.executable, "-c", WORKER],
        input=task,
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
        timeout=120,
    )
    assert int(done.stdout) == sum(each.span.length for each in partitions) > 0


def reads(between: Proxy) -> list[str]:
    """Return the paths of the objects that were read, but that of the manifest, which this archive lacks."""
    found = [request.partition(" ")[2] for request in between.requests if request.startswith("GET ")]
    return [path for path in found if "?" not in path and not path.endswith(MANIFEST)]
