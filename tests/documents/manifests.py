"""Renders kustomizations, and validates objects of Kubernetes with kubeconform.

Its schemas come from OpenAPI descriptions in Go modules: those of Kubernetes itself, and of the resource definitions of
the Prometheus operator and of KEDA.
"""

import json
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from interop.build import BUILD, go_module, go_source, once
from interop.peers import or_skip

KUBERNETES = "1.33"
BUILTINS = "sigs.k8s.io/kubectl-validate@v0.0.5-0.20260105161640-a97ccfaca20b"
"""Has the OpenAPI description of each version of Kubernetes, as its API server sends it."""
GROUPS = ("api/v1", "apis/apps/v1", "apis/policy/v1", "apis/networking.k8s.io/v1")
DEFINITIONS = {
    "github.com/prometheus-operator/prometheus-operator@v0.85.0": "example/prometheus-operator-crd/"
    "monitoring.coreos.com_servicemonitors.yaml",
    "github.com/kedacore/keda/v2@v2.21.0": "config/crd/bases/keda.sh_scaledobjects.yaml",
}
KUBECONFORM = "github.com/yannh/kubeconform/cmd/kubeconform"
_PREFIX = "#/components/schemas/"
_LOCATION = "{{ .ResourceKind }}{{ .KindSuffix }}.json"
_TIMEOUT_S = 60


def render(folder: Path) -> str:
    """Return the objects that `kubectl apply -k` applies, as YAML documents."""
    done = subprocess.run(
        [_programs() / "kubernetes", folder], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def mistakes(objects: str) -> list[str]:
    """Return what kubeconform finds in YAML documents: unknown and missing fields, wrong types and values."""
    command: list[str | Path] = [_programs() / "kubeconform", "-strict", "-output=json", "-verbose"]
    done = subprocess.run(
        [*command, f"-schema-location={_schemas()}/{_LOCATION}"],
        input=objects,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    resources = json.loads(done.stdout)["resources"]
    documents = [each for each in yaml.safe_load_all(objects) if each]
    assert len(resources) == len(documents), done.stdout
    return [
        f"{each['kind']} {each['name']}: {each['msg']}"
        for each in resources
        if each["status"] != "statusValid"
    ]


@cache
def _programs() -> Path:
    with or_skip():
        return go_module(Path(__file__).parent / "kubernetes", "kubernetes", ".", KUBECONFORM)


@cache
def _schemas() -> Path:
    """Return a folder with a JSON Schema for each kind, under the names that kubeconform looks for."""
    with or_skip():
        builtins = go_source(BUILTINS) / "pkg/openapiclient/builtins" / KUBERNETES
        definitions = [go_source(module) / path for module, path in DEFINITIONS.items()]
    folder = BUILD / "kubernetes-schemas"

    def write() -> None:
        for group in GROUPS:
            schemas = json.loads((builtins / f"{group}.json").read_text())["components"]["schemas"]
            for name, schema in schemas.items():
                for kind in schema.get("x-kubernetes-group-version-kind", ()):
                    needed = {"schemas": {each: schemas[each] for each in _reached(schemas, name)}}
                    whole = {"$ref": _PREFIX + name, "components": needed}
                    _write(folder, kind["group"], kind["version"], kind["kind"], whole)
        for path in definitions:
            spec = yaml.safe_load(path.read_text())["spec"]
            for version in spec["versions"]:
                schema = version["schema"]["openAPIV3Schema"]
                _write(folder, spec["group"], version["name"], spec["names"]["kind"], schema)

    once(folder, [Path(__file__), *definitions], write)
    return folder


def _write(folder: Path, group: str, version: str, kind: str, schema: dict[str, Any]) -> None:
    suffix = f"{group.partition('.')[0]}-{version}" if group else version
    for each in _parts(schema):
        # As the API server does with fieldValidation=Strict.
        if "properties" in each and not each.get("x-kubernetes-preserve-unknown-fields"):
            each.setdefault("additionalProperties", False)
    (folder / f"{kind.lower()}-{suffix}.json").write_text(json.dumps(schema))


def _reached(schemas: dict[str, Any], name: str) -> set[str]:
    """Return the names of the schemas that one refers to, directly or not, with its own."""
    reached, waiting = set[str](), [name]
    while waiting:
        if (name := waiting.pop()) not in reached:
            reached.add(name)
            references = [each["$ref"] for each in _parts(schemas[name]) if "$ref" in each]
            waiting += [each.removeprefix(_PREFIX) for each in references]
    return reached


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield all objects of a JSON document."""
    if isinstance(schema, dict):
        if isinstance(schema.get("properties", {}), dict):
            yield schema
        for each in schema.values():
            yield from _parts(each)
    elif isinstance(schema, list):
        for each in schema:
            yield from _parts(each)
