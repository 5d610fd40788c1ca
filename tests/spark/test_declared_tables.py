"""Tests for `qcli pipeline`: the tables that topics declare. Among them are kills at random times.

With `FAULT_COMPLETE=1` (`make soak`) there are many kills; `FAULT_SEED` sets the times.
"""

import json
import os
import random
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import deltalake
import pytest

from cli.support import Cli, Running
from interop.peers import Broker, free_address, qcli_serve
from spark.support import cli_of, column, leftovers, numbers, parquet_files, run_in_process, until
from spark.table_support import DELTA, ICEBERG, catalog_environment, table_rows, use_catalog
from storage.stores import Store
from trio_nsq.spark.places import storage_at
from trio_nsq.spark.tables.delta import delta_options

COMPLETE = os.environ.get("FAULT_COMPLETE") == "1"
SEED = int(os.environ.get("FAULT_SEED", "1"))
NOWHERE = Cli("", "127.0.0.1:1")
QUICK = ("--every", "50ms", "--topic-refresh", "50ms", "--engine", "inline")


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Broker]:
    """A broker for one test: a supervisor writes the tables of all topics."""
    with qcli_serve(tmp_path / "data", "--sync=interval") as running:
        yield running


@pytest.fixture
def qcli(own: Broker) -> Cli:
    return cli_of(own)


def pipeline(qcli: Cli, *args: str) -> AbstractContextManager[Running]:
    return qcli.running("pipeline", "run", *QUICK, *args)


def declare(broker: Broker, topic: str, table: str, **settings: int) -> None:
    body = json.dumps({"table": table, **settings}).encode()
    broker.put("/topic/settings", body, topic=topic)


def seqs_in(folder: Path) -> list[int]:
    """Return the sequences in a folder of files, sorted; empty as long as there is none."""
    return column(folder, "seq") if parquet_files(folder) else []


def seqs_of_delta(place: str) -> list[int]:
    with suppress(deltalake.exceptions.TableNotFoundError):
        options = delta_options(storage_at(place)) if "://" in place else None
        table = deltalake.DeltaTable(place, storage_options=options).to_pyarrow_table()
        return sorted(table["seq"].to_pylist())
    return []


def hear(running: Running, text: str) -> str:
    """Read lines of the diagnostics until one has the text, and return it."""
    while text not in (line := running.hear_line()):
        pass
    return line


def stop(running: Running) -> str:
    running.process.terminate()
    result = running.end()
    assert result.code == 143, result.err
    return result.err


