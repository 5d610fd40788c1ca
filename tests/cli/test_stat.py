"""Tests for `qcli stat`."""

import csv
import io
import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from cli.support import Cli, Run, does_not_exist, lines_until_ready, only_ours, serving, without_suggestion
from interop.peers import Broker, qcli_serve
from qcli.commands.stat.rows import (
    COUNTS,
    HEADINGS,
    NAME_COLUMNS,
    NARROW_HEADINGS,
    RECORD_KEYS,
    Row,
    Sampler,
    table,
)
from qcli.framework.output import plain_table
from qcli.framework.params import Source


def channel(name: str, messages: int = 0, **counts: int) -> dict[str, Any]:
    return (
        {"channel_name": name, "paused": False}
        | dict.fromkeys(COUNTS, 0)
        | {"message_count": messages}
        | counts
    )


def topic_stats(name: str, *channels: dict[str, Any], messages: int = 0) -> dict[str, Any]:
    counts = {"depth": 0, "backend_depth": 0, "message_count": messages}
    return {"topic_name": name, "paused": False, "channels": list(channels)} | counts


def test_rows_are_sorted_and_filtered() -> None:
    topics = [topic_stats("b", channel("y"), channel("x")), topic_stats("a")]
    keys = [(row.topic, row.channel) for row in Sampler(None).rows(topics, 1.0)]
    assert keys == [("a", None), ("b", None), ("b", "x"), ("b", "y")]
    keys = [(row.topic, row.channel) for row in Sampler(Source("b", "y")).rows(topics[:1], 1.0)]
    assert keys == [("b", "y")]


def test_rates_use_the_real_time() -> None:
    sampler = Sampler(None)
    (_, first) = sampler.rows([topic_stats("t", channel("c", 100, depth=100))], 10.0)
    assert (first.ingress_rate, first.egress_rate) == (None, None)
    topic, second = sampler.rows([topic_stats("t", channel("c", 200, depth=50), messages=300)], 14.0)
    assert (second.ingress_rate, second.egress_rate) == (25.0, 37.5)
    assert (topic.ingress_rate, topic.egress_rate) == (75.0, None)


def test_requeued_message_does_not_count_as_consumed() -> None:
    sampler = Sampler(None)
    sampler.rows([topic_stats("t", channel("c", 10, in_flight_count=10))], 0.5)
    _, row = sampler.rows([topic_stats("t", channel("c", 10, depth=4, deferred_count=5))], 1.5)
    assert row.egress_rate == 1.0


def test_decreasing_counts_give_no_rate() -> None:
    sampler = Sampler(None)
    sampler.rows([topic_stats("t", messages=10)], 1.0)
    (row,) = sampler.rows([topic_stats("t", messages=3)], 2.0)
    assert row.ingress_rate is None


@pytest.fixture(scope="module")
def clicks(broker: Broker) -> str:
    """A topic with two channels and three messages, one of which was consumed from the first channel."""
    name = "clicks.stat"
    qcli = Cli(broker.tcp_address, broker.http_address)
    broker.create(name, "a", "b")
    qcli.publish(name, [b"1", b"2", b"3"])
    qcli("tail", f"{name}/a", "-n", "1")
    qcli("channel", "pause", f"{name}/b")
    return name


def test_one_report_without_a_terminal(qcli: Cli, clicks: str) -> None:
    result = qcli("stat", clicks)
    assert (result.code, result.err) == (0, "")
    assert b"\x1b" not in result.out
    heading, *rows = result.out.decode().splitlines()
    assert heading.split()[:3] == ["topic", "channel", "depth"]
    assert [row.split()[:3] for row in rows] == [[clicks, "0", "0"], [clicks, "a", "2"], [clicks, "b", "3"]]
    assert rows[2].endswith("paused")


def test_json(qcli: Cli, clicks: str) -> None:
    topic, a, b = qcli("stat", clicks, "--format", "json").records
    assert tuple(topic) == tuple(a) == RECORD_KEYS
    assert (topic["channel"], topic["message_count"], topic["in_flight_count"]) == (None, 3, None)
    assert (a["channel"], a["depth"], a["message_count"], a["paused"]) == ("a", 2, 3, False)
    assert (b["channel"], b["depth"], b["paused"], b["ingress_rate"]) == ("b", 3, True, None)


def test_single_channel(qcli: Cli, clicks: str) -> None:
    (record,) = qcli("stat", f"{clicks}/a", "--format", "json").records
    assert (record["topic"], record["channel"], record["depth"]) == (clicks, "a", 2)


def test_all_topics(qcli: Cli, clicks: str) -> None:
    records = qcli("stat", "--format", "json").records
    assert [record["channel"] for record in records if record["topic"] == clicks] == [None, "a", "b"]


