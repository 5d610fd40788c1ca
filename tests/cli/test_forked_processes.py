"""Tests for `processes`: a process that is forked behaves as one of a new Python."""

import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from processes import popen
from processes.server import JOB_MODULES, MODULES
from soak import in_soak

QCLI = (sys.executable, "-m", "qcli")
NOWHERE = "127.0.0.1:1"
TIMEOUT_S = 200
"""A new Python takes long on a busy machine."""


@pytest.fixture(params=["forked", *in_soak("new")])
def start(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Selects how `popen` starts a process."""
    monkeypatch.setenv("TEST_PROCESSES", request.param)
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nowhere")
    return str(request.param)


def answer(*words: str, stdin: bytes = b"", **more: str) -> tuple[int, bytes, bytes]:
    """Run a command, and return its exit code and output."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with popen([*QCLI, *words], env=os.environ | more, **pipes) as process:
        out, err = process.communicate(stdin, TIMEOUT_S)
        return process.returncode, out, err


@pytest.mark.usefixtures("start")
def test_output_and_exit_codes() -> None:
    code, out, err = answer("--version")
    assert (code, out.split()[0], err) == (0, b"qcli", b"")
    assert answer("nonsense")[0] == 2
    code, out, err = answer("topic", "list", QCLI_NSQD_HTTP_ADDRESS=NOWHERE)
    assert (code, out, NOWHERE.encode() in err) == (3, b"", True)
    code, out, err = answer("pipeline", "status", QCLI_NSQD_HTTP_ADDRESS=NOWHERE)
    assert (code, out, NOWHERE.encode() in err) == (3, b"", True)


@pytest.mark.usefixtures("start")
def test_input_environment_and_folder(tmp_path: Path) -> None:
    (tmp_path / "nsqd.toml").write_text("max_rdy_count = 5\nnonsense = 1\n")
    words = [*QCLI, "serve", "--config=nsqd.toml", "--check-config"]
    with popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        _, err = process.communicate(timeout=TIMEOUT_S)
    assert b"nonsense" in err
    _, _, err = answer("--version", QCLI_NONSENSE="1")
    assert b"QCLI_NONSENSE" in err
    code, _, err = answer(
        "pub", "t", stdin=b"a\n", QCLI_NSQD_TCP_ADDRESS=NOWHERE, QCLI_NSQD_HTTP_ADDRESS=NOWHERE
    )
    assert (code, NOWHERE.encode() in err) == (3, True)


def test_process_is_a_child_with_signals_and_a_session(start: str, tmp_path: Path) -> None:
    flags = (f"--data-path={tmp_path}", "--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0")
    with popen([*QCLI, "serve", *flags], stderr=subprocess.PIPE, start_new_session=True) as process:
        assert process.stderr is not None
        while not process.stderr.readline().startswith(b"ready"):
            assert process.poll() is None
        state, parent, group = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[:3]
        assert (state != "Z", int(parent), int(group)) == (True, os.getpid(), process.pid)
        open_files = {str(path.readlink()) for path in Path(f"/proc/{process.pid}/fd").iterdir()}
        words = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        assert (b"server.py" in words) == (start == "forked")
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0
    assert not [name for name in open_files if name.startswith("pipe:")][
        1:
    ]  # only that of its standard error
    with popen([*QCLI, "tail", "t", f"--nsqd-tcp-address={NOWHERE}"], stderr=subprocess.DEVNULL) as process:
        process.kill()
    assert process.returncode == -signal.SIGKILL


def test_prepared_modules_exist() -> None:
    assert [name for name in MODULES + JOB_MODULES if find_spec(name) is None] == []


def test_what_python_reads_when_it_starts_is_respected() -> None:
    code, _, err = answer("--version", PYTHONVERBOSE="1")
    assert (code, b"import" in err) == (0, True)