def status(qcli: Cli, *args: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Return the exit code of `pipeline status`, and its records by topic."""
    found = qcli("pipeline", "status", "--format", "json", *args)
    return found.code, {record["topic"]: record for record in found.records}


# ---------------------------------------------------------------------- settings


@pytest.mark.parametrize("form", ["delta", "iceberg", "parquet"])
def test_a_table_that_appears_gets_all_retained_messages(
    form: str, own: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that the only channel has passed, in each format; and it continues after a restart."""
    use_catalog(monkeypatch, tmp_path)
    qcli = Cli(own.tcp_address, own.http_address, catalog_environment(tmp_path))
    target = tmp_path / "lake" / "clicks"
    declared = "iceberg:local/events.clicks" if form == "iceberg" else f"{form}:{target}"

    def seqs(running: Running) -> list[int]:
        """Return the sequences in the table after the next round that has messages."""
        hear(running, "of clicks written to")
        if form == "parquet":
            return seqs_in(target)
        found: list[int] = table_rows(DELTA if form == "delta" else ICEBERG, target)["seq"].to_pylist()
        return found

    own.create("clicks", "other")
    own.put("/topic/settings", b'{"retention_time_ms": -1}', topic="clicks")
    qcli.publish("clicks", numbers(20))
    own.http("POST", "/channel/empty", topic="clicks", channel="other")
    folder = ("--iceberg-folder", str(tmp_path / "lake"))
    with pipeline(qcli, *folder) as running:
        assert "This command waits for one." in hear(
            running, "Note: no topic declares a table: qcli topic set "
        )
        declare(own, "clicks", declared)
        assert seqs(running) == list(range(20))
        qcli.publish("clicks", numbers(5))
        assert seqs(running) == list(range(25))
        assert "clicks" in stop(running)
    own.put("/topic/settings", b'{"retention_time_ms": 0}', topic="clicks")
    qcli.publish("clicks", numbers(7))
    own.http("POST", "/channel/empty", topic="clicks", channel="other")  # the table's channel keeps them
    with pipeline(qcli, *folder) as running:
        assert seqs(running) == list(range(32))
        until(lambda: own.channel_stats("clicks", "tables")["depth"] == 0)
        stop(running)
    assert leftovers(tmp_path) == []


def test_a_table_that_changes_and_vanishes(own: Broker, qcli: Cli, tmp_path: Path) -> None:
    """The new table gets all retained messages, and so does the old one when it comes back; each message once."""
    a, b = tmp_path / "a", tmp_path / "b"
    own.create("clicks", "other")
    declare(own, "clicks", f"delta:{a}", retention_time_ms=-1)
    with pipeline(qcli) as running:
        qcli.publish("clicks", numbers(10))
        until(lambda: seqs_of_delta(str(a)) == list(range(10)))
        declare(own, "clicks", f"parquet:{b}")
        until(lambda: seqs_in(b) == list(range(10)))
        qcli.publish("clicks", numbers(5))
        until(lambda: seqs_in(b) == list(range(15)))
        assert seqs_of_delta(str(a)) == list(range(10))
        declare(own, "clicks", f"delta:{a}")
        until(lambda: seqs_of_delta(str(a)) == list(range(15)))
        until(lambda: own.channel_stats("clicks", "tables")["depth"] == 0)
        declare(own, "clicks", "")
        hear(running, "clicks declares no table any longer")
        qcli.publish("clicks", numbers(3))
        until(lambda: '"tables"' not in own.http("GET", "/stats", format="json").decode())
        stop(running)
    assert seqs_of_delta(str(a)) == list(range(15))


def test_topics_are_independent(own: Broker, qcli: Cli, tmp_path: Path) -> None:
    """Topics with the same table, and one whose folder is a file, do not stop the others; the status names them."""
    address = free_address()
    (tmp_path / "file").write_bytes(b"x")
    for name in ("good", "bad", "one", "two"):
        own.create(name)
    declare(own, "good", f"delta:{tmp_path / 'good'}")
    declare(own, "bad", f"delta:{tmp_path / 'file'}")
    declare(own, "one", f"delta:{tmp_path / 'same'}")
    declare(own, "two", f"delta:{tmp_path / 'same'}")
    for name in ("good", "bad", "one", "two"):
        qcli.publish(name, numbers(5))
    with pipeline(qcli, "--http-address", address) as running:
        until(lambda: seqs_of_delta(str(tmp_path / "good")) == list(range(5)))
        qcli.publish("good", numbers(5))
        until(lambda: seqs_of_delta(str(tmp_path / "good")) == list(range(10)))
        until(lambda: status(qcli, "--http-address", address)[1]["bad"]["error"] is not None)
        code, found = status(qcli, "--http-address", address)
        assert code == 1
        assert [found[name]["error"] is None for name in ("good", "bad", "one", "two")] == [
            True,
            False,
            False,
            False,
        ]
        assert (found["good"]["table"], found["good"]["messages"]) == (f"delta:{tmp_path / 'good'}", 10)
        assert "is that of two, too" in found["one"]["error"]
        with pytest.raises(urllib.error.HTTPError) as unhealthy:
            urllib.request.urlopen(f"http://{address}/healthz")
        assert unhealthy.value.code == 503
        assert "one: its table" in unhealthy.value.read().decode()
        declare(own, "two", f"delta:{tmp_path / 'two'}")
        (tmp_path / "file").unlink()
        for folder in ("file", "same", "two"):
            until(lambda folder=folder: seqs_of_delta(str(tmp_path / folder)) == list(range(5)))  # type: ignore[misc]
        until(lambda: status(qcli, "--http-address", address)[0] == 0)
        stop(running)
    code, found = status(qcli)
    assert (code, found["good"]["lag"], found["good"]["lag_s"]) == (0, 0, None)


def test_sections_have_the_options_of_topics(own: Broker, qcli: Cli, tmp_path: Path) -> None:
    """Keys above the sections are for all topics, and for the command."""
    for name in ("clicks", "orders.eu", "raw"):
        own.create(name)
        declare(own, name, f"delta:{tmp_path / name}")
        qcli.publish(name, [b'{"user": "a", "card": "12345678"}'])
    config = tmp_path / "pipeline.toml"
    config.write_text(
        'every = "50ms"\ncompact = true\n'
        '[clicks]\njson = true\npartition-by = "user"\n'
        '[orders]\ntopic-pattern = "^orders"\njson = true\nmask = "card=last4"\n'
    )
    with qcli.running("pipeline", "run", "--config", str(config), "--engine", "inline") as running:
        for name in ("clicks", "orders.eu", "raw"):
            until(lambda name=name: seqs_of_delta(str(tmp_path / name)) == [0])  # type: ignore[misc]
        stop(running)
    assert [path.split("/")[0] for path in parquet_files(tmp_path / "clicks")] == ["user=a"]
    assert deltalake.DeltaTable(tmp_path / "orders.eu").to_pyarrow_table()["card"].to_pylist() == ["***5678"]
    assert "card" not in deltalake.DeltaTable(tmp_path / "raw").to_pyarrow_table().column_names


def test_key_of_all_topics(own: Broker, qcli: Cli, tmp_path: Path) -> None:
    """Only a table of files cannot have it."""
    for name, kind in (("clicks", "delta"), ("files", "parquet")):
        own.create(name)
        declare(own, name, f"{kind}:{tmp_path / name}")
        qcli.publish(name, [b'{"user": "a"}', b'{"user": "a"}'])
    config = tmp_path / "pipeline.toml"
    config.write_text('json = true\nkey = "user"\ncompact = true\n')
    with pipeline(qcli, "--config", str(config)) as running:
        until(lambda: seqs_of_delta(str(tmp_path / "clicks")) == [1])
        assert "files: --config: " in hear(running, "--key replaces and removes rows of a table")
        stop(running)
    assert seqs_in(tmp_path / "files") == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("delta = true", "delta: the topic declares its table"),
        ("[clicks]\niceberg = 'a/b.c'", "[clicks]: iceberg: the topic declares its table"),
        ("[clicks]\nchannel = 'c'", "channel: it is for all sections"),
        ("[clicks]\nmask = 'x'", "[clicks]: --mask takes fields of JSON bodies"),
        ("[a]\ntopics = ['t']\n[b]\ntopics = ['t']", "[b]: the topic t is in the section [a], too"),
        ("from-segments = '/x'", "from-segments: tables are written from brokers"),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, said: str) -> None:
    config = tmp_path / "pipeline.toml"
    config.write_text(text)
    found = run_in_process(NOWHERE, "pipeline", "run", "--config", str(config))
    assert (found.code, said in " ".join(found.err.split())) == (2, True), found.err


