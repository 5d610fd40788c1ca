"""Tests for all commands: help, versions, exit codes, pipes and signals."""

import platform
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

import processes
from cli.support import DEADLINE_S, Cli, Run, command_line, only_ours
from processes import popen
from qcli.app import notices, root, run
from qcli.framework.errors import ExitCode, Failure, reason_of, translate
from qcli.framework.raised_signals import interrupt
from soak import in_soak
from trio_nsq import __version__
from trio_nsq.protocol import NSQError
from trio_nsq.protocol.bulk import COMPILED

COMMANDS = ["serve", "pub", "tail", "stat", "topic", "channel", "topic create", "channel delete"]


@pytest.mark.parametrize("name", ["", *COMMANDS])
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help(nowhere: Cli, name: str, flag: str) -> None:
    result = nowhere(*name.split(), flag)
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith(f"Usage: qcli {name}".rstrip().encode())
    assert b"\x1b" not in result.out


def test_version(nowhere: Cli) -> None:
    how = "compiled" if COMPILED else "not compiled"
    version = f"qcli {__version__} (Python {platform.python_version()}, {how})\n"
    assert nowhere("--version").out.decode() == version


def test_console_script_equals_the_module() -> None:
    script = Path(sys.executable).with_name("qcli")
    done = subprocess.run([script, "--version"], capture_output=True, check=True, timeout=DEADLINE_S)
    assert done.stdout.startswith(b"qcli ")


@pytest.mark.parametrize(
    "args", [["nonsense"], ["pub"], ["tail", "t", "-n", "0"], ["stat", "--format", "xml"], []]
)
def test_usage_errors(nowhere: Cli, args: list[str]) -> None:
    result = nowhere(*args)
    assert (result.code, result.out) == (2, b"")
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("args", "suggested"),
    [
        (["pubb"], "pub"),
        (["pbu"], "pub"),
        (["stats"], "stat"),
        (["publish"], "pub"),
        (["topic", "lst"], "list"),
        (["topic", "del"], "delete"),
        (["topic", "rename"], None),
        # the words of other tools
        (["consume"], "tail"),
        (["nsq_tail"], "tail"),
        (["produce"], "pub"),
        (["status"], "stat"),
        (["ls"], "topic list"),
        (["version"], "--version"),
        (["topic", "ls"], "list"),
        (["topic", "show"], "settings"),
        (["topic", "resume"], "unpause"),
        (["channel", "resume"], "unpause"),
        (["dlq", "ls"], "list"),
        (["dlq", "rm"], None),
        (["x"], None),
    ],
)
def test_similar_command_is_suggested(nowhere: Cli, args: list[str], suggested: str | None) -> None:
    result = nowhere(*args)
    assert result.code == 2
    hint = f" Did you mean '{suggested}'?" if suggested else ""
    assert result.err.endswith(f"Error: No such command '{args[-1]}'.{hint}\n")
    if suggested:
        assert nowhere(*args[:-1], *suggested.split(), "--help").code == 0


def test_command_line_overrides_the_environment(nowhere: Cli) -> None:
    env = {"QCLI_NSQD_TCP_ADDRESS": "127.0.0.1:2", "QCLI_NSQD_HTTP_ADDRESS": "127.0.0.1:3"}
    assert "127.0.0.1:2" in nowhere("tail", "t", env=env).err
    assert "127.0.0.1:3" in nowhere("stat", env=env).err
    assert "127.0.0.1:4" in nowhere("stat", "--nsqd-http-address", "127.0.0.1:4", env=env).err


def test_invalid_address_in_the_environment_is_a_usage_error(nowhere: Cli) -> None:
    result = nowhere("stat", env={"QCLI_NSQD_HTTP_ADDRESS": "nonsense"})
    assert result.code == 2
    assert "nonsense" in result.err


@pytest.mark.parametrize("args", [["--help"], ["stat"], ["topic", "list"]])
def test_closed_pipe_is_a_silent_success(qcli: Cli, args: list[str], topic: str) -> None:
    qcli("topic", "create", topic)
    process = popen(
        command_line(*args), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=qcli.environment()
    )
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, err) == (0, b"")


@pytest.mark.parametrize("args", [["stat"], ["topic", "list"], ["--version"], ["pub", "--help"]])
def test_full_disk_is_reported(qcli: Cli, args: list[str], topic: str) -> None:
    qcli("topic", "create", topic)
    with open("/dev/full", "wb") as full:
        done = processes.run(command_line(*args), stdout=full, env=qcli.environment(), timeout=DEADLINE_S)
    assert done.returncode == 1
    assert done.stderr == b"Error: Cannot write to standard output: No space left on device.\n"


