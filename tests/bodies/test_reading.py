"""Tests for bodies as people see them: formats, limits, damage and masks. Reading never raises."""

import gzip
import io
import json
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fastavro
import msgspec
import pytest
import snappy
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from soak import examples
from spark import protos
from spark.registries import ScriptedRegistry, scripted_registry
from trio_nsq.bodies.bodies_file import BodiesFileError, TopicReaders, read_bodies_file
from trio_nsq.bodies.reading import MAX_BYTES, PLAIN, BodyReader
from trio_nsq.filters.masks import Mask

CLICK = {
    "type": "record",
    "name": "Click",
    "fields": [
        {"name": "user", "type": "string"},
        {"name": "at", "type": ["null", "bytes"], "default": None},
    ],
}
TREE = {
    "type": "record",
    "name": "Tree",
    "fields": [{"name": "below", "type": {"type": "array", "items": "Tree"}}],
}
SECRET = "tops3cret"


def snappy_frames(data: bytes) -> bytes:
    return bytes(snappy.StreamCompressor().compress(data))


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "zlib": zlib.compress,
    "zstd": zstandard.compress,
    "snappy": snappy_frames,
}


def encoded(schema: dict[str, Any], value: Any) -> bytes:
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, schema, value)
    return stream.getvalue()


def container(schema: dict[str, Any], values: list[Any], codec: str) -> bytes:
    stream = io.BytesIO()
    if codec != "zstandard":
        fastavro.writer(stream, schema, values, codec=codec)
        return stream.getvalue()
    # fastavro needs another package for this codec.
    meta = {"avro.schema": json.dumps(schema).encode(), "avro.codec": b"zstandard"}
    data = zstandard.compress(b"".join(encoded(schema, value) for value in values))
    marker = bytes(range(16))
    header = b"Obj\x01" + encoded({"type": "map", "values": "bytes"}, meta) + marker
    return header + encoded({"type": "long"}, len(values)) + encoded({"type": "bytes"}, data) + marker


def readers_of(folder: Path, text: str) -> TopicReaders:
    """Return the readers of a file."""
    file = folder / "bodies.toml"
    file.write_text(text)
    return read_bodies_file(file)


