"""Tests for `to-parquet --json`: values that do not fit, names of columns, and bodies beside the columns."""

import json
import shutil
from errno import ENOSPC
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from cli.support import Cli
from soak import in_soak
from spark.support import (
    ToParquet,
    bodies_in,
    column,
    export,
    leftovers,
    parquet_files,
    replayed,
    rows,
)
from trio_nsq.log.gaps import Span
from trio_nsq.spark.export.job import ExportJob, open_export
from trio_nsq.spark.export.layout import BodyFormat, JsonColumn, Layout, PartitionBy
from trio_nsq.spark.export.request import ExportRequest
from trio_nsq.spark.export.task import ExportTask
from trio_nsq.spark.logs import BrokerPlace
from trio_nsq.spark.runtime.engine import run_inline
from trio_nsq.spark.runtime.spark_engine import SparkEngine
from trio_nsq.spark.schemas.column_types import JsonType
from trio_nsq.storage import LocalStorage, StorageError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def lines(*objects: object) -> list[bytes]:
    """Return objects as JSON bodies."""
    return [json.dumps(each).encode() for each in objects]


def test_values_that_do_not_fit_are_reported(
    to_parquet: ToParquet, qcli: Cli, topic: str, tmp_path: Path
) -> None:
    good = [{"price": number, "user": "ann"} for number in range(3)]
    bad = lines({"price": "3", "user": "bob"}, {"price": "4", "user": 5}, {"price": True, "user": "eve"})
    qcli.publish(topic, [*lines(*good), *bad])
    result = to_parquet(topic, tmp_path / "a", "--json", "--columns", "price:long,user:string")
    assert result.code == 0
    assert "3 in the column unparsed" in result.err
    assert result.err.endswith(
        "Warning: 4 values did not fit the types of their columns: price (3), user (1). The columns are null there, "
        "and the column unparsed has the whole bodies.\n"
    )
    assert rows(tmp_path / "a", "price", "user", "unparsed").to_pylist() == [
        *({**each, "unparsed": None} for each in good),
        {"price": None, "user": "bob", "unparsed": bad[0]},
        {"price": None, "user": None, "unparsed": bad[1]},
        {"price": None, "user": "eve", "unparsed": bad[2]},
    ]
    said = export(qcli, topic, tmp_path / "b", "--json", "--columns", "price:long,user:string")
    assert (said["misfits"], said["unparsed"]) == ({"price": 3, "user": 1}, 3)
    qcli.publish(topic, lines({"price": 1_700_000_000_000}))
    noted = to_parquet(topic, tmp_path / "d", "--json", "--columns", "price:timestamp")
    assert "Note: price seems to be in milliseconds" in noted.err
    quiet = to_parquet(topic, tmp_path / "c", "--json", "--columns", "price:long", "-q")
    assert quiet.err.startswith("Warning: 3 values did not fit")


def test_fields_that_differ_in_case_only(qcli: Cli, topic: str, tmp_path: Path) -> None:
    qcli.publish(topic, lines({"user": "a", "User": 1, "ts": 2, "Ts": 3}))
    export(qcli, topic, tmp_path, "--json")
    qcli.publish(topic, lines({"Ts": 7, "User": 5, "user": "b"}))
    export(qcli, topic, tmp_path, "--json")
    assert rows(tmp_path, "user", "User_2", "body_ts", "body_Ts_2").to_pylist() == [
        {"user": "a", "User_2": 1, "body_ts": 2, "body_Ts_2": 3},
        {"user": "b", "User_2": 5, "body_ts": None, "body_Ts_2": 7},
    ]


def test_bodies_are_kept_and_replayed(to_parquet: ToParquet, qcli: Cli, topic: str, tmp_path: Path) -> None:
    bodies = [b'{"n": 1,   "text": "x"}', b'{"n": "misfit"}', b"\xffnothing", b'{"n": 1e2}']
    qcli.publish(topic, bodies)
    folder = tmp_path / "kept"
    export(qcli, topic, folder, "--json", "--columns", "n:long", "--keep-body")
    assert rows(folder, "n", "body", "unparsed").to_pylist() == [
        {"n": 1, "body": bodies[0], "unparsed": None},
        *({"n": None, "body": body, "unparsed": body} for body in bodies[1:]),
    ]
    replayed(qcli, tmp_path, str(folder), f"{topic}-again")
    assert bodies_in(qcli.http_address, f"{topic}-again") == bodies
    result = to_parquet(topic, folder, "--json", "--columns", "n:long")
    assert result.code == 1
    assert "--json --columns n:long --keep-body" in result.err
    assert to_parquet(topic, tmp_path, "--keep-body").code == 2