def test_unavailable_topic(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "topics" / "clicks.topic"
    with qcli_serve(tmp_path / "data") as running:
        running.create("clicks", "c")
    for path in folder.glob("state.json*"):
        path.write_text("?")
    with qcli_serve(tmp_path / "data") as running:
        running.create("orders")
        qcli = Cli(running.tcp_address, running.http_address)
        clicks, orders = qcli("stat", "--format", "json").records
        assert f"{folder / 'state.json'} is damaged" in clicks["unavailable"]
        assert orders["unavailable"] is None
        for wanted in ("clicks", "clicks/c"):
            _, row, reason = qcli("stat", wanted).out.decode().splitlines()
            assert row.endswith("unavailable")
            assert reason == f"Topic clicks is unavailable: {clicks['unavailable']}"
        result = qcli("channel", "pause", "clicks/c")
        assert (result.code, "is damaged" in result.err) == (1, True)
        assert qcli("topic", "delete", "--yes", "clicks").code == 0
        assert [record["topic"] for record in qcli("stat", "--format", "json").records] == ["orders"]


@pytest.mark.parametrize(("form", "delimiter"), [("csv", ","), ("tsv", "\t")])
def test_csv_and_tsv(qcli: Cli, clicks: str, form: str, delimiter: str) -> None:
    out = qcli("stat", clicks, "--format", form, "--count", "2", "--interval", "10ms").out.decode()
    heading, *rows = csv.reader(io.StringIO(out), delimiter=delimiter)
    assert tuple(heading) == RECORD_KEYS
    records = [dict(zip(heading, row, strict=True)) for row in rows]
    assert [record["channel"] for record in records] == ["", "a", "b"] * 2
    assert (records[0]["client_count"], records[1]["paused"], records[2]["paused"]) == ("", "false", "true")
    assert (records[0]["ingress_rate"], records[3]["ingress_rate"]) == ("", "0.0")


def test_count_reports(qcli: Cli, clicks: str) -> None:
    records = qcli("stat", f"{clicks}/a", "--format", "json", "--count", "3", "--interval", "20ms").records
    assert len(records) == 3
    assert records[0]["time"] < records[1]["time"] < records[2]["time"]


def test_rates_are_shown(qcli: Cli, broker: Broker, topic: str) -> None:
    broker.create(topic, "c")
    args = ("stat", f"{topic}/c", "--format", "json", "--count", "0", "--interval", "50ms")
    with qcli.running(*args) as stat:
        stat.read_line()
        qcli.publish(topic, [b"x"] * 10)
        while not (record := json.loads(stat.read_line()))["ingress_rate"]:
            assert record["message_count"] == 0
        assert record["message_count"] == 10


@pytest.mark.parametrize("source", ["{nothing}", "{nothing}/c", "{topic}/nothing"])
def test_missing_topic_is_a_failure(qcli: Cli, clicks: str, source: str) -> None:
    name = source.format(nothing="nothing", topic=clicks)
    result = qcli("stat", name)
    assert (result.code, result.out) == (1, b"")
    wanted = name if name.startswith(clicks) else "nothing"
    assert without_suggestion(result.err) == does_not_exist(wanted, qcli.http_address)


def test_no_broker(nowhere: Cli) -> None:
    result = nowhere("stat")
    assert result.code == 3
    assert result.err == (
        "Error: No broker answers at 127.0.0.1:1: connection refused. "
        "Start a broker with 'qcli serve', or use another address: --nsqd-http-address."
        " 'qcli stat --once --wait 10s' waits for a broker that is starting.\n"
    )


@only_ours
def test_a_broker_that_is_starting_is_awaited(tmp_path: Path) -> None:
    socket = str(tmp_path / "http.sock")
    with Cli("127.0.0.1:1", socket).running("stat", "--wait", "30s", "--format", "json") as stat:
        with serving(tmp_path, "--http-address", socket) as broker:
            lines_until_ready(broker)
            assert stat.end().code == 0


def test_the_wait_for_a_broker_ends(nowhere: Cli, qcli: Cli, run_here: Run) -> None:
    result = run_here(nowhere, "stat", "--wait", "1ms")
    assert (result.code, result.err.startswith("Error: No broker answers at 127.0.0.1:1")) == (3, True)
    assert run_here(qcli, "stat", "--wait", "1ms", "--once").code == 0


def test_server_without_http(qcli: Cli) -> None:
    result = qcli("stat", "--nsqd-http-address", qcli.tcp_address)
    assert result.code == 3
    assert result.err.count("\n") == 1


def test_live_table(qcli: Cli, broker: Broker, topic: str) -> None:
    broker.create(topic, "c")
    with qcli.on_terminal("stat", topic, "--interval", "50ms") as terminal:
        terminal.expect(b"in flight")
        qcli.publish(topic, [b"x"] * 1234)
        terminal.expect(b"1,234")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.end() == 130
    before, _, after = terminal.shown.rpartition(
        b"\x1b[?25h\x1b[?1049l"
    )  # the cursor and the normal screen are restored
    assert before.count(b"\x1b[?1049h") == 1
    assert after.count(qcli.http_address.encode()) == 1  # the last table stays, once
    assert b"1,234" in after
    assert b"Traceback" not in terminal.shown


def test_live_table_follows_the_window_size(qcli: Cli, clicks: str) -> None:
    with qcli.on_terminal("stat", clicks, "--interval", "1h", COLUMNS="") as terminal:
        terminal.resize(24, 120)
        terminal.expect(b"requeued")
        terminal.resize(24, 40)
        terminal.expect(b"topic        channel  depth  out/s")
        assert terminal.interrupt() == 130


def test_live_table_retries_a_broker_that_goes_down(tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "data") as broker:
        qcli = Cli(broker.tcp_address, broker.http_address)
        broker.create("t")
        with qcli.on_terminal("stat", "t", "--interval", "50ms") as terminal:
            terminal.expect(b"in flight")
            broker.process.terminate()
            broker.process.wait(30)
            terminal.expect(b"no answer; waiting for the broker")
            assert terminal.interrupt() == 130


def test_live_table_does_not_wait_for_a_broker_at_the_start(nowhere: Cli) -> None:
    with nowhere.on_terminal("stat") as terminal:
        assert terminal.end() == 3
    assert b"\x1b" not in terminal.shown


def test_live_table_has_no_colors_with_no_color(qcli: Cli, clicks: str) -> None:
    with qcli.on_terminal("stat", clicks, "--interval", "50ms", NO_COLOR="1") as terminal:
        terminal.expect(b"paused")
        terminal.expect(clicks.encode())
        terminal.process.terminate()
        assert terminal.end() == 143
    assert re.search(rb"\x1b\[[\d;]*m", terminal.shown) is None  # also neither bold nor dim


def test_live_table_has_colors(qcli: Cli, clicks: str) -> None:
    with qcli.on_terminal("stat", clicks, "--interval", "50ms") as terminal:
        terminal.expect(b"\x1b[33m" + clicks.encode())
        terminal.interrupt()


def table_of(rows: list[Row], width: int | None) -> list[str]:
    return plain_table(table(rows, width), NAME_COLUMNS).splitlines()


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("name", ["t", "orders.eu-west.created", "x" * 64])
def test_columns_are_never_cut(name: str, paused: bool) -> None:
    """At every width the table has names and depth and only whole columns; a wider screen has more."""
    sampler = Sampler(None)
    stats = topic_stats(
        name, channel("archive", 1_234_567, depth=12_345, in_flight_count=2500) | {"paused": paused}
    )
    sampler.rows([stats], 1.0)
    rows = sampler.rows([stats], 2.0)
    full = table_of(rows, None)
    narrow = [NARROW_HEADINGS.get(heading, heading) for heading in HEADINGS if heading]
    columns_before = 0
    for width in range(20, 200):
        heading, _, text = lines = table_of(rows, width)
        assert max(map(len, lines)) <= width
        if lines == full:
            break
        headings = heading.split()
        assert headings[2] == "depth"
        assert set(headings[3:]) <= set(narrow)
        assert text.split()[2] == "12k"
        assert len(headings) >= columns_before
        columns_before = len(headings)
        if len(headings) > 3:  # names are shortened last
            assert text.split()[:2] == [name, "archive"]
    else:
        pytest.fail("there is no width at which all of it fits")


def test_columns_are_dropped_by_importance() -> None:
    (*_, row) = Sampler(None).rows([topic_stats("t", channel("c"))], 1.0)
    widest = table([row], 60)[0]
    assert widest[-4:] == ["cl", "in/s", "out/s", ""]
    assert table([row], 41)[0][2:] == ["depth", "inflt", "in/s", "out/s", ""]
    assert table([row], 21)[0] == ["topic", "channel", "depth", ""]


def test_names_are_shortened_in_the_middle_and_numbers_never(qcli: Cli, broker: Broker, topic: str) -> None:
    name = f"{topic}-with-a-name-that-is-much-too-long-for-the-screen-v2"
    broker.create(name)
    qcli.publish(name, [b"x"] * 12_345)
    for args in (["--interval", "50ms"], ["--once"]):
        with qcli.on_terminal("stat", name, *args, columns=40) as terminal:
            terminal.expect("…".encode())
            terminal.expect(b"-v2")
            terminal.expect(b"12k")
            terminal.interrupt()
    assert (
        len(qcli("stat", name, "--once").out.splitlines()[0]) > 80
    )  # without a terminal the table is complete


@pytest.mark.parametrize("args", [["--once"], ["--count", "1"], ["--format", "json"]])
def test_one_report_on_a_terminal(qcli: Cli, clicks: str, args: list[str]) -> None:
    with qcli.on_terminal("stat", clicks, *args) as terminal:
        assert terminal.end() == 0
    assert b"\x1b" not in terminal.shown


def test_dumb_terminal_gets_one_report(qcli: Cli, clicks: str) -> None:
    with qcli.on_terminal("stat", clicks, TERM="dumb") as terminal:
        assert terminal.end() == 0
    assert b"\x1b" not in terminal.shown


def test_once_and_count_exclude_each_other(qcli: Cli) -> None:
    assert qcli("stat", "--once", "--count", "2").code == 2
