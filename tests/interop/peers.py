"""Run real peers for the tests: nsqd and our broker as processes, and four third-party NSQ clients.

If this machine cannot run a peer, the test is skipped with the reason. If ``CI`` is ``true``, the test fails instead.
"""

import base64
import http.client
import importlib.util
import itertools
import json
import os
import queue
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, NamedTuple, NoReturn

import pytest

from interop.build import (
    INTEROP,
    PeerUnavailable,
    actionlint,
    etcd_of,
    go_program,
    installed_program,
    node_modules,
    nsq_sources,
)
from processes import popen
from trio_nsq.access.secret import authorization

START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 15.0
CLIENT_DEADLINE_S = 60.0


@contextmanager
def or_skip() -> Iterator[None]:
    """Skip the test if the block finds that a peer is not available on this machine; fail in CI."""
    try:
        yield
    except PeerUnavailable as reason:
        if os.environ.get("CI") == "true":
            pytest.fail(f"a peer is missing: {reason}", pytrace=False)
        pytest.skip(str(reason))


# ------------------------------------------------------------------------------------------------ processes


class Lines:
    """The lines of one pipe. A thread reads them, so that the child never blocks on a full pipe."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self.seen: list[str] = []
        self._pipe = pipe
        self._arrived: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for raw in self._pipe:
            line = raw.decode(errors="replace").rstrip("\n")
            self.seen.append(line)
            self._arrived.put(line)
        self._arrived.put(None)

    def next(self, deadline: float) -> str | None:
        """Return the next line, or None at the end of the pipe.

        Raises:
            TimeoutError: no line arrived until ``deadline`` (on the clock of ``time.monotonic``).
        """
        try:
            return self._arrived.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise TimeoutError from None

    def close(self) -> None:
        """Wait for the end of the pipe, which comes when the child exits, and close it."""
        self._thread.join()
        self._pipe.close()


class Child:
    """A child process. Its output is collected while it runs, and every failure message includes it.

    The caller must close it; this kills the process if it still runs.
    """

    def __init__(self, argv: Sequence[str | Path], env: dict[str, str] | None = None) -> None:
        self.argv = [str(word) for word in argv]
        self.process = popen(
            self.argv,
            cwd=INTEROP.parent,  # "python -m interop.NAME" finds the Python peers from here
            env=os.environ | (env or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.stdin = self.process.stdin
        self.stdout = Lines(self.process.stdout)
        self.stderr = Lines(self.process.stderr)

    def send(self, lines: Iterable[str]) -> None:
        """Write ``lines`` to standard input and close it."""
        try:
            self.stdin.write("".join(f"{line}\n" for line in lines).encode())
            self.stdin.close()
        except BrokenPipeError:
            pass  # the child has exited: its exit code and output show the reason

    def wait(self, timeout_s: float) -> int:
        """Wait for the exit and return the exit code; fail the test if the child does not exit in time."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.fail(f"did not end within {timeout_s:g} s")

    def fail(self, reason: str) -> NoReturn:
        """Fail the test with ``reason``, the command and the end of its output."""
        self.close()
        said = "\n".join(line[:500] for line in (self.stdout.seen[-20:] + self.stderr.seen[-100:]))
        message = f"{' '.join(self.argv)}\n{reason}; it said:\n{said}"
        raise pytest.fail.Exception(message, pytrace=False) from None

    def close(self) -> None:
        """Kill the child if it still runs, and close its pipes. Closing again does nothing."""
        self.process.kill()
        self.process.wait()
        try:
            self.stdin.close()
        except BrokenPipeError:
            pass  # unsent input of a child that has exited
        self.stdout.close()
        self.stderr.close()


# ------------------------------------------------------------------------------------------------ brokers

