"""Tests for `processes.shell`: its processes end, and are ended, as those of `qcli` are."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from processes.shell import CLIENT, serving

PATIENCE_S = 60


@pytest.fixture
def qcli() -> Iterator[list[str]]:
    """The command line of `qcli`, in place of `python -m qcli`."""
    with serving() as path:
        yield [sys.executable, "-I", "-S", str(CLIENT), str(path)]


def test_streams_environment_folder_and_exit_code(qcli: list[str], tmp_path: Path) -> None:
    (tmp_path / "words").write_text("1\n")
    environment = os.environ | {"QCLI_NSQD_TCP_ADDRESS": "127.0.0.1:1"}
    with (tmp_path / "words").open() as words:
        done = subprocess.run(
            [*qcli, "pub", "clicks"],
            stdin=words,
            capture_output=True,
            text=True,
            env=environment,
            timeout=PATIENCE_S,
        )
    assert (done.returncode, done.stdout) == (3, "")
    assert "127.0.0.1:1" in done.stderr
    (tmp_path / "broken.toml").write_text("=")
    serve = [*qcli, "serve", "--config", "broken.toml"]
    done = subprocess.run(serve, capture_output=True, text=True, cwd=tmp_path, timeout=PATIENCE_S)
    assert done.returncode == 1
    assert "broken.toml" in done.stderr
    assert "No such file" not in done.stderr
    assert subprocess.check_output([*qcli, "--version"], text=True, timeout=PATIENCE_S).startswith("qcli ")


@contextmanager
def ready_broker(qcli: list[str], data_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a broker that is ready. Its stderr ends when it has ended."""
    addresses = ["--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0"]
    command = [*qcli, "serve", "--data-path", str(data_path), *addresses]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any("ready" in line for line in process.stderr)
        yield process


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGUSR2, -signal.SIGUSR2)]
)
def test_signals_reach_the_process(
    qcli: list[str], tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """A broker does not handle the last one, so that it ends the process."""
    with ready_broker(qcli, tmp_path) as process:
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == code


def test_process_ends_with_its_client(qcli: list[str], tmp_path: Path) -> None:
    with ready_broker(qcli, tmp_path) as process:
        process.kill()
        assert process.stderr is not None
        assert process.stderr.read() == ""
