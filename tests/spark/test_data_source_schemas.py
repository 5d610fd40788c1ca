"""Tests for `format=avro` and `format=protobuf` of the data source `nsq`: the schema, its columns and the registry."""

import base64
import io
import json
import pickle
from collections.abc import Mapping
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import fastavro
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.types import DoubleType, LongType, StringType, StructField, StructType

from cli.support import Cli
from spark.protos import FOLDER, compiled, message_class
from spark.registries import ScriptedRegistry
from spark.support import export, rows
from trio_nsq.bodies.errors import BodySchemaError, RegistryError
from trio_nsq.spark.data_source import NsqDataSource
from trio_nsq.spark.options import OptionError

NOON = datetime(2026, 11, 30, 12, 0, 0, 123000, tzinfo=UTC)
PAYMENT = {
    "type": "record",
    "name": "Payment",
    "fields": [
        {"name": "user", "type": "string"},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}},
        {"name": "ts", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "exact", "type": {"type": "long", "logicalType": "timestamp-nanos"}},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        {
            "name": "opens",
            "type": {"type": "array", "items": {"type": "long", "logicalType": "time-micros"}},
            "default": [],
        },
        {"name": "labels", "type": {"type": "map", "values": "int"}, "default": {}},
    ],
}
VALUE = {
    "user": "u1",
    "price": Decimal("1.50"),
    "ts": NOON,
    "exact": -1,
    "day": date(2026, 11, 30),
    "opens": [time(0, 0, 1)],
    "labels": {"a": 1},
}
ROW = VALUE | {"opens": [1_000_000], "labels": [("a", 1)], "unparsed": None}
USER = {"type": "record", "name": "User", "fields": [{"name": "user", "type": "string"}]}


def avro(schema: Mapping[str, Any], value: Mapping[str, Any], before: bytes = b"") -> bytes:
    body = io.BytesIO()
    body.write(before)
    fastavro.schemaless_writer(body, fastavro.parse_schema(dict(schema)), value)
    return body.getvalue()


def framed(number: int, schema: Mapping[str, Any], value: Mapping[str, Any]) -> bytes:
    return avro(schema, value, b"\0" + number.to_bytes(4, "big"))


def planned(options: dict[str, str], schema: StructType | None = None) -> bytes:
    """Plan a batch as Spark does on the driver, and return what it sends to the tasks."""
    source = NsqDataSource(CaseInsensitiveDict(options))
    reader = source.reader(StructType.fromJson(json.loads((schema or source.schema()).json())))
    return pickle.dumps((reader, reader.partitions()))


def executed(plan: bytes) -> list[dict[str, Any]]:
    """Run the tasks."""
    reader, partitions = pickle.loads(plan)
    batches = [batch for partition in partitions for batch in reader.read(partition)]
    return [row for batch in batches for row in batch.to_pylist()]


def read(options: dict[str, str], schema: StructType | None = None) -> list[dict[str, Any]]:
    return executed(planned(options, schema))


def test_tasks_need_no_file_of_the_driver(qcli: Cli, topic: str, tmp_path: Path) -> None:
    """The fields of the schema are columns; a body that is not valid is in `unparsed`."""
    qcli.publish(topic, [avro(PAYMENT, VALUE), b"\xff"])
    options = {"topic": topic, "nsqdHttpAddress": qcli.http_address, "format": "avro"}
    file = tmp_path / "payment.avsc"
    file.write_text(json.dumps(PAYMENT))
    plan = planned(options | {"schema": str(file)})
    file.unlink()
    first, second = executed(plan)
    names = list(first)
    assert names[:7] == ["topic", "broker", "seq", "id", "ts_ns", "ts", "attempts"]
    assert names[7:] == ["user", "price", "body_ts", "exact", "day", "opens", "labels", "unparsed"]
    first["ts"] = first.pop("body_ts")
    assert {name: first[name] for name in ROW} == ROW
    assert second["unparsed"] == b"\xff"
    assert {second[name] for name in names[7:-1]} == {None}
    assert read(options | {"schema": json.dumps(PAYMENT)})[0]["price"] == Decimal("1.50")


def test_columns(qcli: Cli, topic: str) -> None:
    body = avro(PAYMENT, VALUE)
    qcli.publish(topic, [body])
    options = {"topic": topic, "nsqdHttpAddress": qcli.http_address, "format": "avro"}
    options["schema"] = json.dumps(PAYMENT)
    (found,) = read(options | {"columns": "seq,ts,user,exact:timestamp(ns),body"})
    assert found.pop("ts").tzinfo is not None  # of the publish, as a column of the message has this name
    assert found == {"seq": 0, "user": "u1", "exact": -1, "body": body}
    assert read(options | {"columns": "seq,body"}) == [{"seq": 0, "body": body}]
    given = StructType([StructField("body_ts", NsqDataSource(options).schema()["body_ts"].dataType)])
    assert read(options, given) == [{"body_ts": NOON}]
    for columns, text in (
        ("user:long", "the field user is string in the schema, not long"),
        ("user,nobody", "no field nobody; it has user, price"),
        ("user.name", "no field user.name"),
    ):
        with pytest.raises(Exception, match=text):
            read(options | {"columns": columns})


