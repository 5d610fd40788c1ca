"""Tests for the columns of the data source `nsq`: JSON fields, text, and schemas that the user gives."""

import json
import re
from contextlib import suppress
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from cli.support import Cli
from interop.peers import Broker
from spark.support import export, rows
from trio_nsq.spark.data_source import NsqDataSource
from trio_nsq.spark.export.layout import LayoutError
from trio_nsq.spark.options import OptionError
from trio_nsq.spark.versions import HAS_READ_LIMITS

BODIES = [
    b'{"user":"u1","price":1,"ts":"2026-11-21T12:00:00Z","address":{"zip":"1010"},"User":"U"}',
    b'{"user":"u2","price":2.5,"ok":true}',
    b'{"user":7,"price":"free"}',
    b"no JSON",
]
COLUMNS = "seq,user,price:double,ts:timestamp,address:json,unparsed"


def read(options: dict[str, str], schema: StructType | None = None) -> list[dict[str, Any]]:
    """Read all rows of a batch, as Spark would."""
    source = NsqDataSource(CaseInsensitiveDict({"format": "json"} | options))
    schema = StructType.fromJson(json.loads((schema or source.schema()).json()))
    reader = source.reader(schema)
    batches = [batch for partition in reader.partitions() for batch in reader.read(partition)]
    return [row for batch in batches for row in batch.to_pylist()]


def schema_of(text: str) -> StructType:
    """Return the schema of a list such as `seq long, user string`; a type with `!` is NOT NULL."""
    types: dict[str, DataType] = {
        kind.typeName(): kind for kind in (StringType(), LongType(), DoubleType(), IntegerType())
    }
    types |= {kind.typeName(): kind for kind in (BinaryType(), BooleanType(), TimestampType())}
    pairs = [pair.split() for pair in text.split(", ")]
    return StructType(
        [StructField(name, types[kind.removesuffix("!")], not kind.endswith("!")) for name, kind in pairs]
    )


def test_fields_are_columns(qcli: Cli, topic: str) -> None:
    """A value that does not fit its column is null, and the body is in `unparsed`."""
    qcli.publish(topic, BODIES)
    options = {"topic": topic, "nsqdHttpAddress": qcli.http_address}
    found = read(options | {"columns": COLUMNS})
    assert list(found[0]) == ["seq", "user", "price", "body_ts", "address", "unparsed"]
    assert [row["seq"] for row in found] == [0, 1, 2, 3]
    assert [row["price"] for row in found] == [1.0, 2.5, None, None]
    assert found[0]["body_ts"].isoformat() == "2026-11-21T12:00:00+00:00"
    assert found[0]["address"] == '{"zip":"1010"}'
    assert [row["unparsed"] for row in found] == [None, None, BODIES[2], BODIES[3]]


def test_decimals(qcli: Cli, topic: str) -> None:
    qcli.publish(topic, [b'{"price":1.10}', b'{"price":1.105}'])
    options = {"topic": topic, "nsqdHttpAddress": qcli.http_address, "columns": "price:decimal(5,2),unparsed"}
    assert [str(row["price"]) for row in read(options)] == ["1.10", "None"]
    assert [row["price"] for row in read(options, StructType([StructField("price", DecimalType(5, 2))]))] == [
        Decimal("1.10"),
        None,
    ]


def test_inferred_fields(qcli: Cli, topic: str, tmp_path: Path) -> None:
    """All columns are those of an export."""
    qcli.publish(topic, BODIES[:2])
    found = read({"topic": topic, "nsqdHttpAddress": qcli.http_address, "includeHeaders": "true"})
    export(qcli, topic, tmp_path, "--json")
    assert found == rows(tmp_path).to_pylist()
    assert found[0]["User_2"] == "U"
    qcli.publish(f"{topic}.text", [b"x"])
    with pytest.raises(LayoutError, match="no message of the sample is a JSON object"):
        read({"topic": f"{topic}.text", "nsqdHttpAddress": qcli.http_address})


def test_schema_of_the_user(qcli: Cli, topic: str) -> None:
    qcli.publish(topic, BODIES)
    options = {"topic": topic, "nsqdHttpAddress": qcli.http_address}
    schema = schema_of("user string, seq long, body_ts timestamp, ok boolean, body binary, rest string")
    first, second, *_ = read(options, schema)
    assert (first["user"], first["seq"], first["body"]) == ("u1", 0, BODIES[0])
    assert first["body_ts"].isoformat() == "2026-11-21T12:00:00+00:00"
    assert json.loads(first["rest"]) == {"price": 1, "address": {"zip": "1010"}, "User": "U"}
    assert second["ok"] is True
    plain = read(options | {"format": "binary"}, schema_of("body binary, seq long"))
    assert plain == [{"body": body, "seq": n} for n, body in enumerate(BODIES)]


