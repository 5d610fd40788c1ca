"""Tests of exports to buckets: exactly once with killed, concurrent and sleeping exporters, and without secrets."""

import os
import random
import re
import resource
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
import pytest

from cli.support import Cli, Running
from interop.peers import Broker
from soak import in_soak
from spark.support import export, jobs_of, numbers, replayed, run_in_process, until
from storage.stores import KEY, SECRET, Fault, Judge, Proxy, Store, proxy
from trio_nsq.spark.places import storage_at
from trio_nsq.spark.runtime.spark_engine import SparkEngine

COMPLETE = os.environ.get("FAULT_COMPLETE") == "1"
SMALL = ["--target-file-size", "64KiB", "--compression", "none"]
"""Several ranges for some hundred messages of 1 kB."""


@pytest.fixture
def place(s3: Store) -> str:
    return s3.new_place()


@pytest.fixture
def slow(s3: Store) -> Iterator[Proxy]:
    """A proxy in front of the S3 server."""
    with proxy(s3) as running:
        yield running


def with_store(qcli: Cli, store: Store) -> Cli:
    """Return a `Cli` whose commands reach the store."""
    return replace(qcli, env=qcli.env | store.env)


def folder_of(s3: Store, place: str, tmp_path: Path) -> Path:
    """Copy all Parquet files of a place to a new folder; files of the server would do, but for other stores."""
    folder = tmp_path / f"copy{len(list(tmp_path.iterdir()))}"
    with s3.here():
        storage = storage_at(place)
        found = storage.files()
        assert isinstance(found, list)
        for file in found:
            if file.name.endswith(".parquet"):
                path = folder / file.name
                path.parent.mkdir(parents=True, exist_ok=True)
                with storage.open_input(file.name) as content:
                    path.write_bytes(content.read())
    return folder


def sequences(folder: Path) -> list[int]:
    """Read the sequences with pyarrow, and check that DuckDB sees the same rows."""
    found: list[int] = []
    for path in folder.rglob("*.parquet"):
        found += pq.read_table(path, columns=["seq"], partitioning=None)["seq"].to_pylist()
    query = f"SELECT count(*), count(DISTINCT seq), sum(seq) FROM read_parquet('{folder}/**/*.parquet')"
    assert duckdb.connect().execute(query).fetchall() == [(len(found), len(set(found)), sum(found))]
    return sorted(found)


def bodies(count: int, start: int = 0) -> list[bytes]:
    return [body.ljust(1000, b"x") for body in numbers(count, start)]