# Below the ports that the kernel gives to connections and to servers without a port of their own: the port of a server
# that is down stays free. Each worker of the tests has its own. Only even ones: commands try the port after the
# TCP port for HTTP.
_WORKER_PORTS = 2500
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8
_untried_ports = itertools.cycle(
    range(10_000 + _worker * _WORKER_PORTS, 10_000 + (_worker + 1) * _WORKER_PORTS, 2)
)
for _ in range(
    os.getpid() * 37 % (_WORKER_PORTS // 2)
):  # other runs of the tests on this machine begin elsewhere
    next(_untried_ports)


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback interface that are free, and that no other test gets while servers are restarted."""
    found: list[int] = []
    while len(found) < count:
        port = next(_untried_ports)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
    return found


def free_address() -> str:
    """Return ``127.0.0.1:PORT`` with one of the `free_ports`."""
    return f"127.0.0.1:{free_ports(1)[0]}"


@dataclass(frozen=True)
class Broker:
    """A running broker."""

    tcp_address: str
    """``127.0.0.1:PORT``"""
    http_address: str
    """``127.0.0.1:PORT``"""
    child: Child
    https_address: str = ""
    """``127.0.0.1:PORT``, or empty without ``--tls-cert``"""
    secret: str = ""
    """Secret of every HTTP request; empty if none is sent"""

    @property
    def process(self) -> subprocess.Popen[bytes]:
        return self.child.process

    def log(self) -> list[str]:
        """Return the lines that the broker has printed to stderr so far."""
        return list(self.child.stderr.seen)

    def post(self, path: str, body: bytes, **params: str | int) -> None:
        """POST ``body``. Raises as `http` does."""
        self._request("POST", path, body, params)

    def put(self, path: str, body: bytes, **params: str | int) -> None:
        """PUT ``body``. Raises as `http` does."""
        self._request("PUT", path, body, params)

    def http(self, method: str, path: str, **params: str | int) -> bytes:
        """Send one HTTP request and return the body of the response.

        Raises:
            RuntimeError: the status was not 200.
            OSError: the broker could not be reached.
        """
        return self._request(method, path, b"", params)

    def _request(self, method: str, path: str, body: bytes, params: dict[str, str | int]) -> bytes:
        connection = http.client.HTTPConnection(self.http_address, timeout=CLIENT_DEADLINE_S)
        try:
            headers = {"Authorization": authorization(self.secret)} if self.secret else {}
            connection.request(method, f"{path}?{urllib.parse.urlencode(params)}", body, headers)
            reply = connection.getresponse()
            content = reply.read()
        finally:
            connection.close()
        if reply.status != 200:
            raise RuntimeError(f"{method} {path} {params}: {reply.status} {content!r}")
        return content

    def create(self, topic: str, *channels: str) -> None:
        """Create ``topic`` and its ``channels``."""
        self.http("POST", "/topic/create", topic=topic)
        for channel in channels:
            self.http("POST", "/channel/create", topic=topic, channel=channel)

    def channel_stats(self, topic: str, channel: str) -> dict[str, Any]:
        """Return the ``/stats`` entry of one channel: ``depth``, ``in_flight_count`` and so on."""
        stats = json.loads(self.http("GET", "/stats", format="json", topic=topic, channel=channel))
        found: dict[str, Any] = stats["topics"][0]["channels"][0]
        return found

    def is_drained(self, topic: str, channel: str) -> bool:
        """Return whether the channel has every message of the topic, and none waits, is in flight or deferred.

        The channel is older than the messages. Asks twice: nsqd does not count a message while it takes it out of a
        queue and before it is in flight.
        """
        return all(self._seems_drained(topic, channel) for _ in range(2))

    def _seems_drained(self, topic: str, channel: str) -> bool:
        # nsqd moves messages to the channels after it has accepted them.
        (found,) = json.loads(self.http("GET", "/stats", format="json", topic=topic))["topics"]
        (about,) = (one for one in found["channels"] if one["channel_name"] == channel)
        waiting = any(about[count] for count in ("depth", "in_flight_count", "deferred_count"))
        return not waiting and bool(about["message_count"] >= found["message_count"])


@contextmanager
def nsqd(data_path: Path, *flags: str) -> Iterator[Broker]:
    """Run the real nsqd on free loopback ports, with its data in ``data_path``, until the block exits.

    ``flags`` are further flags of nsqd, each in the form ``--name=value``. The block may end the process itself.
    """
    with or_skip():
        program = go_program("nsqd")
    data_path.mkdir(parents=True, exist_ok=True)
    argv: list[str | Path] = [
        program,
        f"--data-path={data_path}",
        f"--tcp-address={free_address()}",
        f"--http-address={free_address()}",
        f"--https-address={free_address()}",
        "--broadcast-address=127.0.0.1",
        *flags,
    ]
    listeners = {"TCP", "HTTP", "HTTPS"} if _has_tls(flags) else {"TCP", "HTTP"}

    def addresses(child: Child) -> tuple[str, str, str]:
        found: dict[str, str] = {}
        while not listeners <= found.keys():
            listening = _await_line(child, re.compile(r"\b(\w+): listening on (\S+)"))
            found[listening[1]] = listening[2]
        return found["TCP"], found["HTTP"], found.get("HTTPS", "")

    with _broker(argv, addresses) as broker:
        yield broker
        broker.process.terminate()
        try:
            broker.process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            pass  # a connection that never sent its magic causes this


@contextmanager
def nsqlookupd(*flags: str) -> Iterator[Broker]:
    """Run the real nsqlookupd on free loopback ports until the block exits.

    ``flags`` are further flags of nsqlookupd, or override the defaults. The block may end the process itself.
    """
    with or_skip():
        program = go_program("nsqlookupd")
    argv: list[str | Path] = [
        program,
        f"--tcp-address={free_address()}",
        f"--http-address={free_address()}",
        "--broadcast-address=127.0.0.1",
        *flags,
    ]

    def addresses(child: Child) -> tuple[str, str, str]:
        found: dict[str, str] = {}
        while not {"TCP", "HTTP"} <= found.keys():
            listening = _await_line(child, re.compile(r"\b(\w+): listening on (\S+)"))
            found[listening[1]] = listening[2]
        return found["TCP"], found["HTTP"], ""

    with _broker(argv, addresses) as lookupd:
        yield lookupd


@contextmanager
def nsqadmin(lookupd_http_addresses: Iterable[str], *flags: str) -> Iterator[str]:
    """Run the real nsqadmin on a free loopback port until the block exits, and yield its ``127.0.0.1:PORT``.

    It asks these discovery services for brokers. ``flags`` are further flags.
    """
    with or_skip():
        program = go_program("nsqadmin")
    lookupds = [f"--lookupd-http-address={address}" for address in lookupd_http_addresses]
    child = Child([program, "--http-address=127.0.0.1:0", *lookupds, *flags])
    try:
        yield _await_line(child, re.compile(r"\bHTTP: listening on (\S+)"))[1]
    finally:
        child.close()


def nsqd_program() -> Path:
    """Return the path of nsqd, for a test that starts it itself."""
    with or_skip():
        return go_program("nsqd")


def nsq_program(name: str) -> Path:
    """Return the path of one of NSQ's own programs, such as ``nsq_to_file``."""
    with or_skip():
        return go_program(name)


def load_program(name: str) -> Path:
    """Return the path of a load generator of the benchmarks: `goload` or `gonsqload`."""
    with or_skip():
        return go_program(name)


def actionlint_program() -> Path:
    """Return the path of actionlint, which checks GitHub's workflows."""
    with or_skip():
        return actionlint()


def nsqd_example_config() -> Path:
    """Return the example configuration file of nsqd."""
    return _example_config("nsqd")


def nsqlookupd_program() -> Path:
    """Return the path of nsqlookupd, for a test that starts it itself."""
    with or_skip():
        return go_program("nsqlookupd")


def nsqlookupd_example_config() -> Path:
    """Return the example configuration file of nsqlookupd."""
    return _example_config("nsqlookupd")


def _example_config(server: str) -> Path:
    with or_skip():
        return nsq_sources() / "contrib" / f"{server}.cfg.example"


def system_program(*names: str) -> Path:
    """Return a program that `debian.sh` installs, such as ``promtool``: the first of ``names`` that is installed."""
    with or_skip():
        return installed_program(*names)


def etcd_program() -> Path:
    """Return etcd: Debian's, or of the version that the variable TEST_ETCD names, such as ``3.6``."""
    version = os.environ.get("TEST_ETCD")
    with or_skip():
        return etcd_of(version) if version else installed_program("etcd")


def chromium_program() -> Path:
    """Return a browser with everything that protects its user."""
    return system_program("chromium", "chromium-browser", "google-chrome")


def headless_program() -> Path:
    """Return a browser that shows pages. The shell is Chromium without windows, for half the processor time."""
    return system_program("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


@contextmanager
def prometheus(config: Path, data_path: Path) -> Iterator[str]:
    """Run Prometheus on a free loopback port until the block exits, and yield its ``127.0.0.1:PORT``."""
    child = Child(
        [
            system_program("prometheus"),
            f"--config.file={config}",
            f"--storage.tsdb.path={data_path}",
            "--web.listen-address=127.0.0.1:0",
        ]
    )
    try:
        address = ""
        is_ready = False
        while not (address and is_ready):  # in either order
            line = _await_line(
                child, re.compile(r'msg="Listening on" address=(\S+)|Server is ready to receive')
            )
            address = line[1] or address
            is_ready |= line[1] is None
        yield address
    finally:
        child.close()


@contextmanager
def qcli_serve(
    data_path: Path,
    *flags: str,
    python: Path | str = sys.executable,
    env: dict[str, str] | None = None,
    address_file: Path | None = None,
) -> Iterator[Broker]:
    """Run our broker on free loopback ports, with its data in ``data_path``, whose parent must exist.

    ``flags`` are further flags of ``qcli serve``; ``python`` has the package installed; ``env`` are further variables
    of the environment. ``address_file`` is where the broker writes its addresses; None: in a folder that is removed at
    the end, not beside the data, whose disk may be full.

    The block may end the process itself. If it still runs when the block exits, it gets SIGTERM, and the test fails
    unless the exit code is 0.
    """
    with TemporaryDirectory(prefix="addresses-") as folder:
        file = address_file or Path(folder, "addresses.json")
        argv = [
            *(str(python), "-m", "qcli", "serve"),
            f"--data-path={data_path}",
            f"--tcp-address={free_address()}",
            f"--http-address={free_address()}",
            "--broadcast-address=127.0.0.1",
            *([f"--https-address={free_address()}"] if _has_tls(flags) else []),
            f"--address-file={file}",
            *flags,
        ]

        def addresses(child: Child) -> tuple[str, str, str]:
            _await_line(child, re.compile(r"^ready\b"))
            bound = json.loads(file.read_text())
            return bound["tcp_address"], bound["http_address"], bound.get("https_address") or ""

        with _broker(argv, addresses, env) as broker:
            yield broker
            _stop_in_good_order(broker.child)


@contextmanager
def qcli_lookupd(*flags: str) -> Iterator[Broker]:
    """Run our discovery service on free loopback ports until the block exits.

    ``flags`` are further flags of ``qcli lookupd``, or override the defaults. The block may end the process itself. If
    it still runs when the block exits, it gets SIGTERM, and the test fails unless the exit code is 0.
    """
    argv = [
        *(sys.executable, "-m", "qcli", "lookupd"),
        f"--tcp-address={free_address()}",
        f"--http-address={free_address()}",
        "--broadcast-address=127.0.0.1",
        *flags,
    ]

    def addresses(child: Child) -> tuple[str, str, str]:
        bound = _await_line(child, re.compile(r"^ready: tcp ([^ ,]+), http ([^ ,]+)"))
        return bound[1], bound[2], ""

    with _broker(argv, addresses) as lookupd:
        yield lookupd
        _stop_in_good_order(lookupd.child)


@dataclass(frozen=True)
class RunningConsole:
    """A running `qcli admin`."""

    http_address: str
    """``127.0.0.1:PORT``"""
    url: str
    """The URL of the first page, which ends with a slash"""
    child: Child

    @property
    def process(self) -> subprocess.Popen[bytes]:
        return self.child.process

    @property
    def origin(self) -> str:
        """Scheme, host and port of the URL."""
        return self.url[: self.url.index("/", len("https://"))]

    def log(self) -> list[str]:
        """Return the lines that the console has printed to stderr so far."""
        return list(self.child.stderr.seen)


@contextmanager
def qcli_admin(*flags: str) -> Iterator[RunningConsole]:
    """Run the web console on a free loopback port until the block exits.

    ``flags`` are further flags of ``qcli admin``, or override the defaults. The block may end the process itself. If it
    still runs when the block exits, it gets SIGTERM, and the test fails unless the exit code is 0.
    """
    child = Child([sys.executable, "-m", "qcli", "admin", "--http-address=127.0.0.1:0", *flags])
    try:
        url = _await_line(child, re.compile(r"^ready: (\S+)"))[1]
        yield RunningConsole(urllib.parse.urlsplit(url).netloc, url.rstrip("/") + "/", child)
        _stop_in_good_order(child)
    finally:
        child.close()


def _stop_in_good_order(child: Child) -> None:
    if child.process.poll() is None:
        child.process.terminate()
        if code := child.wait(STOP_DEADLINE_S):
            child.fail(f"SIGTERM ended it with exit code {code}")


def _has_tls(flags: Iterable[str]) -> bool:
    return any(flag.startswith("--tls-cert=") for flag in flags)


@contextmanager
def _broker(
    argv: Sequence[str | Path],
    addresses: Callable[[Child], tuple[str, str, str]],
    env: dict[str, str] | None = None,
) -> Iterator[Broker]:
    child = Child(argv, env)
    try:
        tcp_address, http_address, https_address = addresses(child)
        yield Broker(tcp_address, http_address, child, https_address)
    finally:
        child.close()


def _await_line(child: Child, pattern: re.Pattern[str]) -> re.Match[str]:
    """Wait for a line on stderr that ``pattern`` matches, and return the match."""
    deadline = time.monotonic() + START_DEADLINE_S
    while True:
        try:
            line = child.stderr.next(deadline)
        except TimeoutError:
            child.fail(f"was not ready within {START_DEADLINE_S:g} s")
        if line is None:
            child.fail(f"ended with exit code {child.wait(STOP_DEADLINE_S)} before it was ready")
        if found := pattern.search(line):
            return found


# ------------------------------------------------------------------------------------------------ clients


class Delivery(NamedTuple):
    """One delivery of a message to a client; ``attempts`` is 1 on the first delivery."""

    body: bytes
    attempts: int


class Subscriber:
    """A running consumer. It exits when it has finished the number of messages it was started with."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._deadline = time.monotonic() + CLIENT_DEADLINE_S

    def next(self) -> Delivery | None:
        """Wait for the next delivery and return it, or None after the last one."""
        try:
            line = self._child.stdout.next(self._deadline)
        except TimeoutError:
            self._child.fail(f"printed no further delivery within {CLIENT_DEADLINE_S:g} s")
        if line is None:
            return None
        fields = json.loads(line)
        return Delivery(base64.b64decode(fields["body"]), fields["attempts"])

    @property
    def running(self) -> bool:
        """Whether the consumer still runs."""
        return self._child.process.poll() is None

    def release(self) -> None:
        """Let a consumer started with ``hold_first`` finish the message it holds and continue."""
        self._child.send([])

    def rest(self) -> list[Delivery]:
        """Wait for the consumer to exit and return the remaining deliveries; fail the test if the consumer failed."""
        deliveries = list(iter(self.next, None))
        if code := self._child.wait(STOP_DEADLINE_S):
            self._child.fail(f"ended with exit code {code}")
        return deliveries


class PersistentPublisher:
    """A running publisher that publishes each message until one of its brokers accepts it."""

    def __init__(self, child: Child) -> None:
        self._child = child

    def publish(self, body: bytes) -> list[str]:
        """Publish a message; return the errors of the attempts that failed."""
        self._child.stdin.write(base64.b64encode(body) + b"\n")
        self._child.stdin.flush()
        try:
            line = self._child.stdout.next(time.monotonic() + CLIENT_DEADLINE_S)
        except TimeoutError:
            self._child.fail(f"did not publish within {CLIENT_DEADLINE_S:g} s")
        if line is None:
            self._child.fail("ended")
        failures: list[str] = json.loads(line)["failures"]
        return failures


@dataclass(frozen=True)
class Client:
    """A client library, used through a small program; README.md in this folder describes the programs."""

    name: str
    find: Callable[[], tuple[list[str | Path], dict[str, str]]]
    """Return the program's command and its additional environment variables. Raises PeerUnavailable."""

    def publish(
        self,
        tcp_address: str,
        topic: str,
        bodies: Iterable[bytes],
        *,
        batch: int = 1,
        defer_ms: int = 0,
        connection: Sequence[str] = (),
    ) -> None:
        """Publish ``bodies`` and return when all are acknowledged; fail the test if a publish fails.

        ``batch`` is the number of messages per MPUB; 1 means PUB. If ``defer_ms`` > 0, DPUB is used and ``batch`` is
        ignored. ``connection`` contains the program's flags for TLS, compression and AUTH.
        """
        child = self._start("pub", tcp_address, topic, f"--batch={batch}", f"--defer={defer_ms}", *connection)
        try:
            child.send(base64.b64encode(body).decode() for body in bodies)
            if code := child.wait(CLIENT_DEADLINE_S + STOP_DEADLINE_S):
                child.fail(f"ended with exit code {code}")
        finally:
            child.close()

    @contextmanager
    def fail_over(self, addresses: Iterable[str], topic: str) -> Iterator["PersistentPublisher"]:
        """Run a publisher of these brokers until the block exits; go-nsq and pynsq only."""
        child = self._start("fail-over", ",".join(addresses), topic)
        try:
            yield PersistentPublisher(child)
        finally:
            child.close()

    @contextmanager
    def subscribe(
        self,
        tcp_address: str,
        topic: str,
        channel: str,
        count: int,
        *,
        max_in_flight: int = 50,
        requeue_first: bool = False,
        touch: bool = False,
        hold_first: bool = False,
        fail_first: bool = False,
        connection: Sequence[str] = (),
    ) -> Iterator[Subscriber]:
        """Run a consumer that finishes ``count`` messages, until the block exits.

        With ``requeue_first`` it requeues the first delivery of each message. With ``fail_first`` its handler fails on
        the first delivery, so that its library backs off. With ``touch`` it touches each message before finishing it.
        With ``hold_first`` it keeps its first message in flight until ``Subscriber.release``. ``connection`` contains
        the program's flags for TLS, compression and AUTH.
        """
        options = {
            "--requeue-first": requeue_first,
            "--touch": touch,
            "--hold-first": hold_first,
            "--fail-first": fail_first,
        }
        flags = [flag for flag, wanted in options.items() if wanted]
        numbers = [f"--n={count}", f"--max-in-flight={max_in_flight}"]
        child = self._start("sub", tcp_address, topic, f"--channel={channel}", *numbers, *flags, *connection)
        try:
            yield Subscriber(child)
        finally:
            child.close()

    def _start(self, command: str, tcp_address: str, topic: str, *flags: str) -> Child:
        with or_skip():
            program, env = self.find()
        common = [f"--addr={tcp_address}", f"--topic={topic}", f"--timeout={CLIENT_DEADLINE_S:g}"]
        return Child([*program, command, *common, *flags], env)


def _go_nsq() -> tuple[list[str | Path], dict[str, str]]:
    return [go_program("gopeer")], {}


def _nsqjs() -> tuple[list[str | Path], dict[str, str]]:
    return ["node", INTEROP / "node_peer.js"], {"NODE_PATH": str(node_modules())}


def _python(module: str, program: str) -> Callable[[], tuple[list[str | Path], dict[str, str]]]:
    def find() -> tuple[list[str | Path], dict[str, str]]:
        if importlib.util.find_spec(module) is None:
            raise PeerUnavailable(f"the Python package {module} is not installed")
        return [sys.executable, "-m", f"interop.{program}"], {}

    return find


CLIENTS = [
    Client("go-nsq", _go_nsq),
    Client("pynsq", _python("nsq", "pynsq_peer")),
    Client("gnsq", _python("gnsq", "gnsq_peer")),
    Client("nsqjs", _nsqjs),
]