def test_inferred_columns_that_are_written_down(qcli: Cli, topic: str) -> None:
    """A stream should have a schema: it is written from the inferred columns."""
    fields = ["ts", "date", "hour", "seq", "rest", "body", "Ts", "body_x", "user"]
    qcli.publish(topic, [json.dumps({field: field for field in fields} | {"first name": "f"}).encode()])
    options = {"topic": topic, "nsqdHttpAddress": qcli.http_address}
    (inferred,) = read(options)
    names = ["body_ts", "body_date", "body_hour", "body_seq", "body_rest", "body_body", "body_x", "user"]
    (found,) = read(options, schema_of(", ".join(f"{name} string" for name in names)))
    assert found == {name: inferred[name] for name in names}
    assert set(found.values()) == {*fields} - {"Ts"}
    assert read(options | {"columns": "first name:string"}) == [{"first_name": "f"}]


def test_text(qcli: Cli, topic: str) -> None:
    qcli.publish(topic, [b"\xc3\xa4", b"\xff"])
    options = {"topic": topic, "nsqdHttpAddress": qcli.http_address, "columns": "body,unparsed"}
    assert read(options | {"format": "text"}) == [
        {"body": "ä", "unparsed": None},
        {"body": None, "unparsed": b"\xff"},
    ]


def test_invalid_columns() -> None:
    for options, text in (
        ({"columns": "seq,price:decimal"}, r"'price:decimal' must be NAME or FIELD:TYPE"),
        ({"columns": "seq,,user"}, "'' must be NAME or FIELD:TYPE"),
        ({"format": "xml"}, "format must be binary or text or json"),
        ({"format": "text", "columns": "seq,user"}, "no column user; it has topic, .*, unparsed"),
    ):
        with pytest.raises(OptionError, match=text):
            NsqDataSource(CaseInsensitiveDict({"format": "json", "topic": "t"} | options)).schema()
    for form, columns, text in (
        ("json", "ts string", "the column ts is timestamp NOT NULL, not string: .* name the column body_ts"),
        ("json", "price binary", "the column price has the type binary"),
        ("json", "price double!", "the column price has NOT NULL"),
        ("binary", "seq long, user string", "no column user"),
        ("binary", "body string", "the column body is binary NOT NULL, not string"),
    ):
        with pytest.raises(OptionError, match=text):
            NsqDataSource({"format": form, "topic": "t"}).reader(schema_of(columns))
    nested: list[tuple[DataType, str]] = [
        (ArrayType(BinaryType()), "the column x has the type binary"),
        (ArrayType(LongType(), containsNull=False), "the column x has NOT NULL"),
        (StructType([StructField("a", LongType(), nullable=False)]), "the column x has NOT NULL"),
        (MapType(StringType(), LongType(), valueContainsNull=False), "the column x has NOT NULL"),
        (MapType(LongType(), LongType()), "the column x has the type map<bigint,bigint>"),
    ]
    for kind, text in nested:
        with pytest.raises(OptionError, match=text):
            NsqDataSource({"format": "json", "topic": "t"}).reader(StructType([StructField("x", kind)]))


TYPES = """
    b TINYINT, s SMALLINT, n INT, f FLOAT, d DATE,
    items ARRAY<STRUCT<name: STRING, price: DECIMAL(5,2), at: TIMESTAMP, tags: ARRAY<STRING>>>,
    counts MAP<STRING, INT>,
    unparsed BINARY
"""


