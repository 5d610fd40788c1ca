"""Tests for `to-parquet --json`: values that do not fit, names of columns, and bodies beside the columns."""

import json
from pathlib import Path

from cli.support import Cli

from .support import ToParquet, bodies_in, export, replayed, rows


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
        "Warning: 4 values did not fit the type of their column, which is null there: price (3), user (1). The column "
        "unparsed has the whole bodies.\n"
    )
    assert rows(tmp_path / "a", "price", "user", "unparsed").to_pylist() == [
        *({**each, "unparsed": None} for each in good),
        {"price": None, "user": "bob", "unparsed": bad[0]},
        {"price": None, "user": None, "unparsed": bad[1]},
        {"price": None, "user": "eve", "unparsed": bad[2]},
    ]
    said = export(qcli, topic, tmp_path / "b", "--json", "--columns", "price:long,user:string")
    assert (said["misfits"], said["unparsed"]) == ({"price": 3, "user": 1}, 3)
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
