"""Tests for `to-parquet --body-format avro` and `protobuf`: producers, registries, and schemas that change."""

import io
import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import fastavro
import pytest

from cli.support import Cli
from spark import protos
from spark.registries import Registry, ScriptedRegistry
from spark.support import ToParquet, column, export, parquet_files, rows

CLICK = {
    "type": "record",
    "name": "Click",
    "namespace": "shop",
    "fields": [
        {"name": "user", "type": "string"},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
    ],
}
PRICE = {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}
NEWER = CLICK | {
    "fields": [*CLICK["fields"], {"name": "price", "type": ["null", PRICE], "default": None}],
}
NOON = datetime(2026, 11, 29, 12, tzinfo=UTC)
UNKNOWN = b"\0\0\xff\xff\xff\x02a\0"


def plain(schema: Any, value: dict[str, Any]) -> bytes:
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(schema), value)
    return stream.getvalue()


def framed(number: int, schema: Any, value: dict[str, Any]) -> bytes:
    return b"\0" + number.to_bytes(4, "big") + plain(schema, value)


def test_avro_of_a_registry(qcli: Cli, topic: str, registry: Registry, tmp_path: Path) -> None:
    """Two producers with Confluent's serializer, of which one has a newer schema, and a third that has none."""
    bodies = registry.avro(topic, CLICK, [{"user": "a", "at": NOON}])
    bodies += registry.avro(topic, NEWER, [{"user": "b", "at": NOON, "price": Decimal("1.50")}])
    qcli.publish(topic, [*bodies, b"{}", UNKNOWN])
    said = export(qcli, topic, tmp_path, "--body-format", "avro", "--registry", registry.url)
    assert (said["messages"], said["unparsed"], said["misfits"]) == (4, 2, {})
    assert rows(tmp_path, "user", "at", "price", "unparsed").to_pylist() == [
        {"user": "a", "at": NOON, "price": None, "unparsed": None},
        {"user": "b", "at": NOON, "price": Decimal("1.50"), "unparsed": None},
        {"user": None, "at": None, "price": None, "unparsed": b"{}"},
        {"user": None, "at": None, "price": None, "unparsed": UNKNOWN},
    ]


def test_avro_with_references_of_a_registry(
    qcli: Cli, topic: str, registry: Registry, tmp_path: Path
) -> None:
    user = {"type": "record", "name": "shop.User", "fields": [{"name": "id", "type": "int"}]}
    order = {"type": "record", "name": "shop.Order", "fields": [{"name": "user", "type": "shop.User"}]}
    registry.register(f"{topic}-user", json.dumps(user))
    references = [("shop.User", f"{topic}-user")]
    number = registry.register(f"{topic}-order", json.dumps(order), references=references)
    qcli.publish(topic, [b"\0" + number.to_bytes(4, "big") + b"\x0a"])
    options = ("--registry", registry.url, "--subject", "{topic}-order")
    export(qcli, topic, tmp_path, "--body-format", "avro", *options)
    assert column(tmp_path, "user") == [{"id": 5}]


@pytest.fixture(scope="module")
def descriptors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return protos.compiled(protos.FOLDER, tmp_path_factory.mktemp("protobuf") / "order.desc", "order.proto")


def test_protobuf_of_a_registry(
    qcli: Cli, topic: str, registry: Registry, descriptors: Path, tmp_path: Path
) -> None:
    item = protos.message_class(descriptors, "shop.Item")
    cash = protos.message_class(descriptors, "shop.Order.Cash")
    bodies = registry.protobuf(topic, [item(sku="a"), item(sku="b", flags=[True])])
    others = registry.protobuf(topic, [cash(amount=1.0)])
    qcli.publish(topic, [*bodies, *others, b"\0\0\xff\xff\xff\0"])
    options = ("--body-format", "protobuf", "--registry", registry.url, "--message", "Item")
    assert export(qcli, topic, tmp_path, *options)["unparsed"] == 2
    assert column(tmp_path, "sku") == ["a", "b", None, None]
    assert column(tmp_path, "flags") == [[], [True], None, None]
    assert column(tmp_path, "unparsed")[2] == others[0]


def test_protobuf_of_a_registry_that_has_the_source(
    qcli: Cli, topic: str, registry: Registry, tmp_path: Path
) -> None:
    number = registry.register(f"{topic}-value", protos.SOURCE, "PROTOBUF")
    qcli.publish(topic, [b"\0" + number.to_bytes(4, "big") + b"\x02\x02\x0a\x01a"])
    options = ("--body-format", "protobuf", "--registry", registry.url, "--message", "shop.Item")
    export(qcli, topic, tmp_path, *options)
    assert column(tmp_path, "sku") == ["a"]


def test_protobuf_without_a_registry(qcli: Cli, topic: str, descriptors: Path, tmp_path: Path) -> None:
    order = protos.message_class(descriptors, "shop.Order")(id=7, card="visa")
    order.at.FromDatetime(NOON)
    qcli.publish(topic, [order.SerializeToString(), b"\xff"])
    options = ("--body-format", "protobuf", "--schema", str(descriptors), "--message", "Order", "--keep-body")
    assert export(qcli, topic, tmp_path, *options)["unparsed"] == 1
    assert rows(tmp_path, "body_id", "at", "card", "body").to_pylist() == [
        {"body_id": 7, "at": NOON, "card": "visa", "body": order.SerializeToString()},
        {"body_id": None, "at": None, "card": None, "body": b"\xff"},
    ]


