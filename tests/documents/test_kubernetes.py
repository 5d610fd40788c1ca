"""The manifests for Kubernetes: they have its schema, their commands are understood, and what the pods run works."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from tools.pods import single_pods

from documents.commands import check_command
from documents.compose import Compose, until
from documents.manifests import mistakes, render
from trio_nsq.fleet.allowed_tables import AllowedPlace, may_have_table

FOLDER = Path(__file__).parents[2] / "deploy/kubernetes"
DEPLOYED = "brokers", "cluster"
FOLDERS = "lookupd", "brokers", "cluster", "console", "tables", "tokens"


def objects(*names: str) -> list[dict[str, Any]]:
    """Return the objects of the files in these folders, without those of kustomize."""
    files = [file for name in names for file in sorted((FOLDER / name).glob("*.yaml"))]
    found = [each for file in files for each in yaml.safe_load_all(file.read_text())]
    return [each for each in found if each["kind"] != "Kustomization"]


def containers(workload: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = workload["spec"]["template"]["spec"]["containers"]
    return found


WORKLOADS = [each for each in objects(*FOLDERS) if "template" in each["spec"]]


@pytest.mark.interop
@pytest.mark.parametrize("name", FOLDERS)
def test_kustomizations_are_valid(name: str) -> None:
    rendered = render(FOLDER / name)
    assert mistakes(rendered) == []
    found = [each for each in yaml.safe_load_all(rendered) if "template" in each["spec"]]
    assert {each["metadata"]["name"] for each in found} >= {
        each["metadata"]["name"] for each in objects(name) if each in WORKLOADS
    }
    if name in DEPLOYED:
        assert {each["metadata"]["namespace"] for each in yaml.safe_load_all(rendered)} == {"nsq"}
        images = {container["image"] for each in found for container in containers(each)}
        assert images == {"registry.example.com/trio-nsq:0.1.0"}


@pytest.mark.interop
def test_tokens_are_where_the_commands_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page says how to make the secret: it must have all the keys that pods mount."""
    page = (FOLDER.parents[1] / "docs/how-to/run-on-kubernetes.md").read_text()
    commands = page.split("create secret generic nsq-access")[1:]
    rendered = [each for each in yaml.safe_load_all(render(FOLDER / "tokens")) if "template" in each["spec"]]
    assert len(rendered) == 3
    mounted: set[str] = set()
    for workload in rendered:
        (container,), volumes = containers(workload), workload["spec"]["template"]["spec"]["volumes"]
        check_command(
            [re.sub(r"\$\(POD_(\w+)\)", r"pod-\1", word) for word in container["args"]], monkeypatch
        )
        (secret,) = (each["secret"] for each in volumes)
        (folder,) = (each["mountPath"] for each in container["volumeMounts"] if each["name"] == "access")
        values = [*container["args"], *(each.get("value", "") for each in container.get("env", ()))]
        files = re.findall(rf"(?:^|=){folder}/(\S+)$", "\n".join(values), re.MULTILINE)
        assert {each["path"]: each["key"] for each in secret["items"]} == {file: file for file in files}
        assert (secret["secretName"], secret["defaultMode"]) == ("nsq-access", 0o440)
        mounted.update(files)
    assert [{*re.findall(r"--from-file=(\S+)", command)} for command in commands] == [mounted] * 2


@pytest.mark.interop
def test_objects_for_operators_are_valid() -> None:
    files = [file.read_text() for file in sorted((FOLDER / "monitoring").glob("*.yaml"))]
    assert mistakes("\n---\n".join(files)) == []