def reader_of(folder: Path, text: str) -> BodyReader:
    """Return the reader of one topic, with these lines."""
    return readers_of(folder, f'[[topic]]\nname = "t"\n{text}').of("t")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with schemas."""
    found = tmp_path_factory.mktemp("bodies")
    (found / "click.avsc").write_text(json.dumps(CLICK))
    (found / "tree.avsc").write_text(json.dumps(TREE))
    protos.compiled(protos.FOLDER, found / "order.desc", "order.proto")
    return found


@pytest.fixture
def scripted() -> Iterator[ScriptedRegistry]:
    with scripted_registry() as running:
        yield running


# ---------------------------------------------------------------------- compression


@pytest.mark.parametrize("kind", COMPRESS)
@given(body=st.binary(min_size=1, max_size=200))
@settings(max_examples=examples(20))
def test_compressed_bodies_say_what_they_are(kind: str, body: bytes) -> None:
    found = PLAIN.read(COMPRESS[kind](body))
    if not body.startswith(b"Obj\x01"):
        assert (found.content, found.is_complete, found.formats, found.problem) == (body, True, (kind,), "")


@pytest.mark.parametrize("kind", COMPRESS)
def test_what_decompresses_to_more_is_cut(kind: str) -> None:
    found = PLAIN.read(COMPRESS[kind](bytes(64 * MAX_BYTES)))
    assert (len(found.content), found.is_complete) == (MAX_BYTES, False)


def test_many_members_of_gzip() -> None:
    """Their bytes are copied once, not once for each member before them."""
    body = gzip.compress(b"") * 20_000 + b"".join(gzip.compress(b"%d," % n) for n in range(1000))
    assert PLAIN.read(body).content == b"".join(b"%d," % n for n in range(1000))
    assert "ends early" in PLAIN.read(body[:-5]).problem
    assert "is not valid gzip" in PLAIN.read(body + b"more").problem


def test_block_of_snappy(tmp_path: Path) -> None:
    """It does not say what it is, but how large: a larger one is not begun."""
    reader = reader_of(tmp_path, 'compression = "snappy"')
    assert reader.read(snappy.compress(b"{}" * 50)).content == b"{}" * 50
    assert "is not valid snappy" in reader.read(snappy.compress(bytes(2 * MAX_BYTES))).problem
    assert PLAIN.read(snappy.compress(b"{}")).formats == ()


@pytest.mark.parametrize("kind", COMPRESS)
def test_damaged_body_stays_as_it_is(kind: str) -> None:
    body = COMPRESS[kind](bytes(range(256)) * 20)
    for damaged in body[:-5], body[:12] + bytes([body[12] ^ 0xFF]) + body[13:-2]:
        found = PLAIN.read(damaged)
        assert found.content == damaged
        assert found.problem.startswith(f"The body is not valid {kind}")


def test_compression_none_leaves_bodies(tmp_path: Path) -> None:
    body = gzip.compress(b"x")
    assert reader_of(tmp_path, 'compression = "none"').read(body).content == body


def test_members_of_gzip() -> None:
    assert PLAIN.read(gzip.compress(b"ab") + gzip.compress(b"c")).content == b"abc"


# ---------------------------------------------------------------------- formats


def test_avro_with_a_schema(folder: Path) -> None:
    reader = reader_of(folder, 'format = "avro"\nschema = "click.avsc"')
    body = encoded(CLICK, {"user": "ö", "at": b"\0\1"})
    for each in body, gzip.compress(body):
        assert json.loads(reader.read(each).content) == {"user": "ö", "at": "AAE="}
    assert reader.read(gzip.compress(body)).formats == ("gzip", "avro")
    parsed = fastavro.parse_schema(CLICK)
    fingerprint = fastavro.schema.fingerprint(
        fastavro.schema.to_parsing_canonical_form(parsed), "CRC-64-AVRO"
    )
    single = b"\xc3\x01" + bytes.fromhex(fingerprint) + body
    assert json.loads(reader.read(single).content)["user"] == "ö"
    found = reader.read(body + b"x")
    assert (found.content, found.problem) == (body + b"x", "The body is longer than a record of its schema.")


def test_older_schemas_of_single_objects(folder: Path) -> None:
    older = {"type": "record", "name": "Click", "fields": [{"name": "user", "type": "string"}]}
    (folder / "older.avsc").write_text(json.dumps(older))
    form = fastavro.schema.to_parsing_canonical_form(fastavro.parse_schema(older))
    body = b"\xc3\x01" + bytes.fromhex(fastavro.schema.fingerprint(form, "CRC-64-AVRO"))
    body += encoded(older, {"user": "u"})
    text = 'format = "avro"\nschema = "click.avsc"'
    assert reader_of(folder, text).read(body).problem
    found = reader_of(folder, f'{text}\nwriter_schemas = ["older.avsc"]').read(body)
    assert json.loads(found.content) == {"user": "u"}


@pytest.mark.parametrize("codec", ["null", "deflate", "snappy", "zstandard"])
def test_avro_files_have_their_schema(codec: str) -> None:
    values = [{"user": f"u{n}", "at": None} for n in range(3)]
    found = PLAIN.read(container(CLICK, values, codec))
    assert (json.loads(found.content), found.formats) == (values, ("avro file",))
    many = PLAIN.read(container(CLICK, values * 50, codec))
    assert json.loads(many.content)[-1] == {"": "only the first 100 records are shown"}


@pytest.mark.parametrize("masks", [[], [("user", Mask.HIDE)]])
def test_avro_files_without_the_package(
    monkeypatch: pytest.MonkeyPatch, masks: list[tuple[str, Mask]]
) -> None:
    """Anybody can publish bytes that begin as such a file: they are shown, or withheld."""
    monkeypatch.setitem(sys.modules, "fastavro", None)  # as if it were not installed
    for name in "avro", "avro_container":
        monkeypatch.delitem(sys.modules, f"trio_nsq.bodies.{name}", raising=False)
    for body in container(CLICK, [{"user": SECRET, "at": None}], "null"), b"Obj\x01":
        found = BodyReader(masks=masks).read(body)
        if masks:
            assert (found.content, found.is_masked) == (b"withheld: %d bytes" % len(body), True)
        else:
            assert found.content == body
            assert found.problem.startswith("An Avro file needs the extra 'schemas', which is not installed")


def test_protobuf_with_a_schema(folder: Path) -> None:
    reader = reader_of(folder, 'format = "protobuf"\nschema = "order.desc"\nmessage = "shop.Order"')
    order = protos.message_class(folder / "order.desc", "shop.Order")(id=7, card="4111")
    assert json.loads(reader.read(order.SerializeToString()).content) == {"id": "7", "card": "4111"}
    assert "The body is no shop.Order" in reader.read(b"\xff").problem


def test_protobuf_without_a_schema(folder: Path) -> None:
    reader = reader_of(folder, 'format = "protobuf"')
    order = protos.message_class(folder / "order.desc", "shop.Order")(id=7, card="41\x0011")
    order.items.add(sku="a", flags=[True])
    order.items.add(sku="b")
    found = json.loads(reader.read(order.SerializeToString()).content)
    assert (found["1"], found["7"]) == (7, "NDEAMTE=")
    assert found["5"] == [{"1": "a", "2": "AQ=="}, {"1": "b"}]


def test_names_of_messagepack_are_json(tmp_path: Path) -> None:
    """Also arrays, null and booleans."""
    found = reader_of(tmp_path, 'format = "messagepack"').read(b"\x83\x92\x01\xa1a\x01\xc0\x02\xc3\x03")
    assert json.loads(found.content) == {'[1, "a"]': 1, "null": 2, "true": 3}


@pytest.mark.parametrize("masks", [[], [("card", Mask.HIDE)]], ids=["plain", "masked"])
def test_a_body_without_time_says_so(masks: list[tuple[str, Mask]]) -> None:
    """Whether its fields are masked or not."""
    found = BodyReader(masks=masks).unread(b'{"card": 1}')
    assert found.problem == "It is not decoded in this list: open the message."
    assert (b"card" in found.content) is (not masks)


def test_messagepack(tmp_path: Path) -> None:
    reader = reader_of(tmp_path, 'format = "messagepack"')
    value = {"a": [1, None, 1.5, "ö", b"\0"], "b": msgspec.msgpack.Ext(5, b"x")}
    found = json.loads(reader.read(msgspec.msgpack.encode(value)).content)
    assert found == {"a": [1, None, 1.5, "ö", "AA=="], "b": {"type": 5, "data": "eA=="}}
    assert "not valid MessagePack" in reader.read(b"\xdd\xff\xff\xff\xff").problem


def test_framing_of_a_registry(folder: Path, scripted: ScriptedRegistry) -> None:
    """Each body is decoded with the schema that it was written with."""
    scripted.add(7, json.dumps(CLICK))
    reader = reader_of(folder, f'format = "avro"\nregistry = "{scripted.url}"')
    body = b"\0\0\0\0\x07" + encoded(CLICK, {"user": "u", "at": None})
    for _ in range(2):
        assert json.loads(reader.read(body).content) == {"user": "u", "at": None}
    assert len(scripted.requests) == 1
    assert "no framing" in reader.read(b"{}").problem
    assert "Schema not found" in reader.read(b"\0\0\0\0\x08x").problem


def test_protobuf_of_a_registry(folder: Path, scripted: ScriptedRegistry) -> None:
    """The body names the schema, and the message in it: here the second one of the file."""
    scripted.add(1, protos.SOURCE, "PROTOBUF")
    reader = reader_of(folder, f'format = "protobuf"\nregistry = "{scripted.url}"')
    item = protos.message_class(folder / "order.desc", "shop.Item")(sku="a", flags=[True, False])
    body = b"\0\0\0\0\1" + b"\x02\x02" + item.SerializeToString()
    found = reader.read(body)
    assert json.loads(found.content) == {"sku": "a", "flags": [True, False]}
    assert (found.formats, found.problem) == (("protobuf",), "")
    assert reader.read(b"\0\0\0\0\1\x02\x7f" + item.SerializeToString()).problem
    assert len(scripted.requests) == 1


@pytest.mark.parametrize(("status", "said"), [(503, "status 503"), (401, "with registry_secret_file")])
def test_registry_that_does_not_answer_is_asked_once(
    folder: Path, scripted: ScriptedRegistry, status: int, said: str
) -> None:
    """Otherwise each message of a page would wait for it."""
    scripted.before = lambda path: (status, {})
    reader = reader_of(folder, f'format = "avro"\nregistry = "{scripted.url}"')
    for number in b"\x07\x08\x09":
        assert said in reader.read(b"\0\0\0\0" + bytes([number])).problem
    assert len(scripted.requests) == 1


def test_file_of_the_secret_that_is_missing(folder: Path, scripted: ScriptedRegistry) -> None:
    missing = folder / "missing"
    reader = reader_of(
        folder, f'format = "avro"\nregistry = "{scripted.url}"\nregistry_secret_file = "{missing}"'
    )
    assert f"registry_secret_file {missing}: No such file" in reader.read(b"\0\0\0\0\7").problem


# ---------------------------------------------------------------------- limits


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"\x91" * 100_000, id="nested"),
        pytest.param(b"\x91" * 150 + b"\xc0", id="deeper than JSON is shown"),
        pytest.param(b"\xdd\x00\x04\x00\x00" + b"\xc0" * 0x40000, id="too large"),
    ],
)
def test_messagepack_of_strangers(tmp_path: Path, body: bytes) -> None:
    found = reader_of(tmp_path, 'format = "messagepack"').read(body)
    assert (found.content, bool(found.problem)) == (body, True)


def test_records_without_bytes_are_counted(tmp_path: Path) -> None:
    """Ten bytes may say that a billion records follow, of which none takes a byte."""
    empty = {"type": "array", "items": {"type": "record", "name": "Empty", "fields": []}}
    (tmp_path / "s.avsc").write_text(json.dumps(empty))
    count = encoded({"type": "long"}, 10**9)
    found = reader_of(tmp_path, 'format = "avro"\nschema = "s.avsc"').read(count + b"\0")
    assert "too many items" in found.problem


def test_long_names_of_a_schema_are_bounded(tmp_path: Path) -> None:
    """Each item takes one byte of the body, and a name of 10,000 characters in JSON."""
    schema = {
        "type": "array",
        "items": {"type": "record", "name": "R", "fields": [{"name": "n" * 10_000, "type": "int"}]},
    }
    (tmp_path / "s.avsc").write_text(json.dumps(schema))
    body = encoded(schema, [{"n" * 10_000: 1}] * 1000)
    assert (
        "characters as JSON" in reader_of(tmp_path, 'format = "avro"\nschema = "s.avsc"').read(body).problem
    )


FORMATS = {
    "auto": "",
    "avro": 'format = "avro"\nschema = "click.avsc"',
    "tree": 'format = "avro"\nschema = "tree.avsc"',
    "protobuf": 'format = "protobuf"\nschema = "order.desc"\nmessage = "Order"',
    "fields": 'format = "protobuf"',
    "messagepack": 'format = "messagepack"',
    "snappy": 'compression = "snappy"',
    "zstd": 'compression = "zstd"',
}
BEGINNINGS = st.sampled_from(
    [
        b"",
        b"Obj\x01",
        b"\x1f\x8b\x08",
        b"\x78\x9c",
        b"\x28\xb5\x2f\xfd",
        b"\xff\x06\x00\x00sNaPpY",
        b"\xc3\x01",
        b"\0",
    ]
)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("masked", [False, True])
@given(beginning=BEGINNINGS, rest=st.binary(max_size=300))
@settings(max_examples=examples(40))
def test_any_bytes(folder: Path, kind: str, masked: bool, beginning: bytes, rest: bytes) -> None:
    field = "1" if kind == "fields" else "user"
    reader = reader_of(folder, FORMATS[kind] + (f'\nmask = ["{field}"]' if masked else ""))
    found = reader.read(beginning + rest)
    assert len(found.content) <= MAX_BYTES
    assert found.is_masked == (masked and bool(beginning + rest))


@given(st.data())
@settings(max_examples=examples(100))
def test_damaged_avro_files(data: st.DataObject) -> None:
    body = bytearray(container(CLICK, [{"user": "u", "at": b"x"}] * 3, "deflate"))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    found = PLAIN.read(bytes(body[: data.draw(st.integers(1, len(body)))]))
    assert len(found.content) <= MAX_BYTES


# ---------------------------------------------------------------------- masks


NAMES = st.sampled_from(["card", "user", "a.b", "x"])
SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.just(SECRET)
)  # MessagePack has no others
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=10,
)


def has_secret_elsewhere(value: Any, path: tuple[str, ...], masked: str) -> bool:
    """Whether the secret is where a mask does not hide it."""
    if isinstance(value, dict):
        return any(
            has_secret_elsewhere(each, (*path, name), masked)
            for name, each in value.items()
            if ".".join((*path, name)) != masked
        )
    if isinstance(value, list):
        return any(has_secret_elsewhere(each, path, masked) for each in value)
    return bool(value == SECRET)


@given(
    st.dictionaries(NAMES, VALUES, min_size=1, max_size=4),
    st.sampled_from(["card", "user", "user.card", "a.b", "user.card.x"]),
    st.sampled_from([Mask.HIDE, Mask.NULL, Mask.SHA256]),
    st.sampled_from(["json", "gzip", "messagepack"]),
)
@settings(max_examples=examples(300))
def test_masked_values_are_nowhere(value: dict[str, Any], field: str, mask: Mask, form: str) -> None:
    reader = BodyReader(masks=[(field, mask)])
    body = json.dumps(value).encode()
    if form == "gzip":
        body = gzip.compress(body)
    elif form == "messagepack":
        from trio_nsq.bodies.messagepack import MessagePackBodies

        body, reader = (
            msgspec.msgpack.encode(value),
            BodyReader(decoder=MessagePackBodies(), masks=[(field, mask)]),
        )
    found = reader.read(body)
    assert found.is_masked
    if not has_secret_elsewhere(value, (), field):
        assert SECRET not in found.content.decode()
    assert reader.content(body) == found.content
    assert reader.without_masks().read(body).is_masked is False


@pytest.mark.parametrize(
    "body",
    [
        b"tops3cret",
        b'["tops3cret"]',
        b'{"card": "tops3cret"',
        b'\xff{"card": "tops3cret"}',
        gzip.compress(b"tops3cret", mtime=0),
    ],
)
def test_what_cannot_be_masked_is_withheld(body: bytes) -> None:
    found = BodyReader(masks=[("card", Mask.HIDE)]).read(body)
    assert found.content == b"withheld: %d bytes" % len(body)
    assert found.problem == "It is no JSON object, or cannot be decoded, so its fields cannot be masked."


def test_records_of_a_file_are_masked() -> None:
    reader = BodyReader(masks=[("user", Mask.HIDE)])
    found = reader.read(container(CLICK, [{"user": SECRET, "at": None}] * 2, "null"))
    assert json.loads(found.content) == [{"user": "***", "at": None}] * 2


def test_limits_of_a_file_are_for_all_its_records() -> None:
    """A file of 500 bytes has 100 records of 199,000 values each, which take no bytes."""
    nulls = {
        "type": "record",
        "name": "N",
        "fields": [{"name": "a", "type": {"type": "array", "items": "null"}}],
    }
    records = (encoded({"type": "long"}, 199_000) + b"\0") * 100
    data = zlib.compress(records.ljust(250_000, b"\0"), 9)[2:-4]
    empty = container(nulls, [], "deflate")
    body = empty + encoded({"type": "long"}, 100) + encoded({"type": "bytes"}, data) + empty[-16:]
    began_s = time.process_time()
    assert "has more than 1048576 characters" in PLAIN.read(body).problem
    assert time.process_time() - began_s < 2.0  # 0.1 s here


def union_file(branches: int, values: int) -> bytes:
    """Return a file with a union of records without fields; each value is of the last one."""
    records = [{"type": "record", "name": f"U{n}", "fields": []} for n in range(branches)]
    meta = {"avro.schema": json.dumps(records).encode()}
    header = b"Obj\x01" + encoded({"type": "map", "values": "bytes"}, meta) + bytes(16)
    data = encoded({"type": "long"}, branches - 1) * values
    return header + encoded({"type": "long"}, values) + encoded({"type": "bytes"}, data) + bytes(16)


def test_time_of_a_file_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its schema may be such that each value of two bytes takes long."""
    body = union_file(1000, 90)
    began_s = time.thread_time()
    found = PLAIN.read(body)
    assert time.thread_time() - began_s < 3.0  # 1.1 s here; without the limit, 4 s or more
    assert (found.content, found.problem) in (
        (body, "The file takes too long to decode."),
        (json.dumps([{}] * 90).encode(), ""),  # fastavro is fast here
    )
    monkeypatch.setattr("trio_nsq.bodies.reading.FILE_S", 0.0)
    assert PLAIN.read(union_file(2, 2)).problem == "The file takes too long to decode."


