"""Tests for SIGUSR1: the broker begins to drain."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from cli.support import Cli, Running, lines_until_ready


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[tuple[Running, httpx.Client]]:
    """Run a broker, with an HTTP client for it."""
    listen = ["--tcp-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0"]
    file = folder / "addresses.json"
    data = ["--data-path", str(folder / "data"), "--address-file", str(file)]
    with Cli("", "").running("serve", *listen, *data, *flags) as broker:
        lines_until_ready(broker)
        address = json.loads(file.read_text())["http_address"]
        with httpx.Client(base_url=f"http://{address}", timeout=20) as client:
            yield broker, client


def hear(broker: Running, text: str) -> str:
    """Return the next log line that contains this text."""
    while text not in (line := broker.hear_line()):
        pass
    return line


def draining(client: httpx.Client) -> str:
    return client.get("/config/draining").text


def test_signal_begins_the_drain_mode_and_only_that(tmp_path: Path) -> None:
    with serving(tmp_path) as (broker, client):
        assert client.post("/pub?topic=t", content=b"x").text == "OK"
        for _ in range(2):  # the second one changes nothing
            broker.process.send_signal(signal.SIGUSR1)
            hear(broker, "SIGUSR1: draining")
            while draining(client) != "true":
                pass
        refused = client.post("/pub?topic=t", content=b"x")
        assert (refused.status_code, refused.json()["message"].partition(":")[0]) == (503, "DRAINING")
        assert client.put("/config/draining", content=b"false").text == "false"
        assert client.post("/pub?topic=t", content=b"x").text == "OK"
        broker.process.send_signal(signal.SIGUSR1)
        hear(broker, "the broker refuses publishes from now on")
        broker.process.send_signal(signal.SIGHUP)
        hear(broker, "SIGHUP")
        assert draining(client) == "true"
        broker.process.terminate()
        assert broker.end().code == 0


def test_signal_works_if_http_changes_nothing(tmp_path: Path) -> None:
    with serving(tmp_path, "--http-read-only") as (broker, client):
        assert client.put("/config/draining", content=b"true").status_code == 403
        broker.process.send_signal(signal.SIGUSR1)
        hear(broker, "the broker refuses publishes from now on")
        while draining(client) != "true":
            pass
