"""The processes that belong to Spark, to be killed."""

from collections.abc import Iterator
from pathlib import Path


def children(pid: int) -> list[int]:
    """The processes that a process has started, and that still run."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(each) for task in tasks for each in (task / "children").read_text().split()]
    except FileNotFoundError:
        return []


def below(pid: int) -> Iterator[int]:
    """All of them, and theirs."""
    for child in children(pid):
        yield child
        yield from below(child)


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except FileNotFoundError:
        return ""


def jvm_of(pid: int) -> int:
    return next(child for child in children(pid) if "SparkSubmit" in command_of(child))


def workers_of(pid: int) -> list[int]:
    """Those that work, and not the daemon that they come from."""
    daemons = [each for each in below(jvm_of(pid)) if "pyspark.daemon" in command_of(each)]
    return [each for daemon in daemons for each in children(daemon)]