def test_large_unions_are_refused() -> None:
    assert "a union of more than 1000 types" in PLAIN.read(union_file(1001, 1)).problem


def test_names_that_are_bytes_are_masked(tmp_path: Path) -> None:
    """Python's msgpack writes the names of `{b"card": ...}` so."""
    reader = reader_of(tmp_path, 'format = "messagepack"\nmask = ["card"]')
    body = b"\x82\xc4\x04card" + msgspec.msgpack.encode(SECRET) + b"\xc4\x01\xff\x01"
    assert json.loads(reader.read(body).content) == {"card": "***", "/w==": 1}


def test_extensions_have_no_fields(tmp_path: Path) -> None:
    """One in the place of an object may have the masked field in its bytes."""
    reader = reader_of(tmp_path, 'format = "messagepack"\nmask = ["a.b"]')
    extension = msgspec.msgpack.Ext(5, SECRET.encode())
    for value in extension, [extension]:
        found = reader.read(msgspec.msgpack.encode({"a": value, "c": msgspec.msgpack.Ext(5, b"x")}))
        assert json.loads(found.content) == {
            "a": ["***"] if isinstance(value, list) else "***",
            "c": {"type": 5, "data": "eA=="},
        }
    body = msgspec.msgpack.encode(extension)
    assert reader.read(body).content == b"withheld: %d bytes" % len(body)


