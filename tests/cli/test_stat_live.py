"""Tests for the live screen of `qcli stat`, on a terminal."""

import os
import re
import signal
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cli.screens import ScreenReader
from cli.support import Cli, Terminal
from interop.peers import Broker, qcli_serve

DOWN, UP, PAGE_DOWN, END, HOME, ESCAPE = "\x1b[B", "\x1b[A", "\x1b[6~", "\x1b[F", "\x1b[H", "\x1b"


@pytest.fixture(scope="module")
def many(broker: Broker) -> str:
    """Forty topics, `live.NN.created`, with three channels each; NN + 1 messages in the channel `archive`."""
    qcli = Cli(broker.tcp_address, broker.http_address)
    for number in range(40):
        name = f"live.{number:02}.created"
        broker.create(name, "archive")
        qcli.publish(name, [b"x"] * (number + 1))
        broker.create(name, "mail")
        broker.create(name, "metrics-aggregation-hourly")
    qcli.wait_until("live.39.created/archive", lambda record: record["depth"] == 40)
    qcli("channel", "pause", "live.00.created/mail")
    return "live.*"


@contextmanager
def screen_of(
    qcli: Cli, *args: str, rows: int = 24, columns: int = 80, **env: str
) -> Iterator[tuple[ScreenReader, Terminal]]:
    """Run `qcli stat` on a terminal, and read its screen; the size is the terminal's, not the environment's."""
    arguments = ("stat", *args, "--interval", "50ms")
    with qcli.on_terminal(*arguments, rows=rows, columns=columns, shell="", **env) as terminal:
        screen = ScreenReader(terminal, rows, columns)
        screen.wait_for("topic/channel")
        yield screen, terminal


def body(lines: list[str]) -> list[str]:
    """Return the names of the rows on a screen; the long one, which may be cut, is `metrics`."""
    start = next(number for number, line in enumerate(lines) if line.startswith("topic/channel"))
    end = next(number for number, line in enumerate(lines) if line.startswith("total "))
    return [line.split()[0].partition("-")[0] for line in lines[start + 1 : end] if line]


def test_forty_topics_on_a_small_screen(qcli: Cli, many: str) -> None:
    with screen_of(qcli, many) as (screen, _):
        lines = screen.lines
        assert "40 topics, 120 channels" in lines[0]
        headings = "topic/channel depth be inflt def req t-o msgs cl in/s out/s age"
        assert lines[1].split() == headings.split()
        assert body(lines)[:5] == [
            "live.00.created",
            "archive",
            "mail",
            "metrics",
            "live.01.created",
        ]
        assert lines[4].endswith(" P")
        assert lines[21].split()[:2] == ["total", "820"]
        assert (lines[22].split()[0], lines[23].endswith("1-19 of 160")) == ("total", True)


@pytest.mark.parametrize(("locale", "low", "high"), [("C.UTF-8", "▁", "▇"), ("C", "_", "#")])
def test_wide_screen_has_bars_for_the_rates(
    qcli: Cli, broker: Broker, topic: str, locale: str, low: str, high: str
) -> None:
    broker.create(topic, "c")
    with screen_of(qcli, topic, rows=40, columns=140, LC_ALL=locale) as (screen, _):
        assert "in trend" in screen.lines[1]
        screen.wait(lambda lines: low in lines[2] and low in lines[-2])

        def is_busy(lines: list[str]) -> bool:
            qcli.publish(topic, [b"x"])
            return high in lines[2] and high in lines[-2]

        lines = screen.wait(is_busy)
        assert lines[2].startswith(topic)
        assert all(line.isascii() for line in lines) is (locale == "C")


