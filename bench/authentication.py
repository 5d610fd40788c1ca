"""What authentication costs: the broker's CPU time for each message with an auth file, as a ratio of that without."""

import argparse
import http.client
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from struct import pack

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "tests")]

from bench import record
from bench.contenders import cpu_s

from interop.peers import Broker, qcli_serve
from trio_nsq.access.policy import token_digest

TOKEN = b"x" * 43
BODY_BYTES = 200
FRAME_BYTES = 4 + 4 + 26 + BODY_BYTES
OK = b"\0\0\0\x06\0\0\0\0OK"
SECONDS = 0.4
TOPIC, CHANNEL = "t", "c"


@dataclass(frozen=True)
class Result:
    """CPU time of the broker in microseconds for each message, by round."""

    workload: str
    without_us: list[float]
    with_us: list[float]

    @property
    def speed(self) -> float:
        """The speed with authentication, as a ratio of that without: the median of the rounds' ratios."""
        return median(a / b for a, b in zip(self.without_us, self.with_us, strict=True))


@contextmanager
def connected(broker: Broker, *, has_token: bool) -> Iterator[socket.socket]:
    """A TCP client, after AUTH if the broker demands it."""
    host, _, port = broker.tcp_address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as sock:
        sock.sendall(b"  V2")
        if has_token:
            sock.sendall(b"AUTH\n" + pack(">i", len(TOKEN)) + TOKEN)
            assert b"permission_count" in sock.recv(4096)
        yield sock


def exchange(sock: socket.socket, data: bytes, answer_bytes: int) -> None:
    """Send pipelined commands, and read all answers."""
    sock.sendall(data)
    while answer_bytes > 0:
        received = len(sock.recv(1 << 20))
        assert received, "the broker has closed the connection"
        answer_bytes -= received


def pub(broker: Broker, *, has_token: bool) -> int:
    """PUB, 50 in flight."""
    return _publish(broker, has_token, b"PUB t\n" + pack(">i", BODY_BYTES) + bytes(BODY_BYTES), 50, 1)


def alone(broker: Broker, *, has_token: bool) -> int:
    """PUB, one in flight."""
    return _publish(broker, has_token, b"PUB t\n" + pack(">i", BODY_BYTES) + bytes(BODY_BYTES), 1, 1)


def mpub(broker: Broker, *, has_token: bool) -> int:
    """MPUB of 200, 5 in flight."""
    messages = pack(">i", 200) + (pack(">i", BODY_BYTES) + bytes(BODY_BYTES)) * 200
    return _publish(broker, has_token, b"MPUB t\n" + pack(">i", len(messages)) + messages, 5, 200)


def _publish(broker: Broker, has_token: bool, command: bytes, count: int, messages: int) -> int:
    done = 0
    with connected(broker, has_token=has_token) as sock:
        until_s = time.monotonic() + SECONDS
        while time.monotonic() < until_s:
            exchange(sock, command * count, len(OK) * count)
            done += count * messages
    return done


def consume(broker: Broker, *, has_token: bool) -> int:
    """SUB, RDY 2500, FIN of each message. `measure` has filled the channel."""
    done, buffer = 0, b""
    with connected(broker, has_token=has_token) as sock:
        sock.sendall(b"SUB t c\nRDY 2500\n")
        while len(buffer) < len(OK):
            buffer += sock.recv(1 << 16)
        buffer = buffer[len(OK) :]
        until_s = time.monotonic() + SECONDS
        while time.monotonic() < until_s:
            buffer += sock.recv(1 << 20)
            whole = len(buffer) // FRAME_BYTES
            ids = (buffer[at + 18 : at + 34] for at in range(0, whole * FRAME_BYTES, FRAME_BYTES))
            sock.sendall(b"".join(b"FIN %b\n" % each for each in ids))
            buffer = buffer[whole * FRAME_BYTES :]
            done += whole
    return done


def post(broker: Broker, *, has_token: bool) -> int:
    """POST /pub over a kept connection."""
    headers = {"Authorization": f"Bearer {TOKEN.decode()}"} if has_token else {}
    connection, body, done = http.client.HTTPConnection(broker.http_address), bytes(BODY_BYTES), 0
    until_s = time.monotonic() + SECONDS
    while time.monotonic() < until_s:
        connection.request("POST", f"/pub?topic={TOPIC}", body, headers)
        answer = connection.getresponse()
        assert answer.read() == b"OK"
        done += 1
    connection.close()
    return done


WORKLOADS = {"PUB": pub, "PUB, one in flight": alone, "MPUB": mpub, "consume": consume, "POST /pub": post}


def measure(name: str, workload: Callable[..., int], folder: Path, rounds: int) -> Result:
    """Run a workload by turns on a broker without and one with an auth file. Short turns see the same disturbances."""
    auth_file = folder / "auth.toml"
    roles = 'roles = ["publish", "consume", "manage"]'
    auth_file.write_text(
        f'[[token]]\nname = "bench"\nhash = "{token_digest(TOKEN)}"\ngrants = [{{ {roles} }}]\n'
    )
    times: dict[bool, list[float]] = {False: [], True: []}
    with (
        qcli_serve(folder / "without", "--sync=interval") as without,
        qcli_serve(folder / "with", "--sync=interval", f"--auth-file={auth_file}") as with_auth,
    ):
        brokers = [(without, False), (with_auth, True)]
        for broker, has_token in brokers:
            with connected(broker, has_token=has_token) as sock:  # creates the topic, and the channel
                exchange(sock, b"SUB t c\n", len(OK))
        for number in range(rounds + 1):  # the first one warms up
            for broker, has_token in brokers[:: 1 if number % 2 else -1]:
                if workload is consume:
                    mpub(broker, has_token=has_token)
                before_s = cpu_s(broker)
                messages = workload(broker, has_token=has_token)
                if number:
                    times[has_token].append((cpu_s(broker) - before_s) / messages * 1e6)
    return Result(name, times[False], times[True])


def parse() -> argparse.Namespace:
    """Parse the options."""
    parser = record.parser(__doc__, rounds=15)
    return parser.parse_args()


def main() -> None:
    """Measure, print, and write the requested results."""
    options = parse()
    about = record.begin(options, beside_nsqd=False)
    results = []
    for name, workload in WORKLOADS.items():
        with tempfile.TemporaryDirectory(prefix="trio-nsq-", dir=options.data_path) as folder:
            result = measure(name, workload, Path(folder), options.rounds)
        results.append(result)
        print(
            f"{name:20} {median(result.without_us):7.2f} us, with AUTH {median(result.with_us):7.2f} us: "
            f"speed {result.speed:.3f}",
            flush=True,
        )
    record.finish(
        {"machine": about, "results": [asdict(result) for result in results]}, options, "authentication"
    )


if __name__ == "__main__":
    main()
