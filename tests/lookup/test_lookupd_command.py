"""Tests for `qcli lookupd`: options, their sources, and output."""

import dataclasses
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import pytest

from cli.support import DEADLINE_S, Cli, Running, lines_until_ready
from interop.peers import nsqlookupd_example_config, nsqlookupd_program
from qcli.commands.lookupd import SETTINGS, command, lookupd_options
from qcli.framework.errors import Failure
from qcli.framework.params import duration
from trio_nsq.lookup.service.options import LookupdOptions


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore variables of the user who runs the tests."""
    for name in [name for name in os.environ if name.startswith("QCLI_")]:
        monkeypatch.delenv(name)


def options(*args: str) -> LookupdOptions:
    """Return the service's options for these flags and the environment of this process."""
    with command.make_context("lookupd", list(args)) as ctx:
        return lookupd_options(ctx.params)


@contextmanager
def running(*flags: str, **env: str) -> Iterator[Running]:
    """Run a service on free ports, unless the flags have others."""
    free = ("--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0")
    with Cli("127.0.0.1:1", "127.0.0.1:1", env).running("lookupd", *free, *flags) as service:
        yield service


def test_defaults_are_those_of_the_service() -> None:
    assert options() == LookupdOptions()
    names = {setting.name for setting in SETTINGS}
    assert {field.name for field in dataclasses.fields(LookupdOptions)} - names == set()


@pytest.mark.interop
def test_each_flag_of_nsqlookupd_exists_with_its_default() -> None:
    done = subprocess.run(
        [nsqlookupd_program(), "--help"], capture_output=True, text=True, timeout=DEADLINE_S
    )
    described = re.findall(r"^  -([a-z0-9-]+)(?: (\S+))?\n(.*)$", done.stderr, re.MULTILINE)
    assert len(described) > 8
    ours = {param.opts[0]: param for param in command.params if isinstance(param, click.Option)}
    other = {
        # A documented difference: docs/reference/differences.md.
        "tcp-address": "127.0.0.1:4160",
        "http-address": "127.0.0.1:4161",
        "log-prefix": "[qcli] ",
        # nsqlookupd computes the default from the machine.
        "broadcast-address": None,
    }
    for flag, kind, text in described:
        param = ours[f"--{flag}"]
        default = param.default if param.show_default else None
        if flag in other:
            assert default == other[flag], flag
        elif kind == "duration":
            found = re.search(r"\(default ([^)]*)\)$", text)
            assert found
            assert duration(str(default)) == duration(found[1]), flag
        elif flag == "log-level":
            assert default == "info"


def test_flags_environment_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "c.toml"
    file.write_text(
        'tcp_address = "a:1"\nhttp_address = "b:2"\nbroadcast_address = "c"\ninactive_producer_timeout = 1500\n'
        'tombstone_lifetime = "1m30s"\nmax_registrations = 7\ndata_path = "/d"\n'
    )
    expected = LookupdOptions("a:1", "b:2", "c", 1500, 90_000, Path("/d"), 7)
    assert options("-config", str(file)) == expected
    monkeypatch.setenv("QCLI_MAX_REGISTRATIONS", "8")
    monkeypatch.setenv("QCLI_TOMBSTONE_LIFETIME", "0")
    assert options("-config", str(file), "-tombstone-lifetime=1s") == dataclasses.replace(
        expected, max_registrations=8, tombstone_lifetime_ms=1000
    )


@pytest.mark.interop
def test_example_file_of_nsqlookupd_is_accepted() -> None:
    given = options("--config", str(nsqlookupd_example_config()))
    assert given == LookupdOptions("0.0.0.0:4160", "0.0.0.0:4161")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("inactive_producer_timeout = true", "inactive_producer_timeout: true is not a duration"),
        ('inactive_producer_timeout = "0"', "inactive_producer_timeout: It must be longer than 0"),
        ('tcp_address = "nowhere"', "tcp_address: 'nowhere' is not host:port"),
        ('http_address = ""', "http_address: '' is not host:port"),
        ("max_registrations = 0", "max_registrations: 0 is not in the range"),
    ],
)
def test_invalid_values(tmp_path: Path, line: str, reason: str) -> None:
    (tmp_path / "c.toml").write_text(line)
    with pytest.raises(Failure) as refused:
        options("--config", str(tmp_path / "c.toml"))
    assert reason in refused.value.message


@pytest.mark.parametrize(
    "args",
    [["--tcp-address=./socket"], ["--http-address="], ["--tombstone-lifetime=1"], ["-verbose", "false"]],
)
def test_invalid_flags(args: list[str]) -> None:
    with pytest.raises(click.UsageError):
        options(*args)


def test_service_runs_until_a_signal(tmp_path: Path) -> None:
    file, config = tmp_path / "a.json", tmp_path / "c.toml"
    config.write_text("tpc_address = 1")
    flags = (f"--address-file={file}", f"--data-path={tmp_path / 'd'}", f"-config={config}", "-verbose")
    with running(*flags, QCLI_LOG_PREFIX="[x] ") as service:
        heard = lines_until_ready(service)
        bound = json.loads(file.read_text())
        listening = f"tcp {bound['tcp_address']}, http {bound['http_address']}"
        assert heard.pop() == f"ready: {listening}, data {tmp_path / 'd'}\n"
        for line in heard:
            assert re.fullmatch(r"\[x\] \d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d{6} [A-Z]+: .+\n", line)
        assert "WARNING: configuration: unknown key tpc_address is ignored" in "".join(heard)
        assert "WARNING: --verbose has no effect here: see --log-level\n" in "".join(heard)
        service.process.send_signal(signal.SIGTERM)
        result = service.end()
    assert (result.code, result.out, file.exists()) == (0, b"", False)
    assert "Traceback" not in result.err


def test_failed_start_names_the_reason(tmp_path: Path) -> None:
    with running(f"--data-path={tmp_path / 'no' / 'd'}") as service:
        result = service.end()
    assert (result.code, result.out) == (1, b"")
    assert result.err.splitlines()[-1].startswith(
        f"Error: --data-path: cannot use {tmp_path}/no/d: No such file"
    )
