"""JSON Schemas (2020-12) of the records that commands print with `--format json`, made from the types of the records.

See docs/decisions/0065-schemas-of-json-output.md.
"""

import re
import sys
from collections.abc import Iterator
from inspect import cleandoc
from typing import Any, is_typeddict

import click

from .options import GroupedOption
from .output import TIME_SUFFIX

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_ATTRIBUTES = "Attributes:"
_ATTRIBUTE = re.compile(r"^ {4}([a-z][\w, ]*): ", re.MULTILINE)
_RFC_3339 = {
    "type": ["string", "null"],
    "format": "date-time",
    "description": "The time before it in RFC 3339.",
}


def record_types(command: click.Command) -> tuple[type, ...]:
    """Return the types of the records that a command prints with `--format json`; empty: it prints none."""
    options = [each for each in command.params if isinstance(each, GroupedOption)]
    return next((each.records for each in options if each.records), ())


def schema_of(path: str, command: click.Command) -> dict[str, Any] | None:
    """Return the schema of each line that a command prints with `--format json`; None: it has no such output.

    Args:
        path: The name of the command, such as `qcli topic list`.
    """
    import msgspec  # its import takes longer than most commands do

    types = record_types(command)
    if not types:
        return None
    found, definitions = msgspec.json.schema_components(types, ref_template="#/$defs/{name}")
    for each in definitions.values():
        _complete(each)
    for record in types:
        _inherit(record, definitions[record.__name__])
    alternatives = list(found)
    return {
        "$schema": DIALECT,
        "title": f"{path} --format json",
        "description": "Each line of the output. Newer versions may add fields.",
        **(alternatives[0] if len(alternatives) == 1 else {"anyOf": alternatives}),
        "$defs": definitions,
    }


def _complete(definition: dict[str, Any]) -> None:
    """Move descriptions of fields from the docstring to the fields, and add the times that `with_times` adds."""
    text, _, attributes = cleandoc(definition.get("description", "")).partition(_ATTRIBUTES)
    if text:
        definition["description"] = _line(text)
    fields: dict[str, Any] = definition.get("properties", {})
    for field in fields.values():
        kinds = field.get("anyOf", ())
        if kinds and all(kind.keys() == {"type"} for kind in kinds):
            del field["anyOf"]
            field["type"] = [kind["type"] for kind in kinds]
    for name, about in _described(attributes):
        fields[name]["description"] = about
    for name in [name for name in fields if name.endswith(TIME_SUFFIX)]:
        fields[name.removesuffix(TIME_SUFFIX)] = dict(_RFC_3339)
        if name in definition["required"]:
            definition["required"].append(name.removesuffix(TIME_SUFFIX))


def _inherit(record: type, definition: dict[str, Any]) -> None:
    """Add the descriptions that the bases of a record have: a docstring has those of its own fields only.

    Python 3.11 does not tell the bases of a TypedDict. They are those with a part of its fields in its module.
    """
    fields = record.__annotations__
    for base in vars(sys.modules[record.__module__]).values():
        if is_typeddict(base) and all(
            fields.get(name) is kind for name, kind in base.__annotations__.items()
        ):
            for name, about in _described(cleandoc(base.__doc__ or "").partition(_ATTRIBUTES)[2]):
                definition["properties"][name].setdefault("description", about)


def _described(attributes: str) -> Iterator[tuple[str, str]]:
    """Yield each field that a docstring describes, with the description."""
    _, *parts = _ATTRIBUTE.split(attributes)
    for names, about in zip(parts[::2], parts[1::2], strict=True):
        for name in names.split(", "):
            yield name, _line(about)


def _line(text: str) -> str:
    return " ".join(text.split())
