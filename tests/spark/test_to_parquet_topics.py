"""Tests for `qcli to-parquet` of several topics in one process.

Among them are kills at random times; with `FAULT_COMPLETE=1` (`make soak`) there are many, and 1,000 topics instead of
20. `FAULT_SEED` sets the times.
"""

import os
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from cli.support import Cli
from interop.peers import Broker, qcli_lookupd, qcli_serve
from spark.support import (
    ToParquet,
    cli_of,
    column,
    leftovers,
    numbers,
    parquet_files,
    run_in_process,
    until,
)
from spark.table_support import DELTA, table_rows, use_catalog
from trio_nsq.api import lookupd as api
from trio_nsq.client.http.broker_http import BrokerHTTP
from trio_nsq.spark.export.request import ExportRequest
from trio_nsq.spark.export.topics import OPEN_TOPICS, TURN_RANGES, TopicOutcome, TopicsExport, TopicSource
from trio_nsq.spark.logs import BrokerPlace
from trio_nsq.spark.runtime.engine import Advance, Done, Task, run_inline
from trio_nsq.spark.runtime.processes import ProcessDied
from trio_nsq.spark.runtime.spark_engine import SparkEngine
from trio_nsq.spark.tables.target import TableTarget

COMPLETE = os.environ.get("FAULT_COMPLETE") == "1"
SEED = int(os.environ.get("FAULT_SEED", "1"))
DEADLINE_S = 120.0


def several(qcli: Cli, topic: str, counts: dict[str, int]) -> list[str]:
    """Publish to topics whose names begin with this one, and return the names."""
    for name, count in counts.items():
        qcli.publish(f"{topic}.{name}", numbers(count))
    return [f"{topic}.{name}" for name in counts]


def sources(
    qcli: Cli, names: Sequence[str], folder: Path, ranges: Callable[[str], int] = lambda _: 1
) -> list[TopicSource]:
    return [
        TopicSource(
            ExportRequest(name, str(folder / name), min_ranges=ranges(name)),
            [BrokerPlace(qcli.http_address, name)],
        )
        for name in names
    ]


def run(
    found: Sequence[TopicSource],
    engine: Callable[..., None] = run_inline,
    open_topics: int = OPEN_TOPICS,
    turn_ranges: int = TURN_RANGES,
) -> list[tuple[str, int, Exception | None]]:
    """Export the topics; return them in the order of their ends, with the messages of this round."""
    ended: list[tuple[str, int, Exception | None]] = []

    def report(outcome: TopicOutcome) -> None:
        ended.append((outcome.topic, outcome.result.messages, outcome.error))

    TopicsExport(
        lambda *_: engine, lambda *_: None, report, open_topics=open_topics, turn_ranges=turn_ranges
    ).run(found)
    return ended


def locks_held() -> int:
    """Return how many locks of exports this process has open."""
    found = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    return sum(path.endswith("/lock") for path in found)


# ---------------------------------------------------------------------- the command


def test_each_topic_gets_its_folder(qcli: Cli, topic: str, tmp_path: Path, to_parquet: ToParquet) -> None:
    names = several(qcli, topic, {"a": 30, "b": 20})
    found = to_parquet(*names, tmp_path, "--format", "json")
    assert found.code == 0, found.err
    assert {each["topic"]: (each["messages"], each["folder"]) for each in found.records} == {
        names[0]: (30, f"{tmp_path}/{names[0]}"),
        names[1]: (20, f"{tmp_path}/{names[1]}"),
    }
    for name, count in zip(names, (30, 20), strict=True):
        assert column(tmp_path / name, "seq") == list(range(count))
    again = to_parquet(*names, tmp_path, "--format", "json")
    assert [each["messages"] for each in again.records] == [0, 0]
    alone = to_parquet(
        names[0], tmp_path / names[0], "--format", "json"
    )  # the folder is that of one topic, too
    assert [each["messages"] for each in alone.records] == [0]