@pytest.mark.interop
@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("StatefulSet", {"replicas": "two"}),
        ("StatefulSet", {"selector": None}),
        ("Deployment", {"replica": 2}),
        ("Service", {"ports": [{"name": "tcp"}]}),
        ("ServiceMonitor", {"endpoints": [{"intervall": "15s"}]}),
        ("ScaledObject", {"maxReplicaCount": "10"}),
    ],
)
def test_mistakes_are_found(kind: str, change: dict[str, Any]) -> None:
    """In what the tests above call valid."""
    changed = next(each for each in objects("brokers", "console", "monitoring") if each["kind"] == kind)
    spec = changed["spec"] | change
    changed["spec"] = {name: value for name, value in spec.items() if value is not None}
    (mistake,) = mistakes(yaml.safe_dump(changed))
    assert mistake.startswith(f"{kind} ")


@pytest.mark.interop
def test_pods_without_kubernetes_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that `make image` runs: they know each other by names of pods."""
    pods = single_pods(("lookupd", "brokers", "console"), "localhost/trio-nsq:latest", "check-")
    assert mistakes(yaml.safe_dump_all(pods)) == []
    names = [each["metadata"]["name"] for each in pods]
    assert names == ["check-nsqlookupd-0", "check-nsqd-0", "check-nsq-console-0"]
    for pod in pods:
        (container,) = pod["spec"]["containers"]
        check_command(container["args"], monkeypatch)
        hosts = re.findall(r"(?:address=|^)([-\w.]+)(?::\d+)?$", "\n".join(container["args"]), re.MULTILINE)
        assert {*hosts} - {"0.0.0.0", container["args"][0]} <= {*names}
        mounted = {each["name"] for each in container.get("volumeMounts", ())}
        assert mounted == {each["name"] for each in pod["spec"].get("volumes", ())}


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda each: each["metadata"]["name"])
def test_containers_run_commands_that_are_understood(
    workload: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (container,) = containers(workload)
    words = [re.sub(r"\$\(POD_(\w+)\)", r"pod-\1", word) for word in container["args"]]
    check_command(words, monkeypatch)
    if hook := container.get("lifecycle"):
        program, *words = hook["preStop"]["exec"]["command"]
        assert program == "qcli"
        check_command(words, monkeypatch)
        seconds = int(re.findall(r"^(\d+)s$", words[words.index("--timeout") + 1])[0])
        assert seconds < workload["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] / 2


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda each: each["metadata"]["name"])
def test_names_and_ports_agree(workload: dict[str, Any]) -> None:
    spec, (container,) = workload["spec"], containers(workload)
    name, labels = workload["metadata"]["name"], spec["template"]["metadata"]["labels"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert set(ports.values()) == {
        int(port) for port in re.findall(r"0\.0\.0\.0:(\d+)", str(container["args"]))
    }
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        how = container.get(probe, container["readinessProbe"])
        assert (how.get("httpGet") or how["tcpSocket"])["port"] in ports
    folder = next(each for each in FOLDERS if workload in objects(each))
    others = objects(folder)
    services = [
        each
        for each in others
        if each["kind"] == "Service" and each["spec"]["selector"].items() <= labels.items()
    ]
    assert services
    for service in services:
        assert {each["name"]: each["port"] for each in service["spec"]["ports"]} == ports
        assert all(each["targetPort"] == each["name"] for each in service["spec"]["ports"])
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    if workload["kind"] == "StatefulSet":
        headless = {each["metadata"]["name"] for each in services if each["spec"].get("clusterIP") == "None"}
        assert headless == {spec["serviceName"]}
        assert (
            f"--broadcast-address=$(POD_NAME).{spec['serviceName']}.$(POD_NAMESPACE).svc" in container["args"]
        )
        assert [each["name"] for each in container["volumeMounts"]] == [
            each["metadata"]["name"] for each in spec["volumeClaimTemplates"]
        ]
        (budget,) = [each for each in others if each["kind"] == "PodDisruptionBudget"]
        assert budget["spec"]["selector"] == spec["selector"]
        assert budget["spec"]["maxUnavailable"] == 1
    pod = spec["template"]["spec"]["securityContext"]
    assert (pod["runAsNonRoot"], pod["runAsUser"]) == (True, 4150)
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert name in labels.values()


def test_prometheus_scrapes_each_broker_once() -> None:
    monitors = [each for each in objects("monitoring") if each["kind"] == "ServiceMonitor"]
    monitor, of_tables = monitors
    names = monitor["spec"]["selector"]["matchExpressions"][0]["values"]
    assert sorted(names) == ["nsq", "nsqd"]
    (namespace,) = {
        yaml.safe_load((FOLDER / each / "kustomization.yaml").read_text())["namespace"] for each in DEPLOYED
    }
    assert all(each["spec"]["namespaceSelector"]["matchNames"] == [namespace] for each in monitors)
    ends = [end for each in monitors for end in each["spec"]["endpoints"]]
    jobs = [each["replacement"] for end in ends for each in end["relabelings"]]
    rules = (FOLDER.parent / "prometheus/alerts.yml").read_text()
    assert jobs == ["trio-nsq", "trio-nsq-jobs"] == sorted(set(re.findall(r'\bjob="([^"]+)"', rules)))
    for folder in DEPLOYED:
        services = [each["metadata"] for each in objects(folder) if each["kind"] == "Service"]
        assert sum(each["labels"]["app.kubernetes.io/name"] in names for each in services) == 1
    selected = of_tables["spec"]["selector"]["matchLabels"].items()
    services = [each["metadata"] for each in objects("tables") if each["kind"] == "Service"]
    assert [selected <= each["labels"].items() for each in services] == [True]


def test_tables_are_not_where_the_lease_and_the_files_of_iceberg_are() -> None:
    """Who may change the settings of a topic would overwrite them."""
    (pod,) = (each for each in objects("tables") if each["kind"] == "Deployment")
    (container,) = pod["spec"]["template"]["spec"]["containers"]
    options = dict(each.removeprefix("--").split("=", 1) for each in container["args"] if "=" in each)
    allowed = [AllowedPlace.parse(each, Path("/")) for each in options["allow-table"].split(",")]
    for folder in options["lease"], options["iceberg-folder"]:
        assert not may_have_table(folder, Path("/"), allowed)


@pytest.mark.slow
def test_the_pods_run(tmp_path: Path) -> None:
    """Brokers, discovery and console, as processes with the commands of the pods."""
    services: dict[str, Any] = {}
    for workload in (each for each in objects("lookupd", "brokers", "console") if "template" in each["spec"]):
        (container,) = containers(workload)
        for index in range(workload["spec"]["replicas"]):
            pod = f"{workload['metadata']['name'].replace('-', '')}{index}"
            words = [
                re.sub(r"\$\(POD_NAME\)\.\w+\.\$\(POD_NAMESPACE\)\.svc$", pod, word)
                for word in container["args"]
            ]
            words = [re.sub(r"(\w+)-(\d)\.\1:", r"\1\2:", word) for word in words]
            mounts = [f"{pod}:{each['mountPath']}" for each in container.get("volumeMounts", ())]
            services[pod] = {"command": words, "volumes": mounts}
    assert sorted(services) == ["nsqconsole0", "nsqd0", "nsqd1", "nsqlookupd0", "nsqlookupd1"]
    compose = Compose(services, tmp_path)
    http = {"nsqconsole": 4171, "nsqd": 4151, "nsqlookupd": 4161}
    with compose.running() as children:
        until(lambda: all(compose.get(name, http[name[:-1]], "/ping") == "OK" for name in services), children)
        for broker in ("nsqd0", "nsqd1"):
            assert compose.get(broker, 4151, "/pub?topic=clicks", b"1") == "OK"
        for lookupd in ("nsqlookupd0", "nsqlookupd1"):
            until(partial(knows_two, compose, lookupd, 4161, "/lookup?topic=clicks", "producers"), children)
        until(partial(knows_two, compose, "nsqconsole0", 4171, "/api/nodes", "nodes"), children)


def knows_two(compose: Compose, service: str, port: int, path: str, name: str) -> bool:
    """Whether a service answers with a list of two."""
    answer = compose.get(service, port, path)
    return answer is not None and len(answer[name]) == 2