def test_moving_and_scrolling(qcli: Cli, many: str) -> None:
    with screen_of(qcli, many) as (screen, terminal):
        assert screen.reversed_line() == ""
        screen.press(DOWN, "live.00.created  in")  # the full name, below the table
        assert screen.reversed_line().startswith("live.00.created")
        screen.press(DOWN * 3, "live.00.created/metrics-aggregation-hourly  in")
        assert "…" in screen.reversed_line()
        screen.press(UP, "live.00.created/mail  in")
        screen.press(PAGE_DOWN, "4-22 of 160")
        assert screen.reversed_line().split()[0] == "archive"
        lines = screen.press(END, "142-160 of 160")
        assert body(lines)[-1] == "metrics"
        screen.press(DOWN, "142-160 of 160")
        screen.press(HOME, "1-19 of 160")
        terminal.type(ESCAPE.encode())
        screen.wait(lambda lines: lines[-2].startswith("total"))
        assert screen.reversed_line() == ""


def test_sorting(qcli: Cli, many: str) -> None:
    with screen_of(qcli, many) as (screen, _):
        lines = screen.press("s", "by depth")
        assert body(lines)[:5] == [
            "live.39.created",
            "archive",
            "mail",
            "metrics",
            "live.38.created",
        ]
        lines = screen.press("r", "by depth, reversed")
        assert body(lines)[:2] == ["live.00.created", "mail"]
        screen.press("rS", "by name")
        screen.press("S", "by age")


def test_filter(qcli: Cli, many: str) -> None:
    with screen_of(qcli, many) as (screen, terminal):
        lines = screen.press("/7", "/7_")
        lines = screen.wait_for("4 topics, 12 channels")
        assert [name for name in body(lines) if name.startswith("live")] == [
            f"live.{number}.created" for number in ("07", "17", "27", "37")
        ]
        screen.press(" depth>30", "/7 depth>30_")
        lines = screen.wait_for("1 topic, 1 channel")
        assert body(lines) == ["live.37.created", "archive"]
        screen.press("\r", "/7 depth>30  esc")
        screen.press("/\x7f\x7f\x7f\x7f\x7f\x7f\x7f\x7f\x7f", "/7_")
        screen.press("nothing", "no topic or channel matches")
        terminal.type(ESCAPE.encode())
        screen.wait_for("40 topics, 120 channels")
        assert screen.press("/paused\r", "1 channel  by name")
        terminal.type(ESCAPE.encode())
        screen.wait_for("40 topics, 120 channels")
        screen.press("/depht>30\r", "no such condition: depht>30  esc clears it")


def test_one_topic(qcli: Cli, many: str) -> None:
    with screen_of(qcli, many) as (screen, terminal):
        lines = screen.press(f"{DOWN * 6}\r", "topic live.01.created")
        assert body(lines) == ["live.01.created", "archive", "mail", "metrics"]
        screen.press("\r", "40 topics")
        screen.press("\r", "topic live.01.created")
        terminal.type(ESCAPE.encode())
        screen.wait_for("40 topics")


def test_help_and_stop(qcli: Cli, broker: Broker, topic: str) -> None:
    broker.create(topic, "c")
    with screen_of(qcli, topic) as (screen, _):
        screen.press("?", "Keys of qcli stat")
        screen.wait_for("any key: back")
        screen.press("x", "topic/channel")
        screen.press(" ", "stopped")
        qcli.publish(topic, [b"x"] * 777)
        screen.press("s", "by depth")
        assert not any("777" in line for line in screen.lines)
        screen.press(" ", "777")
        screen.wait_without("stopped")


def test_by_broker(qcli: Cli, many: str) -> None:
    with screen_of(qcli, "live.00.created", "--by-broker") as (screen, _):
        assert body(screen.lines)[:3] == ["live.00.created", qcli.http_address, "archive"]
        screen.press("b", "1 topic")
        screen.wait_without(f"  {qcli.http_address}")


def test_resize(qcli: Cli, many: str) -> None:
    with screen_of(qcli, many, LINES="", COLUMNS="") as (screen, _):
        screen.resize(30, 160)
        assert "in trend" in screen.wait(lambda lines: lines[29].endswith("of 160"))[1]
        screen.resize(10, 40)
        small = ["depth", "inflt", "out/s", "age"]
        screen.wait(lambda lines: lines[1].split()[1:] == small and lines[9].endswith("of 160"))
        screen.resize(4, 20)
        screen.wait(lambda lines: lines[1].split()[1:] == ["depth"])