# ---------------------------------------------------------------------- wider columns


def test_fractions_after_whole_numbers_in_one_export(qcli: Cli, topic: str, tmp_path: Path) -> None:
    """The sample is from the whole export: no file is written twice."""
    numbers = [*range(10_000), *(number + 0.5 for number in range(90_000))]
    for start in range(0, len(numbers), 1000):
        qcli.publish(topic, lines(*({"price": number} for number in numbers[start : start + 1000])))
    said = export(qcli, topic, tmp_path, "--json", "--target-file-size", "512KiB")
    assert (said["messages"], said["unparsed"], said["widened"]) == (100_000, 0, [])
    table = rows(tmp_path, "price")
    assert table["price"].type == "double"
    assert pc.sum(table["price"]).as_py() == sum(numbers)


@pytest.mark.parametrize(
    ("partition", "codec"),
    [
        ("none", "zstd"),
        ("hour", "none"),
        ("hour", "lz4"),
        *in_soak(("hour", "zstd"), ("none", "none"), ("none", "lz4")),
    ],
)
def test_fractions_in_a_later_export(
    to_parquet: ToParquet, qcli: Cli, topic: str, tmp_path: Path, partition: str, codec: str
) -> None:
    """All files get doubles: Spark refuses a folder with both types."""
    arguments = ("--json", "--partition-by", partition, "--compression", codec)
    qcli.publish(topic, lines({"price": 1, "n": 1}, {"price": None, "n": 2}, {"price": 2**60, "n": 3}))
    export(qcli, topic, tmp_path, *arguments)
    qcli.publish(topic, lines({"price": 2, "n": 4}))
    export(qcli, topic, tmp_path, *arguments)
    qcli.publish(topic, lines({"price": 2.5, "n": 5}, {"price": 2**60 + 1, "n": 6}))
    result = to_parquet(topic, tmp_path, *arguments)
    assert "Note: wider types of columns, because values need them: price.\n" in result.err
    assert "1 value did not fit the types of their columns: price (1)." in result.err
    assert types_of(tmp_path, "price") == ["double"] * 3
    assert types_of(tmp_path, "n") == ["int64"] * 3
    assert column(tmp_path, "price") == [1.0, None, 2.0**60, 2.0, 2.5, None]
    assert column(tmp_path, "n") == [1, 2, 3, 4, 5, 6]
    assert column(tmp_path, "unparsed")[-1] == lines({"price": 2**60 + 1, "n": 6})[0]
    assert leftovers(tmp_path) == []
    qcli.publish(topic, lines({"price": 3, "n": 7}))
    assert export(qcli, topic, tmp_path, *arguments)["widened"] == []
    assert types_of(tmp_path, "price") == ["double"] * 4


def test_a_column_with_long_numbers_stays_long(qcli: Cli, topic: str, tmp_path: Path) -> None:
    """No file loses digits: the fractions do not fit then."""
    qcli.publish(topic, lines({"big": 2**53 + 1, "n": 1}))
    export(qcli, topic, tmp_path, "--json")
    qcli.publish(topic, lines({"big": 1.5, "n": 1.5}, {"big": 2, "n": 2}))
    said = export(qcli, topic, tmp_path, "--json")
    assert (said["widened"], said["misfits"], said["unparsed"]) == (["n"], {"big": 1}, 1)
    assert (column(tmp_path, "big"), column(tmp_path, "n")) == ([2**53 + 1, None, 2], [1.0, 1.5, 2.0])
    qcli.publish(topic, lines({"big": 2.5}))
    assert export(qcli, topic, tmp_path, "--json")["misfits"] == {"big": 1}


def test_types_of_a_table_do_not_change(qcli: Cli, topic: str, tmp_path: Path) -> None:
    """Tables cannot convert longs to doubles: fractions do not fit."""
    qcli.publish(topic, lines({"n": 1}))
    export(qcli, topic, tmp_path, "--json", "--delta")
    qcli.publish(topic, lines({"n": 1.5, "more": 1}))
    said = export(qcli, topic, tmp_path, "--json", "--delta")
    assert (said["widened"], said["misfits"]) == ([], {"n": 1})
    assert (types_of(tmp_path, "n"), column(tmp_path, "n")) == (["int64"] * 2, [1, None])