@pytest.mark.parametrize("kind", ["s3", *in_soak("moto_s3"), "azure", "gcs"])
def test_export_and_replay(
    qcli: Cli, topic: str, kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    qcli.publish(topic, bodies(300))
    store: Store = request.getfixturevalue(kind)
    with store.here():
        place = store.new_place()
        said = export(qcli, topic, place, *SMALL)  # type: ignore[arg-type]
        assert (said["messages"], said["folder"], said["files"] > 3) == (300, place, True)
        again = export(qcli, topic, place, *SMALL)  # type: ignore[arg-type]
        assert (again["messages"], again["skipped_messages"]) == (0, 300)
        copy = f"{topic}-copy"
        assert replayed(qcli, tmp_path, place, copy)["published"] == 300
    assert sorted(qcli.retained(copy)) == sorted(bodies(300))
    assert sequences(folder_of(store, place, tmp_path)) == list(range(300))


def test_no_secret_is_shown_or_stored(qcli: Cli, topic: str, s3: Store, place: str, tmp_path: Path) -> None:
    qcli.publish(topic, bodies(100))
    with_secret = place.replace("s3://", f"s3://{KEY}:{SECRET}@")
    env = {name: value for name, value in s3.env.items() if not name.endswith(("_KEY_ID", "_ACCESS_KEY"))}
    quiet = replace(qcli, env=qcli.env | env | jobs_of(tmp_path))
    said = []
    for form in ("text", "json"):
        said.append(quiet("to-parquet", topic, with_secret, "--format", form))
        said.append(quiet("replay", with_secret, f"{topic}copy", "--format", form))
    said.append(quiet("to-parquet", topic, with_secret, "--partition-by", "hour"))
    said.append(quiet("to-parquet", "missing", with_secret))
    said.append(quiet("replay", f"{with_secret}/missing", f"{topic}copy"))
    said.append(quiet("to-parquet", topic, with_secret, "--consume", "--channel", "c"))
    assert [each.code for each in said] == [0, 0, 0, 0, 1, 1, 1, 2]
    shown = "".join(each.out.decode() + each.err for each in said)
    files = [path for path in (tmp_path / "jobs").rglob("*") if path.is_file()]
    assert len(files) >= 2
    with s3.here():
        storage = storage_at(place)
        manifest = storage.read(f"_nsq/{topic}/manifest.json")
    assert manifest is not None
    stored = b"".join(path.read_bytes() for path in files) + manifest.data
    assert (SECRET in shown, SECRET.encode() in stored, KEY in shown, place in shown) == (
        False,
        False,
        False,
        True,
    )
    assert {path.stat().st_mode & 0o077 for path in files if path.name != "lock"} == {0}


def test_spark_gets_credentials_apart(
    qcli: Cli, topic: str, s3: Store, place: str, engine: SparkEngine, tmp_path: Path
) -> None:
    """Workers do not have the environment of the command."""
    from trio_nsq.spark.export.job import open_export
    from trio_nsq.spark.export.request import ExportRequest
    from trio_nsq.spark.logs import BrokerPlace

    qcli.publish(topic, bodies(200))
    with s3.here():
        request = ExportRequest(topic, place, target_bytes=64 * 1024)
        with open_export(request, [BrokerPlace(qcli.http_address, topic)]) as job:
            tasks = job.plan([BrokerPlace(qcli.http_address, topic)])
            assert SECRET not in repr(tasks)
            job.run(engine, tasks, lambda *_: None)
    assert sequences(folder_of(s3, place, tmp_path)) == list(range(200))


# ---------------------------------------------------------------------- two exporters


def test_a_second_exporter_is_refused(
    qcli: Cli, topic: str, s3: Store, slow: Proxy, place: str, tmp_path: Path
) -> None:
    """While the first exporter writes, and after it has slept."""
    qcli.publish(topic, bodies(300))
    first = with_store(qcli, s3.behind(slow.endpoint))
    second = with_store(qcli, s3)
    is_held = _hold_back(slow, "PUT", ".parquet")
    with first.running("to-parquet", topic, place, *SMALL) as running:
        until(lambda: len(is_held) > 0)
        refused = second("to-parquet", topic, place, *SMALL)
        assert (refused.code, f"process {running.process.pid} on " in refused.err) == (1, True)
        slow.judge = lambda method, path: None
        running.process.send_signal(signal.SIGSTOP)
        qcli.publish(topic, bodies(100, 300))
        taken_over = second("to-parquet", topic, place, *SMALL)
        assert (taken_over.code, "400 messages" in taken_over.err) == (0, True), taken_over.err
        running.process.send_signal(signal.SIGCONT)
        for released in is_held:
            released.set()
        assert running.process.wait(60) in (1, 4)
        assert running.process.stderr is not None
        assert b"Another process has taken over" in running.process.stderr.read()
    assert sequences(folder_of(s3, place, tmp_path)) == list(range(400))
    assert with_store(qcli, s3)("to-parquet", topic, place, *SMALL).code == 0
    assert sequences(folder_of(s3, place, tmp_path)) == list(range(400))


def _hold_back(server: Proxy, method: str, part: str) -> list[threading.Event]:
    """Hold requests back whose path has a part; return what releases them, when there are some."""
    held: list[threading.Event] = []

    def judge(asked: str, path: str) -> Fault | None:
        if asked != method or part not in path:
            return None
        held.append(threading.Event())
        return Fault(status=503, then=held[-1].wait)

    server.judge = judge
    return held


def test_exporters_that_start_together(qcli: Cli, topic: str, s3: Store, place: str, tmp_path: Path) -> None:
    qcli.publish(topic, bodies(500))
    cli = with_store(qcli, s3)
    codes = []
    with (
        cli.running("to-parquet", topic, place, *SMALL) as one,
        cli.running("to-parquet", topic, place, *SMALL) as other,
    ):
        codes = [one.process.wait(60), other.process.wait(60)]
    assert sorted(codes) in ([0, 0], [0, 1])
    assert sequences(folder_of(s3, place, tmp_path)) == list(range(500))


# ---------------------------------------------------------------------- kills


# A process that is killed before a write leaves the same in the store as one that is killed after the previous write.
@pytest.mark.parametrize("is_sent", [False, True] if COMPLETE else [True])
def test_killed_at_every_request(
    qcli: Cli, topic: str, s3: Store, slow: Proxy, place: str, tmp_path: Path, is_sent: bool
) -> None:
    """The exporter is killed before its first write, then at it, at the second, and so on, until it comes to its end.

    Only the long form does so at each write; otherwise it is at each second one.

    Args:
        is_sent: Whether the store has the write at which the exporter is killed.
    """
    cli = with_store(qcli, s3.behind(slow.endpoint))
    published = kills = 0
    while True:
        qcli.publish(topic, bodies(150, published))
        published += 150
        sent = is_sent and kills > 0
        left = [kills - sent]
        killed: list[int] = []
        with cli.running("to-parquet", topic, place, *SMALL) as running:
            slow.judge = _killer(running, left, killed, is_sent=sent)
            code = running.process.wait(60)
        if code == 0:
            break
        assert (code, killed) == (-signal.SIGKILL, [running.process.pid])
        kills += 1 if COMPLETE else 2
        found = sequences(folder_of(s3, place, tmp_path)) if kills > 6 else []
        assert len(found) == len(set(found))
    assert kills >= 8, kills
    assert sequences(folder_of(s3, place, tmp_path)) == list(range(published))
    with s3.here():
        assert storage_at(place).names(f"_nsq/{topic}/done") == []


def _killer(running: Running, left: list[int], killed: list[int], *, is_sent: bool) -> Judge:
    """Return a judge that kills the exporter at one of its writes, before or after the store has it."""

    def kill() -> None:
        running.process.send_signal(signal.SIGKILL)
        killed.append(running.process.pid)

    def judge(method: str, path: str) -> Fault | None:
        if method in ("GET", "HEAD"):
            return None
        left[0] -= 1
        if left[0] >= 0 or killed:
            return None
        return Fault(is_sent=is_sent, then=kill)

    return judge


# ---------------------------------------------------------------------- faults


def test_follow_goes_on_after_faults(
    broker: Broker, qcli: Cli, topic: str, s3: Store, slow: Proxy, place: str, tmp_path: Path
) -> None:
    """Every fifth request fails: without an answer, with an answer that is lost, or with SlowDown."""
    broker.create(topic, "archive")
    cli = with_store(qcli, s3.behind(slow.endpoint))
    faults = [Fault(), Fault(is_sent=True), Fault(status=503), Fault(is_sent=True, status=500)]
    count = [0]

    def judge(method: str, path: str) -> Fault | None:
        count[0] += 1
        return faults[count[0] // 5 % len(faults)] if count[0] % 5 == 0 else None

    slow.judge = judge
    arguments = ["--channel", "archive", "--follow", "--every", "100ms", *SMALL]
    with cli.running("to-parquet", topic, place, *arguments) as running:
        for start in range(0, 600, 100):
            qcli.publish(topic, bodies(100, start))
            until(lambda: broker.channel_stats(topic, "archive")["depth"] == 0)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(60) in (143, -signal.SIGTERM)
    assert count[0] > 40
    assert sequences(folder_of(s3, place, tmp_path)) == list(range(600))


def test_follow_waits_for_a_store_that_has_worked(
    broker: Broker, qcli: Cli, topic: str, s3: Store, slow: Proxy, place: str, tmp_path: Path
) -> None:
    broker.create(topic, "archive")
    cli = with_store(qcli, s3.behind(slow.endpoint))
    arguments = ["--channel", "archive", "--follow", "--every", "100ms"]
    with cli.running("to-parquet", topic, place, *arguments) as running:
        qcli.publish(topic, bodies(10))
        until(lambda: broker.channel_stats(topic, "archive")["depth"] == 0)
        slow.judge = lambda method, path: Fault(status=403)
        qcli.publish(topic, bodies(10, 10))
        while not (line := running.hear_line()).startswith("Warning: "):
            pass
        assert "; retrying." in line
        assert broker.channel_stats(topic, "archive")["depth"] == 10
        slow.judge = lambda method, path: None
        until(lambda: broker.channel_stats(topic, "archive")["depth"] == 0)
        while not running.hear_line().startswith("Note: the export continues"):
            pass
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(60) in (143, -signal.SIGTERM)
    assert sequences(folder_of(s3, place, tmp_path)) == list(range(20))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_an_export_to_a_silent_store(
    qcli: Cli, topic: str, s3: Store, slow: Proxy, place: str, number: signal.Signals
) -> None:
    qcli.publish(topic, bodies(3))
    held = _hold_back(slow, "GET", "lock")
    with with_store(qcli, s3.behind(slow.endpoint)).running("to-parquet", topic, place) as running:
        until(lambda: len(held) > 0)
        began_s = time.monotonic()
        running.process.send_signal(number)
        assert running.process.wait(60) in (128 + number, -number)
        assert time.monotonic() - began_s < 5
        for released in held:
            released.set()


@pytest.mark.parametrize(
    ("uri", "text"),
    [
        (
            "s3://KEY:wrong@archive/x",
            r"access is denied \(HTTP 403 SignatureDoesNotMatch\) because the secret key is wrong",
        ),
        ("s3://missing/x", "the bucket missing does not exist"),
        ("s3://archive/x?region=eu-west-1", "the region is wrong: set AWS_REGION"),
        ("what://archive/x", "is not supported"),
        ("hdfs://archive/x", "cannot be used: "),
        ("abfss://container/x", "AZURE_STORAGE_ACCOUNT_NAME"),
    ],
)
def test_one_sentence_for_wrong_places(qcli: Cli, topic: str, s3: Store, uri: str, text: str) -> None:
    qcli.publish(topic, numbers(1))
    with s3.here():
        if "region" in uri:
            del os.environ["AWS_REGION"]
        result = run_in_process(qcli, "to-parquet", topic, uri.replace("KEY", KEY))
    assert result.code == 1
    assert re.fullmatch(rf"Error: [^\n]*{text}[^\n]*\.\n", result.err), result.err


class NotFound(BaseHTTPRequestHandler):
    """A web server that is no store."""

    def handle_request(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_request

    def log_message(self, *args: object) -> None:
        pass


@pytest.mark.parametrize("scheme", ["s3", "az"])
def test_endpoint_that_is_no_store(
    qcli: Cli, topic: str, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    qcli.publish(topic, numbers(3))
    with ThreadingHTTPServer(("127.0.0.1", 0), NotFound) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        for name, value in (
            *(("AWS_ENDPOINT_URL", endpoint), ("AWS_ALLOW_HTTP", "true")),
            *(("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b")),
            *(("AZURE_STORAGE_ENDPOINT", endpoint), ("AZURE_ALLOW_HTTP", "true")),
            *(("AZURE_STORAGE_ACCOUNT_NAME", "a"), ("AZURE_STORAGE_ACCOUNT_KEY", "Yg==")),
        ):
            monkeypatch.setenv(name, value)
        place = f"{scheme}://bucket/x"
        for words in (["to-parquet", topic, place], ["to-parquet", topic, place, "--delta"]):
            result = run_in_process(qcli, *words)
            told = f"Error: The object {place}/_nsq/{topic}/lock cannot be written: the store answers HTTP 404: check"
            assert (result.code, result.err.startswith(told)) == (1, True), result.err
        server.shutdown()


def test_full_folder_for_temporary_files_is_named(s3: Store, qcli: Cli, topic: str) -> None:
    """It is on this machine: the bucket is not full."""
    qcli.publish(topic, [random.Random(1).randbytes(100_000)] * 20)
    place = s3.new_place()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit_bytes in (10_000, 1_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limits[1]))
        try:
            with s3.here():
                result = run_in_process(qcli, "to-parquet", topic, place, "-q")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert result.code == 1
        assert f"the folder for temporary files, {tempfile.gettempdir()}: File too large" in result.err, (
            result.err
        )
        assert result.err.endswith("Set TMPDIR to a folder with more space.\n")
    with s3.here():
        assert run_in_process(qcli, "to-parquet", topic, place, "-q").code == 0