@pytest.mark.parametrize("way", ["q", "interrupt", "terminate"])
def test_terminal_is_restored(tmp_path: Path, way: str) -> None:
    with qcli_serve(tmp_path / "data") as broker:
        broker.create("t", "c")
        qcli = Cli(broker.tcp_address, broker.http_address)
        with screen_of(qcli, "t") as (_, terminal):
            raw = settings(terminal)
            if way == "q":
                terminal.type(b"q")
            elif way == "interrupt":
                terminal.process.send_signal(signal.SIGINT)
            else:
                terminal.process.send_signal(signal.SIGTERM)
            assert terminal.end() == {"q": 0, "interrupt": 130}.get(way, 143)
            cooked = settings(terminal)
        before, _, after = terminal.shown.rpartition(
            b"\x1b[?25h\x1b[?1049l"
        )  # the cursor, and the normal screen
        assert before.count(b"\x1b[?1049h") == 1
        assert after.count(qcli.http_address.encode()) == 1  # the last table stays, once
        assert b"Traceback" not in terminal.shown
        assert not raw & (termios.ICANON | termios.ECHO)
        assert cooked & (termios.ICANON | termios.ECHO) == termios.ICANON | termios.ECHO


def settings(terminal: Terminal) -> int:
    """Return the local modes of a terminal."""
    modes: int = termios.tcgetattr(terminal.fd)[3]
    return modes


def test_stop_and_continue(qcli: Cli, many: str) -> None:
    with screen_of(qcli, many) as (screen, terminal):
        terminal.process.send_signal(signal.SIGTSTP)
        os.waitid(os.P_PID, terminal.process.pid, os.WSTOPPED)
        assert settings(terminal) & termios.ECHO
        terminal.expect(b"\x1b[?1049l")
        shown = len(terminal.shown)
        terminal.process.send_signal(signal.SIGCONT)
        screen.press(DOWN, "live.00.created  in")
        assert b"\x1b[?1049h" in terminal.shown[shown:]
        assert not settings(terminal) & termios.ECHO
        assert terminal.interrupt() == 130


def test_table_follows_the_broker(qcli: Cli, broker: Broker, topic: str) -> None:
    broker.create(topic, "c")
    with screen_of(qcli, topic) as (screen, _):
        qcli.publish(topic, [b"x"] * 1234)
        screen.wait_for("1234")
        broker.create(topic, "new")
        screen.wait_for("  new")


def test_broker_that_goes_down_is_named(tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "data") as broker:
        qcli = Cli(broker.tcp_address, broker.http_address)
        broker.create("t")
        with screen_of(qcli, "t") as (screen, terminal):
            broker.process.terminate()
            broker.process.wait(30)
            lines = screen.wait_for(f"no answer from {broker.http_address}: these are the last numbers")
            assert body(lines) == ["t"]
            assert terminal.interrupt() == 130


def test_no_broker_at_the_start_is_a_failure(nowhere: Cli) -> None:
    with nowhere.on_terminal("stat") as terminal:
        assert terminal.end() == 3
    assert b"\x1b" not in terminal.shown


def test_missing_topic_is_a_failure(qcli: Cli) -> None:
    with qcli.on_terminal("stat", "nothing.live") as terminal:
        assert terminal.end() == 1
    assert b"\x1b" not in terminal.shown


def test_no_colors_with_no_color(qcli: Cli, many: str) -> None:
    with screen_of(qcli, many, NO_COLOR="1") as (_, terminal):
        terminal.process.terminate()
        assert terminal.end() == 143
    assert re.search(rb"\x1b\[[\d;]*m", terminal.shown) is None  # also neither bold nor dim


def test_colors(qcli: Cli, many: str) -> None:
    with screen_of(qcli, "live.00.created") as (_, terminal):
        terminal.expect(b"\x1b[33m  mail")


def test_input_that_is_no_terminal_is_not_read(qcli: Cli, many: str) -> None:
    line = f"exec {sys.executable} -m qcli stat '{many}' < /dev/null"
    with qcli.on_terminal(shell=line, columns=80) as terminal:
        ScreenReader(terminal).wait_for("40 topics")
        assert terminal.interrupt() == 130
