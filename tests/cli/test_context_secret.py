"""Tests of the secret that a context refers to: a file, a command, or an entry of a keyring."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.contexts import cli_with_contexts, contexts_file
from cli.support import DEADLINE_S, Cli, Run, command_line
from client.support.tokens import SECRETS, AuthFile
from interop.peers import Broker, qcli_serve
from processes import popen
from qcli.contexts.secret import secret_of_command
from qcli.framework.errors import Failure

TOKEN = SECRETS["read"]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker that requires a token."""
    folder = tmp_path_factory.mktemp("guarded")
    with qcli_serve(folder / "data", f"--auth-file={AuthFile(folder).path}", "--sync=interval") as broker:
        yield broker


@pytest.fixture
def cli(tmp_path: Path, run_here: Run) -> Cli:
    return cli_with_contexts(tmp_path, run_here)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return contexts_file(tmp_path)


def program(tmp_path: Path, text: str) -> str:
    """Return a command that runs a Python program."""
    path = tmp_path / "program.py"
    path.write_text(text)
    return f"{sys.executable} {path}"


def save(cli: Cli, broker: Broker, *options: str) -> None:
    saved = cli("context", "save", "a", "--nsqd-http-address", broker.http_address, *options, "--use")
    assert saved.code == 0, saved.err


@pytest.mark.parametrize(
    "text",
    [
        f"print('{TOKEN}')",
        f"print('{TOKEN}', end='')",
        f"print('{TOKEN}\\r\\nlogin: me\\n' * 100)",
        f"import sys\nassert sys.stdin.read() == ''\nprint('{TOKEN}')",
    ],
)
def test_first_line_of_a_command(cli: Cli, guarded: Broker, tmp_path: Path, text: str) -> None:
    save(cli, guarded, "--auth-secret-command", program(tmp_path, text))
    assert cli("stat", "--format", "json").code == 0
    assert TOKEN not in (tmp_path / "qcli" / "contexts.toml").read_text()


def test_command_runs_once_for_several_brokers(cli: Cli, guarded: Broker, tmp_path: Path) -> None:
    text = f"import sys\nopen({str(tmp_path / 'runs')!r}, 'a').write('x')\nprint('{TOKEN}')"
    save(cli, guarded, "--auth-secret-command", program(tmp_path, text))
    port = guarded.http_address.rpartition(":")[2]
    cli("context", "save", "a", "--nsqd-http-address", f"127.0.0.1:{port},localhost:{port}")
    assert cli("stat", "--format", "json").code == 0
    assert (tmp_path / "runs").read_text() == "x"


def test_command_runs_without_a_shell(cli: Cli, guarded: Broker, tmp_path: Path) -> None:
    save(cli, guarded, "--auth-secret-command", f"echo {TOKEN} | cat; touch {tmp_path}/created")
    assert cli("stat").code == 1
    assert not (tmp_path / "created").exists()
    save(cli, guarded, "--auth-secret-command", f"sh -c 'echo {TOKEN} | cat'")
    assert cli("stat", "--format", "json").code == 0


def test_input_of_a_command_stays_for_the_messages(
    tmp_path: Path, cli: Cli, broker: Broker, topic: str
) -> None:
    text = "import sys\nprint('secret' + sys.stdin.read())"
    save(
        cli,
        broker,
        "--auth-secret-command",
        program(tmp_path, text),
        "--nsqd-tcp-address",
        broker.tcp_address,
    )
    assert cli("pub", topic, stdin=b"one\ntwo\n").code == 0
    assert cli("stat", topic, "--format", "json").records[0]["depth"] == 2


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("print()", "printed no secret: the first line of its output is empty"),
        ("", "printed no secret: the first line of its output is empty"),
        ("print('x'); raise SystemExit(3)", "ended with exit code 3; run it by hand to see why"),
        ("import os; os.kill(os.getpid(), 9)", "was killed by signal 9; run it by hand to see why"),
        ("print('x' * 70000)", "prints more than 65536 bytes"),
        ("while True: print('x' * 1000)", "prints more than 65536 bytes"),
    ],
)
def test_commands_that_give_no_secret(
    cli: Cli, guarded: Broker, tmp_path: Path, text: str, problem: str
) -> None:
    command = program(tmp_path, text)
    save(cli, guarded, "--auth-secret-command", command)
    result = cli("stat")
    expected = f"Error: The context a: auth_secret_command: {command!r} {problem}.\n"
    assert (result.code, result.out) == (1, b"")
    assert result.err.endswith(expected), result.err


