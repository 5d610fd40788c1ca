"""Tests for `to-parquet --mask`: masked values are nowhere in what an export writes."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli.support import Cli
from interop.peers import Broker
from soak import examples
from spark.support import NOON_NS, ToParquet, column, export, parquet_files, rows, run_in_process, write_log
from trio_nsq.filters.masks import BodyMasks, Mask
from trio_nsq.log.records import RecordBatch
from trio_nsq.protocol import pack_messages
from trio_nsq.spark.export.columns import TableBuilder
from trio_nsq.spark.export.json_columns import infer_columns
from trio_nsq.spark.export.layout import BodyFormat, Layout
from trio_nsq.spark.export.masks import with_types_of_masks

SECRET = "tops3cret"
DIGEST = hashlib.sha256(SECRET.encode()).hexdigest()


def everything_in(folder: Path) -> str:
    """Return all names and values that an export has written, as text."""
    texts = [path.read_text() for path in folder.rglob("*.json")]
    for name in parquet_files(folder):
        texts += [name, str(pq.read_table(folder / name, partitioning=None).to_pylist())]
        texts.append(str(pq.read_metadata(folder / name).row_group(0).to_dict()))
    return "\n".join(texts)


@pytest.mark.parametrize(
    ("mask", "wanted", "of_seven"),
    [
        ("", None, None),
        ("=null", None, None),
        ("=hide", "***", "***"),
        ("=sha256", DIGEST, hashlib.sha256(b"7").hexdigest()),
        ("=last4", "***cret", "***"),
    ],
)
def test_masks(
    qcli: Cli, topic: str, tmp_path: Path, mask: str, wanted: str | None, of_seven: str | None
) -> None:
    """In all columns and in folders, also of values that do not fit, and of bodies that are no JSON."""
    bodies = [
        b'{"n": 1.10, "mail": "tops3cret", "user": {"mail": "tops3cret", "more": [1]}}',
        b'{"n": "misfit", "mail": "tops3cret", "user": [{"mail": "tops3cret"}, {"mail": null}, 7]}',
        b'{"n": 3, "mail": "tops3cret", "mail": "tops3cret", "user": {"mail": "tops3cret"}, "user": 1}',
        b'{"n": 4, "\\u006dail": "tops3cret", "user.mail": "tops3cret"}',
        b'{"n": 5, "mail": "tops3cret"',
        b"tops3cret \xff",
    ]
    qcli.publish(topic, bodies)
    arguments = ["--json", "--schema-contract", "evolve", "--keep-body"]
    arguments += ["--partition-by", "mail"] if wanted else []
    export(qcli, topic, tmp_path / "a", *arguments, "--mask", f"mail{mask},user.mail{mask}")
    assert SECRET not in everything_in(tmp_path / "a")
    assert column(tmp_path / "a", "mail") == [*[wanted] * 4, None, None]
    found = [json.loads(each) for each in column(tmp_path / "a", "body")[:4]]
    assert found[0] == {"n": 1.1, "mail": wanted, "user": {"mail": wanted, "more": [1]}}
    assert b'"n":1.10,' in column(tmp_path / "a", "body")[0]
    assert found[1]["user"] == [{"mail": wanted}, {"mail": None}, of_seven]
    assert column(tmp_path / "a", "unparsed")[4:] == [b"withheld: 28 bytes", b"withheld: 11 bytes"]
    export(qcli, topic, tmp_path / "b", "--json", "--columns", "n:long", "--mask", f"mail{mask}")
    assert json.loads(column(tmp_path / "b", "unparsed")[1])["mail"] == wanted


def test_where_sees_the_values(qcli: Cli, topic: str, tmp_path: Path) -> None:
    """A condition selects by the values themselves; it is the user's, like the export."""
    qcli.publish(topic, [b'{"mail": "a@b"}', b'{"mail": "c@d"}'])
    arguments = ("--json", "--where", "mail = 'a@b'", "--mask", "mail=last4")
    export(qcli, topic, tmp_path, *arguments)
    assert rows(tmp_path, "seq", "mail").to_pylist() == [{"seq": 0, "mail": "***"}]


