"""The broker for tests, without pytest."""

import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from testing.support import PATIENCE_S
from trio_nsq.client import BrokerUnreachable
from trio_nsq.client.http.broker_http import BrokerHTTP
from trio_nsq.testing import NSQ, NSQServer, ServerFailed
from trio_nsq.testing.server import ServerProcess

pytestmark = pytest.mark.slow  # starts a process


@pytest.fixture(scope="module")
def process() -> Iterator[ServerProcess]:
    process = ServerProcess()
    yield process
    process.close()


@pytest.fixture(scope="module")
def server(process: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NSQServer]:
    with NSQServer(tmp_path_factory.mktemp("nsq"), process=process) as server:
        yield server


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"msg_timeout": 7}, "TypeError: a broker has no option 'msg_timeout'"),
        ({"max_msg_size": "large"}, "TypeError: .*max_msg_size"),
        ({"node_id": 5000}, "ValueError: node_id is 5000"),
    ],
)
def test_wrong_options(
    options: dict[str, object], reason: str, process: ServerProcess, tmp_path: Path
) -> None:
    assert re.match(reason, process.start(tmp_path, options))
    assert not process.do("look")


def connects(server: NSQServer) -> bool:
    host, _, port = server.tcp_address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), PATIENCE_S).close()
    except ConnectionRefusedError:
        return False
    return True


def test_every_state_leads_to_a_broker_that_runs(server: NSQServer) -> None:
    addresses = server.tcp_address, server.http_address
    for before in (
        [],
        ["kill"],
        ["hang"],
        ["hang", "kill"],
        ["stop"],
        ["stop", "stop", "hang", "resume", "kill"],
    ):
        with NSQ(server) as nsq:
            nsq.publish("t", b"kept")
            for name in before:
                getattr(server, name)()
            is_down = {"kill", "stop"} & set(before)
            assert server.is_running == connects(server) == (not is_down)
            server.restart()
            assert server.is_running
            assert (server.tcp_address, server.http_address) == addresses
            assert nsq.published("t") == [b"kept"]


def test_broker_that_hangs_accepts_and_does_not_answer(server: NSQServer) -> None:
    with NSQ(server) as nsq:
        server.hang()
        with pytest.raises(BrokerUnreachable, match="no answer"):
            BrokerHTTP(server.http_address, answer_timeout_s=0.1).request("GET", "/ping")
        server.resume()
        assert nsq.topics() == []


def test_topics_from_before_stay(server: NSQServer) -> None:
    with NSQ(server) as outer:
        outer.publish("before", b"x")
        with NSQ(server) as inner:
            inner.publish("within", b"x")
            assert inner.topics() == ["within"]
        assert outer.topics() == ["before"]


def test_start_that_fails(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("not a folder")
    with pytest.raises(ServerFailed, match="the broker did not start: FileExistsError"), NSQServer(tmp_path):
        pass


def test_process_that_is_killed_takes_the_broker_along(tmp_path: Path) -> None:
    process = ServerProcess()
    with NSQServer(tmp_path, process=process) as server:
        assert connects(server)
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(ServerFailed, match="the process of the broker ended"):
            server.restart()
        deadline = time.monotonic() + PATIENCE_S
        while connects(server):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_outside_its_block(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="only inside its `with` block"):
        NSQServer(tmp_path).kill()
