"""Tests for headers of messages in exports, tables and replays: a map column, which replays publish again."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.types import StructType

from broker.headers import hpub_body
from cli.support import Cli
from interop.peers import Broker
from spark.support import export, replayed, rows
from spark.table_support import DELTA, ICEBERG, duckdb_counts, table_rows, use_catalog
from trio_nsq.protocol import pack_messages
from trio_nsq.protocol.batcher import HeadersBatcher
from trio_nsq.protocol.headers import (
    MAX_HPUB_HEADERS_BYTES,
    MAX_HPUB_MESSAGES,
    Headers,
    encode_headers,
    prefix_of,
)
from trio_nsq.spark.data_source import NsqDataSource
from trio_nsq.spark.export.columns import TableBuilder, schema_of
from trio_nsq.spark.export.layout import BodyFormat, Layout, name_columns
from trio_nsq.spark.spool.records import SpooledMessage, headers_of, record_of
from trio_nsq.spark.tables.target import TableTarget

TRACE = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "tenant": "sieben: ü"}
MESSAGES: list[tuple[bytes, Headers]] = [(b"1", TRACE), (b"2", {}), (b"3", {"a": ""})]


def publish(broker: Broker, topic: str, messages: list[tuple[bytes, Headers]] = MESSAGES) -> None:
    part = [(body, encode_headers(headers).encode()) for body, headers in messages]
    broker.post("/hpub", hpub_body(*part), topic=topic)


def stored(broker: Broker, topic: str) -> list[tuple[bytes, Headers]]:
    lines = map(json.loads, broker.http("GET", "/topic/read", topic=topic).decode().splitlines())
    return [(line["body"].encode(), line.get("headers", {})) for line in lines]


def in_table(table: pa.Table) -> list[tuple[bytes, Headers]]:
    """Return the bodies and the headers of a table, by sequence."""
    found: list[dict[str, Any]] = table.sort_by("seq").to_pylist()
    assert all(each["headers"] != [] for each in found)
    return [(each["body"], dict(each["headers"] or ())) for each in found]


def test_files_have_a_map_column_that_is_replayed(
    broker: Broker, qcli: Cli, topic: str, tmp_path: Path
) -> None:
    publish(broker, topic)
    qcli.publish(topic, [b"plain"] * 3)
    expected = [*MESSAGES, *[(b"plain", {})] * 3]
    export(qcli, topic, tmp_path / "f")
    assert in_table(rows(tmp_path / "f")) == expected
    again = f"{topic}.again"
    for name, args in (("files", []), ("order", ["--ordered"])):
        assert replayed(qcli, tmp_path, str(tmp_path / "f"), f"{again}.{name}", *args)["published"] == 6
        assert stored(broker, f"{again}.{name}") == expected
    bodies = replayed(qcli, tmp_path, str(tmp_path / "f"), f"{again}.bodies", "--body-column", "body")
    assert bodies["published"] == 6
    assert stored(broker, f"{again}.bodies") == [(body, {}) for body, _ in expected]


def test_a_folder_without_the_column_goes_on(broker: Broker, qcli: Cli, topic: str, tmp_path: Path) -> None:
    """Exports of earlier versions have no column; the headers that it cannot have are counted."""
    qcli.publish(topic, [b"plain"])
    export(qcli, topic, tmp_path / "f")
    (manifest,) = tmp_path.rglob("manifest.json")
    found = json.loads(manifest.read_bytes())
    for layout in found["layouts"]:
        del layout["headers"]
    manifest.write_text(json.dumps(found))
    for file in (tmp_path / "f").glob("*.parquet"):
        pa.parquet.write_table(pa.parquet.read_table(file).drop_columns("headers"), file)
    publish(broker, topic)
    result = qcli("to-parquet", topic, str(tmp_path / "f"), "--engine", "inline", "--format", "json")
    assert result.code == 4, result.err  # the next run does not tell of them again
    assert result.records[-1]["without_column"] == 2
    assert "the headers of 2 messages are not written" in result.err
    table = rows(tmp_path / "f")
    assert "headers" not in table.column_names
    assert sorted(table["body"].to_pylist()) == [b"1", b"2", b"3", b"plain"]


@pytest.mark.parametrize("target", [DELTA, ICEBERG], ids=["delta", "iceberg"])
def test_tables_have_a_map_column(
    target: TableTarget,
    broker: Broker,
    qcli: Cli,
    topic: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_catalog(monkeypatch, tmp_path)
    arguments = [*str(target).split(), "--compact"]
    expected = []
    for _ in range(9 if target == DELTA else 2):  # 8 small files are merged
        publish(broker, topic)
        expected += MESSAGES
        export(qcli, topic, tmp_path / "f", *arguments)
    assert in_table(table_rows(target, tmp_path / "f")) == expected
    assert duckdb_counts(target, tmp_path / "f")[0] == len(expected)


def test_builder_without_the_column_counts() -> None:
    messages = [
        SpooledMessage(7, 1, 1, b"a", "x:1\n"),
        SpooledMessage(9, 2, 1, b"b"),
        SpooledMessage(8, 3, 1, b"c", "y:\n"),
    ]
    record = record_of(5, messages)
    assert headers_of(record) == ["x:1\n", "", "y:\n"]
    assert headers_of(record_of(0, messages[1:2])) == ()
    lost = TableBuilder("t", "b", Layout())
    lost.add(record)
    assert (lost.without_column, "headers" in lost.table().column_names) == (2, False)
    kept = TableBuilder("t", "b", Layout(headers=True))
    for _ in range(2):
        kept.add(record_of(0, messages[1:2]))
        kept.add(record)
        table = kept.table()
        assert table["headers"].to_pylist() == [None, [("x", "1")], None, [("y", "")]]
        assert table["id"].to_pylist() == [f"{each:016x}" for each in (9, 7, 9, 8)]
        assert table["ts_ns"].to_pylist() == [2, 1, 2, 3]
    assert kept.without_column == 0


@pytest.mark.parametrize("form", BodyFormat)
def test_place_of_the_column(form: BodyFormat) -> None:
    names = schema_of(Layout(body=form, headers=True)).names
    assert names[6:8] == ["attempts", "headers"]
    assert schema_of(Layout(body=form)).names == [name for name in names if name != "headers"]


def test_layout_in_the_manifest() -> None:
    for headers in (True, False):
        assert Layout.from_json(Layout(headers=headers).to_json()).headers is headers
    older = Layout(headers=True).to_json()
    del older["headers"]
    assert not Layout.from_json(older).headers


def test_a_field_with_the_name_of_the_column(broker: Broker, qcli: Cli, topic: str, tmp_path: Path) -> None:
    """It is named apart in new folders only: not in those of earlier versions, nor in Spark's data source."""
    publish(broker, topic, [(b'{"headers": "x"}', {"a": "1"})])
    for name, args in (("inferred", []), ("given", ["--columns", "headers"])):
        export(qcli, topic, tmp_path / name, "--json", *args)
        table = rows(tmp_path / name)
        assert table["body_headers"].to_pylist() == ["x"]
        assert table["headers"].to_pylist() == [[("a", "1")]]
    assert name_columns(["headers", "ts"]) == ["headers", "body_ts"]
    assert Layout(body=BodyFormat.JSON).with_fields({"headers": "string"}).json_columns[0].name == "headers"


