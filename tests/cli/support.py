"""Helpers for the tests of commands.

- `Cli` runs `qcli` as users do: as a process with its own environment and pipes, and with a time limit.
  `run_in_process` runs it in this process.
- `serving`, `refusal`, `options` and `lines_until_ready` run `qcli serve`, or only parse its command line.
- `does_not_exist` is the error for a missing topic or channel; `without_suggestion` removes its variable
  part.
- `fail_messages` is a consumer that requeues messages.
- `all_contexts` are the contexts of all commands; `only_ours` marks tests that nsqd cannot pass.
"""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from struct import unpack
from typing import IO, TYPE_CHECKING, Any
from unittest.mock import patch
from urllib.parse import quote

import pytest

import processes
from cli.schemas import check_records
from processes import popen
from qcli.app import run
from trio_nsq.client import RequestRefused
from trio_nsq.client.reading.broker_log import BrokerLog
from trio_nsq.log import RecordBatch
from trio_nsq.log.gaps import Span
from trio_nsq.protocol import pack_messages

if TYPE_CHECKING:
    import click

    from trio_nsq.broker import BrokerOptions

DEADLINE_S = 60.0
"""Far above the time of any command: only a hanging command reaches it."""

only_ours = pytest.mark.skipif(
    os.environ.get("QCLI_TEST_BROKER") == "nsqd", reason="nsqd has no log that could be read"
)
"""Marks tests of features that nsqd does not have."""


@dataclass(frozen=True)
class Result:
    """The result of a command."""

    code: int
    out: bytes
    err: str

    @property
    def records(self) -> list[dict[str, Any]]:
        """The JSON lines of stdout."""
        return [json.loads(line) for line in self.out.splitlines()]


