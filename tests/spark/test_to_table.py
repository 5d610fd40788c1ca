"""`to-parquet --delta` and `--iceberg`: rounds, kills at random times, columns that are added, and what is refused.

By default there are a few kills for each kind of table; with `FAULT_COMPLETE=1` (`make soak`) many. `FAULT_SEED` sets
the times.
"""

import json
import os
import random
import time
from pathlib import Path

import deltalake
import pytest

from cli.support import Cli
from interop.peers import Broker
from spark.support import export, numbers, run_in_process, until
from spark.table_support import (
    DELTA,
    ICEBERG,
    catalog_environment,
    duckdb_counts,
    files_of,
    iceberg_table,
    table_rows,
    use_catalog,
)
from trio_nsq.spark.tables.target import TableTarget

COMPLETE = os.environ.get("FAULT_COMPLETE") == "1"
SEED = int(os.environ.get("FAULT_SEED", "1"))
ROUNDS = 10
"""How many files a run writes before it is killed; it merges 8."""
KINDS = pytest.mark.parametrize("target", [DELTA, ICEBERG], ids=["delta", "iceberg"])


@pytest.fixture(autouse=True)
def _catalog(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_catalog(monkeypatch, tmp_path)


def bodies_of(target: TableTarget, folder: Path) -> list[bytes]:
    """Return the bodies of a table, by sequence."""
    found: list[bytes] = table_rows(target, folder)["body"].to_pylist()
    return found


@KINDS
def test_rounds(target: TableTarget, broker: Broker, qcli: Cli, topic: str, tmp_path: Path) -> None:
    folder = tmp_path / "f"
    broker.create(topic, "lake")
    arguments = [*str(target).split(), "--channel", "lake"]
    qcli.publish(topic, numbers(50))
    assert export(qcli, topic, folder, *arguments)["messages"] == 50
    qcli.publish(topic, numbers(30, 50))
    assert export(qcli, topic, folder, *arguments)["messages"] == 30
    assert export(qcli, topic, folder, *arguments)["messages"] == 0
    assert bodies_of(target, folder) == numbers(80)
    assert duckdb_counts(target, folder) == (80, 80, sum(range(80)))
    versions = deltalake.DeltaTable(folder).history() if target == DELTA else iceberg_table().history()
    assert len(versions) == 2


@KINDS
@pytest.mark.parametrize("kills", [12 if COMPLETE else 2])
def test_killed_follow(
    target: TableTarget, broker: Broker, qcli: Cli, topic: str, tmp_path: Path, kills: int
) -> None:
    """Messages are published all the time, and small files are merged. The channel holds what is not in the table."""
    chance = random.Random(SEED)
    folder = tmp_path / "f"
    broker.create(topic, "lake")
    arguments = ["to-parquet", topic, str(folder), *str(target).split(), "--channel", "lake", "--compact"]
    arguments += ["--engine", "inline", "-q"]
    published = 0
    environment = Cli(qcli.tcp_address, qcli.http_address, catalog_environment(tmp_path))
    for _ in range(kills):
        files = len(list(folder.rglob("*.parquet")))
        with environment.running(*arguments, "--follow", "--every", "20ms") as running:

            def has_more(files: int = files) -> bool:
                nonlocal published
                assert running.process.poll() is None
                qcli.publish(topic, numbers(50, published))
                published += 50
                return len(list(folder.rglob("*.parquet"))) >= files + ROUNDS

            until(has_more)
            time.sleep(chance.uniform(0, 0.15))
            running.process.kill()
            running.process.wait()
        rows, distinct, _ = duckdb_counts(target, folder)
        assert rows == distinct <= published
    assert run_in_process(qcli, *arguments).code == 0
    assert duckdb_counts(target, folder) == (published, published, sum(range(published)))
    assert bodies_of(target, folder) == numbers(published)
    assert broker.channel_stats(topic, "lake")["depth"] == 0
    assert any("-merged-" in name for name in files_of(target, folder))


@KINDS
def test_fields_that_appear_later(target: TableTarget, qcli: Cli, topic: str, tmp_path: Path) -> None:
    folder = tmp_path / "f"
    arguments = [*str(target).split(), "--json"]

    def publish(*bodies: object) -> None:
        qcli.publish(topic, [json.dumps(body).encode() for body in bodies])

    publish({"n": 1}, {"n": 2})
    export(qcli, topic, folder, *arguments)
    publish({"n": 3, "price": 0.5})
    export(qcli, topic, folder, *arguments)
    publish({"n": 4, "price": 1.5}, {"n": 2.5, "price": 2})
    report = export(qcli, topic, folder, *arguments)
    found = table_rows(target, folder)
    assert found["n"].to_pylist() == [1, 2, 3, 4, None]  # a column of a table cannot become a double
    assert found["price"].to_pylist() == [None, None, None, 1.5, 2.0]
    assert json.loads(found["rest"].to_pylist()[2]) == {"price": 0.5}
    assert report["misfits"] == {"n": 1}


@KINDS
def test_files_that_were_exported_before(target: TableTarget, qcli: Cli, topic: str, tmp_path: Path) -> None:
    """A folder of files becomes a table, with all of them; then it stays one."""
    folder = tmp_path / "f"
    plain = ["--json"] if target == DELTA else ["--json", "--partition-by", "hour"]
    for number in range(3):
        qcli.publish(topic, [b'{"n":%d}' % number])
        export(qcli, topic, folder, *plain)
    qcli.publish(topic, [b'{"n":3}'])
    for _ in range(2):
        export(qcli, topic, folder, "--json", *str(target).split())
    assert table_rows(target, folder)["n"].to_pylist() == [0, 1, 2, 3]
    assert len(files_of(target, folder)) == 4
    result = run_in_process(qcli, "to-parquet", topic, str(folder), *plain)
    assert result.code == 1
    assert f"are in a table: give {target}" in result.err


def test_options_that_exclude_each_other(qcli: Cli, topic: str, tmp_path: Path) -> None:
    result = run_in_process(qcli, "to-parquet", topic, str(tmp_path / "x"), "--delta", "--iceberg", "a/b.c")
    assert "--delta and --iceberg exclude each other" in result.err
    result = run_in_process(qcli, "to-parquet", topic, str(tmp_path / "x"), "--compact")
    assert "--compact merges files of a table: give --delta or --iceberg" in result.err


@KINDS
def test_table_that_was_restored_is_refused(
    target: TableTarget, qcli: Cli, topic: str, tmp_path: Path
) -> None:
    """The manifest says that the messages of the second round are in the table."""
    folder = tmp_path / "f"
    for start in (0, 10):
        qcli.publish(topic, numbers(10, start))
        export(qcli, topic, folder, *str(target).split())
    if target == DELTA:
        (folder / "_delta_log" / f"{1:020d}.json").unlink()
    else:
        table = iceberg_table()
        with table.transaction() as change:
            change.set_properties(
                {name: "1" for name in table.properties if name.startswith("qcli.to-parquet.")}
            )
    result = run_in_process(qcli, "to-parquet", topic, str(folder), *str(target).split())
    assert result.code == 1
    assert "the table was dropped, recreated or restored to an older version" in result.err
    assert len(result.err.splitlines()) == 1


def test_folder_whose_name_deltalake_decodes(qcli: Cli, topic: str, tmp_path: Path) -> None:
    qcli.publish(topic, numbers(10))
    result = run_in_process(qcli, "to-parquet", topic, str(tmp_path / "a%20b"), "--delta")
    assert result.code == 1
    assert "because of '%20' in its name. Choose another folder" in result.err
    assert not (tmp_path / "a b").exists()


def test_unknown_catalog(qcli: Cli, topic: str, tmp_path: Path) -> None:
    qcli.publish(topic, numbers(10))
    result = run_in_process(qcli, "to-parquet", topic, str(tmp_path / "f"), "--iceberg", "prod/a.b")
    assert result.code == 1
    assert "The Iceberg catalog prod is not configured: describe it in ~/.pyiceberg.yaml" in result.err
    assert list(tmp_path.rglob("*.parquet")) == []
