"""Fuzzes a running broker, over its sockets:

    python -m fuzz.broker --seconds 30
    python -m fuzz.broker --inputs 2000 --seed 7

What has to hold: every answer is a frame or an HTTP response, and every error one that is documented; the connection
ends; the broker goes on serving others, logs no fault of its own, and its memory stays within MEMORY_BYTES.
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
"""After this time without an answer the broker hangs."""
MEMORY_BYTES = 300 * 1024 * 1024
"""Resident memory that the broker must not exceed: 40 MiB at rest, and what it caches of the messages it accepts."""
LOOKED_AT_EVERY = 100
"""After so many inputs the broker's health, memory and log are looked at."""
OK_STATUSES = STATUSES | {100, 200}
COMPRESSED = re.compile(rb'"(snappy|deflate)":true')
UPGRADES: dict[str, bytes] = {
    upgrade: b"  V2" + encode_identify({"feature_negotiation": True, upgrade: True})
    for upgrade in ("snappy", "deflate")
}


class BrokerFailed(Exception):
    """Something did not hold."""


def talk(address: str, data: bytes, *, after: bytes = b"") -> bytes:
    """Send ``data``, no more after it, and return everything that comes back.

    Args:
        address: Where to.
        data: What to send.
        after: To be sent first, and to be answered before ``data`` is sent.
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
            pass  # it has heard enough; what it said is read all the same
        try:
            while part := connection.recv(65536):
                answer += part
        except ConnectionResetError:
            pass
        except TimeoutError:
            raise BrokerFailed(f"no answer and no end within {PATIENCE_S:g} s") from None
    return answer


def check_frames(answer: bytes) -> None:
    """Raise FrameError or BrokerFailed unless the bytes are whole frames, and errors that are documented."""
    reader = FrameReader()
    reader.receive_data(answer)
    while (event := reader.next_event()) is not None:
        if isinstance(event, ErrorFrame) and event.code not in CODES:
            raise BrokerFailed(f"the error {event}")
        if isinstance(event, ResponseFrame) and COMPRESSED.search(event.data):
            return  # what follows is no frames
    if rest := reader.take_buffered():
        raise BrokerFailed(f"half a frame: {rest[:100]!r}")


def check_responses(answer: bytes) -> None:
    """Raise BrokerFailed unless the bytes begin with a response to HTTP, and all statuses are known."""
    for status in re.findall(rb"(?:^|\n|[^\r\n])HTTP/1\.1 ([0-9]+) ", answer):
        if int(status) not in OK_STATUSES | {503}:
            raise BrokerFailed(f"status {int(status)}")
    if answer and not answer.startswith(b"HTTP/1.1 "):
        raise BrokerFailed(f"no response: {answer[:100]!r}")


def attack(broker: Broker, kind: str, data: bytes) -> None:
    """Send one input and check what comes back."""
    if kind == "http":
        check_responses(talk(broker.http_address, data))
    elif kind == "commands":
        check_frames(talk(broker.tcp_address, data))
    else:
        talk(
            broker.tcp_address, data, after=UPGRADES[kind]
        )  # the answers are compressed: that they end is enough


TARGETS: dict[str, Target] = {
    target.name: target for target in (Commands(), Requests(), SnappyStream(), DeflateStream())
}


def look_at(broker: Broker) -> int:
    """Return the resident memory in bytes; raise BrokerFailed if the broker is not well."""
    if broker.process.poll() is not None:
        raise BrokerFailed(f"it ended with exit code {broker.process.returncode}")
    if broker.http("GET", "/ping") != b"OK":
        raise BrokerFailed("it is not well")
    for line in broker.log():
        if "Traceback (most recent call last)" in line:  # what is logged as an error is mostly a client's
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
    """A broker with small limits and no patience, which syncs seldom."""
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
    """Send so many inputs, or as many as there is time for.

    Returns:
        How many were sent, and the most memory seen, in bytes.

    Raises:
        BrokerFailed: With the input in its text.
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
