"""Build the container image with Docker or Podman, and check it: `make image`.

The image has to be smaller than 150 MB. It runs as its own user, with a read-only root file system and without
capabilities. Its health check must succeed, SIGTERM must stop the broker with exit code 0, and a new container on the
same volume must deliver what the first one stored.

With Podman, a broker, a discovery service and the web console of deploy/kubernetes then run as pods (`podman kube
play`). The console must find the broker through discovery. The broker's pod is stopped and started, and its messages
must still be there.

Options after `--` are for the build: `make image ARGS='-- --network host'`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from shutil import which

import yaml
from tools.pods import single_pods
from tools.wheels import ROOT, Failure, run

DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
MAX_BYTES = 150_000_000
USER = "4150"
RESTRICTED = ("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges")
HTTP_PORTS = {"serve": 4151, "lookupd": 4161, "admin": 4171}
STOP_S = 90
PATIENCE_S = 120.0
"""How long a container may take until it answers, on a busy machine."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Build and check; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=("docker", "podman"), help="default: the first that works")
    parser.add_argument("--tag", default="trio-nsq", help="name of the image (default: trio-nsq)")
    parser.add_argument("--built", action="store_true", help="check the image that has this name already")
    parser.add_argument("build_options", nargs="*", metavar="-- OPTION", help="for the build")
    options = parser.parse_args(arguments)
    try:
        engine = options.engine or working_engine()
        if not options.built:
            build(engine, options.tag, options.build_options)
        print(f"{options.tag}: {check_image(engine, options.tag) / 1e6:.0f} MB", flush=True)
        stopped_s = check_container(engine, options.tag)
        print(f"Container: healthy, stopped after {stopped_s:.1f} s, messages kept", flush=True)
        if engine == "podman":
            check_pods(options.tag)
            print("Pods of deploy/kubernetes: brokers found, messages kept", flush=True)
    except Failure as exc:
        print(f"image: {exc}", file=sys.stderr)
        return 1
    return 0


def working_engine() -> str:
    """Return `docker` or `podman`, whichever can run containers here. Raises Failure: none can."""
    for engine in ("docker", "podman"):
        if which(engine) and succeeds(engine, "info"):
            return engine
    raise Failure("no container can run here: neither `docker info` nor `podman info` succeeds")


def build(engine: str, tag: str, options: Sequence[str]) -> None:
    """Build the image. Raises Failure."""
    # Podman's own format of images has no health check.
    form = ["--format=docker"] if engine == "podman" else []
    print("Building: compiling takes three minutes of processor time.", flush=True)
    run(engine, "build", *form, "--file", DOCKERFILE, "--tag", tag, *options, ROOT, DOCKER_BUILDKIT="1")


def check_image(engine: str, tag: str) -> int:
    """Return the size of the image in bytes. Raises Failure: it is too large, runs as root or has no health check."""
    (image,) = json.loads(run(engine, "image", "inspect", tag))
    size, config = int(image["Size"]), image["Config"]
    if size > MAX_BYTES:
        raise Failure(f"{tag} has {size / 1e6:.0f} MB, more than {MAX_BYTES / 1e6:.0f}")
    if config["User"].partition(":")[0] != USER:
        raise Failure(f"{tag} runs as the user {config['User'] or 'root'}, not as {USER}")
    if not {"Healthcheck"} & (
        config.keys() | image.keys()
    ):  # Docker has it in one place, Podman in the other
        raise Failure(f"{tag} has no health check")
    return size


def check_container(engine: str, tag: str) -> float:
    """Run a broker in two containers, one after the other, on one volume.

    Returns:
        The seconds that the first one took to stop.

    Raises:
        Failure: a check failed.
    """
    name = f"check{os.getpid()}"
    inside = partial(run, engine, "exec", name)
    with removed_volumes(engine, name):
        with container(engine, name, tag):
            until(f"{name} is healthy", partial(is_healthy, engine, name))
            if (user := inside("id", "-u").strip()) != USER:
                raise Failure(f"the broker runs as the user {user}, not as {USER}")
            if succeeds(engine, "exec", name, "touch", "/opt/file"):
                raise Failure("the root file system is not read-only")
            publish_and_consume(inside)
            started_s = time.monotonic()
            run(engine, "stop", "--time", str(STOP_S), name)
            stopped_s = time.monotonic() - started_s
            code = run(engine, "inspect", "--format", "{{.State.ExitCode}}", name).strip()
            if code != "0":
                raise Failure(f"SIGTERM ended the broker with code {code}")
        with container(engine, name, tag):
            until(f"{name} answers", partial(answers, engine, name, "serve"))
            consume_rest(inside)
    return stopped_s


