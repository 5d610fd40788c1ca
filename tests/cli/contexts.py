"""Helpers for the tests of contexts.

- `cli_with_contexts` runs commands with contexts of their own, in `contexts_file`; `write` writes that file.
- `shown` is what a command would use, as `qcli context show` tells it.
"""

import json
from pathlib import Path

from cli.support import Cli, CliHere, Run

NO_ADDRESSES = {"QCLI_NSQD_TCP_ADDRESS": "", "QCLI_NSQD_HTTP_ADDRESS": ""}


def cli_with_contexts(config: Path, run_here: Run) -> Cli:
    """Return what runs commands in this process, with contexts in this folder and no addresses in the environment."""
    return CliHere("", "", {"XDG_CONFIG_HOME": str(config), **NO_ADDRESSES}, run=run_here)


def contexts_file(config: Path) -> Path:
    """Return the file of contexts."""
    return config / "qcli" / "contexts.toml"


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def shown(cli: Cli, *args: str, **env: str) -> dict[str, tuple[str, str]]:
    """Return the values that a command would use, and where they are from, by option."""
    result = cli("context", "show", *args, "--format", "json", env=env)
    assert result.code == 0, result.err
    return {
        each["name"].removeprefix("--"): (
            ",".join(each["value"]) if isinstance(each["value"], list) else str(each["value"]),
            each["from"],
        )
        for each in json.loads(result.out)["options"]
    }