def test_numbers_of_fields_are_masked_by_number(folder: Path) -> None:
    """Without a schema, a mask by name would mask nothing: also that of the topic that a dead letter comes from."""
    found = readers_of(
        folder,
        '[[topic]]\nname = "raw"\nformat = "protobuf"\nmask = ["1"]\n[[topic]]\nname = "t"\nmask = ["user"]',
    )
    body = b"\x0a\x09" + SECRET.encode()
    assert found.of("raw").read(body).content == b'{"1": "***"}'
    assert found.of("t", "raw").read(body).content == b"withheld: 11 bytes"
    assert found.of("raw", "t").read(body).content == b"withheld: 11 bytes"


def test_names_are_not_masked_by_number(folder: Path) -> None:
    """An Avro file has names, also in a topic whose other bodies have numbers."""
    found = readers_of(
        folder,
        '[[topic]]\nname = "raw"\nformat = "protobuf"\nmask = ["1"]\n[[topic]]\nname = "t"\nmask = ["a"]',
    )
    body = container(CLICK, [{"user": SECRET, "at": None}], "null")
    for reader in found.of("raw"), found.of("t", "raw"), found.of_unknown_origin("t"):
        assert reader.read(body).content == b"withheld: %d bytes" % len(body)


def test_last_characters_stay() -> None:
    found = BodyReader(masks=[("card", Mask.LAST4)]).read(b'{"card": 4111111111111111, "n": 1.10}')
    assert found.content == b'{"card":"***1111","n":1.10}'


