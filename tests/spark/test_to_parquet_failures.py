"""Tests for failures of `qcli to-parquet`: usage errors, brokers, folders, a full disk and signals."""

import random
import resource
import select
import signal
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from cli.support import DEADLINE_S, Cli, does_not_exist, without_suggestion
from interop.peers import nsqd, qcli_serve
from spark.support import ToParquet, cli_of, column, export, leftovers, numbers, parquet_files, until
from trio_nsq.log.gaps import Span
from trio_nsq.platform.extras import install_hint
from trio_nsq.spark.export.layout import Layout
from trio_nsq.spark.export.request import ExportRequest
from trio_nsq.spark.export.task import ExportTask
from trio_nsq.spark.logs import BrokerPlace
from trio_nsq.storage import LocalStorage, NewFile


def test_usage_errors(to_parquet: ToParquet, topic: str, tmp_path: Path) -> None:
    for args, text in (
        (["--text", "--json"], "exclude each other"),
        (["--columns", "a"], "say --json"),
        (["--json", "--columns", "a:real"], "is not one of string, long"),
        (["--json", "--columns", "a,a"], "is given twice"),
        (["--json", "--columns", "a,"], "empty name"),
        (["--channel", "c", "--from", "1"], "the export begins at the channel's position"),
        (["--channel", "c d"], "is not a channel name"),
        (["--follow", "--to", "5"], "--follow has no end"),
        (["--engine", "inline", "--master", "local"], "exclude each other"),
        (["--compression", "snappy", "--compression-level", "2"], "has no effect with snappy"),
        (["--target-file-size", "1kB"], "less than 64KiB"),
        (["--nsqd-http-address", "a:1,a:1"], "it names a:1 twice"),
        (["--from", "9", "--to", "3"], "the range is empty"),
        (["--every", "5s"], "--every is for --follow"),
    ):
        result = to_parquet(topic, tmp_path, *args)
        assert (result.code, text in result.err) == (2, True), result.err


def test_no_topic_no_broker_and_no_log(to_parquet: ToParquet, qcli: Cli, topic: str, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    result = to_parquet(topic, folder)
    error = does_not_exist(topic, qcli.http_address, f" --nsqd-http-address {qcli.http_address}")
    assert (result.code, without_suggestion(result.err)) == (1, error)
    result = to_parquet(topic, folder, cli=Cli("127.0.0.1:1", "127.0.0.1:1"))
    assert (result.code, "No broker answers at 127.0.0.1:1: connection refused." in result.err) == (3, True)
    result = to_parquet(topic, folder, "--lookupd-http-address", "127.0.0.1:1")
    assert (result.code, "No nsqlookupd answers at 127.0.0.1:1: " in result.err) == (3, True)
    assert "Start one with 'qcli lookupd', or use another address: --lookupd-http-address." in result.err
    with nsqd(tmp_path / "data") as other:
        other.create("t")
        result = to_parquet("t", folder, cli=cli_of(other))
        assert (result.code, "cannot be read by sequence" in result.err) == (1, True)
    assert not folder.exists()


def test_unusable_folder(to_parquet: ToParquet, qcli: Cli, topic: str, tmp_path: Path) -> None:
    qcli.publish(topic, numbers(3))
    (tmp_path / "file").write_text("")
    result = to_parquet(topic, tmp_path / "file")
    assert (result.code, result.err) == (
        1,
        f"Error: {tmp_path}/file: Not a directory. Name another folder.\n",
    )
    result = to_parquet(topic, "nonsense://bucket/folder")
    assert (result.code, "nonsense://bucket/folder is not supported" in result.err) == (1, True)


@pytest.mark.parametrize(("limit_bytes", "file"), [(100, "_nsq/{0}/manifest.json"), (20_000, "{0}-")])
def test_full_disk_is_named(
    to_parquet: ToParquet, qcli: Cli, topic: str, tmp_path: Path, limit_bytes: int, file: str
) -> None:
    qcli.publish(topic, [random.Random(1).randbytes(100_000)])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limits[1]))
    try:
        result = to_parquet(topic, tmp_path / "a", "-q")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert result.code == 1
    assert result.err.startswith(f"Error: {tmp_path}/a/{file.format(topic)}")
    assert result.err.endswith(": File too large\n")


