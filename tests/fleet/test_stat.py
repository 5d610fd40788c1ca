"""Tests for `qcli stat` with several brokers: sums, partial answers, and a screen that a hung broker does not block."""

import contextlib
import csv
import io
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.screens import ScreenReader
from cli.support import Cli, Result, Run, Terminal
from fleet.support import Fleet, cli_of, hung, refusing_broker, running_fleet, take_down
from interop.peers import qcli_serve
from qcli.framework.errors import ExitCode

ANSWER_TIMEOUT_S = 5.0


def fill(fleet: Fleet, topic: str) -> None:
    """Create a channel `c`, and publish 1 message to the first broker, 2 to the second, and so on."""
    fleet.create(topic, "c")
    for number, broker in enumerate(fleet.brokers, 1):
        for _ in range(number):
            broker.post("/pub", b"x", topic=topic)


def depths(result: Result) -> dict[str | None, int]:
    """Return the depths of the channels of a JSON report, by broker."""
    return {row["broker"]: row["depth"] for row in result.records if row["channel"]}


def test_sum_and_the_brokers_below(run_here: Run, fleet: Fleet, topic: str) -> None:
    fill(fleet, topic)
    result = run_here(fleet.cli, "stat", topic, "--by-broker", "--format", "json")
    assert (result.code, result.err) == (0, "")
    assert depths(result) == {None: 10} | dict(zip(fleet.http_addresses, (1, 2, 3, 4), strict=True))
    ages = {row["broker"]: row["oldest_message_age_ms"] for row in result.records if row["channel"]}
    known = [ages[broker.http_address] for broker in fleet.ours]
    assert (ages[fleet.nsqd.http_address], ages[None]) == (None, max(known))
    table = run_here(fleet.cli, "stat", topic, "--by-broker").out.decode()
    assert [
        line.split()[2] for line in table.splitlines() if fleet.http_addresses[2] in line and " c " in line
    ] == [fleet.http_addresses[2]]
    assert depths(run_here(fleet.cli, "stat", topic, "--format", "json")) == {None: 10}


def test_brokers_of_discovery_services(run_here: Run, fleet: Fleet, topic: str) -> None:
    fill(fleet, topic)
    result = run_here(fleet.discovering, "stat", topic, "--by-broker", "--format", "json")
    found = depths(result)
    assert (result.code, found.pop(None), sorted(found.values())) == (0, 10, [1, 2, 3, 4])