def test_schema_of_the_user() -> None:
    options = {"topic": "t", "format": "avro", "schema": json.dumps(PAYMENT)}
    for field, text in (
        (StructField("user", LongType()), "the column user is bigint, and the field user .* needs string"),
        (StructField("user", StringType(), False), "the column user is string NOT NULL"),
        (StructField("body_ts", LongType()), "the field ts of the schema of the bodies needs timestamp"),
        (StructField("x", DoubleType()), "no field x"),
        (StructField("ts", StringType()), "name the column body_ts"),
        (StructField("rest", StringType()), "no field rest"),
    ):
        with pytest.raises(OptionError, match=text):
            NsqDataSource(options).reader(StructType([field]))


def test_protobuf(qcli: Cli, topic: str, tmp_path: Path) -> None:
    """The columns are those of an export."""
    file = compiled(FOLDER, tmp_path / "order.desc", "order.proto")
    order = message_class(file, "shop.Order")(id=7)
    qcli.publish(topic, [order.SerializeToString(), b"\xff"])
    options = {"topic": topic, "nsqdHttpAddress": qcli.http_address, "format": "protobuf"}
    options |= {"includeHeaders": "true", "message": "shop.Order"}
    found = read(options | {"schema": str(file)})
    assert (found[0]["id"] if "body_id" not in found[0] else found[0]["body_id"]) is not None
    assert found[1]["unparsed"] == b"\xff"
    text = base64.b64encode(file.read_bytes()).decode()
    assert read(options | {"schema": f"base64:{text}"}) == found
    folder = tmp_path / "export"
    export(qcli, topic, folder, "--body-format=protobuf", f"--schema={file}", "--message=shop.Order")
    assert rows(folder).to_pylist() == found
    with pytest.raises(BodySchemaError, match="it has no message Nothing"):
        read(options | {"schema": str(file), "message": "Nothing"})


def test_registry(qcli: Cli, topic: str, scripted: ScriptedRegistry, tmp_path: Path) -> None:
    """The columns are those of the latest schema; bodies are of this one and others."""
    newer = {**USER, "fields": [*USER["fields"], {"name": "age", "type": ["null", "int"], "default": None}]}
    scripted.add(1, json.dumps(USER))
    scripted.add(2, json.dumps(newer), subject=f"{topic}-value")
    bodies = [
        framed(1, USER, {"user": "a"}),
        framed(2, newer, {"user": "b", "age": 5}),
        framed(9, USER, {"user": "c"}),
    ]
    qcli.publish(topic, bodies)
    secret = tmp_path / "secret"
    secret.write_text("me:password\n")
    options = {
        "topic": topic,
        "nsqdHttpAddress": qcli.http_address,
        "format": "avro",
        "registry": scripted.url,
    }
    options |= {"columns": "user,age,unparsed", "registrySecretFile": str(secret)}
    expected = [("a", None, None), ("b", 5, None), (None, None, bodies[2])]
    assert [tuple(row.values()) for row in read(options)] == expected
    assert {sent for _, sent in scripted.requests} == {f"Basic {base64.b64encode(b'me:password').decode()}"}
    of_one = options | {"schema": json.dumps(USER), "columns": "user"}
    assert [row["user"] for row in read(of_one)] == ["a", "b", None]
    several = options | {"topic": "", "subscribe": f"{topic},other"}
    with pytest.raises(OptionError, match="may read several topics"):
        NsqDataSource(several).schema()
    assert NsqDataSource(several | {"subject": f"{topic}-value"}).schema().names == [
        "user",
        "age",
        "unparsed",
    ]
    with pytest.raises(RegistryError, match="has no /subjects/nothing/versions/latest"):
        NsqDataSource(options | {"subject": "nothing"}).schema()