def test_ephemeral_channel_is_refused() -> None:
    found = run_in_process(NOWHERE, "pipeline", "run", "--channel", "c#ephemeral")
    assert (found.code, "is no durable channel" in found.err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "--http-address", ""), "'--http-address': '' is not host:port"),
        (("run", "--lease", ""), "'--lease': it is empty: name a folder or a URL"),
        (
            ("run", "--allow-table", "iceberg:"),
            "'--allow-table': 'iceberg:' is not iceberg:CATALOG, iceberg:CATALOG/NAMESPACE",
        ),
        (
            ("run", "--allow-table", "s3://key:hidden@lake"),
            "'--allow-table': s3://lake: a place of tables has no user, no secret and no options",
        ),
        (
            ("run", "--allow-table", "s3://lake/,iceberg:prod", "--lease", "s3a://key:hidden@lake/pipeline"),
            "--lease s3a://lake/pipeline is in a place of --allow-table",
        ),
        (
            ("run", "--allow-table", "./lake", "--lease", "lake"),
            "--lease lake is in a place of --allow-table",
        ),
        (
            ("run", "--allow-table", "s3://lake/,iceberg:prod", "--iceberg-folder", "s3a://lake/iceberg"),
            "--iceberg-folder s3a://lake/iceberg is in a place of --allow-table",
        ),
        (("status", "--http-address", ""), "'--http-address': '' is not host:port"),
        (("status", "--http-address", "localhost"), "'--http-address': 'localhost' is not host:port"),
    ],
)
def test_wrong_addresses_and_leases(arguments: tuple[str, ...], said: str) -> None:
    found = run_in_process(NOWHERE, "pipeline", *arguments)
    assert (found.code, said in " ".join(found.err.split())) == (2, True), found.err
    assert "hidden" not in found.err


