"""Tests for the reports of `qcli stat`. `test_stat_live.py` tests the screen."""

import csv
import io
import json
from pathlib import Path

import pytest

from cli.support import (
    Cli,
    CliHere,
    Run,
    does_not_exist,
    lines_until_ready,
    only_ours,
    serving,
    without_suggestion,
)
from interop.peers import Broker, qcli_serve
from qcli.commands.stat.columns import RECORD_KEYS


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
    heading, *rows, total = result.out.decode().splitlines()
    assert heading.split()[:3] == ["topic", "channel", "depth"]
    assert [row.split()[:3] for row in rows] == [[clicks, "5", "0"], [clicks, "a", "2"], [clicks, "b", "3"]]
    assert rows[2].endswith("paused")
    assert (total.split()[:3], total.count("paused")) == (["total", "5", "0"], 0)


def test_json(qcli: Cli, clicks: str) -> None:
    topic, a, b = qcli("stat", clicks, "--format", "json").records
    assert tuple(topic) == tuple(a) == RECORD_KEYS
    assert list(topic) == [
        *("time", "topic", "channel", "depth", "backend_depth", "in_flight_count", "deferred_count"),
        *("requeue_count", "timeout_count", "message_count", "client_count", "paused"),
        *("ingress_rate", "egress_rate", "expired_count", "dropped_count", "dead_letter_count"),
        *(
            "given_up_count",
            "blocked_count",
            "rate_limit_per_s",
            "unavailable",
            "oldest_message_age_ms",
            "broker",
            "total_depth",
        ),
    ]
    assert (topic["channel"], topic["message_count"], topic["in_flight_count"]) == (None, 3, None)
    assert [(row["depth"], row["total_depth"]) for row in (topic, a, b)] == [(0, 5), (2, 2), (3, 3)]
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


# ---------------------------------------------------------------------- which rows, in which order


@pytest.fixture(scope="module")
def mails(broker: Broker) -> str:
    """Topics `mails.1` to `mails.3`, with 1 to 3 messages in a channel `c`, and an empty channel `d`."""
    qcli = Cli(broker.tcp_address, broker.http_address)
    for number in (1, 2, 3):
        broker.create(f"mails.{number}", "c")
        qcli.publish(f"mails.{number}", [b"x"] * number)
    for number in (1, 2, 3):
        qcli.wait_until(f"mails.{number}/c", lambda record: record["depth"] == int(record["topic"][-1]))
        broker.create(f"mails.{number}", "d")
    return "mails.*"


@pytest.fixture
def here(qcli: Cli, run_here: Run) -> Cli:
    """Runs commands in this process."""
    return CliHere(qcli.tcp_address, qcli.http_address, run=run_here)


def shown(here: Cli, *args: str) -> list[str]:
    """Return the names of the rows of a report."""
    result = here("stat", *args, "--format", "json")
    assert (result.code, result.err) == (0, "")
    return [f"{row['topic']}/{row['channel']}" if row["channel"] else row["topic"] for row in result.records]


def test_patterns(here: Cli, mails: str) -> None:
    assert shown(here, "mails.[12]/c", "mails.3") == [
        "mails.1/c",
        "mails.2/c",
        "mails.3",
        "mails.3/c",
        "mails.3/d",
    ]
    assert shown(here, "mail*/d") == ["mails.1/d", "mails.2/d", "mails.3/d"]


@pytest.mark.parametrize("pattern", ["nothing*", "nothing*/c", "mails.?/nothing*"])
def test_pattern_without_a_match_is_a_failure(here: Cli, mails: str, pattern: str) -> None:
    result = here("stat", mails, pattern)
    assert (result.code, result.out) == (1, b"")
    assert result.err == (
        f"Error: No topic or channel matches {pattern!r} on {here.http_address}. "
        "'qcli topic list' lists their names.\n"
    )


def test_missing_name_among_others_is_a_failure(here: Cli, mails: str) -> None:
    result = here("stat", mails, "nothing")
    assert (result.code, result.out) == (1, b"")
    assert without_suggestion(result.err) == does_not_exist("nothing", here.http_address)