SCHEMA = json.dumps(USER)
INVALID: list[tuple[dict[str, str], str]] = [
    ({"format": "json", "schema": SCHEMA}, "the option schema is for format=avro and format=protobuf"),
    ({"registryTlsCert": "x"}, "the option registryTlsCert is for format=avro"),
    ({"format": "avro"}, "format=avro needs a schema: give the option schema or registry"),
    ({"format": "avro", "schema": SCHEMA, "message": "M"}, "the option message is for format=protobuf"),
    (
        {"format": "avro", "schema": SCHEMA, "subject": "s", "registry": "http://r"},
        "schema and subject exclude",
    ),
    ({"format": "avro", "schema": SCHEMA, "subject": "s"}, "the option subject is for the option registry"),
    (
        {"format": "avro", "registry": "http://r", "writerSchemas": SCHEMA},
        "writerSchemas is for format=avro without",
    ),
    (
        {"format": "protobuf", "schema": "x", "writerSchemas": SCHEMA},
        "writerSchemas is for format=avro without",
    ),
    ({"format": "avro", "registry": "ftp://r"}, "the option registry: it is not a URL of http"),
    ({"format": "avro", "registry": "http://a:b@r"}, "must not have a user or password"),
    ({"format": "avro", "registry": "http://r?a=b"}, "cannot have a query"),
    (
        {"format": "avro", "registry": "http://r", "registryTlsKey": "k"},
        "registryTlsKey needs registryTlsCert",
    ),
    (
        {"format": "avro", "registry": "http://r", "registrySecret": "s", "registrySecretFile": "f"},
        "registrySecret and registrySecretFile exclude each other",
    ),
    ({"format": "protobuf", "schema": "base64:%"}, "the option schema is not valid after base64:"),
    ({"format": "protobuf", "schema": "base64:QUJD"}, "it is not a file of protoc"),
    ({"format": "avro", "schema": "/nothing.avsc"}, "the schema /nothing.avsc cannot be read: No such file"),
    ({"format": "avro", "schema": '{"type": "record"}'}, "the Avro schema is not valid"),
    ({"format": "avro", "schema": SCHEMA, "writerSchemas": "[{"}, "writerSchemas is no JSON list"),
]


def test_registry_that_refuses_names_the_option_of_spark(scripted: ScriptedRegistry, tmp_path: Path) -> None:
    scripted.before = lambda path: (403, {})
    options = {"topic": "t", "nsqdHttpAddress": "127.0.0.1:1", "format": "avro", "registry": scripted.url}
    with pytest.raises(RegistryError, match=r"give its secret with the option registrySecretFile$"):
        NsqDataSource(options).schema()
    missing = str(tmp_path / "missing")
    with pytest.raises(RegistryError, match=f"the option registrySecretFile {missing}: No such file"):
        NsqDataSource(options | {"registrySecretFile": missing}).schema()


@pytest.mark.parametrize(("options", "text"), INVALID)
def test_invalid_options(options: dict[str, str], text: str) -> None:
    with pytest.raises((OptionError, BodySchemaError), match=text):
        NsqDataSource(CaseInsensitiveDict({"topic": "t"} | options)).schema()


def test_schemas_of_older_bodies(qcli: Cli, topic: str, tmp_path: Path) -> None:
    """Single objects name their schema by its fingerprint."""
    older = {"type": "record", "name": "User", "fields": [{"name": "id", "type": "int"}, *USER["fields"]]}
    fingerprint = bytes.fromhex(
        fastavro.schema.fingerprint(fastavro.schema.to_parsing_canonical_form(older), "CRC-64-AVRO")
    )
    qcli.publish(topic, [avro(older, {"id": 1, "user": "a"}, b"\xc3\x01" + fingerprint)])
    file = tmp_path / "older.avsc"
    file.write_text(json.dumps(older))
    options = {"topic": topic, "nsqdHttpAddress": qcli.http_address, "format": "avro", "schema": SCHEMA}
    for writers in (str(file), json.dumps([older])):
        assert read(options | {"columns": "user", "writerSchemas": writers}) == [{"user": "a"}]


@pytest.mark.slow
def test_with_spark(
    spark: SparkSession, scripted: ScriptedRegistry, qcli: Cli, topic: str, tmp_path: Path
) -> None:
    """Every type of columns, in a batch; bodies with the framing of a registry, in a stream."""
    qcli.publish(topic, [avro(PAYMENT, VALUE), b"\xff"])
    options = {"nsqdHttpAddress": qcli.http_address, "format": "avro"}
    payments = spark.read.format("nsq").options(**options, topic=topic, schema=json.dumps(PAYMENT)).load()
    good, bad = (row.asDict(recursive=True) for row in payments.drop("ts").orderBy("seq").collect())
    assert good["body_ts"].astimezone(UTC) == NOON
    expected = ROW | {"labels": {"a": 1}}
    assert {name: good[name] for name in expected if name != "ts"} | {"ts": NOON} == expected
    assert (bytes(bad["unparsed"]), bad["user"], bad["labels"]) == (b"\xff", None, None)

    scripted.add(1, SCHEMA, subject=f"{topic}.users-value")
    qcli.publish(f"{topic}.users", [framed(1, USER, {"user": name}) for name in "abc"])
    seen: list[str] = []

    def take(batch: DataFrame, _: int) -> None:
        seen.extend(row.user for row in batch.collect())

    stream = spark.readStream.format("nsq").options(**options, topic=f"{topic}.users", registry=scripted.url)
    query = stream.load().writeStream.foreachBatch(take).option("checkpointLocation", str(tmp_path / "c"))
    query.trigger(availableNow=True).start().awaitTermination()
    assert sorted(seen) == ["a", "b", "c"]
