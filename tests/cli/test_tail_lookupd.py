"""`qcli tail --lookupd-http-address`."""

from pathlib import Path

import pytest

from cli.support import Cli
from interop.peers import qcli_lookupd, qcli_serve
from qcli.exit_codes import ExitCode

NOWHERE = Cli("127.0.0.1:1", "127.0.0.1:1")


@pytest.mark.slow
def test_messages_come_from_every_broker_that_is_named(tmp_path: Path) -> None:
    with qcli_lookupd() as lookupd:
        known = f"--lookupd-tcp-address={lookupd.tcp_address}"
        with qcli_serve(tmp_path / "a", known) as one, qcli_serve(tmp_path / "b", known) as other:
            for broker, bodies in ((one, b"1\n2\n3"), (other, b"4\n5\n6")):
                broker.create("clicks", "archive")
                broker.post("/mpub", bodies, topic="clicks")
            told = f"--lookupd-http-address={lookupd.http_address}"
            result = NOWHERE("tail", "clicks/archive", "-n", "6", told)
            assert (result.code, result.err) == (0, "")
            assert sorted(result.out.split()) == [b"1", b"2", b"3", b"4", b"5", b"6"]
            for broker in (one, other):
                stats = broker.channel_stats("clicks", "archive")
                assert (stats["depth"], stats["in_flight_count"]) == (0, 0)


def test_a_service_that_is_not_there_is_named() -> None:
    result = NOWHERE("tail", "clicks", "--lookupd-http-address", "127.0.0.1:1")
    assert (result.code, result.out) == (ExitCode.UNREACHABLE, b"")
    assert "127.0.0.1:1" in result.err
    assert "--lookupd-http-address" in result.err
    assert "--nsqd-tcp-address" not in result.err


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["--lookupd-http-address", "127.0.0.1"], "has no port"),
        (
            ["--lookupd-http-address", "127.0.0.1:1", "--from", "earliest"],
            "--from and --to read the log of one",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(args: list[str], reason: str) -> None:
    result = NOWHERE("tail", "clicks", *args)
    assert (result.code, result.out) == (ExitCode.USAGE, b"")
    assert reason in " ".join(result.err.split())
