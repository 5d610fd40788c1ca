"""The alert rules and the dashboard, with promtool and with a real Prometheus that scrapes a real broker."""

import json
import re
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

import trio_nsq.sync
from broker.metrics import documented
from cli.support import Cli
from interop.peers import Broker, free_address, prometheus, qcli_serve, system_program

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())
RULE_TESTS = yaml.safe_load((DEPLOY / "prometheus/alerts-test.yml").read_text())
DASHBOARD = json.loads((DEPLOY / "grafana/trio-nsq.json").read_text())
PATIENCE_S = 60.0


def promtool(*words: str | Path, text: str = "") -> None:
    done = subprocess.run(
        [system_program("promtool"), *words], input=text, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_configuration() -> None:
    promtool("check", "config", DEPLOY / "prometheus/prometheus.yml")  # and the rules that it names


def test_alerts_fire_on_the_data_they_should() -> None:
    promtool("test", "rules", DEPLOY / "prometheus/alerts-test.yml")


def test_every_alert_has_data_on_which_it_fires_and_data_on_which_it_does_not() -> None:
    names = {rule["alert"] for group in RULES["groups"] for rule in group["rules"]}
    checks = [check for test in RULE_TESTS["tests"] for check in test["alert_rule_test"]]
    assert {check["alertname"] for check in checks if check.get("exp_alerts")} == names
    assert {check["alertname"] for check in checks if not check.get("exp_alerts")} == names


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    flags = ["--sync=interval", "--e2e-processing-latency-percentile=0.99"]
    with qcli_serve(tmp_path_factory.mktemp("monitoring") / "data", *flags) as running:
        running.create("t", "c")
        running.create("dead")
        settings = {"max_attempts": 1, "dead_letter_topic": "dead"}
        running.put("/channel/settings", json.dumps(settings).encode(), topic="t", channel="c")
        yield running


def test_promtool_accepts_the_metrics(broker: Broker) -> None:
    promtool("check", "metrics", text=broker.http("GET", "/metrics").decode())


class Prometheus:
    """The HTTP API of a running Prometheus."""

    def __init__(self, address: str) -> None:
        self._address = address

    def ask(self, path: str, **params: str) -> Any:
        """Return the data of an answer. Raises HTTPError, for example if an expression is not valid."""
        url = f"http://{self._address}/api/v1/{path}?{urllib.parse.urlencode(params)}"
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            return json.load(answer)["data"]

    def has_data(self, expression: str) -> bool:
        """Whether a panel or a variable of the dashboard with this expression shows something."""
        if variable := re.fullmatch(r"label_values\((.*), (\w+)\)", expression):
            return bool(self.ask(f"label/{variable[2]}/values", **{"match[]": variable[1]}))
        return bool(self.ask("query", query=expression)["result"])


@pytest.fixture(scope="module")
def server(broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with scraping(tmp_path_factory, [broker.http_address]) as found:
        yield found


@contextmanager
def scraping(
    tmp_path_factory: pytest.TempPathFactory, brokers: Sequence[str], jobs: Sequence[str] = ()
) -> Iterator[Prometheus]:
    """Prometheus with the configuration of `deploy/`, but for the addresses and shorter intervals."""
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    config["global"] |= {
        "scrape_interval": "200ms",
        "scrape_timeout": "200ms",
        "evaluation_interval": "200ms",
    }
    config["rule_files"] = [str(DEPLOY / "prometheus" / name) for name in config["rule_files"]]
    addresses = {"trio-nsq": brokers, "trio-nsq-jobs": jobs}
    for job in config["scrape_configs"]:
        job["static_configs"] = [{"targets": list(addresses.pop(job["job_name"]))}]
    assert not addresses
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with prometheus(folder / "prometheus.yml", folder / "data") as address:
        yield Prometheus(address)


def expressions_of(dashboard: dict[str, Any]) -> set[str]:
    """What panels and variables ask Prometheus for, with all brokers, topics and channels chosen."""
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    variables = dashboard["templating"]["list"]
    asked += [variable["definition"] for variable in variables if "definition" in variable]
    return {re.sub(r"\$(\w+)", lambda name: VALUES[name[1]], text) for text in asked}


CLUSTER, JOB = "nsq_cluster_", "nsq_job_"
VALUES = {"broker": ".+", "job": ".+", "topic": ".+", "channel": ".+", "__rate_interval": "5m"}
"""Grafana sends `.*`, which would also match a label that does not exist."""


@pytest.mark.slow
def test_every_panel_shows_data(broker: Broker, server: Prometheus) -> None:
    empty = {
        expression
        for expression in expressions_of(DASHBOARD)
        if CLUSTER not in expression and JOB not in expression
    }
    assert len(empty) > 25
    deadline = time.monotonic() + PATIENCE_S
    with trio_nsq.sync.Consumer("t", "c", nsqd_tcp_addresses=[broker.tcp_address]) as consumer:
        while empty and time.monotonic() < deadline:
            broker.post("/pub", b"x", topic="t")
            next(consumer).finish()
            empty = {expression for expression in empty if not server.has_data(expression)}
    assert empty == set()


@pytest.mark.slow
def test_every_panel_of_clusters_shows_data(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("members")
    one_address = free_address()
    empty = {expression for expression in expressions_of(DASHBOARD) if CLUSTER in expression}
    assert len(empty) > 10
    flags = ("--cluster=prod", f"--http-address={one_address}", "--coordinator=static:")
    deadline = time.monotonic() + PATIENCE_S
    with (
        qcli_serve(folder / "one", *flags) as one,
        qcli_serve(folder / "two", "--cluster=prod", f"--coordinator=static:{one_address}") as two,
        scraping(tmp_path_factory, [one.http_address, two.http_address]) as server,
    ):
        one.post("/cluster/promote", b"")
        while empty and time.monotonic() < deadline:
            empty = {expression for expression in empty if not server.has_data(expression)}
            time.sleep(0.1)
    assert empty == set()


@pytest.mark.slow
def test_every_panel_of_jobs_shows_data(
    broker: Broker, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Of an export, and of a connector."""
    broker.create("clicks")
    qcli = Cli(broker.tcp_address, broker.http_address)
    to_parquet, to_file = free_address(), free_address()
    every = ("--follow", "--every", "100ms", "--engine", "inline")
    empty = {expression for expression in expressions_of(DASHBOARD) if JOB in expression}
    assert len(empty) > 10
    deadline = time.monotonic() + PATIENCE_S
    with (
        qcli.running("to-parquet", "clicks", str(tmp_path), *every, "--http-address", to_parquet),
        qcli.running("to-file", "clicks", "--output-dir", str(tmp_path), "--http-address", to_file),
        scraping(tmp_path_factory, (), [to_parquet, to_file]) as server,
    ):
        while empty and time.monotonic() < deadline:
            empty = {expression for expression in empty if not server.has_data(expression)}
            time.sleep(0.1)
        up = server.ask("query", query='up{job="trio-nsq-jobs"}')["result"]
    assert empty == set()
    assert {each["metric"]["instance"]: each["value"][1] for each in up} == {to_parquet: "1", to_file: "1"}


@pytest.mark.slow
def test_prometheus_evaluates_the_rules(broker: Broker, server: Prometheus) -> None:
    firing: set[str] = set()
    deadline = time.monotonic() + PATIENCE_S
    with trio_nsq.sync.Consumer("t", "c", nsqd_tcp_addresses=[broker.tcp_address]) as consumer:
        while "NSQDeadLetters" not in firing and time.monotonic() < deadline:
            broker.post("/pub", b"x", topic="t")
            next(consumer).requeue(0, backoff=False)  # its first attempt is its last
            (group,) = server.ask("rules")["groups"]
            firing = {rule["name"] for rule in group["rules"] if rule["state"] == "firing"}
    assert firing == {"NSQDeadLetters"}
    assert {rule["name"]: rule.get("lastError") for rule in group["rules"] if rule["health"] != "ok"} == {}


@pytest.mark.parametrize("expression", [rule["expr"] for group in RULES["groups"] for rule in group["rules"]])
def test_alerts_ask_for_metrics_that_exist(broker: Broker, expression: str) -> None:
    text = broker.http("GET", "/metrics").decode()
    known = (
        set(re.findall(r"^(\w+)", text, re.MULTILINE)) | documented("all", "leader", "archive", "job").keys()
    )
    wanted = set(re.findall(r"\b(?:nsq|process|python)_\w+", expression))
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