def test_pattern_and_place(qcli: Cli, topic: str, tmp_path: Path, to_parquet: ToParquet) -> None:
    """The name of a topic may be anywhere in the folder, also if the pattern has one match."""
    several(qcli, topic, {"a": 3, "b": 4})
    found = to_parquet("--topic-pattern", rf"^{topic}\.[a]$", tmp_path / "x-{topic}" / "v1")
    assert found.code == 0, found.err
    assert len(parquet_files(tmp_path / f"x-{topic}.a" / "v1")) == 1
    assert [each.name for each in tmp_path.iterdir()] == [f"x-{topic}.a"]
    alone = to_parquet(f"{topic}.b", tmp_path / "x-{topic}" / "v1")
    assert alone.code == 0, alone.err
    assert len(parquet_files(tmp_path / f"x-{topic}.b" / "v1")) == 1
    assert sorted(each.name for each in tmp_path.iterdir()) == [f"x-{topic}.a", f"x-{topic}.b"]
    nothing = to_parquet("--topic-pattern", "^no-such-topic$", tmp_path)
    assert (nothing.code, nothing.err) == (0, "Note: no topic matches.\n")


def test_a_topic_that_fails_does_not_stop_the_others(
    qcli: Cli, topic: str, tmp_path: Path, to_parquet: ToParquet
) -> None:
    names = several(qcli, topic, {"a": 30, "b": 20, "c": 10})
    assert to_parquet(names[1], tmp_path / names[1], "--text").code == 0
    qcli.publish(names[1], [b"x"])
    found = to_parquet(*names, f"{topic}.missing", tmp_path, "--format", "json")
    assert found.code == 4
    assert "2 failures:" in found.err
    assert f'Topic "{topic}.missing" does not exist' in found.err
    by_topic = {each["topic"]: each for each in found.records}
    assert {name: each["exit_code"] for name, each in by_topic.items()} == {
        names[0]: 0,
        names[1]: 1,
        names[2]: 0,
        f"{topic}.missing": 1,
    }
    assert "all files need the same layout" in by_topic[names[1]]["error"]
    assert by_topic[names[2]]["error"] is None
    table = to_parquet(*names, tmp_path)
    lines = [line.split() for line in table.err.splitlines()]
    assert [names[0], "nothing", "new", "0", "0", "B", "0", "0", "B"] in lines
    assert [names[1], "failed", "0", "0", "B", "0", "0", "B"] in lines
    failed = to_parquet(names[1], f"{topic}.missing", tmp_path)
    assert failed.code == 1  # nothing is exported


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["a", "b", "--iceberg", "prod/n.t"], "write {topic} where its name belongs"),
        (["a", "b", "--consume", "--channel", "c"], "are for one topic"),
        (["a", "a"], "The topic a is given twice"),
        ([], "Missing argument 'TOPIC...'"),
        (["--topic-pattern", "("], "is not a regular expression"),
    ],
)
def test_refused_options(tmp_path: Path, to_parquet: ToParquet, args: list[str], text: str) -> None:
    found = to_parquet(*args, tmp_path)
    assert (found.code, text in found.err) == (2, True), found.err


def test_channel_of_each_topic(
    broker: Broker, qcli: Cli, topic: str, tmp_path: Path, to_parquet: ToParquet
) -> None:
    names = [f"{topic}.a", f"{topic}.b"]
    for name in names:
        broker.create(name, "lake")
    several(qcli, topic, {"a": 30, "b": 20})
    arguments = ["--topic-pattern", rf"^{topic}\.", tmp_path, "--channel", "lake", "--format", "json"]
    assert sorted(each["messages"] for each in to_parquet(*arguments).records) == [20, 30]
    assert [broker.channel_stats(name, "lake")["depth"] for name in names] == [0, 0]
    qcli.publish(names[1], numbers(5))
    assert sorted(each["messages"] for each in to_parquet(*arguments).records) == [0, 5]
    assert broker.channel_stats(names[1], "lake")["depth"] == 0


