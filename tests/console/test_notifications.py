"""Notifications of actions: what an endpoint gets, and that one that fails harms nothing."""

import json
import os
import signal
import socket
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from starlette.requests import HTTPConnection

from console.support import WebServer, qcli_admin
from fleet.support import DEADLINE_S, wait_until
from interop.peers import Broker, qcli_serve
from trio_nsq.console.access.viewer import Viewer
from trio_nsq.console.notifications import MAX_WAITING, Notifier


@dataclass
class Endpoint:
    """A server for notifications. It answers with `statuses`, one after the other, then with 200."""

    port: int
    statuses: list[int]
    got: "SimpleQueue[dict[str, Any]]" = field(default_factory=SimpleQueue)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook?x=1"

    def next(self) -> dict[str, Any]:
        """Wait for the next notification."""
        return self.got.get(timeout=DEADLINE_S)


@contextmanager
def endpoint(*statuses: int) -> Iterator[Endpoint]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status = found.statuses.pop(0) if found.statuses else 200
            content = {"body": json.loads(body), "path": self.path, "type": self.headers["Content-Type"]}
            self.send_response(status)
            self.end_headers()
            found.got.put({**content, "status": status})

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Endpoint(server.server_port, list(statuses))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with qcli_serve(tmp_path_factory.mktemp("broker") / "data") as running:
        yield running


@contextmanager
def console(folder: Path, broker: Broker, url: str, *flags: str) -> Iterator[WebServer]:
    address = f"--nsqd-http-address={broker.http_address}"
    with qcli_admin(folder, address, f"--notification-http-endpoint={url}", *flags) as running:
        yield running


def create(site: WebServer, topic: str, channel: str = "", headers: dict[str, str] | None = None) -> int:
    body = {"topic": topic, "channel": channel}
    return site.ask("POST", "/api/topics", json.dumps(body).encode(), headers).status


def test_what_the_endpoint_gets(tmp_path: Path, broker: Broker) -> None:
    with endpoint() as hook, console(tmp_path, broker, hook.url) as site:
        assert create(site, "told", "c", {"User-Agent": "script/1"}) == 200
        first, second = hook.next(), hook.next()
        assert site.ask("POST", "/api/topics/told/c", b'{"action": "pause"}').status == 200
        third = hook.next()
        assert site.ask("DELETE", f"/api/nodes/{broker.http_address}", b'{"topic": "told"}').status == 200
        fourth = hook.next()
    assert (first["path"], first["type"]) == ("/hook?x=1", "application/json")
    about = first["body"]
    assert about.pop("timestamp") > 1_700_000_000
    assert about.pop("remote_ip").startswith("127.0.0.1:")
    assert about == {
        "action": "create_topic",
        "topic": "told",
        "user_agent": "script/1",
        "url": f"http://{site.address}/api/topics",
        "via": socket.gethostname(),
    }
    assert (second["body"]["action"], second["body"]["channel"]) == ("create_channel", "c")
    assert (third["body"]["action"], third["body"]["url"]) == (
        "pause_channel",
        f"http://{site.address}/api/topics/told/c",
    )
    assert (fourth["body"]["action"], fourth["body"]["node"]) == (
        "tombstone_topic_producer",
        broker.http_address,
    )


def test_the_user_is_the_viewer(tmp_path: Path, broker: Broker) -> None:
    basic = {"Authorization": f"Basic {b64encode(b'other:x').decode()}", "X-Forwarded-User": "ann"}
    with endpoint() as hook, console(tmp_path, broker, hook.url, "--admin-user=ann") as site:
        assert create(site, "mine", headers=basic) == 200
        assert hook.next()["body"]["user"] == "ann"


def test_a_failed_notification_is_repeated_in_order(tmp_path: Path, broker: Broker) -> None:
    with endpoint(500) as hook, console(tmp_path, broker, hook.url) as site:
        assert create(site, "first") == create(site, "second") == 200
        got = [hook.next() for _ in range(3)]
    assert [(each["body"]["topic"], each["status"]) for each in got] == [
        ("first", 500),
        ("first", 200),
        ("second", 200),
    ]


def test_a_refused_notification_is_dropped(tmp_path: Path, broker: Broker) -> None:
    with endpoint(404) as hook, console(tmp_path, broker, hook.url) as site:
        assert create(site, "first") == create(site, "second") == 200
        assert [hook.next()["body"]["topic"] for _ in range(2)] == ["first", "second"]
        wait_until(lambda: any("dropped" in line for line in site.child.stderr.seen), "the log tells it")


def test_an_endpoint_that_refuses_connections_harms_nothing(tmp_path: Path, broker: Broker) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://name:secret@127.0.0.1:{unused.getsockname()[1]}/"
        with console(tmp_path, broker, url) as site:
            assert [create(site, f"t{number}") for number in range(20)] == [200] * 20
            wait_until(
                lambda: any("notification failed" in line for line in site.child.stderr.seen),
                "the log tells it",
            )
            assert site.ask("GET", "/ping").status == 200
        assert not any("secret" in line for line in site.child.stderr.seen)


def test_an_endpoint_that_hangs_harms_nothing(tmp_path: Path, broker: Broker) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hanging:  # accepts connections, and never answers
        url = f"http://127.0.0.1:{hanging.getsockname()[1]}/"
        with console(tmp_path, broker, url, "--http-client-request-timeout=300ms") as site:
            assert [create(site, f"t{number}") for number in range(5)] == [200] * 5
            wait_until(
                lambda: any("no answer within" in line for line in site.child.stderr.seen), "the log tells it"
            )
            assert create(site, "more") == 200


async def test_the_queue_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    notifier = Notifier("http://127.0.0.1:1/", connect_timeout_s=1, request_timeout_s=1)
    scope = {
        "type": "http",
        "path": "/x",
        "headers": [],
        "server": ("h", 80),
        "state": {"viewer": Viewer("ann")},
    }
    for _ in range(MAX_WAITING):
        notifier.notify(HTTPConnection(scope), "pause_topic", "t")
    assert caplog.messages == []
    notifier.notify(HTTPConnection(scope), "pause_topic", "u")
    assert caplog.messages == ["pause_topic of u: notification dropped: 1000 others wait"]


def test_nothing_is_told_of_changes_that_failed(tmp_path: Path) -> None:
    with (
        qcli_serve(tmp_path / "data") as broker,
        endpoint() as hook,
        console(tmp_path, broker, hook.url) as site,
    ):
        broker.create("there")
        os.kill(broker.process.pid, signal.SIGKILL)
        broker.process.wait(DEADLINE_S)
        assert site.ask("POST", "/api/topics/there", b'{"action": "pause"}').status == 502
        assert site.ask("POST", "/api/topics/there", b'{"action": "none"}').status == 400
        assert hook.got.empty()
