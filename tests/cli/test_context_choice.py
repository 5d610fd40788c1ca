"""Tests of `--context`: which addresses, options and secret a command uses."""

import dataclasses
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cli.contexts import cli_with_contexts, contexts_file, shown, write
from cli.support import DEADLINE_S, Cli, Run
from client.support.tokens import SECRETS, AuthFile
from interop.peers import Broker, qcli_lookupd, qcli_serve


@pytest.fixture
def cli(tmp_path: Path, run_here: Run) -> Cli:
    """Runs commands in this process, with its own contexts and no addresses in the environment."""
    return cli_with_contexts(tmp_path / "config", run_here)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The file of contexts."""
    return contexts_file(tmp_path / "config")


def test_precedence(cli: Cli, file: Path) -> None:
    write(
        file,
        'current = "a"\n'
        '[context.a]\nnsqd_http_address = "a:1"\ntls_root_ca_file = "/dev/null"\nsnappy = true\n'
        '[context.b]\nnsqd_http_address = ["b:1", "b:2"]\nlookupd_http_address = ["b:3"]\n',
    )
    a = {
        "nsqd-http-address": ("a:1", "context a"),
        "tls-root-ca-file": ("/dev/null", "context a"),
        "snappy": ("True", "context a"),
    }
    b = {"nsqd-http-address": ("b:1,b:2", "context b"), "lookupd-http-address": ("b:3", "context b")}
    typed = {"nsqd-http-address": ("t:1", "command line")}
    tls = {"QCLI_CLIENT_TLS_ROOT_CA_FILE": "/dev/zero"}

    assert shown(cli) == a
    assert shown(cli, QCLI_CONTEXT="b") == b
    assert shown(cli, "--context", "b") == shown(cli, "b") == b
    assert shown(cli, "--context", "a", QCLI_CONTEXT="b") == a
    # single options: typed, then the environment, then the context
    assert shown(cli, **tls) == a | {"tls-root-ca-file": ("/dev/zero", "QCLI_CLIENT_TLS_ROOT_CA_FILE")}
    assert shown(cli, "--tls-root-ca-file", "/dev/stdin", **tls) == a | {
        "tls-root-ca-file": ("/dev/stdin", "command line")
    }
    # a context that is typed: the environment counts no longer
    assert shown(cli, "--context", "a", **tls, QCLI_LOOKUPD_HTTP_ADDRESS="e:1") == a
    assert shown(cli, "--context", "b", **tls, QCLI_LOOKUPD_HTTP_ADDRESS="e:1") == b
    # another address is another cluster
    assert shown(cli, "--nsqd-http-address", "t:1") == typed
    assert shown(cli, "--nsqd-http-address", "t:1", QCLI_CONTEXT="b") == typed
    assert shown(cli, QCLI_LOOKUPD_HTTP_ADDRESS="e:1", QCLI_CONTEXT="b") == {
        "lookupd-http-address": ("e:1", "QCLI_LOOKUPD_HTTP_ADDRESS")
    }
    assert shown(cli, "--context", "a", "--nsqd-http-address", "t:1") == a | typed
    assert shown(cli, "--context", "b", "--nsqd-http-address", "t:1") == typed
    # no context at all
    assert shown(cli, "--context", "", QCLI_CONTEXT="b") == {
        "nsqd-tcp-address": ("127.0.0.1:4150", "default"),
        "nsqd-http-address": ("127.0.0.1:4151", "default"),
    }


def test_a_context_that_is_not_used_is_reported_by_show(cli: Cli, file: Path) -> None:
    write(file, '[context.a]\nnsqd_http_address = "a:1"\n')
    result = cli("context", "show", "--nsqd-tcp-address", "b:1", env={"QCLI_CONTEXT": "a"})
    assert result.out.decode().splitlines() == [
        "context: none",
        "",
        "option              value  from",
        "--nsqd-tcp-address  b:1    command line",
    ]
    assert result.err == "Note: the context a is not used, because --nsqd-tcp-address is given.\n"
    assert cli("context", "show", "a").out.startswith(b"context: a (--context)\n")
    assert cli("context", "show", env={"QCLI_CONTEXT": "a"}).out.startswith(b"context: a (QCLI_CONTEXT)\n")


def test_failure_names_the_context_that_is_not_used(cli: Cli, file: Path) -> None:
    write(file, '[context.a]\nnsqd_http_address = "a:1"\n')
    typed = ("--nsqd-http-address", "127.0.0.1:1")
    assert "Note" not in cli("stat", *typed).err
    note = "Note: the context a is not used, because --nsqd-http-address is given.\n"
    assert cli("stat", *typed, env={"QCLI_CONTEXT": "a"}).err.endswith(note)
    cli("context", "use", "a")
    assert cli("stat", *typed).err.endswith(note)
    assert "Note" not in cli("--context", "a", "stat", *typed).err
    write(file, "broken")
    assert "Note" not in cli("stat", *typed).err


def test_a_secret_is_not_shown(cli: Cli, file: Path) -> None:
    write(file, '[context.a]\nnsqd_http_address = "a:1"\nauth_secret_command = "false"\n')
    assert shown(cli, "a")["auth-secret-command"] == ("false", "context a")
    result = cli("context", "show", env={"QCLI_CONTEXT": "a", "QCLI_CLIENT_AUTH_SECRET": "opensesame"})
    assert "opensesame" not in result.out.decode() + result.err
    assert "auth-secret-command" not in result.out.decode()
    assert "--auth-secret        (not shown)  QCLI_CLIENT_AUTH_SECRET" in result.out.decode()


def test_commands_use_the_context(qcli: Cli, broker: Broker, topic: str, cli: Cli) -> None:
    cli(
        "context",
        "save",
        "here",
        "--nsqd-tcp-address",
        broker.tcp_address,
        "--nsqd-http-address",
        broker.http_address,
    )
    qcli.publish(topic, [b"one"])
    for args in (["--context", "here", "peek", topic], ["peek", topic, "--context=here"]):
        assert b"one" in cli(*args).out
    cli("context", "use", "here")
    assert b"one" in cli("peek", topic).out
    published = dataclasses.replace(qcli, env=cli.env)("pub", topic, stdin=b"two\n")
    assert (published.code, cli("stat", topic, "--format", "json").records[0]["depth"]) == (0, 2), (
        published.err
    )
    # the default of another kind of address does not join those of the context
    tail = cli("tail", topic, "--from", "earliest", "-n", "2")
    assert tail.out == b"one\ntwo\n", tail.err


def test_only_a_discovery_service(tmp_path: Path, cli: Cli) -> None:
    with (
        qcli_lookupd() as lookupd,
        qcli_serve(
            tmp_path / "data", f"--lookupd-tcp-address={lookupd.tcp_address}", "--sync=interval"
        ) as broker,
    ):
        broker.create("clicks", "archive")
        cli("context", "save", "fleet", "--lookupd-http-address", lookupd.http_address, "--use")
        while not (records := cli("stat", "--format", "json").records):
            pass  # the broker registers soon after its start
        assert {each["topic"] for each in records} == {"clicks"}
        assert cli("pub", "clicks", stdin=b"x\n").code == 0
        assert cli("tail", "clicks/archive", "-n", "1").out == b"x\n"


@pytest.mark.parametrize(
    ("keys", "command", "options"),
    [
        ("nsqd_tcp_address", ["stat"], "--nsqd-http-address or --lookupd-http-address"),
        ("nsqd_tcp_address", ["topic", "delete", "t", "--yes"], "--nsqd-http-address or --lookupd-http-address"),
        ("nsqd_tcp_address", ["tail", "t", "--from", "earliest"], "--nsqd-http-address or --lookupd-http-address"),
        ("nsqd_tcp_address", ["replay", "t", "u"], "--nsqd-http-address or --lookupd-http-address"),
        ("nsqd_tcp_address", ["to-parquet", "t", "/nowhere/x"], "--nsqd-http-address or --lookupd-http-address"),
        ("nsqd_http_address", ["tail", "t"], "--nsqd-tcp-address or --lookupd-http-address"),
        ("nsqd_http_address", ["pub", "t"], "--nsqd-tcp-address or --lookupd-http-address"),
        ("nsqd_http_address", ["replay", "t", "u"], "--nsqd-tcp-address"),
        ("nsqd_http_address", ["to-parquet", "t", "/nowhere/x", "--consume", "--channel", "c"], "--nsqd-tcp-address or "
         "--lookupd-http-address"),
    ],
)  # fmt: skip
def test_default_brokers_do_not_replace_missing_addresses(
    cli: Cli, file: Path, keys: str, command: list[str], options: str
) -> None:
    write(file, f'[context.a]\n{keys} = "127.0.0.1:1"\n')
    result = cli("--context", "a", *command)
    assert (result.code, result.out) == (2, b"")
    assert f"The context a has no address for this command: {options}. Add one" in " ".join(
        result.err.split()
    )


def test_drain_asks_for_one_broker_of_the_context(cli: Cli, file: Path) -> None:
    write(file, '[context.a]\nlookupd_http_address = "127.0.0.1:1"\n')
    result = cli("--context", "a", "drain")
    assert (result.code, result.out) == (2, b"")
    assert "Name it: 'qcli --context a drain --nsqd-http-address HOST:PORT'." in " ".join(result.err.split())


def test_missing_topic_in_a_context_is_created_with_the_same_context(
    cli: Cli, file: Path, broker: Broker
) -> None:
    write(file, f'[context.a]\nnsqd_http_address = "{broker.http_address}"\n')
    result = cli("--context", "a", "stat", "no.such.topic", "--once")
    assert "Create it with 'qcli topic create no.such.topic', or" in " ".join(result.err.split())


def test_typed_address_replaces_those_of_all_kinds(cli: Cli, file: Path) -> None:
    write(file, '[context.a]\nnsqd_http_address = "127.0.0.1:1"\nnsqd_tcp_address = "127.0.0.1:2"\n')
    typed = ("--context", "a", "--nsqd-tcp-address", "127.0.0.1:3")
    result = cli("tail", "t", "--from", "earliest", *typed)
    assert result.code == 2
    assert result.err.endswith(
        "Error: The typed address replaces those of the context a: give --nsqd-http-address or --lookupd-http-address, "
        "too.\n"
    )
    assert "127.0.0.1:3" in cli("tail", "t", *typed).err
    assert "127.0.0.1:3" in cli("pub", "t", *typed, stdin=b"x\n").err
    assert "127.0.0.1:1" in cli("stat", *typed).err  # which accepts a TCP address, and does not use it


def test_a_value_that_cannot_be_used_names_the_context(cli: Cli, file: Path) -> None:
    write(file, '[context.a]\nnsqd_http_address = "a:1"\ntls_root_ca_file = "missing.pem"\n')
    result = cli("--context", "a", "stat")
    path = file.with_name("missing.pem")
    assert result.code == 2
    assert result.err.endswith(
        f"Error: Invalid value for '--tls-root-ca-file' of the context a: File '{path}' does not exist.\n"
    )


def test_secret_goes_to_the_brokers_of_the_context_only(
    tmp_path: Path, cli: Cli, broker: Broker, topic: str
) -> None:
    auth_file = AuthFile(tmp_path)
    with qcli_serve(tmp_path / "data", f"--auth-file={auth_file.path}", "--sync=interval") as guarded:
        (tmp_path / "token").write_text(SECRETS["read"])
        (tmp_path / "token").chmod(0o600)
        cli("context", "save", "a", "--nsqd-http-address", guarded.http_address, "--use")
        assert cli("stat").code == 1
        cli("context", "save", "a", "--auth-secret-file", str(tmp_path / "token"))
        assert cli("stat").code == 0
        typed = ("--nsqd-http-address", guarded.http_address)
        assert cli("stat", *typed).code == 1
        assert cli("--context", "a", "stat", *typed).code == 0
        wrong = {"QCLI_CLIENT_AUTH_SECRET": "wrong"}
        assert cli("stat", env=wrong).code == 1
        assert cli("stat", "--context", "a", env=wrong).code == 0
        assert cli("stat", "--context", "a", "--auth-secret", "wrong").code == 1


@pytest.mark.parametrize(
    "command", [["serve", "--help"], ["lookupd", "--help"], ["log", "--help"], ["help", "stat"]]
)
def test_commands_without_brokers_do_not_read_the_file(cli: Cli, file: Path, command: list[str]) -> None:
    write(file, "broken")
    assert cli(*command).code == 0
    assert cli("stat", "--help").code == 0
    assert cli("stat", "--nsqd-http-address", "127.0.0.1:1").code == 3


def test_commands_that_do_not_connect_take_no_context(cli: Cli) -> None:
    for command in ("serve", "lookupd", "log verify ."):
        result = cli("--context", "a", *command.split())
        assert (result.code, "--context is for commands that connect to brokers" in result.err) == (2, True)


def test_names_are_completed(cli: Cli, file: Path) -> None:
    write(file, '[context.prod]\nnsqd_http_address = "a:1"\n[context.test]\nnsqd_http_address = "a:1"\n')

    def complete(line: str) -> list[str]:
        *words, current = shlex.split(line + "_")
        env = {"_QCLI_COMPLETE": "zsh_complete", "QCLI_WORDS": "\n".join(words), "QCLI_CURRENT": current[:-1]}
        result = cli(env=env)
        assert result.err == ""
        return [answer.split("\t")[1] for answer in result.out.decode().splitlines() if answer]

    for line in (
        "--context ",
        "stat --context ",
        "context use ",
        "context save ",
        "context delete x ",
        "context show ",
    ):
        assert complete(f"qcli {line}") == ["prod", "test"], line
    assert complete("qcli stat --context=p") == ["--context=prod"]
    write(file, "broken")
    assert complete("qcli --context ") == []
    assert complete("qcli stat ") == []


def test_topics_of_the_context_are_completed(cli: Cli, broker: Broker, topic: str) -> None:
    broker.create(topic, "c")
    cli("context", "save", "here", "--nsqd-http-address", broker.http_address)
    env = {"_QCLI_COMPLETE": "zsh_complete", "QCLI_COMPLETION_TIMEOUT": "20s", "QCLI_CURRENT": topic}
    for words in ("--context\nhere\nstat", "stat\n--context\nhere"):
        assert f"\t{topic}\t".encode() in cli(env=env | {"QCLI_WORDS": f"qcli\n{words}"}).out


def test_a_process_uses_its_own_file(file: Path, cli: Cli) -> None:
    write(file, 'current = "a"\n[context.a]\nnsqd_http_address = "127.0.0.1:9"\n')
    done = subprocess.run(
        [sys.executable, "-m", "qcli", "stat", "--once"],
        env=cli.environment(),
        capture_output=True,
        timeout=DEADLINE_S,
    )
    assert (done.returncode, b"127.0.0.1:9" in done.stderr) == (3, True)


def test_origins_of_the_options_of_the_console(cli: Cli, file: Path, tmp_path: Path) -> None:
    write(file, '[context.a]\nnsqd_http_address = "a:1"\n')
    config = tmp_path / "admin.cfg"
    config.write_text('title = "fleet"\n')
    result = cli(
        "--context", "a", "admin", "--config", str(config), "--title-color=red", "--check-config=show"
    )
    assert result.code == 0, result.err
    lines = result.out.decode().splitlines()
    for line in (
        'nsqd_http_addresses = ["a:1"]  # context a',
        f'title = "fleet"  # {config}',
        'title_color = "red"  # command line',
        "max_connections = 0  # default",
    ):
        assert line in lines