def check_types(spark: SparkSession, qcli: Cli, topic: str) -> None:
    """Read the types that are not inferred: a value of each that fits, none, and one that does not."""
    item = '{"name":"i","price":1.10,"at":"2026-11-28T06:00:00Z","tags":["x",null],"more":1}'
    good = (
        f'{{"b":-128,"s":1,"n":2147483647,"f":0.1,"d":"2026-11-28","items":[{item},null],"counts":{{"k":1}}}}'
    )
    bad = good.replace("-128", "-129").replace('"s":1', '"s":32768').replace("647", "648")
    bad = bad.replace("0.1,", "16777217,").replace('28",', '31",').replace("1.10", "1.105")
    bad = bad.replace('"k":1', '"k":1.5')
    qcli.publish(topic, [good.encode(), b"{}", bad.encode()])
    options = {"topic": topic, "nsqdHttpAddress": qcli.http_address, "format": "json"}
    found = spark.read.format("nsq").options(**options).schema(TYPES).load()
    with_values, empty, without = [row.asDict(recursive=True) for row in found.collect()]
    at = with_values["items"][0].pop("at")
    assert at.astimezone(UTC) == datetime(2026, 11, 28, 6, tzinfo=UTC)
    assert with_values == {
        "b": -128,
        "s": 1,
        "n": 2**31 - 1,
        "f": 0.100000001490116119384765625,
        "d": date(2026, 11, 28),
        "items": [{"name": "i", "price": Decimal("1.10"), "tags": ["x", None]}, None],
        "counts": {"k": 1},
        "unparsed": None,
    }
    assert set(empty.values()) == {None}
    assert without.pop("items")[0] | {"at": None} == {
        "name": "i",
        "price": None,
        "at": None,
        "tags": ["x", None],
    }
    assert without.pop("counts") == {"k": None}
    assert without == dict.fromkeys(without) | {"unparsed": bad.encode()}
    total = found.selectExpr("explode(items) AS item").selectExpr("sum(item.price)")
    assert total.collect()[0][0] == Decimal("1.10")
    named = spark.read.format("nsq").options(**options, columns="b:byte,s:short,n:int,f:float,d:date").load()
    assert named.schema.simpleString() == "struct<b:tinyint,s:smallint,n:int,f:float,d:date>"
    assert [tuple(row) for row in named.where("n > 0").collect()] == [tuple(with_values.values())[:5]]


@pytest.mark.slow
def test_with_spark(spark: SparkSession, qcli: Cli, topic: str, tmp_path: Path) -> None:
    """Given, inferred, and in a stream."""
    qcli.publish(topic, BODIES)
    options = {"topic": topic, "nsqdHttpAddress": qcli.http_address, "format": "json"}
    inferred = spark.read.format("nsq").options(**options).load()
    assert inferred.columns[7:] == ["user", "price", "body_ts", "address", "User_2", "ok", "rest", "unparsed"]
    assert inferred.where("ok").count() == 1
    given = spark.read.format("nsq").options(**options).schema("user STRING, price DECIMAL(5,2)").load()
    assert [tuple(row) for row in given.collect()] == [("u1", 1.0), ("u2", 2.5), (None, None), (None, None)]
    check_types(spark, qcli, f"{topic}.types")
    seen: list[tuple[object, ...]] = []

    def take(batch: DataFrame, _: int) -> None:
        seen.extend(tuple(row) for row in batch.collect())

    stream = spark.readStream.format("nsq").options(**options, columns="seq,price:double").load()
    query = stream.writeStream.foreachBatch(take).option("checkpointLocation", str(tmp_path / "c"))
    query.trigger(availableNow=True).start().awaitTermination()
    assert sorted(seen) == [(0, 1.0), (1, 2.5), (2, None), (3, None)]


@pytest.mark.slow
def test_examples_of_the_documentation(
    spark: SparkSession, broker: Broker, qcli: Cli, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The first program of docs/how-to/spark.md with its output, and the SQL."""
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "spark.md").read_text()
    page = page.replace("127.0.0.1:4151", qcli.http_address)
    qcli.publish("clicks", [b'{"user":"u%d","path":"/page/%d"}' % (n % 7, n) for n in range(1, 1001)])
    try:
        program, output = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", page, re.DOTALL)[0]
        exec(program, {})
        assert capsys.readouterr().out.strip() == output.strip()
        answers: list[list[Any]] = []
        for block in re.findall(r"```sql\n(.*?)```", page, re.DOTALL):
            for statement in filter(str.strip, block.split(";")):
                rows = spark.sql(statement).collect()
                if statement.strip().startswith("SELECT"):
                    answers.append(rows)
        assert [tuple(row) for row in answers[0]][:2] == [("u0", 142), ("u1", 143)]
        if HAS_READ_LIMITS:
            assert answers[1][0][0] == 1000
        with pytest.raises(Exception, match="Spark does not pass the options of a table"):
            spark.sql(
                f"CREATE TABLE other USING nsq OPTIONS (topic 'clicks', nsqdHttpAddress '{qcli.http_address}')"
            )
    finally:
        spark.sql("DROP VIEW IF EXISTS clicks")
        spark.sql("DROP TABLE IF EXISTS messages")
        broker.http("POST", "/topic/delete", topic="clicks")
        warehouse = spark.conf.get("spark.sql.warehouse.dir")
        assert warehouse is not None
        with suppress(OSError):  # other tests may use it
            Path(urlsplit(warehouse).path).rmdir()