@pytest.mark.parametrize(
    "target", [DELTA, TableTarget.iceberg("local/n.t_{topic}")], ids=["delta", "iceberg"]
)
def test_table_of_each_topic(
    target: TableTarget,
    qcli: Cli,
    topic: str,
    tmp_path: Path,
    to_parquet: ToParquet,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Columns are those of the topic, and become wider in one of them."""
    use_catalog(monkeypatch, tmp_path)
    qcli.publish(f"{topic}.a", [b'{"x": %d}' % number for number in range(20)])
    qcli.publish(f"{topic}.b", [b'{"y": "%d"}' % number for number in range(30)])
    arguments = ["--topic-pattern", rf"^{topic}\.", tmp_path / "f", "--json", *str(target).split()]
    assert to_parquet(*arguments).code == 0
    qcli.publish(f"{topic}.a", [b'{"x": 1.5}'])
    assert to_parquet(*arguments, "-q").code == 0
    for name, field, count in (("a", "x", 21), ("b", "y", 30)):
        folder = tmp_path / "f" / f"{topic}.{name}"
        own = TableTarget(target.kind, target.catalog, target.name.replace("{topic}", f"{topic}_{name}"))
        found = table_rows(own, folder)
        assert (found.num_rows, field in found.column_names) == (count, True)


def test_columns_become_wider_in_one_topic(
    qcli: Cli, topic: str, tmp_path: Path, to_parquet: ToParquet
) -> None:
    arguments = ["--topic-pattern", rf"^{topic}\.", tmp_path, "--json", "--format", "json"]
    for name in ("a", "b"):
        qcli.publish(f"{topic}.{name}", [b'{"x": %d}' % number for number in range(20)])
    assert to_parquet(*arguments).code == 0
    qcli.publish(f"{topic}.a", [b'{"x": 1.5}'])
    qcli.publish(f"{topic}.b", [b'{"x": 20}'])
    found = to_parquet(*arguments)
    assert {each["topic"]: each["widened"] for each in found.records} == {
        f"{topic}.a": ["x"],
        f"{topic}.b": [],
    }
    assert column(tmp_path / f"{topic}.a", "x") == [*map(float, range(20)), 1.5]
    assert column(tmp_path / f"{topic}.b", "x") == list(range(21))


def listed(lookupd: str) -> dict[str, int]:
    """Return how many brokers a discovery service lists with each topic."""
    nodes = BrokerHTTP(lookupd).ask(api.nodes())
    return dict(Counter(topic for node in nodes for topic in node.topics))


def test_archives_and_discovery(tmp_path: Path) -> None:
    """Topics are found in data folders, and at discovery services, each with the brokers that have it."""
    with qcli_lookupd() as lookupd:
        tcp = f"--lookupd-tcp-address={lookupd.tcp_address}"
        with qcli_serve(tmp_path / "1", tcp) as one, qcli_serve(tmp_path / "2", tcp) as two:
            cli_of(one).publish("both", numbers(10))
            cli_of(two).publish("both", numbers(20))
            cli_of(two).publish("only", numbers(30))
            service = ["--lookupd-http-address", lookupd.http_address]
            until(lambda: listed(lookupd.http_address) == {"both": 2, "only": 1})
            found = cli_of(one)(
                "to-parquet", "--topic-pattern", ".", str(tmp_path / "a"), "--format", "json", *service
            )
            assert found.code == 0, found.err
            assert {each["topic"]: each["messages"] for each in found.records} == {"both": 30, "only": 30}
            assert set(column(tmp_path / "a" / "both", "broker")) == {one.http_address, two.http_address}
            missing = cli_of(one)("to-parquet", "only", "nowhere", str(tmp_path / "a"), "-q", *service)
            assert (missing.code, "know no broker with topic nowhere" in missing.err) == (4, True)
    folders = ",".join(f"{name}={tmp_path / name}" for name in ("1", "2"))
    archive = run_in_process(
        cli_of(one),
        *("to-parquet", "--topic-pattern", "o", str(tmp_path / "b"), "--format", "json"),
        *("--from-segments", folders),
    )
    assert archive.code == 0, archive.err
    assert {each["topic"]: each["messages"] for each in archive.records} == {"both": 30, "only": 30}


# ---------------------------------------------------------------------- continuous


def test_new_topics_are_found_while_it_follows(qcli: Cli, topic: str, tmp_path: Path) -> None:
    """So are new messages of a known topic; a topic that fails, and then does not, is told once."""
    several(qcli, topic, {"a": 10})
    blocked = tmp_path / f"{topic}.c"
    blocked.write_bytes(b"a file")
    arguments = ["--topic-pattern", rf"^{topic}\.", str(tmp_path), "--follow", "--every", "50ms"]
    with qcli.running("to-parquet", *arguments, "--topic-refresh", "50ms") as running:
        until(lambda: len(parquet_files(tmp_path / f"{topic}.a")) == 1)
        several(qcli, topic, {"b": 20})
        until(lambda: len(parquet_files(tmp_path / f"{topic}.b")) == 1)
        several(qcli, topic, {"c": 5})
        lines: list[str] = []
        while not any(f"{topic}.c" in line for line in lines):
            lines.append(running.hear_line())
        assert lines[-1].endswith("; retrying.\n"), lines
        several(qcli, topic, {"a": 7})
        until(lambda: len(parquet_files(tmp_path / f"{topic}.a")) == 2)
        blocked.unlink()
        while not running.hear_line().startswith(f"5 messages (5 B) of {topic}.c written"):
            pass
        running.process.terminate()
        result = running.end()
    assert result.code == 143
    assert f"{topic}.c" in result.err  # its row
    assert "42 messages" in result.err
    assert column(tmp_path / f"{topic}.a", "seq") == list(range(17))


def test_a_later_topic_is_exported_from_its_first_message(
    broker: Broker, qcli: Cli, topic: str, tmp_path: Path
) -> None:
    """Although another channel was there first, so that a new one begins after the messages."""
    several(qcli, topic, {"a": 1})
    arguments = ["--topic-pattern", rf"^{topic}\.", str(tmp_path), "--channel", "lake", "--follow"]
    with qcli.running("to-parquet", *arguments, "--every", "50ms", "--topic-refresh", "50ms") as running:
        until(lambda: len(parquet_files(tmp_path / f"{topic}.a")) == 1)
        broker.create(f"{topic}.b", "other")
        several(qcli, topic, {"b": 20})
        folder = tmp_path / f"{topic}.b"
        until(lambda: bool(parquet_files(folder)) and column(folder, "seq") == list(range(20)))
        running.process.terminate()
        assert "begins after the newest message" not in running.end().err


def test_topics_without_news_are_not_opened_again(qcli: Cli, topic: str, tmp_path: Path) -> None:
    names = several(qcli, topic, {str(number): 3 for number in range(5)})
    found = sources(qcli, names, tmp_path)
    assert run(found) == [(name, 3, None) for name in names]
    assert run(found) == []
    qcli.publish(names[3], numbers(2))
    assert run(found) == [(names[3], 2, None)]
    assert run(found) == []


def test_rounds_begin_where_the_last_one_ended(qcli: Cli, topic: str, tmp_path: Path) -> None:
    """Without a channel too, and although no job lives longer than a round."""
    (name,) = several(qcli, topic, {"a": 10})
    request = ExportRequest(name, str(tmp_path), first="latest")
    source = TopicSource(request, [BrokerPlace(qcli.http_address, name)])
    assert run([source]) == [(name, 0, None)]
    qcli.publish(name, numbers(4, 10))
    assert run([source]) == [(name, 4, None)]
    assert column(tmp_path, "seq") == [10, 11, 12, 13]


# ---------------------------------------------------------------------- scheduling


def test_a_large_topic_does_not_hold_up_small_ones(qcli: Cli, topic: str, tmp_path: Path) -> None:
    counts = {"large": 30, **{f"s{number}": 1 for number in range(6)}}
    names = several(qcli, topic, counts)
    turns: list[list[str]] = []
    most = 0

    def engine(tasks: Sequence[Task[Done]], finish: Callable[[Done], None], advance: Advance) -> None:
        nonlocal most
        most = max(most, locks_held())
        turns.append([])

        def finished(done: Done) -> None:
            assert isinstance(done, tuple)
            turns[-1].append(done[0])
            finish(done)

        run_inline(tasks, finished, advance)

    found = sources(qcli, names, tmp_path, lambda name: 30 if name == names[0] else 1)
    ended = run(found, engine, open_topics=4, turn_ranges=8)
    assert ended[-1] == (names[0], 30, None)
    assert sorted(ended) == sorted((name, counts[name.partition(".")[2]], None) for name in names)
    assert most == 4
    assert locks_held() == 0
    assert [len(turn) for turn in turns[:3]] == [8, 8, 8]
    assert set(turns[0] + turns[1]) == set(names)
    assert column(tmp_path / names[0], "seq") == list(range(30))


def test_interrupted_in_a_turn(qcli: Cli, topic: str, tmp_path: Path) -> None:
    """What is done is reported and in the manifests, no lock is held, and the next run exports the rest."""
    names = several(qcli, topic, {"a": 10, "b": 10, "c": 10})

    def engine(tasks: Sequence[Task[Done]], finish: Callable[[Done], None], advance: Advance) -> None:
        run_inline(tasks[:4], finish, advance)
        raise KeyboardInterrupt

    found = sources(qcli, names, tmp_path, lambda _: 2)
    outcomes: list[TopicOutcome] = []
    with pytest.raises(KeyboardInterrupt):
        TopicsExport(lambda *_: engine, lambda *_: None, outcomes.append).run(found)
    assert [(each.topic, each.result.messages) for each in outcomes] == [
        (names[0], 10),
        (names[1], 5),
        (names[2], 5),
    ]
    assert (locks_held(), leftovers(tmp_path)) == (0, [])
    assert sorted(run(found)) == [(names[0], 0, None), (names[1], 5, None), (names[2], 5, None)]
    assert [column(tmp_path / name, "seq") for name in names] == [list(range(10))] * 3


def test_an_engine_that_fails_keeps_what_is_done(qcli: Cli, topic: str, tmp_path: Path) -> None:
    names = several(qcli, topic, {"a": 10, "b": 10})

    def engine(tasks: Sequence[Task[Done]], finish: Callable[[Done], None], advance: Advance) -> None:
        run_inline(tasks[:1], finish, advance)
        raise ProcessDied("a process died")

    found = sources(qcli, names, tmp_path)
    outcomes: list[TopicOutcome] = []
    with pytest.raises(ProcessDied):
        TopicsExport(lambda *_: engine, lambda *_: None, outcomes.append).run(found)
    assert [(each.topic, each.result.messages, str(each.error)) for each in outcomes] == [
        (names[0], 10, "a process died")
    ]
    assert run(found) == [(names[0], 0, None), (names[1], 10, None)]


def test_a_folder_that_fails_in_a_turn(qcli: Cli, topic: str, tmp_path: Path) -> None:
    """The other topics of the turn are exported."""
    names = several(qcli, topic, {"a": 10, "b": 10})
    folder, aside = tmp_path / names[0], tmp_path / "aside"

    def engine(tasks: Sequence[Task[Done]], finish: Callable[[Done], None], advance: Advance) -> None:
        folder.rename(aside)
        folder.write_bytes(b"a file")
        run_inline(tasks, finish, advance)

    found = sources(qcli, names, tmp_path)
    ended = {name: (messages, error) for name, messages, error in run(found, engine)}
    assert ended[names[1]] == (10, None)
    assert isinstance(ended[names[0]][1], OSError)
    folder.unlink()
    aside.rename(folder)
    assert run(found) == [(names[0], 10, None)]


@contextmanager
def closing_server() -> Iterator[tuple[str, list[int]]]:
    """A server that closes every connection: its address, and a list that has an item for each."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        seen: list[int] = []

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                seen.append(1)
                connection.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        host, port = server.getsockname()
        yield f"{host}:{port}", seen
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_broker_that_does_not_answer_is_asked_once_in_a_round(
    qcli: Cli, topic: str, tmp_path: Path
) -> None:
    names = several(qcli, topic, {str(number): 3 for number in range(5)})
    with closing_server() as (address, seen):
        found = [
            TopicSource(each.request, [*each.places, BrokerPlace(address, each.request.topic)])
            for each in sources(qcli, names, tmp_path)
        ]
        outcomes: list[TopicOutcome] = []
        TopicsExport(lambda *_: run_inline, lambda *_: None, outcomes.append).run(found)
        asked = len(seen)
    assert [(each.result.messages, list(each.failures)) for each in outcomes] == [(3, [address])] * 5
    assert asked <= 2  # an HTTP client may try a second time


def test_topics_on_spark(engine: SparkEngine, qcli: Cli, topic: str, tmp_path: Path) -> None:
    names = several(qcli, topic, {str(number): 10 * number + 1 for number in range(5)})
    found = sources(qcli, [*names, f"{topic}.missing"], tmp_path, lambda _: 2)
    ended = {name: (messages, error is None) for name, messages, error in run(found, engine)}
    assert ended.pop(f"{topic}.missing") == (0, True)  # in the outcome's failures
    assert ended == {name: (10 * number + 1, True) for number, name in enumerate(names)}
    for number, name in enumerate(names):
        assert column(tmp_path / name, "seq") == list(range(10 * number + 1))


# ---------------------------------------------------------------------- many topics, and kills


def test_many_small_topics(topic: str, tmp_path: Path) -> None:
    """Memory and descriptors do not grow with the number of topics."""
    count, at_once = (1000, OPEN_TOPICS) if COMPLETE else (20, 5)
    most: list[tuple[int, int]] = []

    def engine(tasks: Sequence[Task[Done]], finish: Callable[[Done], None], advance: Advance) -> None:
        most.append((locks_held(), len(os.listdir("/proc/self/fd"))))
        run_inline(tasks, finish, advance)

    with qcli_serve(tmp_path / "data", "--sync=interval") as broker:
        names = several(cli_of(broker), topic, {f"{number:04d}": 2 for number in range(count)})
        before = len(os.listdir("/proc/self/fd"))
        found = sources(cli_of(broker), names, tmp_path)
        assert run(found, engine, open_topics=at_once) == [(name, 2, None) for name in names]
        assert run(found, engine) == []
    assert max(locks for locks, _ in most) == at_once
    assert max(descriptors for _, descriptors in most) <= before + at_once + 20
    assert [len(parquet_files(tmp_path / name)) for name in names] == [1] * count


@pytest.mark.parametrize("kills", [20 if COMPLETE else 2])
def test_killed_while_topics_are_exported(qcli: Cli, topic: str, tmp_path: Path, kills: int) -> None:
    """The ledger of what was published, by topic, is exactly what the files have, while messages are published."""
    chance = random.Random(SEED)
    names = [f"{topic}.{number}" for number in range(4)]
    ledger: dict[str, int] = dict.fromkeys(names, 0)
    folder = tmp_path / "a"
    arguments = ["--topic-pattern", rf"^{topic}\.", str(folder), "--target-file-size", "64KiB", "-q"]

    def publish() -> None:
        for name in names:
            count = chance.randrange(200, 600)
            qcli.publish(name, [b"%d" % n + b"x" * 500 for n in range(ledger[name], ledger[name] + count)])
            ledger[name] += count

    for _ in range(kills):
        publish()
        before = len(parquet_files(folder))
        with qcli.running("to-parquet", *arguments, "--engine", "inline") as running:
            deadline = time.monotonic() + DEADLINE_S
            while running.process.poll() is None and len(parquet_files(folder)) < before + 4:
                assert time.monotonic() < deadline
            time.sleep(chance.uniform(0, 0.05))
            running.process.kill()
            running.process.wait()
        for name in names:
            found = column(folder / name, "seq") if parquet_files(folder / name) else []
            assert len(found) == len(set(found))
    publish()
    result = run_in_process(qcli, "to-parquet", *arguments)
    assert result.code == 0, result.err
    for name in names:
        assert column(folder / name, "seq") == list(range(ledger[name]))
        bodies = column(folder / name, "body")
        assert [int(body.partition(b"x")[0]) for body in bodies] == list(range(ledger[name]))
    assert leftovers(folder) == []
