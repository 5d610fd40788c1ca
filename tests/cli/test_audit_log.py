"""`--audit-log` of real servers: rotation by SIGHUP under load, and standard output."""

import http.client
import json
import signal
import threading
import time
from pathlib import Path

import pytest

from cli.support import DEADLINE_S, Cli, lines_until_ready, serving


def create_topics(address: str, names: list[str]) -> None:
    connection = http.client.HTTPConnection(address, timeout=DEADLINE_S)
    for name in names:
        connection.request("POST", f"/topic/create?topic={name}", b"")
        response = connection.getresponse()
        assert (response.status, response.read()) == (200, b"")
    connection.close()


def test_rotation_as_logrotate_does_it_loses_no_line(tmp_path: Path) -> None:
    path, addresses = tmp_path / "audit.log", tmp_path / "addresses.json"
    names = [
        [f"t{thread}.{number}#ephemeral".replace("#", "%23") for number in range(150)] for thread in range(2)
    ]
    with serving(tmp_path, "--audit-log", str(path), "--address-file", str(addresses)) as broker:
        lines_until_ready(broker)
        address = json.loads(addresses.read_text())["http_address"]
        threads = [threading.Thread(target=create_topics, args=(address, part)) for part in names]
        for thread in threads:
            thread.start()
        rotations = 0
        while any(thread.is_alive() for thread in threads):
            path.rename(tmp_path / f"audit.log.{rotations:03}")
            rotations += 1
            broker.process.send_signal(signal.SIGHUP)
            deadline = time.monotonic() + DEADLINE_S
            while not path.exists():
                assert time.monotonic() < deadline, "the broker does not open the file again"
        for thread in threads:
            thread.join()
        broker.process.send_signal(signal.SIGTERM)
        result = broker.end()
    assert result.code == 0, result.err
    lines = [
        json.loads(line)
        for file in sorted(tmp_path.glob("audit.log*"))
        for line in file.read_text().splitlines()
    ]
    assert rotations > 1
    assert sorted(line["topic"] for line in lines if line["event"] == "action") == sorted(
        name.replace("%23", "#") for part in names for name in part
    )
    assert {line["event"] for line in lines} == {"action"}


@pytest.mark.parametrize("command", ["serve", "lookupd"])
def test_stdout_has_only_the_audit_log(tmp_path: Path, command: str) -> None:
    addresses = tmp_path / "addresses.json"
    flags = [
        "--tcp-address",
        "127.0.0.1:0",
        "--http-address",
        "127.0.0.1:0",
        "--address-file",
        str(addresses),
    ]
    more = ["--data-path", str(tmp_path / "d")] if command == "serve" else []
    with Cli("127.0.0.1:1", "127.0.0.1:1").running(command, *flags, *more, "--audit-log", "-") as server:
        lines_until_ready(server)
        create_topics(json.loads(addresses.read_text())["http_address"], ["t"])
        line = json.loads(server.read_line())
        assert (line["event"], line["action"], line["status"]) == ("action", "POST /topic/create", 200)
        server.process.send_signal(signal.SIGTERM)
        result = server.end()
    assert (result.code, result.out) == (0, b"")


def test_reader_of_stdout_that_is_gone_stops_nothing(tmp_path: Path) -> None:
    addresses = tmp_path / "addresses.json"
    with serving(tmp_path, "--audit-log", "-", "--address-file", str(addresses)) as broker:
        lines_until_ready(broker)
        assert broker.process.stdout is not None
        broker.process.stdout.close()
        create_topics(json.loads(addresses.read_text())["http_address"], ["t", "u"])
        while not (line := broker.hear_line()).endswith(
            "cannot write the audit log -: Broken pipe; trying again\n"
        ):
            assert line
