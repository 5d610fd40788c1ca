"""The files for systemd and containers fit the program: commands are understood, and systemd accepts the unit."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import click
import pytest
import yaml

from interop.peers import system_program
from qcli.app import root

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "docker/compose.yaml").read_text())
CLUSTER = yaml.safe_load((DEPLOY / "docker/compose-cluster.yaml").read_text())
DOCKERFILE = (DEPLOY / "docker/Dockerfile").read_text()
UNIT = (DEPLOY / "systemd/trio-nsq.service").read_text()
CONNECTOR = (DEPLOY / "systemd/trio-nsq-connector@.service").read_text()


def check_command(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises UsageError if qcli does not understand a command line; configuration files need not be there."""
    words = [word for word in words if word != "--config" and not word.endswith(".toml")]
    top = click.Context(root, info_name="qcli")
    command = root.get_command(top, words[0])
    assert command is not None
    monkeypatch.chdir("/")
    command.make_context(words[0], words[1:], parent=top)


def test_the_unit_runs_a_command_that_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = re.findall(r"^ExecStart=\S*/qcli (.*)$", UNIT, re.MULTILINE)
    check_command(shlex.split(line), monkeypatch)


def test_the_connectors_of_the_unit_are_commands_that_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = re.findall(r"ARGUMENTS=(to-[^']*?)'?(?: >.*)?$", CONNECTOR, re.MULTILINE)
    assert [line.split()[0] for line in lines] == ["to-file", "to-http", "to-nsq"]
    for line in lines:
        check_command(shlex.split(line.replace("@/etc/trio-nsq/hook-headers", "X-Key: 1")), monkeypatch)


@pytest.mark.parametrize(
    ("name", "text"), [("trio-nsq.service", UNIT), ("trio-nsq-connector@archive.service", CONNECTOR)]
)
def test_systemd_accepts_the_unit(tmp_path: Path, name: str, text: str) -> None:
    unit = tmp_path / name
    unit.write_text(re.sub(r"^(ExecStart=)\S+", r"\1/bin/true", text, flags=re.MULTILINE))
    done = subprocess.run(
        [system_program("systemd-analyze"), "verify", "--man=false", str(unit)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_containers_run_commands_that_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    (default,) = re.findall(r"^CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
    check_command(json.loads(default), monkeypatch)
    ours = [service for service in COMPOSE["services"].values() if service["image"] == "trio-nsq"]
    assert len(ours) == 3
    for service in ours:
        check_command(service["command"], monkeypatch)


def test_containers_of_a_cluster_are_members_that_find_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    services = CLUSTER["services"]
    members = {name: each for name, each in services.items() if each.get("command", [""])[0] == "serve"}
    assert len(members) == 3
    check_command(services["lookupd"]["command"], monkeypatch)
    for name, member in members.items():
        options = {
            f"--{key[11:].lower().replace('_', '-')}": value for key, value in member["environment"].items()
        }
        check_command(
            member["command"] + [f"{option}={value}" for option, value in options.items()], monkeypatch
        )
        # A container's name is how the others reach it; each has a folder of its own.
        assert f"--broadcast-address={name}" in member["command"]
        assert member["volumes"] == [f"{name}:/data"]
        assert options["--data-path"] == "/data"
        for option in ("--coordinator", "--lookupd-tcp-address"):
            host, port = options[option].rpartition("/")[2].split(":")
            assert any(f":{port}" in word for word in services[host]["command"])
            assert host in member["depends_on"]
    volumes = {mount.split(":")[0] for each in services.values() for mount in each["volumes"]}
    assert volumes == set(CLUSTER["volumes"])
    ports = [mapping for each in services.values() for mapping in each.get("ports", ())]
    assert len(set(ports)) == len(ports)
    assert all(mapping.startswith("127.0.0.1:") for mapping in ports)


def test_files_that_containers_get_are_there() -> None:
    copies = re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE)
    sources = {source for line in copies for source in line.split()}
    assert {source for source in sources if not (ROOT / source).exists()} == set()
    ignore = (DEPLOY / "docker/Dockerfile.dockerignore").read_text()
    assert set(re.findall(r"^!(.*)$", ignore, re.MULTILINE)) == sources
    mounts = [
        mount.split(":")[0]
        for service in COMPOSE["services"].values()
        for mount in service.get("volumes", ())
    ]
    files = [mount for mount in mounts if mount.startswith(".")]
    assert len(files) == 4
    assert [name for name in files if not (DEPLOY / "docker" / name).exists()] == []
    assert {mount for mount in mounts if not mount.startswith(".")} == set(COMPOSE["volumes"])
