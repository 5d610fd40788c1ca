"""Tables in buckets: exports, kills, replays, and lost answers of the store. `FAULT_COMPLETE=1` kills more often."""

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import deltalake
import duckdb
import pytest

from cli.support import Cli
from interop.peers import Broker
from soak import in_soak
from spark.support import numbers, replayed, run_in_process, until
from spark.table_support import COUNT, DELTA, ICEBERG, catalog_environment, write_range
from storage.stores import KEY, SECRET, Fault, Store, proxy
from trio_nsq.spark.export.layout import Layout
from trio_nsq.spark.places import keep_secrets, storage_at
from trio_nsq.spark.tables.catalogs import load
from trio_nsq.spark.tables.delta import delta_options
from trio_nsq.spark.tables.opening import open_table
from trio_nsq.spark.tables.target import TableError, TableTarget

COMPLETE = os.environ.get("FAULT_COMPLETE") == "1"
SEED = int(os.environ.get("FAULT_SEED", "1"))
KINDS = pytest.mark.parametrize("target", [DELTA, ICEBERG], ids=["delta", "iceberg"])
ROUNDS = 10


@pytest.fixture(params=["s3", *in_soak("moto_s3")])
def store(request: pytest.FixtureRequest) -> Store:
    found: Store = request.getfixturevalue(request.param)
    return found


def rows_in(target: TableTarget, place: str) -> Any:
    """Read a table through its library."""
    if target == DELTA:
        options = delta_options(storage_at(place))
        return deltalake.DeltaTable(place, storage_options=options).to_pyarrow_table()
    return load(target.catalog, storage_at(place)).load_table(target.name).scan().to_arrow()


def counts(table: Any) -> tuple[int, int, int]:
    """Have DuckDB count the rows of a table: all, those with different sequences, and the sum of sequences."""
    query = "SELECT count(*), count(DISTINCT (broker, seq)), sum(seq)::BIGINT FROM found"
    with duckdb.connect() as database:
        database.register("found", table)
        ((rows, distinct, total),) = database.execute(query).fetchall()
    return rows, distinct, total


@KINDS
@pytest.mark.parametrize("kills", [12 if COMPLETE else 1])
def test_killed_follow(
    target: TableTarget, store: Store, broker: Broker, qcli: Cli, topic: str, tmp_path: Path, kills: int
) -> None:
    """Small files are merged meanwhile; at the end the table is replayed."""
    chance = random.Random(SEED)
    place = store.new_place()
    broker.create(topic, "lake")
    environment = store.env | catalog_environment(tmp_path)
    arguments = ["to-parquet", topic, place, *str(target).split(), "--channel", "lake", "--compact"]
    arguments += ["--engine", "inline", "-q"]
    published = 0
    with store.here(**catalog_environment(tmp_path)):
        for _ in range(kills):
            files = _parquet_files(place)
            with Cli(qcli.tcp_address, qcli.http_address, environment).running(
                *arguments, "--follow", "--every", "20ms"
            ) as running:

                def has_more(files: int = files) -> bool:
                    nonlocal published
                    assert running.process.poll() is None
                    qcli.publish(topic, numbers(50, published))
                    published += 50
                    return _parquet_files(place) >= files + ROUNDS

                until(has_more)
                time.sleep(chance.uniform(0, 0.15))
                running.process.kill()
                running.process.wait()
            rows, distinct, _ = counts(rows_in(target, place))
            assert rows == distinct <= published
        result = run_in_process(qcli, *arguments)
        assert result.code == 0, result.err
        assert counts(rows_in(target, place)) == (published, published, sum(range(published)))
        assert broker.channel_stats(topic, "lake")["depth"] == 0
        source = [place, "--delta"] if target == DELTA else ["local/events.clicks", "--iceberg"]
        report = replayed(qcli, tmp_path, *source, f"{topic}.again")
        assert report["published"] == published


def _parquet_files(place: str) -> int:
    found = storage_at(place).files()
    return sum(each.name.endswith(".parquet") for each in found) if isinstance(found, list) else 0


def test_answers_that_are_lost(s3: Store, qcli: Cli, topic: str) -> None:
    """Requests that write the table's log are applied or not, and answered or not; each round is added once."""
    place = s3.new_place()
    faults = [Fault(is_sent=True), Fault(status=503), Fault(is_sent=True, status=500)]
    with proxy(s3) as between, s3.behind(between.endpoint).here():
        failed: set[str] = set()

        def fail_first(method: str, path: str) -> Fault | None:
            if method != "PUT" or "_delta_log" not in path or path in failed:
                return None
            failed.add(path)
            return faults[len(failed) % len(faults)]

        between.judge = fail_first
        for start in range(0, 90, 10):
            qcli.publish(topic, numbers(10, start))
            result = run_in_process(
                qcli, "to-parquet", topic, place, "--delta", "--compact", "--engine", "inline"
            )
            assert result.code == 0, result.err
        assert len(failed) > 9
        assert counts(rows_in(DELTA, place)) == (90, 90, sum(range(90)))