def test_avro_without_a_registry(qcli: Cli, topic: str, tmp_path: Path) -> None:
    """Plain bodies have the schema of the file, and single objects that of their fingerprint."""
    (tmp_path / "new.avsc").write_text(json.dumps(NEWER))
    (tmp_path / "old.avsc").write_text(json.dumps(CLICK))
    canonical = fastavro.schema.to_parsing_canonical_form(CLICK)
    fingerprint = bytes.fromhex(fastavro.schema.fingerprint(canonical, "CRC-64-AVRO"))
    single = b"\xc3\x01" + fingerprint + plain(CLICK, {"user": "old", "at": NOON})
    qcli.publish(topic, [plain(NEWER, {"user": "new", "at": NOON, "price": None}), single])
    options = ("--schema", str(tmp_path / "new.avsc"), "--writer-schema", str(tmp_path / "old.avsc"))
    export(qcli, topic, tmp_path / "out", "--body-format", "avro", *options)
    assert column(tmp_path / "out", "user") == ["new", "old"]


def test_selected_fields(qcli: Cli, topic: str, scripted: ScriptedRegistry, tmp_path: Path) -> None:
    scripted.add(1, json.dumps(NEWER), subject=f"{topic}-value")
    qcli.publish(topic, [framed(1, NEWER, {"user": "a", "at": NOON, "price": None})])
    options = ("--body-format", "avro", "--registry", scripted.url, "--columns")
    export(qcli, topic, tmp_path, *options, "at,user")
    assert rows(tmp_path).column_names[-3:] == ["at", "user", "unparsed"]


def test_condition_on_decoded_fields(
    qcli: Cli, topic: str, scripted: ScriptedRegistry, tmp_path: Path
) -> None:
    scripted.add(1, json.dumps(NEWER), subject=f"{topic}-value")
    values = [{"user": user, "at": NOON, "price": Decimal(user)} for user in ("1.00", "2.50", "9.00")]
    qcli.publish(topic, [*(framed(1, NEWER, value) for value in values), b"{}"])
    options = ("--body-format", "avro", "--registry", scripted.url, "--where", "price > 2")
    assert export(qcli, topic, tmp_path, *options)["filtered"] == 2
    assert column(tmp_path, "user") == ["2.50", "9.00"]


# ---------------------------------------------------------------------- schemas that change


@pytest.fixture
def evolving(qcli: Cli, topic: str, scripted: ScriptedRegistry) -> Callable[..., None]:
    """Publishes a message with the second schema, which is the latest of the subject from then on."""
    scripted.add(1, json.dumps(CLICK), subject=f"{topic}-value")
    qcli.publish(topic, [framed(1, CLICK, {"user": "a", "at": NOON})])

    def evolve() -> None:
        scripted.add(2, json.dumps(NEWER), subject=f"{topic}-value")
        qcli.publish(topic, [framed(2, NEWER, {"user": "b", "at": NOON, "price": Decimal("1.50")})])

    return evolve


@pytest.mark.parametrize("table", [(), ("--delta",)])
def test_new_field_of_the_latest_schema_becomes_a_column(
    qcli: Cli,
    topic: str,
    scripted: ScriptedRegistry,
    evolving: Callable[..., None],
    table: tuple[str, ...],
    tmp_path: Path,
) -> None:
    options = ("--body-format", "avro", "--registry", scripted.url, *table)
    export(qcli, topic, tmp_path, *options)
    evolving()
    said = export(qcli, topic, tmp_path, *options)
    assert (said["messages"], said["unparsed"]) == (1, 0)
    found = [rows(tmp_path / name).to_pylist()[0] for name in parquet_files(tmp_path)]
    assert [row.get("price") for row in found] == [None, Decimal("1.50")]
    if table:
        from deltalake import DeltaTable

        merged = DeltaTable(tmp_path).to_pyarrow_table().sort_by("seq")
        assert merged["price"].to_pylist() == [None, Decimal("1.50")]


def test_new_field_has_no_column_where_the_contract_says_so(
    qcli: Cli, topic: str, scripted: ScriptedRegistry, evolving: Callable[..., None], tmp_path: Path
) -> None:
    options = ("--body-format", "avro", "--registry", scripted.url, "--schema-contract", "discard-value")
    export(qcli, topic, tmp_path, *options)
    evolving()
    export(qcli, topic, tmp_path, *options)
    assert "price" not in rows(tmp_path).column_names


# ---------------------------------------------------------------------- failures


