"""The files for systemd and containers fit the program: commands are understood, and systemd accepts the unit."""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from broker.certificates import Certificates
from documents.commands import check_command
from documents.compose import Compose, until
from interop.peers import free_ports, qcli_serve, system_program

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "docker/compose.yaml").read_text())
CLUSTER = yaml.safe_load((DEPLOY / "docker/compose-cluster.yaml").read_text())
DOCKERFILE = (DEPLOY / "docker/Dockerfile").read_text()
UNIT = (DEPLOY / "systemd/trio-nsq.service").read_text()
CONNECTOR = (DEPLOY / "systemd/trio-nsq-connector@.service").read_text()


def test_the_unit_runs_a_command_that_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = re.findall(r"^ExecStart=\S*/qcli (.*)$", UNIT, re.MULTILINE)
    check_command(shlex.split(line), monkeypatch)


def test_the_connectors_of_the_unit_are_commands_that_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = re.findall(r"ARGUMENTS=((?:to-|pipeline )[^']*?)'?(?: >.*)?$", CONNECTOR, re.MULTILINE)
    assert [line.split()[0] for line in lines] == ["to-file", "to-http", "to-nsq", "to-parquet", "pipeline"]
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


@pytest.mark.slow
def test_the_services_of_a_cluster_run(tmp_path: Path) -> None:
    """As processes, with the commands, environments and health checks of the containers."""
    compose = Compose(CLUSTER["services"], tmp_path)

    def in_sync() -> int:
        cluster = compose.get("n2", 4151, "/cluster") or {"members": []}
        return sum(each["in_sync"] and each["state"] != "disconnected" for each in cluster["members"])

    with compose.running() as children:
        until(lambda: in_sync() == 3, children)
        assert all(compose.is_healthy(name) for name in ("n1", "n2", "n3"))
        assert compose.get("n3", 4151, "/pub?topic=clicks", b"1") == "OK"
        until(lambda: has_producer(compose, "clicks"), children)
        leader = compose.get("n1", 4151, "/cluster")["leader"]
        (name,) = [
            each for each in ("n1", "n2", "n3") if compose.get(each, 4151, "/cluster/member")["id"] == leader
        ]
        children.pop(name).close()
        other = "n1" if name != "n1" else "n2"
        until(
            lambda: (compose.get(other, 4151, "/cluster") or {"leader": leader})["leader"] != leader, children
        )
        assert not compose.is_healthy(name)
        assert compose.get(other, 4151, "/pub?topic=clicks", b"2") == "OK"


def has_producer(compose: Compose, topic: str) -> bool:
    """Whether the discovery service knows a broker of a topic."""
    found = compose.get("lookupd", 4161, f"/lookup?topic={topic}")
    return bool(found and found["producers"])


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


@pytest.mark.parametrize("requires_tls", [False, True])
def test_health_check_of_the_image(tmp_path: Path, requires_tls: bool) -> None:
    """With curl for the wget of the image: a running broker is healthy, also if it requires TLS; nothing else is."""
    (check,) = re.findall(r"^HEALTHCHECK .*? CMD (.*)$", DOCKERFILE, re.MULTILINE)
    (tmp_path / "wget").write_text('#!/bin/sh\nfor url; do :; done\nexec curl -s -f -k -o /dev/null "$url"\n')
    (tmp_path / "wget").chmod(0o755)
    flags: list[str] = []
    if requires_tls:
        options = Certificates(tmp_path).options
        flags = [f"--{name.replace('_', '-')}={path}" for name, path in options.items()] + ["--tls-required"]
    ports = dict(zip(("4151", "4152", "4161", "4171"), map(str, free_ports(4)), strict=True))

    def code() -> int:
        line = re.sub(r"(?<=:)\d+", lambda found: ports[found[0]], check)
        environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        return subprocess.run(
            ["sh", "-c", line], env=environment, capture_output=True, check=False
        ).returncode

    assert code() == 1
    with qcli_serve(tmp_path / "data", *flags) as broker:
        ports["4151"] = broker.http_address.rpartition(":")[2]
        if requires_tls:
            ports["4152"] = str(broker.https_address).rpartition(":")[2]
        assert code() == 0
