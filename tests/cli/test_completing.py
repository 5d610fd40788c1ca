"""Tests for completion, called as the shell scripts call it."""

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli.completing import ask
from cli.support import DEADLINE_S, Cli
from interop.peers import Broker, system_program

REPOSITORY = Path(__file__).parents[2]


def names(qcli: Cli, line: str) -> list[str]:
    """Return the candidates only."""
    return [value for kind, value, _ in ask(qcli, line)]


@pytest.fixture
def topics(broker: Broker, topic: str) -> str:
    """The common prefix of two topics, one with two channels and one with none."""
    broker.create(f"{topic}.a", "c1", "c2#ephemeral")
    broker.create(f"{topic}.b")
    return topic


def test_commands_and_options(nowhere: Cli) -> None:
    assert names(nowhere, "qcli d") == ["definitions", "drain", "dlq", "deferred"]
    assert names(nowhere, "qcli channel de") == ["delete"]
    assert names(nowhere, "qcli serve --sync-") == ["--sync-every", "--sync-timeout"]
    assert names(nowhere, "qcli tail --format j") == ["json"]
    assert names(nowhere, "qcli tail --format=") == ["--format=raw", "--format=json"]
    assert ["plain", "pub", "Publish lines to a topic."] in ask(nowhere, "qcli ")
    assert ask(nowhere, "qcli pub clicks ./a") == [["file", "./a", ""]]


def test_topics_of_help(nowhere: Cli) -> None:
    assert names(nowhere, "qcli help ex") == ["exit-codes"]
    assert names(nowhere, "qcli help p") == ["pub", "peek", "pipeline", "positions"]
    assert names(nowhere, "qcli help channel se") == ["seek", "set", "settings"]
    assert names(nowhere, "qcli help pub ") == []
    assert ["plain", "connection", "TLS, AUTH and compression"] in ask(nowhere, "qcli help ")


def test_values_of_options_of_serve(nowhere: Cli) -> None:
    assert names(nowhere, "qcli serve --log-level ") == ["debug", "info", "warn", "error", "fatal"]
    assert names(nowhere, "qcli serve -log-level w") == ["warn"]
    assert names(nowhere, "qcli serve --sync=") == ["--sync=always", "--sync=interval"]
    assert names(nowhere, "qcli serve --tls-min-version tls1.") == ["tls1.0", "tls1.1", "tls1.2", "tls1.3"]
    assert names(nowhere, "qcli serve --tls-client-auth-policy ") == [
        "require",
        "require-verify",
        "verify-if-given",
    ]
    assert ask(nowhere, "qcli serve --tls-cert ./c") == [["file", "./c", ""]]
    assert ask(nowhere, "qcli serve -config ./c") == [["file", "./c", ""]]
    assert ask(nowhere, "qcli serve --data-path ./d") == [["dir", "./d", ""]]


def test_optional_value_is_offered_only_after_the_equals_sign(nowhere: Cli) -> None:
    assert names(nowhere, "qcli serve --tls-required=t") == [
        "--tls-required=true",
        "--tls-required=tcp-https",
    ]
    assert names(nowhere, "qcli serve --snappy=") == ["--snappy=true", "--snappy=false"]
    assert names(nowhere, "qcli serve --snappy ") == []
    assert names(nowhere, "qcli serve --snappy --deflate --cac") == ["--cache-bytes"]


def test_invalid_configuration_file_is_ignored(nowhere: Cli) -> None:
    assert names(nowhere, "qcli serve --config /nonsense --cac") == ["--cache-bytes"]


def test_topics(qcli: Cli, topics: str) -> None:
    both = [f"{topics}.a", f"{topics}.b"]
    assert names(qcli, f"qcli pub {topics}") == both
    assert names(qcli, f"qcli topic delete --yes {both[0]} {topics}") == both
    assert names(qcli, f"qcli stat {topics}") == both


def test_values_of_settings(nowhere: Cli) -> None:
    assert names(nowhere, "qcli topic set t when") == ["when_full="]
    assert names(nowhere, "qcli topic set t when_full=") == [
        "when_full=reject",
        "when_full=drop-oldest",
        "when_full=default",
    ]
    assert names(nowhere, "qcli topic set t ttl=1h retention_bytes=u") == ["retention_bytes=unlimited"]
    assert names(nowhere, "qcli channel set t/c max_attempts=") == ["max_attempts=default"]
    assert bash(nowhere, "qcli topic set t when_full=d") == ["drop-oldest", "default"]