@dataclass(frozen=True)
class Cli:
    """Runs `qcli` with the addresses of one broker in its environment."""

    tcp_address: str
    http_address: str
    env: dict[str, str] = field(default_factory=dict)
    timeout_s: float = DEADLINE_S

    def environment(self, **more: str) -> dict[str, str]:
        """The environment of the commands."""
        plain = {
            name: value for name, value in os.environ.items() if not name.startswith(("QCLI_", "COLUMNS"))
        }
        addresses = {"QCLI_NSQD_TCP_ADDRESS": self.tcp_address, "QCLI_NSQD_HTTP_ADDRESS": self.http_address}
        no_contexts = {"XDG_CONFIG_HOME": "/nowhere"}
        return plain | no_contexts | addresses | self.env | more

    def __call__(self, *args: str, stdin: bytes = b"", env: dict[str, str] | None = None) -> Result:
        """Run a command to its end."""
        done = processes.run(
            command_line(*args),
            data=stdin,
            env=self.environment(**(env or {})),
            timeout=self.timeout_s,
        )
        return Result(done.returncode, done.stdout, done.stderr.decode())

    def publish(self, topic: str, bodies: Sequence[bytes], *, at_once: int = 5000) -> None:
        """Publish over HTTP, in a hundredth of the time of `qcli pub`."""
        connection = http.client.HTTPConnection(self.http_address, timeout=DEADLINE_S)
        try:
            for start in range(0, len(bodies), at_once):
                messages = pack_messages(bodies[start : start + at_once])
                body = len(messages).to_bytes(4, "big") + messages.data
                connection.request("POST", f"/mpub?topic={quote(topic)}&binary=true", body)
                answer = connection.getresponse()
                assert (answer.status, answer.read()) == (200, b"OK")
        finally:
            connection.close()

    def retained(self, topic: str) -> list[bytes]:
        """Read all bodies that the topic's log has, in a tenth of the time of `qcli tail --from earliest`."""
        log = BrokerLog(self.http_address, topic)
        try:
            bounds = log.bounds()
        except RequestRefused:
            return []  # there is no such topic
        found = log.read(Span(bounds.first, bounds.end)) if bounds.end > bounds.first else ()
        return [body for each in found if isinstance(each, RecordBatch) for body in each.messages.bodies()]

    @contextmanager
    def running(
        self, *args: str, stdin: int | IO[bytes] | None = subprocess.PIPE, stdout: int = subprocess.PIPE
    ) -> Iterator[Running]:
        """Run a command in the background. At the end of the block it is killed if it still runs."""
        process = popen(
            command_line(*args),
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.PIPE,
            env=self.environment(),
        )
        try:
            yield Running(process)
        finally:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    try:
                        stream.close()
                    except BrokenPipeError:
                        pass  # unsent input

    def wait_until(self, source: str, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Run `stat` until a record of a topic or channel meets the condition; return that record."""
        with self.running("stat", source, "--format", "json", "--count", "0", "--interval", "20ms") as stat:
            deadline = time.monotonic() + DEADLINE_S
            while not condition(record := json.loads(stat.read_line())):
                assert time.monotonic() < deadline, f"{source} stays {record}"
        found: dict[str, Any] = record
        return found

    @contextmanager
    def on_terminal(
        self, *args: str, rows: int = 24, columns: int = 120, shell: str = "", **env: str
    ) -> Iterator[Terminal]:
        """Run a command, or a line of shell, on its own terminal. At the end of the block it is killed if it runs."""
        ours, theirs = pty.openpty()
        process = popen(
            ["sh", "-c", shell] if shell else command_line(*args),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=self.environment(**({"TERM": "xterm", "LINES": str(rows), "COLUMNS": str(columns)} | env)),
            start_new_session=True,
        )
        os.close(theirs)
        try:
            yield Terminal(process, ours)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(
                    process.pid, signal.SIGKILL
                )  # it has its own session, and so has a shell's pipeline
            process.wait()
            os.close(ours)


Run = Callable[..., Result]
"""Runs a command of a `Cli` in this process; the fixture `run_here`."""


@dataclass(frozen=True)
class CliHere(Cli):
    """Runs commands to their end in this process, and commands in the background as processes."""

    run: Run = field(kw_only=True)

    def __call__(self, *args: str, stdin: bytes = b"", env: dict[str, str] | None = None) -> Result:
        return self.run(self, *args, stdin=stdin, env=env)


def run_in_process(
    capture: pytest.CaptureFixture[bytes],
    cli: Cli,
    *args: str,
    stdin: bytes = b"",
    env: dict[str, str] | None = None,
) -> Result:
    """Run a command in this process, whose output the fixture captures."""
    environment = cli.environment(**(env or {}))
    with patch.dict(os.environ, environment, clear=True), standard_input(stdin):
        code = run(args)
    out, err = capture.readouterr()
    check_records(args, out)
    return Result(code, out, err.decode())


@contextmanager
def standard_input(data: bytes) -> Iterator[None]:
    """Make a pipe with this data the standard input of this process, for a block."""
    ours, theirs = os.pipe()
    writer = threading.Thread(target=write_and_close, args=(theirs, data))
    before, before_fd = sys.stdin, os.dup(0)
    try:
        os.dup2(ours, 0)
        os.close(ours)
        writer.start()
        with open(0, closefd=False) as sys.stdin:
            yield
    finally:
        os.dup2(before_fd, 0)
        os.close(before_fd)
        sys.stdin = before
        writer.join()


def write_and_close(fd: int, data: bytes) -> None:
    """Write data that a reader need not read to its end."""
    with suppress(BrokenPipeError), open(fd, "wb") as pipe:
        pipe.write(data)


def command_line(*args: str) -> list[str]:
    """Return the command line that runs `qcli` with these arguments."""
    return [sys.executable, "-m", "qcli", *args]


class Running:
    """A running command."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def write(self, data: bytes) -> None:
        """Write to its stdin and flush."""
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def read(self, size: int) -> bytes:
        """Read this many bytes of its stdout."""
        assert self.process.stdout is not None
        return read_exactly(self.process.stdout.fileno(), size)

    def read_line(self) -> bytes:
        """Read the next line of its stdout."""
        line = b""
        while not line.endswith(b"\n"):
            line += self.read(1)
        return line

    def hear_line(self) -> str:
        """Read the next line of its stderr."""
        assert self.process.stderr is not None
        line = b""
        while not line.endswith(b"\n"):
            line += read_exactly(self.process.stderr.fileno(), 1)
        return line.decode()

    def end(self) -> Result:
        """Close its stdin, and wait until it exits."""
        out, err = self.process.communicate(timeout=DEADLINE_S)
        return Result(self.process.returncode, out, err.decode())


class Terminal:
    """A command and its terminal."""

    def __init__(self, process: subprocess.Popen[bytes], fd: int) -> None:
        self.process = process
        self.shown = b""
        self.fd = fd

    def expect(self, text: bytes) -> None:
        """Wait until the terminal has shown this text."""
        deadline = time.monotonic() + DEADLINE_S
        while text not in self.shown:
            if not self.read(deadline):
                raise EOFError(f"{text!r} was not shown, but {self.shown!r}")

    def read(self, deadline: float) -> bytes:
        """Wait for output, and return it; empty if the command has exited. Raises TimeoutError at the deadline."""
        if not select.select([self.fd], [], [], max(0, deadline - time.monotonic()))[0]:
            raise TimeoutError(f"nothing more was shown after {self.shown[-4000:]!r}")
        try:
            data = os.read(self.fd, 65536)
        except OSError:  # EIO: the command has exited
            return b""
        self.shown += data
        return data

    def type(self, text: bytes) -> None:
        """Press keys."""
        os.write(self.fd, text)

    def resize(self, rows: int, columns: int) -> None:
        """Resize the window. The new size is used by commands that ask the terminal, not the environment."""
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        # The kernel signals only the processes of the terminal's session, and this process has another
        # session.
        self.process.send_signal(signal.SIGWINCH)

    def interrupt(self) -> int:
        """Send SIGINT until it exits, and return the exit code. One signal may be lost: Python can miss it
        between the start of an `input` and its wait.
        """
        while self.process.poll() is None:
            # A command that has ended leaves SIGINT its default effect until the process exits.
            if handles(self.process.pid, signal.SIGINT):
                self.process.send_signal(signal.SIGINT)
            # A second signal would end it at once: not while a busy machine makes it slow.
            self._read_until(time.monotonic() + 5)
        return self.end()

    def end(self) -> int:
        """Wait until it exits and return the exit code; `shown` is then complete."""
        self._read_until(time.monotonic() + DEADLINE_S)
        return self.process.wait(DEADLINE_S)

    def _read_until(self, deadline: float) -> None:
        while select.select([self.fd], [], [], max(0, deadline - time.monotonic()))[0]:
            try:
                self.shown += os.read(self.fd, 65536)
            except OSError:  # EIO: it has exited
                return


def handles(pid: int, number: signal.Signals) -> bool:
    """Return whether a process has a handler for a signal."""
    with suppress(FileNotFoundError):
        (caught,) = re.findall(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return bool(int(caught, 16) >> (number - 1) & 1)
    return False


def read_exactly(fd: int, size: int) -> bytes:
    """Read this many bytes from a descriptor, before the deadline."""
    data = b""
    deadline = time.monotonic() + DEADLINE_S
    while len(data) < size:
        if not select.select([fd], [], [], max(0, deadline - time.monotonic()))[0]:
            raise TimeoutError(f"{size} bytes were expected, {data!r} came")
        piece = os.read(fd, size - len(data))
        if not piece:
            raise EOFError(f"{size} bytes were expected, {data!r} came")
        data += piece
    return data


def lines(bodies: Sequence[bytes]) -> bytes:
    """Return bodies as `tail` writes them."""
    return b"".join(body + b"\n" for body in bodies)


FREE_PORTS = ("--tcp-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0")


@contextmanager
def serving(tmp_path: Path, *flags: str, **env: str) -> Iterator[Running]:
    """Run a broker on free ports. Its data is in `tmp_path`, unless the flags have another folder."""
    nowhere = Cli("127.0.0.1:1", "127.0.0.1:1", env)
    with nowhere.running("serve", "--data-path", str(tmp_path / "data"), *FREE_PORTS, *flags) as broker:
        yield broker


def lines_until_ready(broker: Running) -> list[str]:
    """Return its log lines up to and including the one that says it is ready."""
    heard = [broker.hear_line()]
    while not heard[-1].startswith("ready"):
        heard.append(broker.hear_line())
    return heard


def refusal(tmp_path: Path, *flags: str, code: int = 1) -> str:
    """Return the one line with the reason why the broker does not start. Only the log or the usage may
    precede it.
    """
    with serving(tmp_path, *flags) as broker:
        result = broker.end()
    assert (result.code, result.out) == (code, b""), result.err
    errors = [
        line
        for line in result.err.splitlines()
        if not line.startswith(("[qcli] ", "Usage: ", "Try ")) and line
    ]
    assert len(errors) == 1
    assert errors[0].startswith("Error: ")
    return errors[0]


def all_contexts() -> list[click.Context]:
    """Return the contexts of the root command and of all its subcommands."""
    import click

    from qcli.app import root
    from qcli.framework.command import contexts_below

    return list(contexts_below(click.Context(root, info_name="qcli", **root.context_settings)))


def options(*args: str) -> BrokerOptions:
    """Return the broker's options for these flags and the environment of this process."""
    from qcli.commands.serve.command import command
    from qcli.commands.serve.settings import broker_options

    with command.make_context("serve", list(args)) as ctx:
        return broker_options(ctx.params)


def _read_exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = sock.recv(size - len(data))
        assert piece, "the broker closed the connection"
        data += piece
    return data


def fail_messages(tcp_address: str, topic: str, channel: str, count: int) -> None:
    """Requeue this many messages of a channel, as they arrive."""
    host, _, port = tcp_address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        sock.sendall(f"  V2SUB {topic} {channel}\nRDY 1\n".encode())
        while count:
            size, frame_type = unpack(">ii", _read_exactly(sock, 8))
            data = _read_exactly(sock, size - 4)
            if frame_type == 2:
                sock.sendall(b"REQ %s 0\n" % data[10:26])
                count -= 1
        sock.sendall(b"CLS\n")
        while _read_exactly(sock, unpack(">ii", _read_exactly(sock, 8))[0] - 4) != b"CLOSE_WAIT":
            pass


def does_not_exist(name: str, address: str, option: str = "") -> str:
    """Return the error for a topic or channel (`TOPIC/CHANNEL`) that does not exist, at a broker's HTTP
    address. `option` is the end of the command that creates it.
    """
    kind, also = ("channel", "") if "/" in name else ("topic", ", or publish to it")
    return (
        f'Error: {kind.capitalize()} "{name}" does not exist on {address}. '
        f"Create it with 'qcli {kind} create {name}{option}'{also}.\n"
    )


def without_suggestion(text: str) -> str:
    """Remove the suggested name from an error: it may be a topic of another test."""
    return re.sub(r" \(did you mean \S+\?\)", "", text)