@pytest.mark.parametrize("args", ["stat", "--help", *in_soak("tail t/c -n 1", "--version", "pub -h")])
def test_closed_stdout(qcli: Cli, args: str) -> None:
    line = " ".join(command_line(*args.split()))
    done = subprocess.run(
        ["sh", "-c", f"exec {line} >&-"], stderr=subprocess.PIPE, env=qcli.environment(), timeout=DEADLINE_S
    )
    assert (done.returncode, done.stderr) == (1, b"Error: Standard output is closed.\n")


def test_closed_stdin(qcli: Cli) -> None:
    line = " ".join(command_line("pub", "t"))
    done = subprocess.run(
        ["sh", "-c", f"exec {line} <&-"], stderr=subprocess.PIPE, env=qcli.environment(), timeout=DEADLINE_S
    )
    assert done.returncode == 1
    assert done.stderr.startswith(b"Error: Standard input is closed.")


@pytest.mark.parametrize(("args", "code"), [("stat nope", 1), ("nonsense", 2), ("pub {topic}", 0)])
def test_closed_stderr_loses_diagnostics_only(qcli: Cli, topic: str, args: str, code: int) -> None:
    line = " ".join(command_line(*args.format(topic=topic).split()))
    done = subprocess.run(
        ["sh", "-c", f"exec {line} 2>&-"],
        input=b"message",
        stdout=subprocess.PIPE,
        env=qcli.environment(),
        timeout=DEADLINE_S,
    )
    assert (done.returncode, done.stdout) == (code, b"")


@pytest.mark.parametrize("closed", ["2>&-", "<&- 2>&-", "<&- >&- 2>&-"])
def test_no_file_gets_the_descriptor_of_stderr(tmp_path: Path, closed: str) -> None:
    program = (
        "import os, sys; from qcli.framework.output import configure_streams; configure_streams(); "
        f"fd = os.open({str(tmp_path / 'data')!r}, os.O_WRONLY | os.O_CREAT); os.write(2, b'a fatal error'); "
        "os.write(fd, b'data')"
    )
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh"]
    subprocess.run([*shell, sys.executable, "-c", program], check=True, timeout=DEADLINE_S)
    assert (tmp_path / "data").read_bytes() == b"data"


@only_ours
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_data_is_utf_8_in_every_locale(qcli: Cli, topic: str, encoding: str) -> None:
    qcli("pub", topic, stdin="caf\u00e9 \u65e5\u672c".encode())
    env = {"PYTHONIOENCODING": encoding}
    result = qcli("peek", topic, env=env)
    assert (result.code, result.err) == (0, "")
    assert result.out.decode().endswith("caf\u00e9 \u65e5\u672c\n")
    assert qcli("peek", topic, "--format", "json", env=env).records[0]["body"] == "caf\u00e9 \u65e5\u672c"