def test_command_that_does_not_exist(cli: Cli, guarded: Broker) -> None:
    save(cli, guarded, "--auth-secret-command", "/nowhere/pass show x")
    result = cli("stat")
    assert result.code == 1
    assert result.err.endswith("'/nowhere/pass show x' cannot be started: no such file or directory.\n")


def test_what_a_command_says_is_shown(cli: Cli, guarded: Broker, tmp_path: Path) -> None:
    save(
        cli,
        guarded,
        "--auth-secret-command",
        program(tmp_path, "import sys; sys.exit('the store is locked')"),
    )
    result = cli("stat")
    assert result.err.startswith("the store is locked\nError: The context a: "), result.err


@pytest.mark.parametrize(
    "text", ["import time\nwhile True: time.sleep(9)", "import time\nprint('x', flush=True)\ntime.sleep(99)"]
)
def test_command_that_hangs_is_killed(tmp_path: Path, text: str) -> None:
    pid = tmp_path / "pid"
    command = program(tmp_path, f"import os\nopen({str(pid)!r}, 'w').write(str(os.getpid()))\n{text}")
    begun = time.monotonic()
    with pytest.raises(Failure, match=r"did not end within 1.5 s, and was killed"):
        secret_of_command(command, timeout_s=1.5)
    assert time.monotonic() - begun < DEADLINE_S
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_background_process_of_a_command_is_not_awaited(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    text = f"""if True:
        import os, time
        print("{TOKEN}", flush=True)
        if child := os.fork():
            open({str(pid)!r}, "w").write(str(child))
        else:
            time.sleep(60)
    """
    assert secret_of_command(program(tmp_path, text)) == TOKEN
    os.kill(int(pid.read_text()), signal.SIGKILL)


def test_interruption_ends_a_command_that_hangs(cli: Cli, guarded: Broker, tmp_path: Path) -> None:
    fifo, pid = tmp_path / "started", tmp_path / "pid"
    os.mkfifo(fifo)
    text = (
        f"import os, time\nopen({str(pid)!r}, 'w').write(str(os.getpid()))\nopen({str(fifo)!r}, 'w').close()\n"
        "time.sleep(60)"
    )
    save(cli, guarded, "--auth-secret-command", program(tmp_path, text))
    process = popen(command_line("stat"), env=cli.environment(), stderr=subprocess.PIPE)
    try:
        fifo.read_bytes()
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=DEADLINE_S)[1] == b""
        assert process.returncode == 130
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.read_text()), 0)
    finally:
        process.kill()
        process.wait()


def test_command_is_not_run_if_others_can_change_the_file(
    cli: Cli, guarded: Broker, tmp_path: Path, file: Path
) -> None:
    save(cli, guarded, "--auth-secret-command", f"touch {tmp_path}/created")
    for path in (file, file.parent):
        mode = path.stat().st_mode
        path.chmod(mode | 0o020)
        result = cli("stat")
        assert (result.code, "other users can change this file or its folder" in result.err) == (1, True)
        assert cli("context", "list").code == 0
        path.chmod(mode)
    assert not (tmp_path / "created").exists()


def test_command_of_a_linked_file(cli: Cli, guarded: Broker, tmp_path: Path, file: Path) -> None:
    save(cli, guarded, "--auth-secret-command", f"echo {TOKEN}")
    real = tmp_path / "dotfiles" / "contexts.toml"
    real.parent.mkdir(mode=0o700)
    file.rename(real)
    file.symlink_to(real)
    assert cli("stat", "--format", "json").code == 0
    real.parent.chmod(0o770)
    assert "other users can change" in cli("stat").err
    real.parent.chmod(0o700)
    assert cli("context", "save", "a", "--tls").code == 0
    assert file.is_symlink()


