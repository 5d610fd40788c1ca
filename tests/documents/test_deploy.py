"""The files in `deploy/` fit the program: commands are understood, metrics exist, and their tools accept them."""

import json
import re
import shlex
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import promql_parser
import pytest
import yaml

from interop.peers import Broker, qcli_serve
from qcli.app import root

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "docker/compose.yaml").read_text())
DOCKERFILE = (DEPLOY / "docker/Dockerfile").read_text()
UNIT = (DEPLOY / "systemd/trio-nsq.service").read_text()
RULES = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())
DASHBOARD = json.loads((DEPLOY / "grafana/trio-nsq.json").read_text())


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


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "trio-nsq.service"
    unit.write_text(re.sub(r"^(ExecStart=)\S+", r"\1/bin/true", UNIT, flags=re.MULTILINE))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=false", str(unit)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_containers_run_commands_that_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    (default,) = re.findall(r"^CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
    check_command(json.loads(default), monkeypatch)
    ours = [service for service in COMPOSE["services"].values() if service["image"] == "trio-nsq"]
    assert len(ours) == 2
    for service in ours:
        check_command(service["command"], monkeypatch)


def test_files_that_containers_get_are_there() -> None:
    for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE):
        *sources, _ = line.split()
        assert [source for source in sources if not (ROOT / source).exists()] == []
    mounts = [mount.split(":")[0] for service in COMPOSE["services"].values() for mount in service["volumes"]]
    files = [mount for mount in mounts if mount.startswith(".")]
    assert len(files) == 4
    assert [name for name in files if not (DEPLOY / "docker" / name).exists()] == []
    assert {mount for mount in mounts if not mount.startswith(".")} == set(COMPOSE["volumes"])


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    flags = ["--sync=interval", "--e2e-processing-latency-percentile=0.99"]
    with qcli_serve(tmp_path_factory.mktemp("deploy") / "data", *flags) as running:
        running.create("t", "c")
        yield running


def names_in(expressions: list[str]) -> set[str]:
    return {name for text in expressions for name in re.findall(r"\b(?:nsq|process|python)_\w+", text)}


def expressions_of(dashboard: dict[str, Any]) -> list[str]:
    """What panels and variables ask Prometheus for."""
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    variables = dashboard["templating"]["list"]
    return asked + [variable["definition"] for variable in variables if "definition" in variable]


@pytest.mark.parametrize(
    "expressions",
    [
        expressions_of(DASHBOARD),
        [rule["expr"] for group in RULES["groups"] for rule in group["rules"]],
    ],
    ids=["dashboard", "alerts"],
)
def test_expressions_are_valid_and_ask_for_metrics_that_exist(broker: Broker, expressions: list[str]) -> None:
    with urllib.request.urlopen(f"http://{broker.http_address}/metrics") as answer:
        text = answer.read().decode()
    known = set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE)) | set(
        re.findall(r"^(\w+)", text, re.MULTILINE)
    )
    for expression in expressions:
        if not expression.startswith("label_values("):
            promql_parser.parse(expression.replace("$__rate_interval", "5m"))
    wanted = names_in(expressions)
    assert len(wanted) > 8
    assert wanted - known == set()


def test_the_dashboard_shows_every_panel_in_a_place_of_its_own() -> None:
    places = [
        (panel["gridPos"]["x"] + column, panel["gridPos"]["y"] + line)
        for panel in DASHBOARD["panels"]
        for column in range(panel["gridPos"]["w"])
        for line in range(panel["gridPos"]["h"])
    ]
    assert len(places) == len(set(places))
    assert max(column for column, _ in places) < 24
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
