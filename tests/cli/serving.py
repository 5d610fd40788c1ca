"""Runs `qcli serve`, or only reads its command line."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cli.support import Cli, Running
from qcli.commands.serve.command import command
from qcli.commands.serve.settings import broker_options
from trio_nsq.broker import BrokerOptions

FREE_PORTS = ("--tcp-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0")


@contextmanager
def serving(tmp_path: Path, *flags: str, **env: str) -> Iterator[Running]:
    """A broker on free ports, with its data in `tmp_path`, unless flags say otherwise."""
    nowhere = Cli("127.0.0.1:1", "127.0.0.1:1", env)
    with nowhere.running("serve", "--data-path", str(tmp_path / "data"), *FREE_PORTS, *flags) as broker:
        yield broker


def hear_until_ready(broker: Running) -> list[str]:
    """What it says until it is ready, that included."""
    heard = [broker.hear_line()]
    while not heard[-1].startswith("ready"):
        heard.append(broker.hear_line())
    return heard


def refusal(tmp_path: Path, *flags: str, code: int = 1) -> str:
    """The one line that says why the broker does not start, before which only the log, or the usage, may stand."""
    with serving(tmp_path, *flags) as broker:
        result = broker.end()
    assert (result.code, result.out) == (code, b""), result.err
    errors = [
        line
        for line in result.err.splitlines()
        if not line.startswith(("[qcli] ", "Usage: ", "Try ")) and line
    ]
    assert len(errors) == 1
    assert errors[0].startswith("Error: ")
    return errors[0]


def options(*args: str) -> BrokerOptions:
    """What the broker is told for these flags, and this process's environment."""
    with command.make_context("serve", list(args)) as ctx:
        return broker_options(ctx.params)
