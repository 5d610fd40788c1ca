"""Writes the JSON Schemas of what commands print with `--format json`, and the page that lists them."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import click

from ..app import root
from ..framework.command import contexts_below
from ..framework.json_schema import schema_of

FOLDER = "docs/reference/json"
_ABOUT = """# JSON output

<!-- Written by `python -m qcli.generate`; do not edit. -->

With `--format json`, a command writes one JSON object per line. Each of these commands has a JSON Schema (2020-12) of
a line. Tests compare them with what the commands print. `qcli help COMMAND --schema` prints the schema of the installed
version, and `schema_command` in `qcli help --format json` says which commands have one.

- Newer versions may add fields, so the schemas allow fields that they do not name. Existing fields change only after a
  deprecation: see [Compatibility](../../project/compatibility.md).
- A field in `required` is always there; it may be null if its type says so.
- Names end with the unit: `_ns`, `_ms`, `_s`, `_bytes`. Each Unix time `NAME_ns` has an RFC 3339 time `NAME` beside it.

```sh
qcli help topic list --schema > topic-list.json
```

| command | a line is | schema |
|---|---|---|"""


def json_schemas() -> dict[str, str]:
    """Return the text of each file, by name: a schema for each command, and `index.md`."""
    schemas = {
        ctx.command_path: schema
        for ctx in contexts_below(click.Context(root, info_name="qcli"))
        if (schema := schema_of(ctx.command_path, ctx.command)) is not None
    }
    files = {_file(path): json.dumps(schema, indent=2) + "\n" for path, schema in schemas.items()}
    return {**files, "index.md": "\n".join(_index(schemas)) + "\n"}


def _file(path: str) -> str:
    return "-".join(path.split()[1:]) + ".json"


def _index(schemas: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    yield _ABOUT
    for path, schema in schemas.items():
        lines = [schema["$defs"][name]["description"] for name in _names(schema)]
        yield f"| `{path}` | {' Or: '.join(lines)} | [{_file(path)}]({_file(path)}) |"


def _names(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the records that a line may be."""
    for each in schema.get("anyOf", [schema]):
        yield each["$ref"].rpartition("/")[2]