def test_topics_with_dead_letters(qcli: Cli, broker: Broker, topics: str) -> None:
    broker.create(f"{topics}.dead", "dead-letters")
    for verb in ("list", "show", "requeue", "drop"):
        assert names(qcli, f"qcli dlq {verb} {topics}") == [f"{topics}.dead"]


def test_channels_of_the_given_topic(qcli: Cli, topics: str) -> None:
    channels = [f"{topics}.a/c1", f"{topics}.a/c2#ephemeral"]
    assert names(qcli, f"qcli tail {topics}.a") == [f"{topics}.a", *channels]
    assert names(qcli, f"qcli tail {topics}.a/") == channels
    assert names(qcli, f"qcli stat {topics}.a/c2") == channels[1:]
    assert names(qcli, f"qcli channel pause {topics}.a") == channels


def test_topic_is_completed_with_a_slash(qcli: Cli, topics: str) -> None:
    answers = ask(qcli, f"qcli channel pause {topics}")
    assert answers == [["unfinished", f"{topics}.a/", ""], ["unfinished", f"{topics}.b/", ""]]


def test_address_on_the_command_line_is_used(nowhere: Cli, broker: Broker, topics: str) -> None:
    assert names(nowhere, f"qcli pub {topics}") == []
    address = broker.http_address
    assert len(names(nowhere, f"qcli pub --nsqd-http-address {address} {topics}")) == 2
    assert len(names(nowhere, f"qcli pub --nsqd-http-address={address} {topics}")) == 2


def test_silent_broker_does_not_block(nowhere: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        for timeout in ("", "100ms", "nonsense"):
            begun = time.monotonic()
            line = f"qcli pub --nsqd-http-address {address} "
            assert ask(nowhere, line, QCLI_COMPLETION_TIMEOUT=timeout) == []
            # Half a second, and the start of a Python process; a connection would time out after five.
            assert time.monotonic() - begun < 4


def bash(qcli: Cli, line: str) -> list[str]:
    """Return the candidates that bash shows, by running the script."""
    script = f"""
        source {REPOSITORY}/completions/qcli.bash
        compopt() {{ echo "compopt $*"; }}
        COMP_LINE=$1; COMP_POINT=${{#1}}
        _qcli qcli
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    path = qcli.environment()["PATH"]
    programs = Path(sys.executable).parent
    done = subprocess.run(
        ["bash", "--norc", "-c", script, "bash", line],
        capture_output=True,
        check=True,
        env=qcli.environment(PATH=f"{programs}:{path}", QCLI_COMPLETION_TIMEOUT="20s"),
        timeout=DEADLINE_S,
    )
    assert done.stderr == b""
    return done.stdout.decode().split()


def test_bash(qcli: Cli, topics: str) -> None:
    assert sorted(bash(qcli, "qcli d")) == ["deferred", "definitions", "dlq", "drain"]
    assert bash(qcli, f"qcli tail {topics}.a/") == [f"{topics}.a/c1", f"{topics}.a/c2#ephemeral"]
    assert bash(qcli, f"cat x | qcli pub {topics}") == []  # bash cuts the line at the cursor
    # bash treats the part after `=` as the word
    assert bash(qcli, "qcli tail --format=j") == ["json"]
    address = qcli.http_address
    assert bash(qcli, f"qcli pub --nsqd-http-address={address} {topics}.b") == [f"{topics}.b"]
    assert bash(qcli, f"qcli channel pause {topics}")[:3] == ["compopt", "-o", "nospace"]


@pytest.mark.parametrize(
    ("shell", "script"), [("bash", "qcli.bash"), ("zsh", "_qcli"), ("fish", "qcli.fish")]
)
def test_scripts_are_valid(shell: str, script: str) -> None:
    subprocess.run(
        [system_program(shell), "-n", REPOSITORY / "completions" / script], check=True, timeout=DEADLINE_S
    )