def test_completion_runs_no_command(cli: Cli, guarded: Broker, tmp_path: Path) -> None:
    save(cli, guarded, "--auth-secret-command", f"touch {tmp_path}/created")
    env = {"_QCLI_COMPLETE": "zsh_complete", "QCLI_WORDS": "qcli\nstat", "QCLI_CURRENT": ""}
    assert cli(env=env).err == ""
    assert not (tmp_path / "created").exists()


def test_commands_that_do_not_connect_read_no_secret(cli: Cli, guarded: Broker, tmp_path: Path) -> None:
    save(cli, guarded, "--auth-secret-command", f"touch {tmp_path}/created")
    for command in (["context", "show"], ["context", "list"], ["stat", "--help"]):
        assert cli(*command).code == 0
    assert not (tmp_path / "created").exists()


def test_file_that_others_can_read(cli: Cli, guarded: Broker, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    save(cli, guarded, "--auth-secret-file", str(token))
    assert "other users can read the secret: chmod 600" in cli("stat").err
    token.unlink()
    result = cli("stat")
    assert (result.code, result.err) == (
        1,
        f"Error: The context a: --auth-secret-file {token}: no such file or directory.\n",
    )


# ---------------------------------------------------------------------- keyring


@pytest.fixture
def keyring(tmp_path: Path, cli: Cli) -> dict[str, str]:
    """The environment that selects a real keyring, which is a file."""
    pytest.importorskip("keyrings.alt.file")
    env = {
        "PYTHON_KEYRING_BACKEND": "keyrings.alt.file.PlaintextKeyring",
        "XDG_DATA_HOME": str(tmp_path / "data"),
    }
    subprocess.run(
        [sys.executable, "-m", "keyring", "set", "nsq/prod", "me"],
        input=TOKEN.encode(),
        env=os.environ | env,
        check=True,
        timeout=DEADLINE_S,
    )
    return env


def run(cli: Cli, *args: str, env: dict[str, str]) -> tuple[int, str]:
    """Run a command in a process of its own, because keyring keeps its backend."""
    done = subprocess.run(
        command_line(*args), env=cli.environment(**env), capture_output=True, text=True, timeout=DEADLINE_S
    )
    return done.returncode, done.stderr


def test_entry_of_a_keyring(cli: Cli, guarded: Broker, keyring: dict[str, str]) -> None:
    save(cli, guarded, "--auth-secret-keyring", "nsq/prod/me")
    assert run(cli, "stat", env=keyring) == (0, "")
    save(cli, guarded, "--auth-secret-keyring", "nsq/prod/you")
    assert run(cli, "stat", env=keyring) == (
        1,
        "Error: The context a: auth_secret_keyring: the keyring has no entry nsq/prod/you. Create it: keyring set "
        "nsq/prod you\n",
    )


def test_keyring_that_cannot_be_read(cli: Cli, guarded: Broker, keyring: dict[str, str]) -> None:
    save(cli, guarded, "--auth-secret-keyring", "nsq/prod/me")
    code, said = run(cli, "stat", env=keyring | {"PYTHON_KEYRING_BACKEND": "keyring.backends.fail.Keyring"})
    assert code == 1
    assert said.startswith(
        "Error: The context a: auth_secret_keyring: cannot read nsq/prod/me from the keyring: "
    )


def test_missing_package(cli: Cli, guarded: Broker, tmp_path: Path) -> None:
    save(cli, guarded, "--auth-secret-keyring", "nsq/prod/me")
    (tmp_path / "keyring.py").write_text("raise ImportError('not installed')")
    code, said = run(cli, "stat", env={"PYTHONPATH": str(tmp_path)})
    assert code == 1
    assert (
        "auth_secret_keyring: this needs the Python package keyring: pip install 'trio-nsq[keyring]'" in said
    )
