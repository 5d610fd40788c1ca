"""Tests for sd_notify, and for the log as JSON."""

import json
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cli.support import DEADLINE_S, Cli, Running, lines_until_ready

SERVERS = {
    "serve": ("--http-address", "127.0.0.1:0", "--tcp-address", "127.0.0.1:0", "--data-path", "data"),
    "lookupd": ("--http-address", "127.0.0.1:0", "--tcp-address", "127.0.0.1:0"),
}


@contextmanager
def server(name: str, *more: str, **env: str) -> Iterator[Running]:
    cli = Cli("", "", {**env, "QCLI_ADDRESS_FILE": "addresses.json"})
    with cli.running(name, *SERVERS[name], *more) as running:
        yield running


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.parametrize("address", ["notify", "@trio-nsq-test-{}"])
def test_service_manager_is_notified(name: str, address: str, tmp_path: Path) -> None:
    address = address.format(tmp_path.name)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.settimeout(DEADLINE_S)
        manager.bind("\0" + address[1:] if address.startswith("@") else address)

        def told() -> dict[str, str]:
            return dict(line.split("=", 1) for line in manager.recv(4096).decode().splitlines())

        with server(name, NOTIFY_SOCKET=address) as running:
            ready = told()
            bound = json.loads(Path("addresses.json").read_text())
            assert ready["READY"] == "1"
            assert ready["STATUS"].startswith(f"tcp {bound['tcp_address']}, http {bound['http_address']}")
            running.process.send_signal(signal.SIGHUP)
            assert told().keys() == {"RELOADING", "MONOTONIC_USEC"}
            assert told() == ready
            running.process.terminate()
            assert told()["STOPPING"] == "1"
            assert running.end().code == 0


@pytest.mark.parametrize("name", SERVERS)
def test_reload_during_the_start_does_not_report_ready(name: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.settimeout(DEADLINE_S)
        manager.bind("notify")
        with server(name, "--log-level", "debug", NOTIFY_SOCKET="notify") as running:
            running.hear_line()
            running.process.send_signal(signal.SIGHUP)
            told = b""
            while b"READY=1" not in told:
                told = manager.recv(4096)
            assert b"STATUS=tcp " in told
            running.process.terminate()
            assert running.end().code == 0


@pytest.mark.parametrize(
    ("name", "more"), [("serve", ()), ("lookupd", ()), ("serve", ("--processes", "2"))], ids=str
)
def test_signs_of_life(name: str, more: tuple[str, ...]) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.settimeout(DEADLINE_S)
        manager.bind("notify")
        with server(name, *more, NOTIFY_SOCKET="notify", WATCHDOG_USEC="20000") as running:
            told: list[bytes] = []
            while told.count(b"WATCHDOG=1") < 3 or not any(each.startswith(b"READY=1") for each in told):
                told.append(manager.recv(4096))
            running.process.terminate()
            while not told[-1].startswith(b"STOPPING=1"):
                told.append(manager.recv(4096))
            assert running.end().code == 0


@pytest.mark.parametrize(
    "environment", [{"WATCHDOG_PID": "1"}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_USEC": "x"}]
)
def test_no_signs_of_life_if_none_are_wanted(environment: dict[str, str]) -> None:
    """Also not if the variables are for another process, which has started this one."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.settimeout(DEADLINE_S)
        manager.bind("notify")
        with server(
            "serve", **{"NOTIFY_SOCKET": "notify", "WATCHDOG_USEC": "20000", **environment}
        ) as running:
            told = [manager.recv(4096)]
            running.process.terminate()
            told.append(manager.recv(4096))
            assert running.end().code == 0
    assert [each[:8] for each in told] == [b"READY=1\n", b"STOPPING"]


def test_missing_service_manager_does_not_stop_the_server() -> None:
    with server("serve", NOTIFY_SOCKET="gone") as running:
        lines_until_ready(running)
        assert "WARNING: NOTIFY_SOCKET gone: No such file or directory" in running.hear_line()
        running.process.terminate()
        assert running.end().code == 0


@pytest.mark.parametrize("name", SERVERS)
def test_log_as_json(name: str) -> None:
    with server(name, "--log-format", "json", "--log-level", "debug") as running:
        lines = [running.hear_line()]
        while "ready: " not in lines[-1]:
            lines.append(running.hear_line())
        running.process.terminate()
        lines += running.end().err.splitlines()
    records = [json.loads(line) for line in lines]
    assert all(record.keys() == {"time", "level", "logger", "message"} for record in records)
    assert {record["level"] for record in records} <= {"debug", "info", "warn"}
    assert all(record["time"].endswith("+00:00") for record in records)