@pytest.mark.parametrize("version", [0, 1])
def test_conflicts_that_the_store_reports(s3: Store, qcli: Cli, topic: str, version: int) -> None:
    """A store may answer 409 to a conditional request because of another one, which may fail later."""
    place = s3.new_place()
    left = [Fault(status=409), Fault(status=409)]
    with proxy(s3) as between, s3.behind(between.endpoint).here():
        commit = f"_delta_log/{version:020d}.json"
        between.judge = lambda method, path: (
            left.pop() if method == "PUT" and path.endswith(commit) and left else None
        )
        for start in (0, 10):
            qcli.publish(topic, numbers(10, start))
            result = run_in_process(qcli, "to-parquet", topic, place, "--delta", "--engine", "inline")
            assert result.code == 0, result.err
        assert left == []
        assert counts(rows_in(DELTA, place)) == (20, 20, sum(range(20)))


def test_follow_waits_for_the_table(s3: Store, qcli: Cli, topic: str, tmp_path: Path) -> None:
    place = s3.new_place()
    qcli.publish(topic, numbers(10))
    with proxy(s3) as between, s3.behind(between.endpoint).here():
        between.judge = lambda method, path: Fault(status=503) if "_delta_log/0" in path else None
        environment = s3.env | {"AWS_ENDPOINT_URL": between.endpoint}
        with Cli(qcli.tcp_address, qcli.http_address, environment).running(
            "to-parquet", topic, place, "--delta", "--follow", "--every", "50ms", "--engine", "inline"
        ) as running:
            until(lambda: sum(1 for each in between.requests if "_delta_log/0" in each) > 8)
            assert running.process.poll() is None
            between.judge = lambda method, path: None
            until(lambda: storage_at(place).size(f"_delta_log/{0:020d}.json") is not None)
            qcli.publish(topic, numbers(10, 10))
            until(lambda: counts(rows_in(DELTA, place)) == (20, 20, sum(range(20))))


def test_delta_on_azure(azure: Store, qcli: Cli, topic: str, tmp_path: Path) -> None:
    place = azure.new_place()
    with azure.here():
        for start in range(0, 90, 10):
            qcli.publish(topic, numbers(10, start))
            result = run_in_process(qcli, "to-parquet", topic, place, "--delta", "--compact")
            assert result.code == 0, result.err
        assert counts(rows_in(DELTA, place)) == (90, 90, sum(range(90)))
        assert replayed(qcli, tmp_path, place, "--delta", f"{topic}.again")["published"] == 90


@KINDS
@pytest.mark.parametrize("name", ["zz#b", "a%20b", "50 % é[c]+&=:;"])
def test_any_folder_has_its_table_or_is_refused(
    target: TableTarget, moto_s3: Store, tmp_path: Path, name: str
) -> None:
    result = write_range(tmp_path / "f", 0, layout := Layout())
    with moto_s3.here(**catalog_environment(tmp_path)):
        parent = moto_s3.new_place()
        storage = storage_at(f"{parent}/{name}")
        storage.put_new(result.files[0], (tmp_path / "f" / result.files[0]).read_bytes())
        refusal = ""
        try:
            open_table(target, storage, "t", "e1").commit(1, [result], layout)
        except TableError as error:
            refusal = str(error)
        if refusal:
            assert "would use another folder than" in refusal
        else:
            assert rows_in(target, storage.url_of("")).num_rows == COUNT
        files = storage_at(parent).files()
        assert isinstance(files, list)
        assert {each.name.partition("/")[0] for each in files} == {name}
        assert (len(files) == 1) == bool(refusal)


@KINDS
def test_expired_keys_of_a_profile_are_renewed(target: TableTarget, s3: Store, tmp_path: Path) -> None:
    """An export that follows for days commits with the keys that its profile has then."""
    program, keys = tmp_path / "keys.py", tmp_path / "keys.json"
    program.write_text(f"print(open({str(keys)!r}).read())")
    (tmp_path / "config").write_text(
        f"[profile short]\ncredential_process = {sys.executable} {program}\n"
        f"region = us-east-1\nendpoint_url = {s3.endpoint}\n"
    )

    def give(secret: str) -> None:
        found = {"Version": 1, "AccessKeyId": KEY, "SecretAccessKey": secret}
        keys.write_text(json.dumps(found | {"Expiration": "2020-01-01T00:00:00Z"}))

    give(SECRET)
    profile = {"AWS_CONFIG_FILE": str(tmp_path / "config"), "AWS_PROFILE": "short"}
    with Store(s3.place, profile, "").here(**catalog_environment(tmp_path)):
        place = keep_secrets(s3.new_place())
        storage, layout = storage_at(place), Layout()
        results = [write_range(tmp_path / "f", number, layout) for number in range(2)]
        for result in results:
            storage.put_new(result.files[0], (tmp_path / "f" / result.files[0]).read_bytes())
        table = open_table(target, storage, "t", "e1")
        table.commit(1, results[:1], layout)
        give("wrong")
        with pytest.raises(TableError):
            table.commit(2, results[1:], layout)
        give(SECRET)
        table.commit(2, results[1:], layout)
        assert counts(rows_in(target, place))[:2] == (2 * COUNT, 2 * COUNT)