@pytest.mark.parametrize("mask", Mask)
@pytest.mark.parametrize(
    ("condition", "wanted"),
    [
        ("TRY_CAST(age AS INT) >= 18", [0, 2]),
        ("age IS NOT NULL", [0, 1, 2]),
        ("unparsed IS NULL", [0, 1, 2, 3]),
    ],
)
def test_where_sees_the_values_whatever_the_mask(
    tmp_path: Path, mask: Mask, condition: str, wanted: list[int]
) -> None:
    """Also numbers, whose masks have another type."""
    bodies = [b'{"age": 20, "n": 1}', b'{"age": 3, "n": 1}', b'{"age": 18, "n": 1}', b'{"n": 1}']
    write_log(tmp_path / "data", "t", [(NOON_NS, bodies)])
    arguments = ["--from-segments", f"b={tmp_path / 'data'}", "--json", "--mask", f"age={mask}"]
    said = export(Cli("", ""), "t", tmp_path / "out", *arguments, "--where", condition)
    assert (column(tmp_path / "out", "seq"), said["filtered"]) == (wanted, 4 - len(wanted))
    assert said["unparsed"] == 0


@pytest.mark.parametrize("mask", Mask)
def test_errors_of_the_condition_hide_the_values(tmp_path: Path, mask: Mask) -> None:
    write_log(tmp_path / "data", "t", [(NOON_NS, [b'{"card": "tops3cret"}'])])
    arguments = ["t", str(tmp_path / "out"), "--from-segments", f"b={tmp_path / 'data'}", "--json"]
    arguments += ["--mask", f"card={mask}", "--where", "CAST(card AS BIGINT) > 0"]
    result = run_in_process(Cli("", ""), "to-parquet", *arguments)
    assert (result.code, "--mask hides the value. TRY_CAST" in result.err) == (1, True), result.err
    assert SECRET not in result.err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            ["--columns", "a:long", "--mask", "a=sha256"],
            "he field a has the type long, and its mask sha256 is text",
        ),
        (["--columns", "a:struct<b:array<int>>", "--mask", "a.b=last4"], "has the type array<int>"),
        (["--columns", "a:array<struct<b:date>>", "--mask", "a.b=last4"], "has the type date"),
        (
            ["--mask", "a", "--partition-by", "date", "--event-time", "a"],
            "the field a, which names the folders",
        ),
        (["--mask", "a", "--partition-by", "a"], "the field a, which names the folders"),
        (
            ["--mask", "a.x=hide", "--partition-by", "date", "--event-time", "a"],
            "the field a.x, which names the folders",
        ),
        (["--mask", "card=hide", "--columns", "a.k AS card"], "write --mask a.k=hide"),
        *(
            (["--delta", "--key", "k", "--op", "o", "--columns", "a.k AS k,a.o AS o", "--mask", mask], reason)
            for mask, reason in (
                ("a.k=hide", "hides the field k of --key or --op, so different keys would be one"),
                ("a.k=last4", "hides the field k of"),
                ("a.k", "hides the field k of"),
                ("a=sha256", "hides the field k of"),
                ("a.k.x=hide", "hides the field k of"),
                ("a.o.x", "hides the field o of"),
                ("a.o=sha256", "hides the field o of"),
            )
        ),
    ],
)
def test_masks_that_fit_no_column(tmp_path: Path, arguments: list[str], reason: str) -> None:
    """Otherwise no message would fit, or different keys would be one."""
    write_log(tmp_path / "data", "t", [(NOON_NS, [b'{"a": 1}'])])
    place = ["t", str(tmp_path / "out"), "--from-segments", f"b={tmp_path / 'data'}", "--json"]
    result = run_in_process(Cli("", ""), "to-parquet", *place, *arguments)
    assert (result.code, reason in result.err, parquet_files(tmp_path / "out")) == (1, True, []), result.err


