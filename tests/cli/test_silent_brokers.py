"""Tests for a broker that accepts connections and never answers, such as a stopped process."""

import socket
from collections.abc import Iterator

import pytest

from cli.support import Cli, Run
from qcli.framework.errors import ExitCode


@pytest.fixture
def silent() -> Iterator[Cli]:
    """Runs commands against a port that only listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = "127.0.0.1:%d" % listener.getsockname()[1]
        yield Cli(address, address)


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("stat", "--nsqd-http-address"),
        ("topic create t", "--nsqd-http-address"),
        ("peek t", "--nsqd-http-address"),
        ("tail t --from earliest", "--nsqd-http-address"),
        ("to-parquet t x", "--nsqd-http-address"),
        ("tail t/c", "--nsqd-tcp-address"),
        ("pub t", "--nsqd-tcp-address"),
    ],
)
def test_silent_broker_is_reported_as_such(
    run_here: Run,
    silent: Cli,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
    command: str,
    option: str,
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("export"))
    monkeypatch.setattr("qcli.broker.admin_client.REQUEST_TIMEOUT_S", 0.05)
    monkeypatch.setattr("trio_nsq.client.connection.connection.HANDSHAKE_TIMEOUT_S", 0.05)
    monkeypatch.setattr("trio_nsq.client.connection.connection.LEADER_TIMEOUT_S", 0.1)
    monkeypatch.setattr("trio_nsq.client.reading.topic_reader.SILENCE_S", 0.05)
    monkeypatch.setattr("trio_nsq.client.http.broker_http.ANSWER_TIMEOUT_S", 0.05)
    result = run_here(silent, *command.split())
    assert result.code == ExitCode.UNREACHABLE
    assert f"The broker at {silent.http_address} does not answer: connected, but no answer" in result.err
    assert "stopped (SIGSTOP), overloaded, or waiting for its disk: see its log." in result.err
    assert f"Or use another address: {option}." in result.err
    assert "qcli serve" not in result.err


@pytest.mark.parametrize("command", [("pub", "t", __file__), ("tail", "t/c")])
def test_wait_for_an_answer_is_reported_on_a_terminal(silent: Cli, command: tuple[str, ...]) -> None:
    with silent.on_terminal(*command, columns=200) as terminal:
        terminal.expect(
            f"Note: no answer yet from {silent.tcp_address}. A member of a cluster waits".encode()
        )
        assert terminal.interrupt() == ExitCode.INTERRUPTED


def test_wait_names_only_brokers_that_have_not_answered(silent: Cli, qcli: Cli) -> None:
    tcp, http = f"{qcli.tcp_address},{silent.tcp_address}", f"{qcli.http_address},{silent.http_address}"
    command = ("pub", "t", __file__, "--nsqd-tcp-address", tcp, "--nsqd-http-address", http)
    with silent.on_terminal(*command, columns=200) as terminal:
        terminal.expect(f"Note: no answer yet from {silent.tcp_address}. A".encode())
        assert terminal.interrupt() == ExitCode.INTERRUPTED