# ---------------------------------------------------------------------- the file


def test_first_topic_that_matches_counts(tmp_path: Path) -> None:
    found = readers_of(
        tmp_path, '[[topic]]\nname = "orders-*"\nmask = ["card"]\n[[topic]]\nname = "*"\nmask = ["user=null"]'
    )
    assert found.of("orders-eu").masks == (("card", Mask.HIDE),)
    assert found.of("clicks").masks == (("user", Mask.NULL),)
    assert found.of("clicks", "orders-eu").masks == (("user", Mask.NULL), ("card", Mask.HIDE))
    assert set(dict(found.of_unknown_origin("clicks").masks)) == {"user", "card"}


def test_dead_letters_are_read_as_in_their_topic(folder: Path) -> None:
    found = readers_of(
        folder, '[[topic]]\nname = "t"\nformat = "avro"\nschema = "click.avsc"\nmask = ["user"]'
    )
    body = encoded(CLICK, {"user": SECRET, "at": None})
    assert json.loads(found.of("dead", "t").read(body).content) == {"user": "***", "at": None}
    assert found.of("dead").read(body).content == body


def test_dead_letters_have_the_format_of_their_topic(folder: Path) -> None:
    """Other topics have another one, in which the masked field has another name."""
    (folder / "other.avsc").write_text(json.dumps(CLICK).replace('"user"', '"note"'))
    avro = 'format = "avro"\nschema = '
    found = readers_of(
        folder,
        f'[[topic]]\nname = "t"\n{avro}"click.avsc"\nmask = ["user"]\n'
        f'[[topic]]\nname = "d"\n{avro}"other.avsc"\n[[topic]]\nname = "*"\nmask = ["password"]',
    )
    body = encoded(CLICK, {"user": SECRET, "at": None})
    for topic in "d", "another":
        assert json.loads(found.of(topic, "t").read(body).content) == {"user": "***", "at": None}
    assert found.of_unknown_origin("d").read(body).content == b"withheld: %d bytes" % len(body)


