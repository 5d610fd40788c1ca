"""Checks what commands print with `--format json` against their schemas, which must name every field."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import click
from jsonschema import Draft202012Validator

from qcli.app import root
from qcli.framework.command import contexts_below
from qcli.framework.json_schema import schema_of


@cache
def schemas() -> Mapping[str, dict[str, Any]]:
    """The schemas of all commands that print JSON, by their names without `qcli`."""
    contexts = contexts_below(click.Context(root, info_name="qcli"))
    found = {ctx.command_path.partition(" ")[2]: schema_of(ctx.command_path, ctx.command) for ctx in contexts}
    return {name: schema for name, schema in found.items() if schema is not None}


@cache
def _validator(command: str) -> Draft202012Validator | None:
    """Return what checks a record of a command strictly: no field may be missing in the schema."""
    schema = schemas().get(command)
    if schema is None:
        return None
    definitions = {name: {"additionalProperties": False, **each} for name, each in schema["$defs"].items()}
    return Draft202012Validator({**schema, "$defs": definitions})


def check_records(args: Sequence[str], out: bytes) -> int:
    """Check the output of a command, if it has `--format json`, and return the number of its records."""
    words = [word for word in args if word.startswith("-")]
    if "--format" not in words or args[args.index("--format") + 1] != "json":
        return 0
    validator = next(filter(None, (_validator(" ".join(args[:count])) for count in (2, 1))), None)
    if validator is None:
        return 0
    records = [json.loads(line) for line in out.decode().splitlines()]
    for record in records:
        problems = [f"{error.json_path}: {error.message}" for error in validator.iter_errors(record)]
        assert not problems, (args, problems)
    return len(records)
