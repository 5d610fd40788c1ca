"""Fuzzes a running broker over its sockets:

    python -m fuzz.broker --seconds 30
    python -m fuzz.broker --inputs 2000 --seed 7

Every answer must be a frame or an HTTP response, and every error a documented one. The connection must end.
The broker must serve other clients meanwhile, log no bug, and keep its memory within MEMORY_BYTES.
"""

import argparse
import re
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random

from fuzz.codecs import DeflateStream, SnappyStream
from fuzz.commands import CODES, Commands
from fuzz.engine import Target, make
from fuzz.requests import STATUSES, Requests
from interop.peers import Broker, qcli_serve
from trio_nsq.protocol.encode import encode_identify
from trio_nsq.protocol.frames import ErrorFrame, FrameReader, ResponseFrame

PATIENCE_S = 20.0
"""A broker that does not answer within this time has hung."""
MEMORY_BYTES = 300 * 1024 * 1024
"""The limit of the broker's resident memory: 40 MiB at rest, and its cache of accepted messages."""
LOOKED_AT_EVERY = 100
"""The broker's health, memory and log are checked after this many inputs."""
OK_STATUSES = STATUSES | {100, 200}
COMPRESSED = re.compile(rb'"(snappy|deflate)":true')
UPGRADES: dict[str, bytes] = {
    upgrade: b"  V2" + encode_identify({"feature_negotiation": True, upgrade: True})
    for upgrade in ("snappy", "deflate")
}


class BrokerFailed(Exception):
    """A check failed."""


def exchange(address: str, data: bytes, *, after: bytes = b"") -> bytes:
    """Send ``data``, close the sending side, and return everything that is received.

    Args:
        address: The address.
        data: The data.
        after: Is sent first, and must be answered before ``data`` is sent.
    """
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
        answer = b""
        try:
            if after:
                connection.sendall(after)
                answer = connection.recv(65536)
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
        except (BrokenPipeError, ConnectionResetError, OSError):
            pass  # the broker has closed its receiving side; its answers are read nevertheless
        try:
            while part := connection.recv(65536):
                answer += part
        except ConnectionResetError:
            pass
        except TimeoutError:
            raise BrokerFailed(f"no answer and no end within {PATIENCE_S:g} s") from None
    return answer


def check_frames(answer: bytes) -> None:
    """Raise FrameError or BrokerFailed unless the bytes are complete frames and documented errors."""
    reader = FrameReader()
    reader.receive_data(answer)
    while (event := reader.next_event()) is not None:
        if isinstance(event, ErrorFrame) and event.code not in CODES:
            raise BrokerFailed(f"the error {event}")
        if isinstance(event, ResponseFrame) and COMPRESSED.search(event.data):
            return  # what follows is compressed
    if rest := reader.take_buffered():
        raise BrokerFailed(f"half a frame: {rest[:100]!r}")


def check_responses(answer: bytes) -> None:
    """Raise BrokerFailed unless the bytes begin with an HTTP response, and all statuses are documented."""
    for status in re.findall(rb"(?:^|\n|[^\r\n])HTTP/1\.1 ([0-9]+) ", answer):
        if int(status) not in OK_STATUSES | {503}:
            raise BrokerFailed(f"status {int(status)}")
    if answer and not answer.startswith(b"HTTP/1.1 "):
        raise BrokerFailed(f"no response: {answer[:100]!r}")


def attack(broker: Broker, kind: str, data: bytes) -> None:
    """Send one input and check the answer."""
    if kind == "http":
        check_responses(exchange(broker.http_address, data))
    elif kind == "commands":
        check_frames(exchange(broker.tcp_address, data))
    else:
        exchange(
            broker.tcp_address, data, after=UPGRADES[kind]
        )  # the answers are compressed: only their end is checked


TARGETS: dict[str, Target] = {
    target.name: target for target in (Commands(), Requests(), SnappyStream(), DeflateStream())
}


def look_at(broker: Broker) -> int:
    """Return the resident memory in bytes. Raises BrokerFailed if the broker is not healthy."""
    if broker.process.poll() is not None:
        raise BrokerFailed(f"it ended with exit code {broker.process.returncode}")
    if broker.http("GET", "/ping") != b"OK":
        raise BrokerFailed("it is not well")
    for line in broker.log():
        if "Traceback (most recent call last)" in line:  # most errors in the log are errors of clients
            raise BrokerFailed(f"its log: {line}")
    status = Path(f"/proc/{broker.process.pid}/status").read_text()
    found = re.search(r"VmRSS:\s+([0-9]+) kB", status)
    assert found is not None
    rss_bytes = int(found[1]) * 1024
    if rss_bytes > MEMORY_BYTES:
        raise BrokerFailed(f"{rss_bytes} bytes of memory")
    return rss_bytes


@contextmanager
def broker_to_fuzz(folder: Path) -> Iterator[Broker]:
    """Run a broker with small limits and short timeouts, which syncs rarely."""
    flags = [
        "--max-msg-size=64",
        "--max-body-size=300",
        "--max-req-timeout=1s",
        "--sync=interval",
        "--log-level=warn",
    ]
    with qcli_serve(folder / "data", *flags) as broker:
        yield broker


def fuzz(broker: Broker, seed: int, *, inputs: int | None, seconds: float | None) -> tuple[int, int]:
    """Send this many inputs, or as many as the time allows.

    Returns:
        The number of inputs, and the peak memory in bytes.

    Raises:
        BrokerFailed: A check failed; the text has the input.
    """
    deadline = time.monotonic() + seconds if seconds is not None else float("inf")
    number = most_bytes = 0
    names = list(TARGETS)
    while (inputs is None or number < inputs) and time.monotonic() < deadline:
        name = names[Random(number).randrange(len(names))]
        data, _ = make(TARGETS[name], seed, number)
        try:
            attack(broker, name, data)
            if number % LOOKED_AT_EVERY == 0:
                most_bytes = max(most_bytes, look_at(broker))
        except Exception as error:
            raise BrokerFailed(
                f"{name}: input {number} of seed {seed}: {error!r}\nthe input: {data!r}"
            ) from error
        number += 1
    return number, max(most_bytes, look_at(broker))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m fuzz.broker",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--inputs", type=int, help="so many inputs")
    parser.add_argument("--seconds", type=float, help="for so long; 10, if --inputs is not given either")
    parser.add_argument("--seed", type=int, default=1, help="another seed makes other inputs (default: 1)")
    given = parser.parse_args(arguments)
    seconds = 10.0 if given.inputs is None and given.seconds is None else given.seconds
    with tempfile.TemporaryDirectory() as folder, broker_to_fuzz(Path(folder)) as broker:
        try:
            count, most_bytes = fuzz(broker, given.seed, inputs=given.inputs, seconds=seconds)
        except BrokerFailed as failure:
            print(failure, file=sys.stderr)
            return 1
    print(f"{count:,} inputs with seed {given.seed}; at most {most_bytes / 1024**2:.0f} MiB of memory")
    return 0


if __name__ == "__main__":
    sys.exit(main())