def test_mask_that_hides_nothing_is_told(qcli: Cli, topic: str, tmp_path: Path) -> None:
    """Its name is probably misspelt. Others are counted."""
    qcli.publish(topic, [b'{"a": 1, "b": [{"c": 1}, {"c": 2}], "User": 1}', b'{"a": null}', b"no JSON"])
    arguments = ("--json", "--mask", "a,b.c,user,d.e", "--format", "json")
    result = run_in_process(qcli, "to-parquet", topic, str(tmp_path), *arguments)
    assert (result.code, result.records[0]["masked"]) == (0, {"a": 2, "b.c": 2})
    assert "Warning: --mask has hidden no value of user, d.e in 3 messages: check the name" in result.err
    result = run_in_process(qcli, "to-parquet", topic, str(tmp_path), *arguments)
    assert "Warning" not in result.err  # there was no message


def test_masks_belong_to_the_folder(to_parquet: ToParquet, qcli: Cli, topic: str, tmp_path: Path) -> None:
    qcli.publish(topic, [b'{"a": 12345678, "b": 1}'])
    export(qcli, topic, tmp_path, "--json", "--mask", "a=last4")
    assert column(tmp_path, "a") == ["***5678"]
    assert json.loads((tmp_path / "_nsq" / topic / "manifest.json").read_bytes())["version"] == 3
    for other in ((), ("--mask", "a"), ("--mask", "a=last4,b")):
        result = to_parquet(topic, tmp_path, "--json", *other)
        assert (result.code, "has files with --json --mask a=last4, and all" in result.err) == (1, True), (
            result.err
        )


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--mask", "a"], "--mask takes fields of JSON bodies: say --json"),
        (["--json", "--mask", "a=md5"], "'md5' is not one of null, hide, sha256, last4"),
        (["--json", "--mask", "a,a=null"], "given twice"),
        (["--json", "--mask", "a..b"], "not a field"),
        (["--json", "--mask", "a", "--dead-letter-topic", "d"], "--dead-letter-topic and --mask exclude"),
    ],
)
def test_wrong_masks(
    to_parquet: ToParquet, broker: Broker, tmp_path: Path, arguments: list[str], reason: str
) -> None:
    result = to_parquet("any", tmp_path, *arguments)
    assert (result.code, reason in result.err) == (2, True), result.err


leaves = st.none() | st.booleans() | st.integers() | st.just(SECRET) | st.text(max_size=3)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["s", "a", "b.s"]), inner, max_size=3)
    ),
    max_leaves=8,
)


def without(value: Any, name: str) -> Any:
    """Return a value without the members of a name, in all depths."""
    if isinstance(value, dict):
        return {key: without(each, name) for key, each in value.items() if key != name}
    return [without(each, name) for each in value] if isinstance(value, list) else value


@settings(max_examples=examples(100))
@given(st.dictionaries(st.sampled_from(["s", "a", "c"]), values, max_size=3), st.sampled_from(Mask))
def test_other_values_stay(body: dict[str, Any], mask: Mask) -> None:
    """A mask changes its field only, and applying it to all depths is what removing the field does."""
    masks = BodyMasks([(path, mask) for path in ("s", "a.s", "a.a.s", "c.s")])
    (found,) = masks.masked([json.dumps(body).encode()])
    decoded = json.loads(found)
    assert decoded.keys() == body.keys()
    assert without(decoded, "s").keys() == without(body, "s").keys()
    if not isinstance(body.get("a"), list | dict):  # it has no field that can be masked
        assert SECRET not in str(decoded.get("a"))
    assert SECRET not in str(decoded.get("s"))


def test_types_are_those_of_masked_values() -> None:
    """A number whose mask is text has a column of strings."""
    body = b'{"n": 12345678, "m": 5}'
    layout = Layout(body=BodyFormat.JSON, keep_rest=True, masks=(("n", "last4"),))
    columns = with_types_of_masks(infer_columns([body], ()), layout)
    layout = replace(layout, json_columns=tuple(columns))
    builder = TableBuilder("t", "b", layout)
    builder.add(RecordBatch(0, 1, 10**18, 0, pack_messages([body])))
    assert builder.table().select(["n", "m", "unparsed"]).to_pylist() == [
        {"n": "***5678", "m": 5, "unparsed": None}
    ]


def test_members_of_one_name() -> None:
    """Only the last one is decoded, and the others do not stay in the body."""
    masks = BodyMasks([("user.mail", Mask.NULL)])
    assert masks.masked([b'{"user": {"mail": "tops3cret"}, "user": {"n": 1}}']) == [b'{"user":{"n":1}}']
