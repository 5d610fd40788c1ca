"""Tests for `qcli tail --lookupd-http-address`."""

from pathlib import Path

import pytest

from cli.support import Cli
from interop.peers import nsqd, qcli_lookupd, qcli_serve
from qcli.framework.errors import ExitCode

NOWHERE = Cli("127.0.0.1:1", "127.0.0.1:1")


@pytest.mark.slow
def test_messages_of_all_registered_brokers(tmp_path: Path, nowhere: Cli) -> None:
    with qcli_lookupd() as lookupd:
        known = f"--lookupd-tcp-address={lookupd.tcp_address}"
        with qcli_serve(tmp_path / "a", known) as one, qcli_serve(tmp_path / "b", known) as other:
            for broker, bodies in ((one, b"1\n2\n3"), (other, b"4\n5\n6")):
                broker.create("clicks", "archive")
                broker.post("/mpub", bodies, topic="clicks")
            told = f"--lookupd-http-address={lookupd.http_address}"
            result = nowhere("tail", "clicks/archive", "-n", "6", told)
            assert (result.code, result.err) == (0, "")
            assert sorted(result.out.split()) == [b"1", b"2", b"3", b"4", b"5", b"6"]
            for broker in (one, other):
                stats = broker.channel_stats("clicks", "archive")
                assert (stats["depth"], stats["in_flight_count"]) == (0, 0)


@pytest.mark.parametrize("has_channel", [True, False])
def test_channels_of_a_registered_nsqd_are_checked(tmp_path: Path, has_channel: bool) -> None:
    with (
        qcli_lookupd() as lookupd,
        nsqd(tmp_path / "a", f"--lookupd-tcp-address={lookupd.tcp_address}") as broker,
    ):
        broker.create("clicks", *(["archive"] if has_channel else []))
        while b"clicks" not in lookupd.http("GET", "/topics"):
            pass
        args = ("tail", "clicks", "-n", "1", f"--lookupd-http-address={lookupd.http_address}")
        with NOWHERE.running(*args) as tail:
            said = tail.hear_line()
            if has_channel:
                assert said.startswith(f"Warning: the broker at {broker.tcp_address} has no private channels")
                direct = Cli(broker.tcp_address, broker.http_address)
                direct.wait_until("clicks", lambda record: str(record["channel"]).startswith("tail"))
                broker.post("/pub", b"new", topic="clicks")
            result = tail.end()
        if has_channel:
            assert (result.code, result.out) == (ExitCode.OK, b"new\n")
        else:
            assert said.startswith(f"Error: Topic clicks has no durable channel on {broker.tcp_address}")
            assert result.code == ExitCode.USAGE


@pytest.mark.slow
def test_named_and_listed_brokers_are_united(tmp_path: Path, nowhere: Cli) -> None:
    """The named one is not registered. A typed address replaces those of the environment."""
    with qcli_lookupd() as lookupd:
        known = f"--lookupd-tcp-address={lookupd.tcp_address}"
        with qcli_serve(tmp_path / "a", known) as listed, qcli_serve(tmp_path / "b") as named:
            for broker, body in ((listed, b"listed"), (named, b"named")):
                broker.create("clicks", "archive")
                broker.post("/pub", body, topic="clicks")
            args = ("tail", "clicks/archive", "--lookupd-http-address", lookupd.http_address)
            result = nowhere(*args, "-n", "2", "--nsqd-tcp-address", named.tcp_address)
            assert (result.code, sorted(result.out.split())) == (0, [b"listed", b"named"])
            named.post("/pub", b"named", topic="clicks")
            env = {"QCLI_LOOKUPD_HTTP_ADDRESS": lookupd.http_address}
            only = nowhere(*args[:2], "-n", "1", "--nsqd-tcp-address", named.tcp_address, env=env)
            assert (only.code, only.out) == (0, b"named\n")


def test_unreachable_service_is_named(nowhere: Cli) -> None:
    result = nowhere("tail", "clicks", "--lookupd-http-address", "127.0.0.1:1")
    assert "127.0.0.1:1: Connection refused. Start one" in result.err
    assert (result.code, result.out) == (ExitCode.UNREACHABLE, b"")
    assert "127.0.0.1:1" in result.err
    assert "--lookupd-http-address" in result.err
    assert "--nsqd-tcp-address" not in result.err


def test_address_without_port(nowhere: Cli) -> None:
    args, reason = ["--lookupd-http-address", "127.0.0.1"], "has no port"
    result = nowhere("tail", "clicks", *args)
    assert (result.code, result.out) == (ExitCode.USAGE, b"")
    assert reason in " ".join(result.err.split())


def test_topic_without_a_registered_broker_is_reported_on_a_terminal(tmp_path: Path, nowhere: Cli) -> None:
    """Otherwise a user whose broker does not register waits without an end."""
    with qcli_lookupd() as lookupd:
        known = f"--lookupd-tcp-address={lookupd.tcp_address}"
        with qcli_serve(tmp_path / "a", known) as broker:
            broker.create("clicks", "archive")
            while b"clicks" not in lookupd.http("GET", "/topics"):
                pass
            told = f"--lookupd-http-address={lookupd.http_address}"
            with nowhere.on_terminal(
                "tail", "clicks/archive", "orders", told, columns=300, QCLI_NSQD_TCP_ADDRESS=""
            ) as terminal:
                terminal.expect(b"Waiting for messages of clicks/archive, orders; Ctrl-C ends.\r\n")
                terminal.expect(
                    f"Note: no broker that is registered at {lookupd.http_address} has orders yet. 'qcli serve "
                    "--lookupd-tcp-address HOST:4160' registers.\r\n".encode()
                )
                assert terminal.interrupt() == ExitCode.INTERRUPTED