def test_missing_packages_are_named(qcli: Cli, topic: str, tmp_path: Path) -> None:
    consuming = ["--nsqd-tcp-address", "127.0.0.1:1", "--channel", "c"]
    for module, args in (("pyarrow", []), ("pyarrow", consuming), ("pyspark", ["--engine", "spark"])):
        qcli.publish(topic, numbers(1))
        program = f"import sys; sys.modules[{module!r}] = None; from qcli.app import run; sys.exit(run(sys.argv[1:]))"
        done = subprocess.run(
            [sys.executable, "-c", program, "to-parquet", topic, str(tmp_path / module), *args],
            env=qcli.environment(),
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == 1
        assert install_hint("spark") in done.stderr
        assert "Traceback" not in done.stderr
        assert parquet_files(tmp_path / module) == []


class StalledAnswers(socketserver.ThreadingTCPServer):
    """A proxy in front of a broker. Until it is released, it passes on 3 MiB of an answer."""

    block_on_close = False

    def __init__(self, broker_address: str) -> None:
        host, _, port = broker_address.rpartition(":")
        self._broker = (host, int(port))
        self.stalled, self.goes_on = threading.Event(), threading.Event()
        super().__init__(("127.0.0.1", 0), socketserver.BaseRequestHandler)
        self.address = "%s:%d" % self.socket.getsockname()

    def finish_request(self, request: Any, client_address: object) -> None:
        """Relay one connection until either side closes it."""
        passed = 0
        with socket.create_connection(self._broker) as broker, suppress(OSError):
            while True:
                for source in select.select([request, broker], [], [])[0]:
                    if not (data := source.recv(65536)):
                        return
                    if source is request:
                        broker.sendall(data)
                        continue
                    passed += len(data)
                    if passed > 3 << 20 and not self.goes_on.is_set():
                        self.stalled.set()
                        self.goes_on.wait(DEADLINE_S)
                    request.sendall(data)


@contextmanager
def stalled_answers(broker_address: str) -> Iterator[StalledAnswers]:
    with StalledAnswers(broker_address) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield proxy
        finally:
            proxy.goes_on.set()
            proxy.shutdown()
            thread.join()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_leaves_no_unfinished_files(
    qcli: Cli, topic: str, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """The broker stalls in the middle of a range, so that the signal arrives there."""
    qcli.publish(topic, [b"x" * 1000] * 6000)
    with stalled_answers(qcli.http_address) as proxy:
        slow = Cli(qcli.tcp_address, proxy.address)
        with slow.running("to-parquet", topic, str(tmp_path / "a"), "--row-group-size", "1MiB") as running:
            assert proxy.stalled.wait(DEADLINE_S)
            until(lambda: any(".parquet" in path.name for path in leftovers(tmp_path / "a")))
            running.process.send_signal(number)
            result = running.end()
        assert result.code == code
        assert result.err.rstrip().endswith("Run the same command again to continue.")
        assert (parquet_files(tmp_path / "a"), leftovers(tmp_path / "a")) == ([], [])
        proxy.goes_on.set()
        export(slow, topic, tmp_path / "a")
        assert column(tmp_path / "a", "seq") == list(range(6000))


class InterruptingStorage(LocalStorage):
    """Interrupts the main thread when the first file is created, and continues after the main thread has
    noticed.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.noticed, self.begun = threading.Event(), threading.Event()

    def create(self, name: str) -> NewFile:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        self.noticed.wait(0.2)  # times out if the main thread waits for this thread
        try:
            return super().create(name)
        finally:
            self.begun.set()


def test_interrupt_waits_for_the_writing_thread(qcli: Cli, topic: str, tmp_path: Path) -> None:
    """Also if the signal arrives while the main thread starts the thread, when Python's executor does not
    know it yet.
    """
    qcli.publish(topic, [b"x" * 1000] * 2000)
    request = ExportRequest(topic, str(tmp_path), row_group_bytes=1 << 20)
    task = ExportTask(request, Layout(), BrokerPlace(qcli.http_address, topic), Span(0, 2000))
    storage = InterruptingStorage(tmp_path)
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(0.5)  # the new thread runs until it waits
    try:
        with pytest.raises(KeyboardInterrupt):
            task.run(storage=storage)
    finally:
        sys.setswitchinterval(before_s)
        storage.noticed.set()
    assert storage.begun.wait(DEADLINE_S)
    assert leftovers(tmp_path) == []


def test_progress_bar_on_a_terminal(topic: str, tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "data") as broker:
        qcli = cli_of(broker)
        qcli.publish(topic, [b"x" * 1000] * 30_000)
        arguments = ["--target-file-size", "1MiB", "--compression", "none"]
        with qcli.on_terminal("to-parquet", topic, str(tmp_path / "a"), *arguments) as terminal:
            terminal.expect(b"/30000")
            terminal.expect(b"messages/s")
            assert terminal.end() == 0
    assert b"30,000 messages (28.6 MiB) of" in terminal.shown
