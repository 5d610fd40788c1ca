"""Tests for positions: from the command line to the request."""

import time

import click
import pytest

from cli.support import Cli, all_contexts
from qcli.framework.positions import BrokerPosition, position
from trio_nsq.log.positions import parse_position


def convert(text: str) -> str:
    return BrokerPosition().convert(text, None, None)


@pytest.mark.parametrize(
    ("text", "sent"),
    [
        ("0", "0"),
        ("1000", "1000"),
        ("earliest", "earliest"),
        ("latest", "latest"),
        ("2h", "-7200000ms"),
        ("1m30s", "-90000ms"),
        (".5s", "-500ms"),
        ("-15m", "-900000ms"),
        ("7d", "-604800000ms"),
        ("1d12h", "-129600000ms"),
        ("2026-11-21T04:14:05.5Z", "@1795234445.500000000"),
        ("2026-11-21T05:14:05+01:00", "@1795234445.000000000"),
        ("1970-01-01T00:00:01Z", "@1.000000000"),
        ("@1700000000.5", "@1700000000.500000000"),
    ],
)
def test_position_in_the_request(text: str, sent: str) -> None:
    assert convert(text) == sent
    parse_position(sent, time.time_ns())  # the broker supports these words


def test_time_without_a_zone_is_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        assert convert("2026-11-21T05:14:05") == "@1795234445.000000000"
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("text", ["", "yesterday", "1h2", "forever", "2026-13-01", "-", "@"])
def test_invalid_positions(text: str) -> None:
    with pytest.raises(
        click.BadParameter, match=r"is neither a sequence such as 1000, nor .*earliest or latest"
    ):
        convert(text)


def test_words_are_completed(qcli: Cli) -> None:
    found = qcli(
        env={
            "_QCLI_COMPLETE": "fish_complete",
            "QCLI_WORDS": "qcli\ntail\nclicks\n--from",
            "QCLI_CURRENT": "e",
        }
    )
    assert b"earliest" in found.out


def test_now_means_the_end_in_every_command() -> None:
    assert convert("now") == convert("latest") == "latest"
    assert position("now") == position("latest")
    for ctx in all_contexts():
        for param in ctx.command.params:
            if param.metavar == "POSITION":
                assert isinstance(param.type, BrokerPosition) or param.type("now") == position("now"), param
