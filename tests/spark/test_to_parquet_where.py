"""Tests for `to-parquet --where`: the messages that meet a condition are written, the others counted, each once."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli.support import Cli
from interop.peers import Broker
from spark.support import (
    NOON_NS,
    ToParquet,
    bodies_in,
    column,
    export,
    parquet_files,
    replayed,
    rows,
    run_in_process,
    write_log,
)
from trio_nsq.log.records import RecordBatch
from trio_nsq.protocol import pack_messages
from trio_nsq.spark.export.columns import TableBuilder
from trio_nsq.spark.export.job import open_export
from trio_nsq.spark.export.json_columns import infer_columns
from trio_nsq.spark.export.layout import BodyFormat, Layout
from trio_nsq.spark.export.request import ExportRequest
from trio_nsq.spark.logs import BrokerPlace
from trio_nsq.spark.runtime.spark_engine import SparkEngine
from trio_nsq.spark.schemas.column_types import JsonType

EVENTS = [
    b'{"level": "error", "code": 5, "note": null}',
    b'{"level": "info", "code": 5, "extra": {"a": 1}}',
    b'{"level": "error", "code": "six"}',
    b"no JSON, error",
    b"\xff error",
    b'{"code": 7}',
]
CONDITIONS = {
    "level = 'error'": [0, 2],
    "Level='error' AND code = 5": [0],
    "code >= 5": [0, 1, 5],
    "code IS NULL": [2, 3, 4],
    "body LIKE '%error%'": [0, 2, 3, 4],
    "get_json_object(body, '$.extra.a') = '1'": [1],
    "unparsed IS NOT NULL": [2, 3, 4],
    "seq % 2 = 0 AND topic LIKE 'e%' AND attempts IS NULL AND ts > '2026-01-01'": [0, 2, 4],
    "true": [0, 1, 2, 3, 4, 5],
    "-- all of them\n1 = 1": [0, 1, 2, 3, 4, 5],
    "false": [],
}
COLUMNS = "level,code:long"


@pytest.fixture(scope="module")
def events(broker: Broker) -> str:
    Cli(broker.tcp_address, broker.http_address).publish("events", EVENTS)
    return "events"


@pytest.mark.parametrize(("condition", "wanted"), CONDITIONS.items())
def test_condition_on_columns(
    qcli: Cli, events: str, tmp_path: Path, condition: str, wanted: Sequence[int]
) -> None:
    arguments = ("--json", "--columns", COLUMNS, "--where", condition)
    said = export(qcli, events, tmp_path, *arguments)
    assert (said["messages"], said["filtered"]) == (len(wanted), len(EVENTS) - len(wanted))
    assert said["body_bytes"] == sum(len(EVENTS[number]) for number in wanted)
    assert said["unparsed"] == len({2, 3, 4} & set(wanted))
    if wanted:
        assert column(tmp_path, "seq") == wanted
    else:
        assert parquet_files(tmp_path) == []
    again = export(qcli, events, tmp_path, *arguments)
    assert (again["messages"], again["filtered"], again["skipped_messages"]) == (0, 0, len(EVENTS))


@pytest.mark.parametrize(
    ("form", "condition", "wanted"),
    [
        ((), "body LIKE '%error%'", [0, 2, 3, 4]),
        (("--text",), "unparsed IS NULL AND body LIKE '%error%'", [0, 2, 3]),
        (("--json",), "rest IS NULL AND level = 'error'", [0, 2]),
        (("--json",), "EXISTS (SELECT 1) AND extra LIKE '%a%'", [1]),
    ],
)
def test_all_kinds_of_bodies(
    qcli: Cli, events: str, tmp_path: Path, form: Sequence[str], condition: str, wanted: Sequence[int]
) -> None:
    said = export(qcli, events, tmp_path, *form, "--where", condition)
    assert (column(tmp_path, "seq"), said["filtered"]) == (wanted, len(EVENTS) - len(wanted))


def test_headers_are_columns(qcli: Cli, topic: str, tmp_path: Path) -> None:
    for tenant in ("a", "b"):
        qcli("pub", topic, "--header", f"tenant:{tenant}", stdin=b"x\ny\n")
    export(qcli, topic, tmp_path, "--where", "headers['tenant'] = 'b'")
    assert column(tmp_path, "seq") == [2, 3]


def test_the_same_as_a_replay(qcli: Cli, topic: str, tmp_path: Path) -> None:
    """A condition selects the same messages of the log, and of files with all messages."""
    qcli.publish(topic, EVENTS)
    condition = "code = 5 OR body LIKE '%no JSON%'"
    export(qcli, topic, tmp_path / "all", "--json", "--columns", COLUMNS, "--keep-body")
    replayed(qcli, tmp_path, str(tmp_path / "all"), f"{topic}.again", "--where", condition)
    as_text = condition.replace("code = 5", "get_json_object(body, '$.code') = '5'")
    export(qcli, topic, tmp_path / "some", "--where", as_text)
    assert column(tmp_path / "some", "body") == sorted(
        bodies_in(qcli.http_address, f"{topic}.again"), key=EVENTS.index
    )


def test_condition_belongs_to_the_folder(
    to_parquet: ToParquet, qcli: Cli, topic: str, tmp_path: Path
) -> None:
    qcli.publish(topic, [b"1", b"2"])
    result = to_parquet(topic, tmp_path, "--where", "body = '2'")
    assert result.code == 0
    assert "1 message (1 B)" in result.err
    assert "1 left out by --where" in result.err
    for other in ((), ("--where", "body = '1'")):
        result = to_parquet(topic, tmp_path, *other)
        assert (result.code, "has files with --where 'body = '" in result.err) == (1, True)
    manifest = json.loads((tmp_path / "_nsq" / topic / "manifest.json").read_bytes())
    assert manifest["version"] == 3  # programs that do not know conditions refuse it
    qcli.publish(topic, [b"2", b"3"])
    said = export(qcli, topic, tmp_path, "--where", " body = '2' ")
    assert (said["messages"], said["filtered"]) == (1, 1)
    assert column(tmp_path, "seq") == [1, 2]


@pytest.mark.parametrize(
    ("condition", "reason"),
    [
        ("ts > now() - INTERVAL 1 DAY", "cannot have now"),
        ("ts > current_timestamp", "cannot have current_timestamp"),
        ("Random() < 0.5", "cannot have random"),
        ("rand() < 0.5", "cannot have rand"),
        ("age(ts) < INTERVAL 1 DAY", "cannot have age"),
        (
            "levle = 'error'",
            'Referenced column "levle" not found in FROM clause; there are attempts, body, broker',
        ),
        ("level =", "syntax error"),
        ("body IN (SELECT content FROM read_text('/etc/hostname'))", "cannot be used"),
        ("count(*) > 1", "cannot be used"),
    ],
)
def test_wrong_conditions(
    to_parquet: ToParquet, events: str, tmp_path: Path, condition: str, reason: str
) -> None:
    """Nothing is written, and the folder has no condition yet."""
    result = to_parquet(events, tmp_path, "--where", condition)
    assert (result.code, reason in result.err, parquet_files(tmp_path)) == (1, True, []), result.err
    assert to_parquet(events, tmp_path).code == 0


def test_text_that_is_compared_with_a_number(to_parquet: ToParquet, events: str, tmp_path: Path) -> None:
    """Nothing is guessed about a message: the export stops, and says how to write the condition."""
    code = "get_json_object(body, '$.code')"
    result = to_parquet(events, tmp_path / "a", "--where", f"CAST({code} AS INT) > 5")
    assert (result.code, "Could not convert string 'six'" in result.err, "TRY_CAST" in result.err) == (
        1,
        True,
        True,
    )
    assert to_parquet(events, tmp_path / "b", "--where", f"TRY_CAST({code} AS BIGINT) > 5").code == 0
    assert column(tmp_path / "b", "seq") == [5]


def test_time_differences_are_no_changing_function(qcli: Cli, events: str, tmp_path: Path) -> None:
    said = export(qcli, events, tmp_path, "--where", "age(ts, TIMESTAMPTZ '2000-01-01') > INTERVAL 1 DAY")
    assert said["messages"] == len(EVENTS)


def test_fractions_in_the_condition(qcli: Cli, topic: str, tmp_path: Path) -> None:
    """A column of the condition becomes double before the message is selected by it."""
    arguments = ("--json", "--where", "price > 2")
    qcli.publish(topic, [b'{"price": 1, "n": 1}', b'{"price": 3, "n": 2}'])
    export(qcli, topic, tmp_path, *arguments)
    qcli.publish(topic, [b'{"price": 2.5, "n": 3}', b'{"price": 1.5, "n": 4}'])
    said = export(qcli, topic, tmp_path, *arguments)
    assert (said["widened"], said["messages"], said["filtered"]) == (["price"], 1, 1)
    assert rows(tmp_path, "price", "n").to_pylist() == [{"price": 3.0, "n": 2}, {"price": 2.5, "n": 3}]


def test_sections_of_a_configuration_file(
    to_parquet: ToParquet, qcli: Cli, topic: str, tmp_path: Path
) -> None:
    """Two topics, each with its condition."""
    other = f"{topic}-b"
    for name in (topic, other):
        qcli.publish(name, [b"1", b"2", b"3"])
    config = tmp_path / "pipeline.toml"
    config.write_text(
        f'folder = "{tmp_path}/out"\n["{topic}"]\nwhere = "body = \'1\'"\n["{other}"]\nwhere = "body > \'1\'"\n'
    )
    assert to_parquet("--config", config).code == 0
    assert column(tmp_path / "out" / topic, "body") == [b"1"]
    assert column(tmp_path / "out" / other, "body") == [b"2", b"3"]


@pytest.mark.slow
def test_on_spark(engine: SparkEngine, qcli: Cli, topic: str, tmp_path: Path) -> None:
    """Workers evaluate the same language."""
    qcli.publish(topic, EVENTS * 50)
    fields = [("level", None), ("code", JsonType.LONG)]
    layout = Layout(body=BodyFormat.JSON, where="code >= 5")
    place = BrokerPlace(qcli.http_address, topic)
    with open_export(
        ExportRequest(topic, str(tmp_path), layout=layout, json_fields=fields, min_ranges=3), [place]
    ) as job:
        job.run(engine, job.plan([place]), lambda *_: None)
        assert (job.result.messages, job.result.filtered, job.result.ranges) == (150, 150, 3)
    assert [number % 6 for number in column(tmp_path, "seq")] == [0, 1, 5] * 50


values = (
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "a", "b", "1"]) | st.floats(-2, 2)
)
objects = st.dictionaries(st.sampled_from(["a", "b", "c"]), values, max_size=3)
found_bodies = st.lists(
    objects.map(lambda each: json.dumps(each).encode()) | st.binary(max_size=4), max_size=12
)


@settings(max_examples=8)  # each opens two databases
@given(
    found_bodies,
    st.sampled_from(
        [
            "seq > 3",
            "a = 'a'",
            "b IS NULL",
            "a > b",
            "length(body) > 9",
            "unparsed IS NULL",
            "rest LIKE '%c%'",
        ]
    ),
    st.integers(1, 5),
)
def test_selected_and_left_out_are_all(bodies: list[bytes], condition: str, at_once: int) -> None:
    """The messages of a condition and those of its opposite are the log, with the same values as without."""
    columns = infer_columns([b'{"a": "x", "b": "y"}'], [("a", None), ("b", None)])
    layout = Layout(body=BodyFormat.JSON, json_columns=tuple(columns), keep_rest=True)

    def read(where: str) -> tuple[list[object], int]:
        builder = TableBuilder("t", "b:1", replace(layout, where=where))
        found: list[object] = []
        for start in range(0, len(bodies), at_once):
            batch = bodies[start : start + at_once]
            builder.add(RecordBatch(start, 1 + start, 10**18, 0, pack_messages(batch)))
            found += builder.table().to_pylist()
        filtered = builder.filtered
        builder.close()
        return found, filtered

    everything, none_left_out = read("")
    chosen, left_out = read(condition)
    others, _ = read(f"({condition}) IS NOT TRUE")
    assert (none_left_out, left_out) == (0, len(others))
    assert sorted([*chosen, *others], key=lambda row: row["seq"]) == everything  # type: ignore[index]  # rows are dicts


@pytest.mark.parametrize(
    ("arguments", "is_refused"),
    [
        ((), False),
        (("--schema-contract", "evolve"), True),
        (("--schema-contract", "discard-value"), False),
        (("--delta",), True),
        (("--delta", "--schema-contract", "freeze"), False),
    ],
)
def test_the_rest_is_no_condition_where_its_fields_become_columns(
    tmp_path: Path, arguments: tuple[str, ...], is_refused: bool
) -> None:
    """The same message would be left out once its field has a column."""
    write_log(tmp_path / "data", "t", [(NOON_NS, [b'{"a":1}'])])
    place = ("t", str(tmp_path / "out"), "--from-segments", f"b={tmp_path / 'data'}", "--json")
    result = run_in_process(Cli("", ""), "to-parquet", *place, "--where", "rest IS NULL", *arguments)
    assert (result.code, "--where cannot have rest, because new" in result.err) == (
        int(is_refused),
        is_refused,
    )


def test_the_rest_of_a_folder_that_has_it_as_a_condition(tmp_path: Path) -> None:
    write_log(tmp_path / "data", "t", [(NOON_NS, [b'{"a":1}'])])
    place = ("t", str(tmp_path / "out"), "--from-segments", f"b={tmp_path / 'data'}", "--json")
    export(Cli("", ""), *place[:1], tmp_path / "out", *place[2:], "--where", "rest IS NULL")
    result = run_in_process(
        Cli("", ""), "to-parquet", *place, "--where", "rest IS NULL", "--schema-contract", "evolve"
    )
    assert (result.code, "--where cannot have rest" in result.err) == (1, True)


@pytest.mark.parametrize(
    "more",
    [
        ["--partition-by", "country"],
        ["--partition-by", "truncate(1,country)"],
        ["--partition-by", "truncate(10,m)"],
        ["--delta", "--key", "country"],
    ],
)
def test_condition_without_the_fields_of_folders_and_keys(tmp_path: Path, more: list[str]) -> None:
    bodies = [b'{"n":1,"m":5,"country":"de"}', b'{"n":2,"m":15,"country":"fr"}']
    write_log(tmp_path / "data", "t", [(NOON_NS, bodies)])
    place = ["t", str(tmp_path / "out"), "--from-segments", f"b={tmp_path / 'data'}", "--json", *more]
    result = run_in_process(Cli("", ""), "to-parquet", *place, "--where", "n > 1", "--format", "json")
    assert (result.code, result.records[0]["messages"]) == (0, 1), result.err
