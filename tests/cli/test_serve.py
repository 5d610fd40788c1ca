"""`qcli serve`."""

import dataclasses
import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import pytest

from cli.support import Cli, Running
from qcli.serve import broker_options, command
from trio_nsq.broker import BrokerOptions
from trio_nsq.protocol import Limits

FREE_PORTS = ("--tcp-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0")


@contextmanager
def serving(tmp_path: Path, *flags: str) -> Iterator[Running]:
    """A broker that is ready; `log` holds what it said until then."""
    nowhere = Cli("127.0.0.1:1", "127.0.0.1:1")
    with nowhere.running("serve", "--data-path", str(tmp_path / "data"), *FREE_PORTS, *flags) as broker:
        yield broker


def hear_until_ready(broker: Running) -> list[str]:
    heard = [broker.hear_line()]
    while not heard[-1].startswith("ready"):
        heard.append(broker.hear_line())
    return heard


def options(*args: str) -> BrokerOptions:
    """What the broker is told for these flags."""
    with command.make_context("serve", list(args)) as ctx:
        params = dict(ctx.params)
    for other in ("address_file", "log_level", "log_prefix"):
        del params[other]
    return broker_options(params)


def test_defaults_are_the_broker_s() -> None:
    assert options() == BrokerOptions(data_path=Path())


def test_every_option_of_the_broker_has_a_flag() -> None:
    names = {param.name for param in command.params}
    fields = {field.name for field in dataclasses.fields(BrokerOptions)} - {"limits"}
    # nsqd has no flags for the first two; compression comes with a flag of its own.
    limits = {field.name for field in dataclasses.fields(Limits)} - {
        "heartbeat_interval_ms",
        "output_buffer_size",
        "max_deflate_level",
    }
    assert (fields | limits) - names == set()


def test_flags_arrive() -> None:
    given = options(
        "--sync=interval", "--sync-timeout", "1m", "--msg-timeout=90s", "--max-msg-size", "10", "--node-id", "7",
        "--http-address", "", "--mem-queue-size=0",
    )  # fmt: skip
    assert (given.sync, given.sync_timeout_ms, given.node_id, given.http_address) == (
        "interval",
        60_000,
        7,
        "",
    )
    assert (given.limits.msg_timeout_ms, given.limits.max_msg_size, given.mem_queue_size) == (90_000, 10, 0)


def test_ready_comes_after_the_address_file(tmp_path: Path) -> None:
    file = tmp_path / "addresses.json"
    file.write_text("of an earlier broker")
    with serving(tmp_path, "--address-file", str(file)) as broker:
        ready = hear_until_ready(broker)[-1]
        addresses = json.loads(file.read_text())
        assert ready == (
            f"ready: tcp {addresses['tcp_address']}, http {addresses['http_address']}, data {tmp_path / 'data'}\n"
        )
        qcli = Cli(addresses["tcp_address"], addresses["http_address"])
        assert qcli("topic", "list").code == 0
        assert [path.name for path in tmp_path.iterdir() if path.suffix != ""] == ["addresses.json"]
        broker.process.send_signal(signal.SIGINT)
        assert broker.process.wait(30) == 0
    assert not file.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_it_in_good_order(tmp_path: Path, number: signal.Signals) -> None:
    with serving(tmp_path) as broker:
        hear_until_ready(broker)
        broker.process.send_signal(number)
        result = broker.end()
    assert (result.code, result.out) == (0, b"")
    assert "Traceback" not in result.err


def test_messages_outlive_it(tmp_path: Path) -> None:
    file = tmp_path / "addresses.json"
    for out in (b"", b"a\n"):
        with serving(tmp_path, "--address-file", str(file)) as broker:
            hear_until_ready(broker)
            addresses = json.loads(file.read_text())
            qcli = Cli(addresses["tcp_address"], addresses["http_address"])
            if out:
                assert qcli("tail", "t/c", "-n", "1").out == out
            else:
                assert qcli("pub", "t", stdin=b"a\n").code == 0
            broker.process.terminate()
            assert broker.process.wait(30) == 0


def test_the_log_is_nsqd_s(tmp_path: Path) -> None:
    with serving(tmp_path, "--log-prefix", "[b1] ") as broker:
        log = hear_until_ready(broker)[:-1]
        assert log
        for line in log:
            assert re.fullmatch(r"\[b1\] \d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d{6} [A-Z]+: .+\n", line)


def test_a_log_level_is_kept_to(tmp_path: Path) -> None:
    with serving(tmp_path, "--log-level", "ERROR") as broker:
        assert len(hear_until_ready(broker)) == 1


def test_no_http(tmp_path: Path) -> None:
    with serving(tmp_path, "--http-address", "", "--address-file", str(tmp_path / "a.json")) as broker:
        assert ", http off, " in hear_until_ready(broker)[-1]
        assert json.loads((tmp_path / "a.json").read_text())["http_address"] is None


def refusal(tmp_path: Path, *flags: str) -> str:
    """The one line that says why the broker does not start."""
    with serving(tmp_path, *flags) as broker:
        result = broker.end()
    assert (result.code, result.out) == (1, b"")
    errors = [line for line in result.err.splitlines() if not line.startswith("[qcli] ")]
    assert len(errors) == 1
    assert errors[0].startswith("Error: ")
    return errors[0]


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert address in refusal(tmp_path, "--tcp-address", address)
        assert address in refusal(tmp_path, "--http-address", address)


def test_a_folder_in_use(tmp_path: Path) -> None:
    with serving(tmp_path) as broker:
        hear_until_ready(broker)
        assert str(tmp_path / "data") in refusal(tmp_path)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    assert "missing" in refusal(tmp_path, "--data-path", str(tmp_path / "missing" / "data"))


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file") in refusal(tmp_path, "--data-path", str(tmp_path / "file"))


def test_a_relative_folder_is_told_as_an_absolute_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert str(tmp_path / "no") in refusal(tmp_path, "--data-path", "./no/such")
    with serving(tmp_path, "--data-path", "./here") as broker:
        assert hear_until_ready(broker)[-1].endswith(f", data {tmp_path / 'here'}\n")


def test_an_address_file_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "missing" / "a.json"
    expected = f"Error: --address-file: cannot write {file}: No such file or directory."
    assert refusal(tmp_path, "--address-file", str(file)) == expected


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_is_not_writable(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir(mode=0o500)
    assert str(tmp_path / "data") in refusal(tmp_path)


@pytest.mark.parametrize(
    "flag",
    [
        "--tcp-address=4150",
        "--node-id=1024",
        "--sync=never",
        "--msg-timeout=60",
        "--sync-every=0",
        "--log-level=x",
    ],
)
def test_bad_flags_are_usage_errors(flag: str) -> None:
    with pytest.raises(click.UsageError):
        options(flag)