def test_folders_of_the_file_are_in_no_place_of_tables(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.toml"
    file.write_text('[clicks]\nfolder = "s3://lake/tables/iceberg"\n')
    found = run_in_process(
        NOWHERE, "pipeline", "run", "--config", str(file), "--allow-table", "s3://lake/tables"
    )
    said = f"--config: {file}: the folder s3://lake/tables/iceberg is in a place of --allow-table"
    assert (found.code, said in " ".join(found.err.split())) == (2, True), found.err


def test_iceberg_needs_a_folder(own: Broker, qcli: Cli, tmp_path: Path) -> None:
    own.create("clicks")
    declare(own, "clicks", "iceberg:local/events.clicks")
    with pipeline(qcli) as running:
        assert "give --iceberg-folder" in hear(running, "Warning: clicks: ")
        stop(running)


def test_tables_in_other_places_are_not_written(own: Broker, qcli: Cli, tmp_path: Path) -> None:
    """Whoever may change the settings of a topic does not choose any folder of the supervisor."""
    for name, place in (("a", "lake/a"), ("b", "elsewhere"), ("c", "lake/../elsewhere")):
        own.create(name)
        declare(own, name, f"parquet:{tmp_path / place}")
        qcli.publish(name, [b"x"])
    with pipeline(qcli, "--allow-table", f"iceberg:local,{tmp_path / 'lake'}") as running:
        until(lambda: seqs_in(tmp_path / "lake" / "a") == [0])
        heard = [hear(running, "is in no place of --allow-table") for _ in range(2)]
        stop(running)
    assert sorted(line.split(": ")[1] for line in heard) == ["b", "c"]
    assert not (tmp_path / "elsewhere").exists()


def test_channel_of_a_table_that_was_removed_meanwhile(own: Broker, qcli: Cli) -> None:
    """Only a warning: it may be the channel of something else."""
    own.create("clicks", "tables")
    with pipeline(qcli) as running:
        assert "qcli channel delete clicks/tables" in hear(running, "Warning: clicks declares no table")
        stop(running)
    assert own.channel_stats("clicks", "tables")["depth"] == 0


# ---------------------------------------------------------------------- kills


def test_kills_of_supervisor_and_broker(tmp_path: Path) -> None:
    """Each acknowledged message is in the tables once."""
    chance = random.Random(SEED)
    http, published = free_address(), dict.fromkeys(("a", "b"), 0)
    args = ("--every", "20ms", "--topic-refresh", "50ms", "--engine", "inline", "-q")
    for life in range(12 if COMPLETE else 3):
        with qcli_serve(tmp_path / "data", f"--http-address={http}") as broker:
            qcli = cli_of(broker)
            if life == 0:
                for name in published:
                    broker.create(name)
                    declare(broker, name, f"delta:{tmp_path / name}")
            with qcli.running("pipeline", "run", *args) as running:
                until_s = time.monotonic() + chance.uniform(0.5, 1.0)
                while time.monotonic() < until_s:
                    for name in published:
                        qcli.publish(name, numbers(20, published[name]))
                        published[name] += 20
                    time.sleep(0.01)
                running.process.kill()
                running.process.wait()
            broker.process.kill()
            broker.process.wait()
        for name, count in published.items():
            found = seqs_of_delta(str(tmp_path / name))
            assert len(found) == len(set(found)) <= count
    with qcli_serve(tmp_path / "data", f"--http-address={http}") as broker:
        with cli_of(broker).running("pipeline", "run", *args) as running:
            for name, count in published.items():
                until(lambda name=name, count=count: len(seqs_of_delta(str(tmp_path / name))) == count)  # type: ignore[misc]
            stop(running)
    for name, count in published.items():
        table = deltalake.DeltaTable(tmp_path / name).to_pyarrow_table()
        assert sorted(map(int, table["body"].to_pylist())) == list(range(count))


def test_the_stand_by_takes_over_while_the_holder_is_suspended(
    moto_s3: Store, own: Broker, tmp_path: Path
) -> None:
    """The holder continues later, notices that it has lost the lease, and no message is missing or twice."""
    place, lease = moto_s3.new_place(), moto_s3.new_place()
    qcli = Cli(own.tcp_address, own.http_address, moto_s3.env)
    own.create("clicks")
    declare(own, "clicks", f"delta:{place}")
    published = 0

    def publish_until(condition: Callable[[], bool]) -> None:
        nonlocal published

        def met() -> bool:
            nonlocal published
            qcli.publish("clicks", numbers(10, published))
            published += 10
            return condition()

        until(met)

    with moto_s3.here(), pipeline(qcli, "--lease", lease) as first:
        publish_until(lambda: len(seqs_of_delta(place)) >= 30)
        with pipeline(qcli, "--lease", lease) as second:
            hear(second, "has the lease and writes; waiting for it")
            first.process.send_signal(signal.SIGSTOP)
            before = len(seqs_of_delta(place))
            publish_until(lambda: len(seqs_of_delta(place)) > before)  # the lease has expired
            first.process.send_signal(signal.SIGCONT)
            hear(first, "Waiting for the lease.")
            hear(first, "has the lease and writes; waiting for it")
            qcli.publish("clicks", numbers(10, published))
            published += 10
            until(lambda: seqs_of_delta(place) == list(range(published)))
            stop(second)
        hear(first, "this process has the lease now")
        qcli.publish("clicks", numbers(10, published))
        published += 10
        until(lambda: seqs_of_delta(place) == list(range(published)))
        stop(first)
