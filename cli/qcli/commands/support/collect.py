"""What a bundle has of this machine, of a broker, and of a data folder."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Any

from trio_nsq._version import __version__
from trio_nsq.api import broker as api
from trio_nsq.api.request import Request

from ...broker.admin_client import AdminClient
from ...broker.failures import Refused
from ...contexts.context import KEYS
from ...contexts.store import read_contexts
from ...framework.errors import Failure
from .archive import Bundle
from .redaction import HIDDEN, is_secret_name

_REQUESTS: Mapping[str, Request[Any]] = {
    "info.json": api.unchecked_info(),
    "stats.json": api.unchecked_stats(clients=True, disk=True, memory=True),
    "metrics.txt": api.metrics(),
    "jobs.json": api.jobs(),
    "debug-tasks.txt": api.debug_tasks(),
    "cluster-member.json": api.unchecked_member(),
}
_OTHER_OPTIONS = ("log_level", "draining", "id", "log_prefix", "retention_time", "retention_bytes")
"""Options of `/config` that are not fields of the options of a broker."""


def add_machine(parts: Bundle) -> None:
    """Add the versions, the variables of qcli, and the contexts."""
    from trio_nsq.platform.compiled import form

    # A distribution without metadata, as an interrupted pip leaves, has neither name nor version.
    packages = {
        name: each.metadata["Version"] or ""
        for each in metadata.distributions()
        if (name := each.metadata["Name"])
    }
    parts.add(
        "versions.json",
        {
            "qcli": __version__,
            "hot_path": form(),
            "python": platform.python_version(),
            "implementation": platform.python_implementation(),
            "platform": platform.platform(),
            "libc": " ".join(platform.libc_ver()),
            # Not as names of fields: a package may have a name that says that its value is secret.
            "packages": [
                f"{name} {version}"
                for name, version in sorted(packages.items(), key=lambda item: item[0].lower())
            ],
        },
    )
    ours = {name: value for name, value in sorted(os.environ.items()) if name.startswith("QCLI_")}
    parts.add("environment.json", {n: HIDDEN if is_secret_name(n) else v for n, v in ours.items()})
    try:
        contexts = read_contexts()
    except Failure as failure:
        parts.add_error("contexts", failure.message)
        return
    parts.add(
        "contexts.json",
        {
            "current": contexts.current,
            "contexts": {name: _of_context(table) for name, table in contexts.tables.items()},
        },
    )


def _of_context(table: object) -> dict[str, Any]:
    """Return the known keys of a context. A command that prints a secret may contain one."""
    known = table if isinstance(table, dict) else {}
    return {
        key: HIDDEN if key == "auth_secret_command" else value for key, value in known.items() if key in KEYS
    }


def broker_answers(address: str) -> dict[str, Any]:
    """Return the answers of a broker by file name; a Failure for each that it does not give.

    Raises Failure: it does not answer at all.
    """
    client = AdminClient(address, is_patient=True)
    try:
        client.info()
        found = {name: _asked(client, request) for name, request in _REQUESTS.items()}
        return found | {"config.json": _config(client)}
    finally:
        client.close()


def _asked(client: AdminClient, request: Request[Any]) -> Any:
    try:
        return client.ask(request)
    except Failure as failure:
        return failure


def _config(client: AdminClient) -> dict[str, str] | Failure:
    """Return the options that the broker has, by name. A Failure if they may not be read."""
    from trio_nsq.broker.options import BrokerOptions
    from trio_nsq.protocol.limits import Limits

    names = sorted(
        field.name.removesuffix("_ms") for kind in (BrokerOptions, Limits) for field in fields(kind)
    )
    found = {}
    for name in [*_OTHER_OPTIONS, *names]:
        try:
            found[name] = client.ask(api.option(name)).decode("utf-8", "replace")
        except Refused as refused:
            if refused.is_about_secret:
                return refused
        except Failure as failure:
            return failure
    return found


def add_folder(parts: Bundle, folder: Path) -> None:
    """Add the names, sizes and times of the files of a folder."""
    lines = []

    def failed(error: OSError) -> None:  # a running broker removes folders, too
        lines.append(f"{os.path.relpath(error.filename, folder)}: {error.strerror}")

    paths = sorted(
        Path(parent, name)
        for parent, folders, files in os.walk(folder, onerror=failed)
        for name in (*folders, *files)
    )
    for path in paths:
        try:
            state = path.lstat()
        except OSError as error:  # a running broker removes files
            lines.append(f"{path.relative_to(folder)}: {error.strerror}")
            continue
        kind = "/" if path.is_dir() else ""
        lines.append(
            f"{state.st_size:>14} {state.st_mtime_ns} {state.st_mode:o} {path.relative_to(folder)}{kind}"
        )
    parts.add("data-path.txt", "bytes, Unix time in nanoseconds, mode, name\n" + "\n".join(lines) + "\n")