def test_batches_of_a_replay_keep_to_the_limits_of_headers() -> None:
    plain, short, long = (prefix_of(text) + b"x" for text in ("", "a:1\n", f"a:{'x' * 16_000}\n"))
    for messages in ([plain] * 5000 + [short] * 2000 + [plain] * 2000, [long] * 200):
        batcher = HeadersBatcher(10_000, 2**21)
        batches = [*batcher.add(messages[:77]), *batcher.add(messages[77:]), batcher.rest()]
        assert [each for batch in batches for each in batch] == messages
        once = HeadersBatcher(10_000, 2**21)
        assert [*once.add(messages), once.rest()] == batches
        for batch in batches:
            if any(each != plain for each in batch):
                assert len(batch) <= MAX_HPUB_MESSAGES
                assert pack_messages(batch).body_bytes <= MAX_HPUB_HEADERS_BYTES + 3 * len(batch)


@pytest.mark.parametrize("form", [BodyFormat.BINARY, BodyFormat.TEXT, BodyFormat.JSON])
def test_source_of_spark_has_the_column_if_asked(
    form: BodyFormat, broker: Broker, qcli: Cli, topic: str
) -> None:
    """Without the option, a JSON field of this name keeps its column."""
    publish(broker, topic, [(b'{"headers": "x"}', {"a": "1"}), (b'{"headers": "y"}', {})])
    options = {"topic": topic, "nsqdHttpAddress": qcli.http_address, "format": str(form)}
    plain = read_by_source(options)
    assert ("headers" in plain[0]) == (form is BodyFormat.JSON)
    asked = read_by_source(options | {"includeHeaders": "true"})
    assert [each["headers"] for each in asked] == [[("a", "1")], None]
    if form is BodyFormat.JSON:
        assert [each["headers"] for each in plain] == ["x", "y"]
        assert [each["body_headers"] for each in asked] == ["x", "y"]
    else:
        (first, _) = read_by_source(options | {"includeHeaders": "true", "columns": "headers,seq"})
        assert first == {"headers": [("a", "1")], "seq": 0}


def read_by_source(options: dict[str, str]) -> list[dict[str, Any]]:
    """Read all rows, as Spark would."""
    source = NsqDataSource(CaseInsensitiveDict(options))
    schema = StructType.fromJson(json.loads(source.schema().json()))
    reader = source.reader(schema)
    batches = [batch for partition in reader.partitions() for batch in reader.read(partition)]
    return [row for batch in batches for row in batch.to_pylist()]
