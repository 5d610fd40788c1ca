"""Tests for `qcli help`: commands and topics."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from cli.support import Cli, Run, all_contexts

TOPICS = ["connection", "environment", "positions", "format-strings", "durations", "exit-codes"]


@pytest.mark.parametrize("words", ["pub", "channel", "channel seek", "serve", "help"])
def test_help_of_a_command(nowhere: Cli, run_here: Run, words: str) -> None:
    result = run_here(nowhere, "help", *words.split())
    assert (result.code, result.err) == (0, "")
    assert result.out == run_here(nowhere, *words.split(), "--help").out


@pytest.mark.parametrize("words", [["--help"], ["help", "help"]])
def test_all_topics_are_listed(nowhere: Cli, run_here: Run, words: list[str]) -> None:
    text = run_here(nowhere, *words).out.decode()
    assert [each for each in TOPICS if each not in text] == []


def test_help_without_arguments(nowhere: Cli, run_here: Run) -> None:
    assert run_here(nowhere, "help").out == run_here(nowhere, "--help").out


@pytest.mark.parametrize(
    ("topic", "expected"),
    [
        ("connection", ["--tls-root-ca-file FILE", "Skip certificate verification.", "https://HOST:PORT"]),
        ("connection", ["--auth-secret TEXT", "--snappy", "QCLI_CLIENT_AUTH_SECRET"]),
        ("environment", ["QCLI_NSQD_TCP_ADDRESS", "NO_COLOR", "QCLI_COMPLETION_TIMEOUT"]),
        ("positions", ["2026-11-21T04:14", "earliest"]),
        ("durations", ["1m30s", "10GiB"]),
        ("exit-codes", ["130", "Interrupted (SIGINT)."]),
    ],
)
def test_topics(nowhere: Cli, run_here: Run, topic: str, expected: list[str]) -> None:
    result = run_here(nowhere, "help", topic)
    assert (result.code, result.err) == (0, "")
    text = result.out.decode()
    assert len(text.splitlines()) <= 40
    for each in expected:
        assert each in text


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("conection", " (did you mean connection?)"),
        ("pub x", ""),
        ("xyz", ""),
        ("consume", " (did you mean tail?)"),
        ("requeue", ". Commands about it: qcli dlq requeue, qcli dlq, "),
        ("ports", ". Commands about it: qcli serve, qcli lookupd, "),
    ],
)
def test_unknown_word_is_an_error(nowhere: Cli, run_here: Run, words: str, hint: str) -> None:
    result = run_here(nowhere, "help", *words.split())
    assert (result.code, result.out) == (2, b"")
    text = " ".join(result.err.split())
    assert f"There is no command or topic '{words}'{hint}" in text
    assert f". The topics are {', '.join(TOPICS)}." in text


# ---------------------------------------------------------------------- as JSON


def commands_in(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the records of all commands that are no groups."""
    if "commands" in record:
        for each in record["commands"]:
            yield from commands_in(each)
    else:
        yield record


@pytest.fixture
def described(nowhere: Cli, run_here: Run) -> dict[str, dict[str, Any]]:
    """The records of all commands by name."""
    result = run_here(nowhere, "help", "--format", "json")
    assert (result.code, result.err) == (0, "")
    return {record["command"]: record for record in commands_in(json.loads(result.out))}


def test_all_commands_are_described(described: dict[str, dict[str, Any]]) -> None:
    """Each option with all its names, the exit codes of the manual page, and a type that programs know."""
    for ctx in all_contexts():
        if ctx.command_path not in described:
            assert ctx.command_path.count(" ") == 0 or f"{ctx.command_path} " in " ".join(described)
            continue
        record = described[ctx.command_path]
        names = {name for option in record["options"] for name in option["names"]}
        assert names >= {
            name
            for param in ctx.command.params
            if param.param_type_name == "option" and not getattr(param, "hidden", False)
            for name in (*param.opts, *param.secondary_opts)
        }
        assert record["exit_codes"].keys() >= {"0", "1", "2"}
        assert record["examples"]
        for value in (*record["options"], *record["arguments"]):
            assert value["type"] in ("flag", "text", "choice", "integer", "number", "path", "boolean")


def test_types_of_options(described: dict[str, dict[str, Any]]) -> None:
    options = {name: option for option in described["qcli tail"]["options"] for name in option["names"]}
    assert (options["--tls"]["type"], options["--tls"]["value"]) == ("flag", None)
    assert options["--tls"]["environment"] == ["QCLI_CLIENT_TLS"]
    assert options["--format"]["choices"][0] == options["--format"]["default"]
    assert (options["--count"]["type"], options["--count"]["minimum"]) == ("integer", 1)
    assert options["--nsqd-http-address"]["default"] == "127.0.0.1:4151"
    (topic,) = described["qcli topic pause"]["arguments"]
    assert (topic["required"], topic["repeatable"]) == (True, True)
    assert (
        next(each for each in described["qcli serve"]["options"] if each["names"] == ["--processes"])["type"]
        == "text"
    )


def test_commands_that_only_read(described: dict[str, dict[str, Any]]) -> None:
    effects = {record["effect"] for record in described.values()}
    assert effects == {"read", "write"}
    for name in ("stat", "peek", "topic list", "dlq show", "log verify"):
        assert described[f"qcli {name}"]["effect"] == "read"
    for name in (
        "tail",
        "pub",
        "serve",
        "topic delete",
        "context use",
        "to-parquet",
    ):  # tail finishes messages
        assert described[f"qcli {name}"]["effect"] == "write"


def test_commands_that_ask_for_confirmation_write(described: dict[str, dict[str, Any]]) -> None:
    asking = [
        name
        for name, record in described.items()
        if any("--yes" in option["names"] for option in record["options"])
    ]
    assert asking
    assert {described[name]["effect"] for name in asking} == {"write"}


def test_one_command_is_described(nowhere: Cli, run_here: Run) -> None:
    record = json.loads(run_here(nowhere, "help", "channel", "seek", "--format", "json").out)
    assert record["command"] == "qcli channel seek"
    assert record["usage"] == "qcli channel seek [OPTIONS] TOPIC/CHANNEL"
    group = json.loads(run_here(nowhere, "help", "channel", "--format", "json").out)
    assert record in group["commands"]


def test_topic_is_not_described(nowhere: Cli, run_here: Run) -> None:
    result = run_here(nowhere, "help", "positions", "--format", "json")
    assert (result.code, result.out) == (2, b"")
    assert "--format json describes commands, and 'positions' is a topic." in result.err