@pytest.fixture
def short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the timeout of requests, but for brokers on a loaded machine."""
    monkeypatch.setattr("qcli.broker.admin_client.REQUEST_TIMEOUT_S", 2.0)


@pytest.mark.parametrize("form", ["table", "json", "csv"])
def test_hung_broker_is_named_after_the_numbers_of_the_others(
    run_here: Run, fleet: Fleet, topic: str, form: str, short_timeout: None
) -> None:
    fill(fleet, topic)
    silent = fleet.ours[1]
    with hung(silent):
        begun_s = time.monotonic()
        result = run_here(fleet.cli, "stat", topic, "--format", form)
        assert time.monotonic() - begun_s < 2 * ANSWER_TIMEOUT_S
    assert result.code == ExitCode.PARTIAL
    assert silent.http_address in result.err
    assert fleet.ours[0].http_address not in result.err
    if form == "json":
        assert depths(result) == {None: 8}
    elif form == "csv":
        row = list(csv.DictReader(io.StringIO(result.out.decode())))[-1]
        assert (row["channel"], row["depth"]) == ("c", "8")
    else:
        assert result.out.decode().splitlines()[-1].split()[:2] == ["total", "8"]


def test_broker_that_is_down_and_one_that_refuses(tmp_path: Path, run_here: Run, topic: str) -> None:
    with (
        running_fleet(tmp_path / "fleet", ours=2) as fleet,
        refusing_broker(tmp_path / "refusing") as refusing,
    ):
        fill(fleet, topic)
        down = fleet.ours[0]
        take_down(down)
        cli = cli_of(*fleet.brokers, refusing)
        result = run_here(cli, "stat", topic, "--format", "json")
        assert (result.code, depths(result)) == (ExitCode.PARTIAL, {None: 5})
        assert f"No broker answers at {down.http_address}" in result.err
        assert f"{refusing.http_address} requires a secret" in result.err
        absent = run_here(cli, "stat", "absent")
        assert (absent.code, absent.out) == (ExitCode.PARTIAL, b"")
        assert down.http_address in absent.err
        # Its topics may be those that the broker that is down has.
        some = run_here(cli, "stat", topic, "absent*", "--format", "json")
        assert (some.code, depths(some)) == (ExitCode.PARTIAL, {None: 5})
        none = run_here(cli_of(down), "stat")
        assert none.code == ExitCode.UNREACHABLE


def test_failures_between_reports_are_warnings(fleet: Fleet, topic: str) -> None:
    fill(fleet, topic)
    cli = Cli("", f"{fleet.ours[0].http_address},127.0.0.1:1")
    result = cli("stat", topic, "--format", "json", "--count", "3", "--interval", "10ms")
    assert (result.code, len(result.records)) == (ExitCode.PARTIAL, 6)
    warning, error = result.err.splitlines()
    assert warning.startswith("Warning: No broker answers at 127.0.0.1:1")
    assert error.startswith("Error: No broker answers at 127.0.0.1:1")


# ---------------------------------------------------------------------- the live screen


PATIENT = "from qcli import main; from qcli.broker import admin_client; admin_client.REQUEST_TIMEOUT_S = 600.0; main()"
"""A program of Python that runs a command whose requests to a hung broker end later than a test waits for anything."""


@contextlib.contextmanager
def live(cli: Cli, *args: str) -> Iterator[tuple[ScreenReader, Terminal]]:
    command = [sys.executable, "-c", PATIENT, "stat", *args, "--interval", "100ms"]
    with cli.on_terminal(shell=f"exec {shlex.join(command)}", rows=24, columns=80) as terminal:
        screen = ScreenReader(terminal)
        screen.wait_for("topic/channel")
        yield screen, terminal


def test_keys_work_while_a_broker_hangs(fleet: Fleet, topic: str) -> None:
    fill(fleet, topic)
    silent = fleet.ours[2]
    with live(fleet.cli, topic) as (screen, terminal):
        screen.wait(lambda lines: lines[-3].split()[:2] == ["total", "10"])
        with hung(silent):
            # The note may come a moment before the numbers without the broker.
            note = f"no answer from {silent.http_address}: not in these numbers"
            screen.wait(lambda lines: note in lines[1] and lines[-3].split()[:2] == ["total", "7"])
            for keys, text in (("s", "by depth"), ("r", "by depth, reversed"), ("\x1b[B", f"{topic}  in")):
                screen.press(keys, text)
            fleet.ours[0].post("/pub", b"x", topic=topic)  # the others' numbers go on
            screen.wait(lambda lines: lines[-3].split()[:2] == ["total", "8"])
        screen.wait_without("no answer")
        screen.wait(lambda lines: lines[-3].split()[:2] == ["total", "11"])
        terminal.type(b"q")
        assert terminal.end() == 0


def test_screen_starts_without_a_hung_broker_and_ends_at_once(fleet: Fleet, topic: str) -> None:
    fill(fleet, topic)
    with hung(fleet.ours[0]), live(fleet.cli, topic) as (screen, terminal):
        screen.wait(lambda lines: "no answer from" in lines[1] and lines[-3].split()[:2] == ["total", "9"])
        terminal.type(b"q")
        assert terminal.end() == 0  # before the request to the hung broker does


def test_enter_shows_the_brokers_of_a_topic(fleet: Fleet, topic: str) -> None:
    fill(fleet, topic)
    with live(fleet.cli, f"{topic}*") as (screen, _):
        screen.wait(lambda lines: "4 brokers" in lines[0] and lines[-3].split()[:2] == ["total", "10"])
        screen.press("\x1b[B\r", f"topic {topic}")
        screen.wait(
            lambda lines: (
                [line.split()[1] for line in lines if line.startswith("    ")] == ["1", "2", "3", "4"]
            )
        )


def test_broker_that_registers_later_appears(tmp_path: Path, topic: str) -> None:
    with running_fleet(tmp_path / "fleet", ours=1) as fleet:
        fleet.create(topic, "c")
        with live(fleet.discovering, topic, "--by-broker") as (screen, _):
            screen.wait(
                lambda lines: all(any(each in line for line in lines) for each in fleet.http_addresses)
            )
            flags = [f"--lookupd-tcp-address={lookupd.tcp_address}" for lookupd in fleet.lookupds]
            with qcli_serve(tmp_path / "new", *flags) as new:
                new.create(topic, "c")
                new.post("/pub", b"x", topic=topic)
                screen.wait_for(f"    {new.http_address}")
            screen.wait_for(f"no answer from {new.http_address}")  # it does not vanish


def test_refusal_is_shown_in_its_own_words(tmp_path: Path, fleet: Fleet, topic: str) -> None:
    fill(fleet, topic)
    with refusing_broker(tmp_path) as refusing, live(cli_of(fleet.ours[0], refusing), topic) as (screen, _):
        reason = f"The broker at {refusing.http_address} requires a secret"
        screen.wait(lambda lines: reason in lines[1] and lines[-3].split()[:2] == ["total", "1"])


def test_broker_without_topics_beside_one_that_is_down(tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "data") as broker:
        with live(Cli("", f"{broker.http_address},127.0.0.1:1")) as (screen, _):
            screen.wait_for("no topics yet")
            screen.wait_for("no answer from 127.0.0.1:1")


def test_unavailable_topic_is_named_with_its_broker(tmp_path: Path, run_here: Run) -> None:
    with qcli_serve(tmp_path / "damaged") as broker:
        broker.create("t", "c")
    for path in (tmp_path / "damaged" / "topics" / "t.topic").glob("state.json*"):
        path.write_text("?")
    with qcli_serve(tmp_path / "damaged") as damaged, qcli_serve(tmp_path / "sound") as sound:
        sound.create("t", "c")
        sound.post("/pub", b"x", topic="t")
        *table, reason = run_here(cli_of(sound, damaged), "stat").out.decode().splitlines()
        assert reason.startswith(f"Topic t is unavailable on {damaged.http_address}: ")
        assert [line.split()[:2] for line in table[1:]] == [["t", "1"], ["t", "c"], ["total", "1"]]
        assert table[1].endswith("unavailable")
        with live(cli_of(sound, damaged)) as (screen, _):
            screen.wait_for(f"Topic t is unavailable on {damaged.http_address}")