def check_pods(tag: str) -> None:
    """Run pods of deploy/kubernetes with Podman, and stop and start the one with the broker. Raises Failure."""
    pods = single_pods(("lookupd", "brokers", "console"), f"localhost/{tag}:latest", f"check{os.getpid()}-")
    names, containers, claims = {}, {}, []
    for each in pods:
        (one,) = each["spec"]["containers"]
        command = one["args"][0]
        names[command] = each["metadata"]["name"]
        containers[command] = f"{names[command]}-{one['name']}"
        claims += [volume["persistentVolumeClaim"]["claimName"] for volume in each["spec"].get("volumes", ())]
    inside = partial(run, "podman", "exec", containers["serve"])
    nodes = f"http://127.0.0.1:{HTTP_PORTS['admin']}/api/nodes"
    ask_console = ("podman", "exec", containers["admin"], "wget", "-q", "-O", "-", nodes)
    with removed_volumes("podman", *claims), running_pods(pods):
        for command, name in containers.items():
            until(f"{name} answers", partial(answers, "podman", name, command))
        publish_and_consume(inside)
        until("the console knows the broker", lambda: names["serve"] in run(*ask_console))
        run("podman", "pod", "stop", "--time", str(STOP_S), names["serve"])
        run("podman", "pod", "start", names["serve"])
        until(f"{containers['serve']} answers", partial(answers, "podman", containers["serve"], "serve"))
        consume_rest(inside)


@contextmanager
def container(engine: str, name: str, tag: str) -> Iterator[None]:
    """Run a broker as restricted as possible, with its data on the volume of the same name; remove it at the end."""
    run(engine, "run", "--detach", "--name", name, "--volume", f"{name}:/data", *RESTRICTED, tag)
    try:
        yield
    finally:
        run(engine, "rm", "--force", name)


@contextmanager
def running_pods(pods: Sequence[dict[str, object]]) -> Iterator[None]:
    """Run pods until the end of the block."""
    with tempfile.TemporaryDirectory(prefix="trio-nsq-pods-") as folder:
        manifest = Path(folder, "pods.yaml")
        manifest.write_text(yaml.safe_dump_all(pods))
        try:
            run("podman", "kube", "play", manifest)
            yield
        finally:
            run("podman", "kube", "down", manifest)


@contextmanager
def removed_volumes(engine: str, *names: str) -> Iterator[None]:
    """Remove volumes at the end of the block."""
    try:
        yield
    finally:
        run(engine, "volume", "rm", "--force", *names)


def is_healthy(engine: str, name: str) -> bool:
    """Whether the health check of a container succeeds."""
    if engine == "podman":  # which repeats it only where systemd runs
        return succeeds(engine, "healthcheck", "run", name)
    return run(engine, "inspect", "--format", "{{.State.Health.Status}}", name).strip() == "healthy"


def answers(engine: str, name: str, command: str) -> bool:
    """Whether a server in a container answers at the usual port of its command."""
    url = f"http://127.0.0.1:{HTTP_PORTS[command]}/ping"
    return succeeds(engine, "exec", name, "wget", "-q", "-O", "/dev/null", url)


def publish_and_consume(inside: Callable[..., str]) -> None:
    """Publish ten messages, and consume half of them, in the container of a broker. Raises Failure."""
    inside("sh", "-c", "seq 10 | qcli pub clicks")
    consume(inside, range(1, 6))


def consume_rest(inside: Callable[..., str]) -> None:
    """Consume the other half. Raises Failure."""
    consume(inside, range(6, 11))


def consume(inside: Callable[..., str], expected: range) -> None:
    """Consume as many messages as expected. Raises Failure: they are others."""
    received = inside("qcli", "tail", "clicks/archive", "-n", str(len(expected))).split()
    if received != [str(number) for number in expected]:
        raise Failure(f"the broker delivered {received} instead of {[*expected]}")


def succeeds(*command: str) -> bool:
    """Whether a command ends with exit code 0."""
    return not subprocess.run(command, capture_output=True, check=False).returncode


def until(what: str, holds: Callable[[], bool]) -> None:
    """Wait until something holds. Raises Failure: it takes longer than `PATIENCE_S`."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > deadline_s:
            raise Failure(f"not so after {PATIENCE_S:.0f} s: {what}")
        time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main())
