"""The broker for tests, without pytest."""

import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import trio_nsq.testing.server as server_module
from testing.support import PATIENCE_S
from trio_nsq.client import BrokerUnreachable, RequestRefused
from trio_nsq.client.http.broker_http import BrokerHTTP
from trio_nsq.sync import Consumer
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
        ({"max_msg_size": "large"}, "TypeError: .*(max_msg_size|int)"),  # compiled code does not name it
        ({"node_id": 5000}, "ValueError: node_id is 5000"),
    ],
)
def test_wrong_options(
    options: dict[str, object], reason: str, process: ServerProcess, tmp_path: Path
) -> None:
    assert re.match(reason, process.start(tmp_path, options))
    assert not process.do("look")


def test_ports_are_kept_while_no_broker_runs(process: ServerProcess) -> None:
    for address in process.addresses:
        host, _, port = address.rpartition(":")
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((host, int(port)))


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


@pytest.mark.parametrize("fail", [NSQ.kill, NSQ.hang])
def test_next_test_finds_a_broker_that_answers(fail: Callable[[NSQ], None], server: NSQServer) -> None:
    with NSQ(server) as nsq:
        fail(nsq)
    BrokerHTTP(server.http_address).request("GET", "/ping")


def test_consumed_messages_stay(tmp_path: Path) -> None:
    bodies = [b"%0100d" % number for number in range(50)]
    with NSQServer(tmp_path, {"max_bytes_per_file": 1000}) as server, NSQ(server) as nsq:
        nsq.publish("t", *bodies[:25])
        nsq.publish("t", *bodies[25:])
        with Consumer("t", "c", nsqd_tcp_addresses=nsq.tcp_address, max_in_flight=50) as consumer:
            for batch in consumer.batches():
                batch.finish()
                if consumer.stats().finished == len(bodies):
                    break
        nsq.wait_empty("t", "c")
        nsq.restart()
        assert nsq.published("t") == bodies


def test_threads_may_kill_and_start(server: NSQServer) -> None:
    def restart() -> None:
        for _ in range(3):
            server.kill()
            server.start()

    with ThreadPoolExecutor() as threads:
        for done in [threads.submit(restart) for _ in range(3)]:
            done.result()
    server.start()
    assert connects(server)
    assert "GET" not in server.log


@pytest.fixture
def new_process() -> Iterator[ServerProcess]:
    process = ServerProcess()
    yield process
    process.close()


def test_late_answer_is_not_that_of_the_next_command(
    new_process: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not new_process.do("look")
    os.kill(new_process.pid, signal.SIGSTOP)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(server_module, "PATIENCE_S", 0.01)
            for command in ("resume", "look"):
                with pytest.raises(ServerFailed, match="did not answer"):
                    new_process.do(command)
    finally:
        os.kill(new_process.pid, signal.SIGCONT)
    assert new_process.start(tmp_path, {"unknown": 1}).startswith("TypeError")
    assert new_process.start(tmp_path, {}) == ""
    assert new_process.do("look")


def test_threads_may_be_the_first_to_use_it(new_process: ServerProcess) -> None:
    with ThreadPoolExecutor(8) as threads:
        found = [*threads.map(lambda _: new_process.addresses, range(8))]
    assert len({*found}) == 1


def test_broker_that_hangs_accepts_and_does_not_answer(server: NSQServer) -> None:
    with NSQ(server) as nsq:
        server.hang()
        with pytest.raises(BrokerUnreachable, match="no answer"):
            BrokerHTTP(server.http_address, answer_timeout_s=0.1).request("GET", "/ping")
        server.resume()
        assert nsq.topics() == []


def test_many_and_large_messages(server: NSQServer) -> None:
    many = [b"%d" % number for number in range(2500)]
    large = [bytes([number]) * 900_000 for number in range(1, 5)]
    with NSQ(server) as nsq:
        nsq.publish("many", *many)
        nsq.publish("many")  # none
        for body in large:
            nsq.publish("large", body)
        assert nsq.published("many") == many
        assert nsq.published("large") == large
        with pytest.raises(ValueError, match="defer_s is inf"):
            nsq.publish("many", b"x", defer_s=math.inf)
        with pytest.raises(RequestRefused, match="empty"):
            nsq.publish("many", b"")


def test_clock_that_stands_still(server: NSQServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test may freeze the clocks of its process."""
    with NSQ(server) as nsq, monkeypatch.context() as patch:
        for name in ("time", "monotonic"):
            patch.setattr(time, name, lambda: 5.0)
        nsq.publish("t", b"x")
        with pytest.raises(TimeoutError, match="topic 't' has 1 message; 2 are expected, after"):
            nsq.wait_published("t", 2, timeout_s=0.05)


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


def test_fork_of_the_tests_does_not_keep_the_broker(tmp_path: Path) -> None:
    """A program under test may leave a fork behind, which has the pipes to the broker's process, too."""
    program = """
import os, pathlib, signal, sys
from trio_nsq.testing import NSQServer

with NSQServer(pathlib.Path(sys.argv[1])) as server:
    fork = os.fork()
    if not fork:
        signal.pause()
print("closed", flush=True)
os.kill(fork, signal.SIGKILL)
"""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, timeout=PATIENCE_S)
    assert done.stdout == b"closed\n"
    assert time.monotonic() - began < server_module.PATIENCE_S, "it was killed instead"


def test_outside_its_block(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="only inside its `with` block"):
        NSQServer(tmp_path).kill()