def test_invalid_text_is_escaped_as_in_json() -> None:
    program = (
        "import os; from qcli.framework.output import configure_streams, write; "
        "configure_streams(); write(os.fsdecode(b'\\xe9'))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=DEADLINE_S)
    assert (done.stdout, done.stderr) == (rb"\udce9", b"")


def test_start_imports_no_large_modules() -> None:
    """Help and completion must start fast, so only the commands that need large modules import them."""
    code = (
        "import sys; from qcli.app import run; run(['--help']); "
        "heavy = {'trio', 'rich', 'httpx', 'asyncio', 'ssl', 'http.client', 'logging'} & set(sys.modules); "
        "sys.exit(', '.join(sorted(heavy)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stderr) == (0, b"")


def test_command_in_another_program_keeps_its_signal_handlers(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert run(["--version"]) == ExitCode.OK
    assert run(["nonsense"]) == ExitCode.USAGE
    assert signal.getsignal(signal.SIGTERM) is before
    assert capsys.readouterr().out.startswith("qcli ")


def test_interrupt_during_the_start_is_silent() -> None:
    """At any point: by default, Python would raise KeyboardInterrupt from the module being imported."""
    program = (
        "import importlib.abc, os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # tests in the background have SIGINT ignored
        "import qcli\n"
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
        "class Interrupting(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'qcli.app':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "qcli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_interrupt_in_executed_code_has_the_usual_exit_code(tmp_path: Path) -> None:
    """Python executes generated code for each dataclass, and commands import modules with dataclasses."""
    program = (
        "import importlib.abc, sys, qcli\n"
        "class Interrupting(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'qcli.commands.stat.command':\n"
        "            exec('import os, signal; os.kill(os.getpid(), signal.SIGINT)')\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "qcli.main()\n"
    )
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, "-m", "program", "stat"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


@pytest.mark.parametrize("args", ["stat --count 0 --interval 20ms", "tail {topic}/c"])
def test_interrupt_works_in_the_background(qcli: Cli, topic: str, args: str) -> None:
    """A shell without a terminal starts background processes with SIGINT ignored."""
    qcli("pub", topic, stdin=b"message")
    line = " ".join(command_line(*args.format(topic=topic).split()))
    process = subprocess.Popen(
        ["sh", "-c", f"trap '' INT; exec {line}"], stdout=subprocess.PIPE, env=qcli.environment()
    )
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(DEADLINE_S) == 130
        finally:
            process.kill()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_second_signal_ends_a_command_at_once(number: signal.Signals, code: int) -> None:
    """Whatever the first signal started. A command that waits says that a second signal ends it."""
    program = (
        "import trio; from qcli.framework.signals import at_first_signal, run_trio\n"
        "async def main():\n"
        "    at_first_signal(lambda code: print(int(code), flush=True))\n"
        "    print('ready', flush=True)\n"
        "    await trio.sleep_forever()\n"
        "run_trio(main)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(number)
        assert process.stdout.readline() == b"%d\n" % code
        assert process.stderr.readline() == b"Stopping; interrupt again to stop at once.\n"
        process.send_signal(number)
        assert process.wait(DEADLINE_S) == code


def test_errors_in_exception_groups_are_reported() -> None:
    inner = ExceptionGroup("tasks", [ValueError("a bug"), ExceptionGroup("more", [NSQError("went wrong")])])
    outcome = translate(inner)
    assert isinstance(outcome, Failure)
    assert (outcome.message, outcome.exit_code) == ("went wrong", ExitCode.FAILURE)
    assert translate(ValueError("a bug")) is None


def test_reasons_are_those_of_the_system() -> None:
    error = RuntimeError("wrapped")
    error.__cause__ = ConnectionRefusedError(111, "[Errno 111] at some length")
    assert reason_of(error) == "connection refused"
    assert reason_of(RuntimeError("plain")) == "plain"


def test_every_exit_code_has_a_meaning() -> None:
    assert [code for code in ExitCode if not code.meaning] == []
    assert run(["--version"]) == 0


def test_unknown_variables_are_found() -> None:
    names = ["QCLI_NSQD_TCP_ADRESS", "QCLI_CLIENT_TLS_CERTS", "QCLI_FOO", "HOME"]
    known = ["QCLI_NSQD_TCP_ADDRESS", "QCLI_CLIENT_TLS_CERT", "QCLI_TCP_ADDRESS", "QCLI_DATA_PATH"]
    assert notices(names + known, root) == [
        "Note: qcli does not know the environment variable QCLI_CLIENT_TLS_CERTS (did you mean QCLI_CLIENT_TLS_CERT?).",
        "Note: qcli does not know the environment variable QCLI_FOO.",
        "Note: qcli does not know the environment variable QCLI_NSQD_TCP_ADRESS (did you mean QCLI_NSQD_TCP_ADDRESS?).",
    ]


def test_unknown_variables_are_named_on_stderr(run_here: Run) -> None:
    result = run_here(Cli("127.0.0.1:1", "127.0.0.1:1", {"QCLI_DATA_PAHT": "x"}), "topic", "list", "--help")
    assert result.code == 0
    assert (
        result.err
        == "Note: qcli does not know the environment variable QCLI_DATA_PAHT (did you mean QCLI_DATA_PATH?).\n"
    )


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["dlq", "requeue", "t", "--yes"], "No such option '--yes': this command asks no question."),
        (["stat", "-y"], "No such option '-y': this command asks no question."),
    ],
)
def test_yes_for_a_command_without_questions(nowhere: Cli, args: list[str], said: str) -> None:
    result = nowhere(*args)
    assert result.code == 2
    assert said in result.err


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, ExitCode.TERMINATED), (signal.SIGINT, ExitCode.INTERRUPTED)]
)
def test_signal_interrupts_a_function_that_then_fails(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: ExitCode
) -> None:
    """Such as the wait for a thread, which then releases a lock that it does not have. It is no bug of the command."""

    def work() -> None:
        try:
            signal.raise_signal(number)
        finally:
            fail()

    def fail() -> None:
        raise RuntimeError("cannot release un-acquired lock")

    def use(callback: Callable[[], None]) -> None:
        monkeypatch.setattr(root, "get_command", lambda ctx, name: click.Command(name, callback=callback))

    handled = signal.signal(signal.SIGINT, interrupt)
    try:
        use(work)
        assert run(["fails"]) == code
    finally:
        signal.signal(signal.SIGINT, handled)
    use(fail)
    with pytest.raises(RuntimeError, match="un-acquired"):
        run(["fails"])


def test_help_names_its_option_whatever_used_the_command_before() -> None:
    for name in COMMANDS:
        ctx = click.Context(root)
        command: click.Command | None = root
        for word in name.split():
            assert isinstance(command, click.Group)
            command = command.get_command(ctx, word)
        assert command is not None
        option = command.get_help_option(click.Context(command))
        assert option is not None
        assert option.opts == ["-h", "--help"]