@pytest.mark.parametrize("text", ["a*b/", "/c*", "a*/b/c", "a b"])
def test_invalid_pattern_is_a_usage_error(nowhere: Cli, text: str) -> None:
    assert nowhere("stat", text).code == 2


def test_filter(here: Cli, mails: str) -> None:
    assert shown(here, mails, "--filter", "depth>1") == ["mails.2", "mails.2/c", "mails.3", "mails.3/c"]
    assert shown(here, mails, "--filter", "depth>1", "--filter", "depth<3") == ["mails.2", "mails.2/c"]
    assert shown(here, mails, "--filter", "clients>0") == []
    assert shown(here, mails, "--filter", "paused") == []


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("depth", "'depth' is not a condition. Write 'depth>0'"),
        ("size>1", "'size' is not a column. Columns: depth, backend, in-flight,"),
        ("depth>many", "'many' is not a number"),
        ("age>5", "'5' has no unit"),
    ],
)
def test_invalid_filter_is_a_usage_error(nowhere: Cli, value: str, reason: str) -> None:
    result = nowhere("stat", "--filter", value)
    assert (result.code, reason in result.err) == (2, True)


def test_sort(here: Cli, mails: str) -> None:
    by_depth = shown(here, mails, "--sort", "depth")
    assert by_depth[:4] == ["mails.3", "mails.3/c", "mails.3/d", "mails.2"]
    assert shown(here, "mails.*/c", "--sort", "depth", "--reverse") == ["mails.1/c", "mails.2/c", "mails.3/c"]
    assert shown(here, "mails.*/c", "--reverse") == ["mails.3/c", "mails.2/c", "mails.1/c"]
    for other_name in ("message_count", "messages", "age"):
        assert len(shown(here, mails, "--sort", other_name)) == 9
    assert here("stat", "--sort", "size").code == 2


def test_total(here: Cli, mails: str) -> None:
    *_, total = here("stat", mails).out.decode().splitlines()
    assert total.split()[:2] == ["total", "6"]
    *_, row = here("stat", "mails.1/c").out.decode().splitlines()
    assert row.startswith("mails.1")  # no total of one row


@only_ours
def test_age_of_the_oldest_message(here: Cli, mails: str) -> None:
    topic, full, empty = here("stat", "mails.1", "--format", "json").records
    assert (topic["oldest_message_age_ms"], empty["oldest_message_age_ms"]) == (None, 0)
    assert 0 <= full["oldest_message_age_ms"] < 600_000
    assert shown(here, mails, "--filter", "age>1h") == []
    assert len(shown(here, mails, "--filter", "age<1h")) == 6


def test_by_broker_with_one_broker(here: Cli, mails: str) -> None:
    found = here("stat", "mails.1/c", "--by-broker", "--format", "json").records
    assert [(row["broker"], row["depth"]) for row in found] == [(None, 1), (here.http_address, 1)]


def test_table_on_a_terminal_is_a_tree(qcli: Cli, mails: str) -> None:
    with qcli.on_terminal("stat", "mails.1", "--once", columns=80) as terminal:
        assert terminal.end() == 0
    heading, topic, first, second, total = terminal.shown.decode().replace("\r", "").splitlines()
    assert heading.split()[:2] == ["topic/channel", "depth"]
    assert [line.split()[0] for line in (topic, first, second, total)] == ["mails.1", "c", "d", "total"]
    assert first.startswith("  c ")


@pytest.mark.parametrize(("locale", "sign"), [("C.UTF-8", "…"), ("C", "~")])
def test_long_names_are_cut_and_numbers_stay(
    qcli: Cli, broker: Broker, topic: str, locale: str, sign: str
) -> None:
    name = f"{topic}-with-a-name-that-is-much-too-long-for-the-screen-v2"
    broker.create(name)
    qcli.publish(name, [b"x"] * 12_345)
    with qcli.on_terminal("stat", name, "--once", columns=60, LC_ALL=locale) as terminal:
        assert terminal.end() == 0
    _, row = terminal.shown.decode().replace("\r", "").splitlines()
    shown_name, depth, *_ = row.split()
    assert (sign in shown_name, shown_name.endswith("v2"), depth) == (True, True, "12k")
    assert len(qcli("stat", name, "--once").out.splitlines()[0]) > 80  # without a terminal it is complete
