"""The pods of deploy/kubernetes on one machine without Kubernetes: what `podman kube play` runs.

Of each workload there is one pod. What needs a cluster is replaced:

- A StatefulSet, which Podman does not have, becomes its pod, and a claim becomes a volume of Podman with the same name.
- Headless services do not exist, so an address such as `nsqd-0.nsqd` becomes the name of the pod. Others that are not
  the first of their workload are left out.
- Probes and hooks are left out: Podman runs probes with curl, which the image does not have, and ignores `preStop`.
- Container ports are left out: Podman 4 publishes them on all addresses of the machine.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

KUBERNETES = Path(__file__).parents[1] / "deploy" / "kubernetes"
LEFT_OUT = ("startupProbe", "readinessProbe", "livenessProbe", "lifecycle", "ports", "env")
"""Fields of a container. Its only variables are the parts of the name that other pods know."""
_OWN_NAME = re.compile(r"\$\(POD_NAME\)\.[-\w]+\.\$\(POD_NAMESPACE\)\.svc")
_OTHER_NAME = re.compile(r"\b([-\w]+)-(\d+)\.\1\b")


def single_pods(folders: Sequence[str], image: str, prefix: str = "") -> list[dict[str, Any]]:
    """Return a pod for each workload of these folders of deploy/kubernetes, as objects of Kubernetes.

    Args:
        folders: Each has a file with its own name, such as `brokers/brokers.yaml`.
        image: The image of all containers, which is on this machine.
        prefix: The beginning of the names of pods and volumes.
    """
    workloads = [
        each
        for folder in folders
        for each in yaml.safe_load_all((KUBERNETES / folder / f"{folder}.yaml").read_text())
        if "template" in each.get("spec", ())
    ]
    return [_pod(workload, image, prefix) for workload in workloads]


def _pod(workload: dict[str, Any], image: str, prefix: str) -> dict[str, Any]:
    pod: dict[str, Any] = workload["spec"]["template"]
    pod["metadata"]["name"] = name = f"{prefix}{workload['metadata']['name']}-0"
    for container in pod["spec"]["containers"]:
        for field in LEFT_OUT:
            container.pop(field, None)
        arguments = [_OWN_NAME.sub(name, word) for word in container["args"]]
        first = [word for word in arguments if all(index == "0" for _, index in _OTHER_NAME.findall(word))]
        container["args"] = [_OTHER_NAME.sub(rf"{prefix}\1-\2", word) for word in first]
        container["image"], container["imagePullPolicy"] = image, "Never"
    claims = [each["metadata"]["name"] for each in workload["spec"].get("volumeClaimTemplates", ())]
    if claims:
        pod["spec"]["volumes"] = [
            {"name": claim, "persistentVolumeClaim": {"claimName": f"{claim}-{name}"}} for claim in claims
        ]
    return {"apiVersion": "v1", "kind": "Pod", **pod}