@pytest.mark.parametrize("others", ['name = "d"', 'name = "*"'])
def test_equal_masks_do_not_decode_letters_of_others(folder: Path, others: str) -> None:
    """A letter whose origin is not known may be of the topic whose schema gives the masked field its name."""
    (folder / "other.avsc").write_text(json.dumps(CLICK).replace('"user"', '"note"'))
    avro = 'format = "avro"\nschema = '
    found = readers_of(
        folder,
        f'[[topic]]\nname = "t"\n{avro}"click.avsc"\nmask = ["user"]\n'
        f'[[topic]]\n{others}\n{avro}"other.avsc"\nmask = ["user", "password"]',
    )
    body = encoded(CLICK, {"user": SECRET, "at": None})
    assert found.of_unknown_origin("d").read(body).content == b"withheld: %d bytes" % len(body)


def test_letters_of_a_topic_without_a_format_are_not_decoded(folder: Path) -> None:
    """In their topic they are withheld: the schema of the dead-letter topic must not show them."""
    found = readers_of(
        folder,
        '[[topic]]\nname = "t"\nmask = ["user"]\n'
        '[[topic]]\nname = "*"\nformat = "avro"\nschema = "click.avsc"\nmask = ["at"]',
    )
    body = encoded(CLICK, {"user": SECRET, "at": None})
    for reader in found.of("t"), found.of("d", "t"):
        assert reader.read(body).content == b"withheld: %d bytes" % len(body)
    assert json.loads(found.of("d", "t").read(b'{"user": 1, "at": 2}').content) == {
        "user": "***",
        "at": "***",
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('name = "t"\nmasks = ["a"]', "unknown key masks"),
        ('mask = ["a"]', "a [[topic]] has no name"),
        ('name = "t"\nmask = ["a=blur"]', "'blur' is not one of null, hide, sha256, last4"),
        ('name = "t"\nmask = "a"', "mask is not a list of strings"),
        ('name = "t"\nmask = ["a..b"]', "is not a field such as user.name"),
        ('name = "t"\nformat = "xml"', "'xml' is not one of auto, avro, protobuf, messagepack"),
        ('name = "t"\nformat = "avro"', "the format avro needs a schema or a registry"),
        ('name = "t"\nschema = "click.avsc"', "a schema or registry needs the format avro or protobuf"),
        ('name = "t"\nformat = "avro"\nschema = "none.avsc"', "none.avsc cannot be read: No such file"),
        (
            'name = "t"\nformat = "avro"\nschema = "bodies.toml"',
            "cannot be used: the Avro schema is not valid",
        ),
        ('name = "t"\nformat = "avro"\nregistry = "ftp://x"', "the URL of the registry cannot be used"),
        (
            'name = "t"\nformat = "protobuf"\nmask = ["user.email"]',
            "the fields of Protobuf bodies have numbers: write masks such as 2.1",
        ),
        ('name = "t"\nformat = "protobuf"\nmask = ["01"]', "write masks such as 2.1"),
        ('name = "t"\nformat = "protobuf"\nmask = ["2.0"]', "write masks such as 2.1"),
        ('name = "t"\nformat = "protobuf"\nmask = ["²"]', "write masks such as 2.1"),
        ('name = "t"\nmessage = "M"', "message is for the format protobuf with a schema"),
        ("name = ", "is not valid: "),
    ],
)
def test_file_that_cannot_be_used(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(BodiesFileError) as error:
        readers_of(tmp_path, f"[[topic]]\n{text}")
    assert str(tmp_path / "bodies.toml") in str(error.value)
    assert said in str(error.value)


def test_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(BodiesFileError, match=r"cannot read .*: No such file"):
        read_bodies_file(tmp_path / "none.toml")