def test_registry_that_is_down_is_no_misfit(
    to_parquet: ToParquet, qcli: Cli, topic: str, scripted: ScriptedRegistry, tmp_path: Path
) -> None:
    """The export fails, and the next one continues."""
    scripted.add(1, json.dumps(CLICK), subject=f"{topic}-value")
    qcli.publish(topic, [framed(1, CLICK, {"user": "a", "at": NOON})])
    forbidden = 403, {"message": "no"}
    scripted.before = lambda path: forbidden if path == "/schemas/ids/1" else None
    scripted.answers[f"/subjects/{topic}-value/versions/latest"][1]["id"] = 2
    options = ("--body-format", "avro", "--registry", scripted.url)
    failed = to_parquet(topic, tmp_path, *options)
    assert failed.code == 1
    assert f"The schema registry {scripted.url} refuses access (status 403)" in failed.err
    assert parquet_files(tmp_path) == []
    scripted.before = lambda path: None
    assert export(qcli, topic, tmp_path, *options)["messages"] == 1
    assert column(tmp_path, "unparsed") == [None]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--body-format", "avro"), "--body-format avro needs a schema: give --schema or --registry."),
        (("--body-format", "avro", "--json"), "--json and --body-format exclude each other."),
        (("--registry", "http://a"), "--registry is for Avro and Protobuf bodies: say --body-format avro or"),
        (
            ("--body-format", "avro", "--registry", "ftp://a"),
            "'--registry': The URL cannot be used: it is not a URL",
        ),
        (
            ("--body-format", "avro", "--registry", "http://a/b?token=c"),
            "'--registry': The URL cannot have a query",
        ),
        (
            ("--body-format", "avro", "--registry", "http://u:p@a", "--registry-secret-file", "FILE"),
            "--registry has a user and a password, and --registry-secret-file excludes them",
        ),
        (("--body-format", "avro", "--schema", "FILE", "--subject", "s"), "--subject is for --registry."),
        (
            ("--body-format", "avro", "--schema", "FILE", "--registry", "http://a", "--subject", "s"),
            "--schema and --subject exclude each other",
        ),
        (
            ("--body-format", "avro", "--schema", "FILE", "--message", "M"),
            "--message is for --body-format protobuf.",
        ),
        (
            ("--body-format", "protobuf", "--schema", "FILE", "--writer-schema", "FILE"),
            "--writer-schema is for --body-format avro without --registry.",
        ),
        (
            ("--body-format", "avro", "--registry", "http://a", "--registry-tls-key", "FILE"),
            "--registry-tls-key needs a certificate",
        ),
        (
            ("--body-format", "text", "--schema", "FILE"),
            "--schema describes columns, and --body-format text has none",
        ),
        (("--body-format", "text", "--keep-body"), "--keep-body is for --json, and for --body-format avro"),
    ],
)
def test_options_that_contradict_each_other(
    to_parquet: ToParquet, tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    (tmp_path / "FILE").write_text(json.dumps(CLICK))
    result = to_parquet(
        "t", tmp_path / "out", *(str(tmp_path / "FILE") if each == "FILE" else each for each in options)
    )
    assert (result.code, said in " ".join(result.err.split())) == (2, True), result.err


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("avro", "{}", "cannot be used: the Avro schema is not valid"),
        ("avro", '"int"', "the columns are those of a record"),
        (
            "protobuf",
            "{}",
            "cannot be used: it is not a file of protoc --include_imports --descriptor_set_out",
        ),
    ],
)
def test_schema_file_that_cannot_be_used(
    to_parquet: ToParquet, qcli: Cli, topic: str, tmp_path: Path, kind: str, text: str, said: str
) -> None:
    qcli.publish(topic, [b"m"])
    (tmp_path / "file").write_text(text)
    result = to_parquet(topic, tmp_path / "out", "--body-format", kind, "--schema", tmp_path / "file")
    assert (result.code, said in result.err) == (1, True), result.err
    assert parquet_files(tmp_path) == []


@pytest.mark.parametrize(
    ("kind", "package", "users"),
    [
        ("avro", "fastavro", ["bodies.avro"]),
        ("protobuf", "google.protobuf.descriptor", ["bodies.descriptors", "spark.bodies.protobuf"]),
    ],
)
def test_extra_that_is_missing_is_named(
    to_parquet: ToParquet,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    package: str,
    users: list[str],
    tmp_path: Path,
) -> None:
    for name in users:
        monkeypatch.delitem(sys.modules, f"trio_nsq.{name}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "file").write_text(json.dumps(CLICK))
    result = to_parquet("t", tmp_path / "out", "--body-format", kind, "--schema", tmp_path / "file")
    assert result.code == 1
    assert f"{kind} bodies need the extra 'schemas', which is not installed" in result.err


def test_another_format_than_that_of_the_folder(
    to_parquet: ToParquet, qcli: Cli, topic: str, scripted: ScriptedRegistry, evolving: object, tmp_path: Path
) -> None:
    options = ("--body-format", "avro", "--registry", scripted.url)
    export(qcli, topic, tmp_path, *options)
    result = to_parquet(topic, tmp_path, "--json")
    assert (result.code, "has files with --body-format avro, and" in result.err) == (1, True)
    printed = to_parquet(topic, tmp_path, "--print-schema", *options)
    assert [field["name"] for field in json.loads(printed.out)["fields"]] == ["user", "at"]