def test_fractions_on_spark(
    engine: SparkEngine, spark: "SparkSession", qcli: Cli, topic: str, tmp_path: Path
) -> None:
    """Several tasks find them; ranges without fractions are written, and then converted."""
    qcli.publish(topic, lines({"price": 1}))
    export(qcli, topic, tmp_path, "--json", "--engine", "inline")
    objects = [{"price": number if number < 6000 else number + 0.5} for number in range(8000)]
    for start in range(0, len(objects), 100):
        qcli.publish(topic, lines(*objects[start : start + 100]))
    request = ExportRequest(topic, str(tmp_path), layout=Layout(body=BodyFormat.JSON), min_ranges=4)
    place = BrokerPlace(qcli.http_address, topic)
    with open_export(request, [place]) as job:
        job.run(engine, job.plan([place]), lambda *_: None)
        assert (job.result.messages, job.result.ranges, job.result.widened) == (8000, 4, ["price"])
    found = spark.read.parquet(str(tmp_path))
    assert found.schema["price"].dataType.typeName() == "double"
    assert found.selectExpr("sum(price)", "count(*)", "count(unparsed)").first() == (
        sum(each["price"] for each in objects) + 1,
        8001,
        0,
    )


class FullDisk(LocalStorage):
    """A folder whose disk is full after some files were replaced."""

    def __init__(self, path: Path, room: int) -> None:
        super().__init__(path)
        self._room = room

    def put(self, name: str, data: bytes) -> None:
        if name.endswith(".parquet"):
            self._room -= 1
            if self._room < 0:
                raise OSError(ENOSPC, "No space left on device", name)
        super().put(name, data)


@pytest.mark.parametrize("room", [0, 1, 2])
def test_an_interrupted_conversion_is_continued(qcli: Cli, topic: str, tmp_path: Path, room: int) -> None:
    arguments = ("--json", "--partition-by", "hour")
    for number in range(3):
        qcli.publish(topic, lines({"price": number}))
        export(qcli, topic, tmp_path, *arguments)
    qcli.publish(topic, lines({"price": 0.5}))
    layout = Layout(PartitionBy.HOUR, BodyFormat.JSON)
    request = ExportRequest(topic, str(tmp_path), layout=layout)
    place = BrokerPlace(qcli.http_address, topic)
    storage = FullDisk(tmp_path, room)
    with storage.hold(f"_nsq/{topic}/lock", StorageError) as lease:
        job = ExportJob(request, storage, lease)
        with pytest.raises(OSError, match="No space left"):
            job.run(run_inline, job.plan([place]), lambda *_: None)
    assert sorted(types_of(tmp_path, "price")) == ["double"] * room + ["int64"] * (3 - room)
    killed = (tmp_path / parquet_files(tmp_path)[0]).parent / ".x.parquet.tmp-1-a"
    killed.write_bytes(b"half a file")
    assert export(qcli, topic, tmp_path, *arguments)["messages"] == 1
    assert leftovers(tmp_path) == []
    assert types_of(tmp_path, "price") == ["double"] * 4
    assert column(tmp_path, "price") == [0.0, 1.0, 2.0, 0.5]


def test_a_file_of_an_attempt_before_the_conversion(qcli: Cli, topic: str, tmp_path: Path) -> None:
    """A task that was considered dead may have published it. It is kept, with the new types."""
    qcli.publish(topic, lines({"price": 1}))
    place = BrokerPlace(qcli.http_address, topic)
    columns = (JsonColumn("price", JsonType.LONG, "price", widens=True),)
    layout = Layout(body=BodyFormat.JSON, json_columns=columns)
    request = ExportRequest(topic, str(tmp_path))
    (name,) = ExportTask(request, layout, place, Span(0, 1)).run().files
    shutil.rmtree(tmp_path / "_nsq")
    wider = layout.widened({"price": "double"})
    result = ExportTask(request, wider, place, Span(0, 1)).run()
    assert result.files == [name]
    assert result.file_bytes == (tmp_path / name).stat().st_size
    assert (types_of(tmp_path, "price"), column(tmp_path, "price")) == (["double"], [1.0])


def types_of(folder: Path, name: str) -> list[str]:
    """Return the type of a column in each file."""
    files = parquet_files(folder)
    return [str(pq.read_schema(folder / file).field(name).type) for file in files]
