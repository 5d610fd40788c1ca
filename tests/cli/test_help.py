"""Tests for `qcli help`: commands and topics."""

import pytest

from cli.support import Cli, Run

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
