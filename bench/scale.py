"""Processor time and memory of a broker with many channels, clients or topics. `growth.py` has the curves."""

import http.client
import json
import socket
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from struct import pack

from bench.contenders import Contender, cpu_s, memory_mib
from bench.loads import CHANNEL, TOPIC, children_cpu_s

from interop.peers import Broker

CONNECTIONS = 4
"""The connections that create channels or topics, or connect clients, each waiting for its answers."""
_STATS = 30
_PATIENCE_S = 300.0
_IDENTIFY = json.dumps({"client_id": "scale", "hostname": "scale", "user_agent": "scale/1.0"}).encode()
_HELLO = b"  V2IDENTIFY\n" + pack(">i", len(_IDENTIFY)) + _IDENTIFY
_SUB = f"SUB {TOPIC} {CHANNEL}\n".encode()
_PUB = f"PUB {TOPIC}\n".encode() + pack(">i", 1) + b"x"
_OK = b"\x00\x00\x00\x00OK"


def channels(contender: Contender, data_path: Path, size: int) -> dict[str, float]:
    """Create channels of one topic by HTTP, then ask for `/stats`."""
    with contender.running(data_path) as broker:
        broker.create(TOPIC)
        memory, used_s = memory_mib(broker), cpu_s(broker)
        paths = [f"/channel/create?topic={TOPIC}&channel=c{number}" for number in range(size)]
        _spread(partial(_post, broker), paths)
        return {
            "create CPU s": cpu_s(broker) - used_s,
            "KiB/channel": (memory_mib(broker) - memory) * 1024 / size,
            **_stats(broker),
        }


def clients(contender: Contender, data_path: Path, size: int) -> dict[str, float]:
    """Connect consumers of one channel, ask for `/stats`, and stop the broker."""
    return _of_clients(contender, data_path, size, _SUB)


def producers(contender: Contender, data_path: Path, size: int) -> dict[str, float]:
    """The same with producers, each after a message."""
    return _of_clients(contender, data_path, size, _PUB)


def _of_clients(contender: Contender, data_path: Path, size: int, command: bytes) -> dict[str, float]:
    with contender.running(data_path) as broker:
        broker.create(TOPIC, CHANNEL)
        memory, used_s = memory_mib(broker), cpu_s(broker)
        with _connected(broker, size, command):
            figures = {
                "connect CPU s": cpu_s(broker) - used_s,
                "KiB/client": (memory_mib(broker) - memory) * 1024 / size,
                **_stats(broker),
            }
            return figures | {"stop CPU s": _stop_cpu_s(broker)}


def topics(contender: Contender, data_path: Path, size: int) -> dict[str, float]:
    """Stop and start a broker that has topics with a channel each."""
    with tempfile.TemporaryDirectory(prefix="scale-", dir=data_path) as folder:
        data = Path(folder) / "data"
        with contender.start(data, *contender.flags) as broker:
            paths = [f"/channel/create?topic=t{number}&channel={CHANNEL}" for number in range(size)]
            _spread(partial(_post, broker), [f"/topic/create?topic=t{number}" for number in range(size)])
            _spread(partial(_post, broker), paths)
            stopping_s = _stop_cpu_s(broker)
        with contender.start(data, *contender.flags) as broker:
            starting_s = cpu_s(broker)  # of a fork of a Python that has imported qcli: see tests/processes
            stats = _stats(broker)
            if contender.is_nsqd:
                broker.process.kill()
                broker.process.wait()
    return {"stop CPU s": stopping_s, "start CPU s": starting_s, **stats}


def _spread(work: Callable[[Sequence[str]], object], items: Sequence[str]) -> None:
    """Do work for all items, in a few threads."""
    with ThreadPoolExecutor(CONNECTIONS) as threads:
        for _ in threads.map(work, [items[first::CONNECTIONS] for first in range(CONNECTIONS)]):
            pass


def _post(broker: Broker, paths: Sequence[str]) -> None:
    connection = http.client.HTTPConnection(broker.http_address, timeout=_PATIENCE_S)
    for path in paths:
        connection.request("POST", path)
        reply = connection.getresponse()
        content = reply.read()
        if reply.status != 200:
            raise RuntimeError(f"POST {path}: {reply.status} {content!r}")
    connection.close()


@contextmanager
def _connected(broker: Broker, count: int, command: bytes) -> Iterator[None]:
    """Connect clients that send IDENTIFY and this command."""
    host, _, port = broker.tcp_address.rpartition(":")
    with ExitStack() as stack:

        def connect(some: Sequence[str]) -> None:
            for _ in some:
                sock = socket.create_connection((host, int(port)), timeout=_PATIENCE_S)
                stack.enter_context(sock)
                sock.sendall(_HELLO + command)
                received = b""
                while received.count(_OK) < 2:
                    piece = sock.recv(4096)
                    if not piece:
                        raise ConnectionError("the broker closed a connection")
                    received += piece

        _spread(connect, [""] * count)
        yield


def _stats(broker: Broker) -> dict[str, float]:
    """Return the processor time for one `/stats` as JSON, and as text."""
    return {"stats CPU ms": _request_cpu_ms(broker, "json"), "text CPU ms": _request_cpu_ms(broker, "text")}


def _request_cpu_ms(broker: Broker, form: str) -> float:
    used_s = []
    for _ in range(1 + _STATS):
        before_s = cpu_s(broker)
        broker.http("GET", "/stats", format=form)
        used_s.append(cpu_s(broker) - before_s)
    return 1000 * statistics.median(used_s[1:])


def _stop_cpu_s(broker: Broker) -> float:
    """Stop a broker, and return its processor time for that."""
    before_s, ended_s = cpu_s(broker), children_cpu_s()
    broker.process.terminate()
    broker.process.wait(_PATIENCE_S)
    return children_cpu_s() - ended_s - before_s
