"""Write `reference/http-api.md` from `reference/openapi.yaml`: `python docs/_ext/http_api.py`. A test checks that."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

REFERENCE = Path(__file__).parents[1] / "reference"
_METHODS = ("get", "post", "put")
_ERRORS = {
    f"#/components/responses/{name}": name
    for name in ("badRequest", "unauthenticated", "forbidden", "notFound", "tooLarge", "unavailable")
}
"""Answers that many operations have; the page has them once."""


def render(spec: dict[str, Any]) -> str:
    """The page of an OpenAPI document."""
    return "\n\n".join(_page(spec)) + "\n"


def _page(spec: dict[str, Any]) -> Iterator[str]:
    yield "# HTTP API"
    yield "<!-- Written by docs/_ext/http_api.py from openapi.yaml; do not edit. -->"
    yield (
        "The endpoints of `qcli serve`. This page is made from [openapi.yaml](openapi.yaml), which tests compare with "
        "the answers of a running broker. The discovery service has its own endpoints: see "
        "[discovery](../how-to/discovery.md)."
    )
    yield spec["info"]["description"].strip()
    yield "## Errors"
    statuses = {
        response["$ref"]: status
        for item in spec["paths"].values()
        for operation in item.values()
        if isinstance(operation, dict)
        for status, response in operation["responses"].items()
        if response.get("$ref", "") in _ERRORS
    }
    answers = spec["components"]["responses"]
    rows = [(statuses[place], answers[name]["description"]) for place, name in _ERRORS.items()]
    yield _table(rows, "| status | |")
    yield "## Access"
    yield (
        "What each endpoint needs with `--auth-file` or `--auth-http-address`: a [role](access.md#roles) on the topic "
        "or channel of the request, or on all topics. A longer body than the limit gets 413, before it is read. With "
        "`--tls-required=true`, every endpoint needs HTTPS."
    )
    yield _table(list(_access(spec)), "| endpoint | role | on | longest body |")
    for tag in spec["tags"]:
        yield f"## {tag['name']}"
        yield tag["description"]
        for path, item in spec["paths"].items():
            for method in _METHODS:
                if tag["name"] in item.get(method, {}).get("tags", ()):
                    yield from _operation(spec, method.upper(), path, item, item[method])
    yield "## Values"
    for name in ("Position", "Message", "Gap", "Origin", "TopicSettings", "ChannelSettings", "JobReport"):
        schema = spec["components"]["schemas"][name]
        yield f"### {name}"
        if "description" in schema:
            yield schema["description"].strip()
        if "properties" in schema:
            yield _table(_rows(spec, schema))


def _access(spec: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    for path, item in spec["paths"].items():
        for method in _METHODS:
            if method in item:
                access = item[method]["x-access"]
                role, scope, body = access["role"], access["scope"], access["body"]
                where = {"all": "all topics"}.get(scope, f"the {scope}")
                roles = {"open": "none: open to all", "any": "any"}
                is_role = role not in roles
                yield (
                    f"`{method.upper()} {path}`",
                    f"`{role}`" if is_role else roles[role],
                    where if is_role else "",
                    f"`{body}`" if body.startswith("-") else body,
                )


def _operation(
    spec: dict[str, Any], method: str, path: str, item: dict[str, Any], operation: dict[str, Any]
) -> Iterator[str]:
    yield f"### {method} {path}"
    yield f"{operation['summary']}."
    if "description" in operation:
        yield operation["description"].strip()
    parameters = [
        _resolve(spec, each) for each in [*item.get("parameters", ()), *operation.get("parameters", ())]
    ]
    if parameters:
        rows = [
            (_code(each["name"]), _kind(spec, each["schema"]), _parameter_text(each)) for each in parameters
        ]
        yield _table(rows, "| parameter | type | |")
    if "requestBody" in operation:
        body = operation["requestBody"]
        example = next(iter(body["content"].values())).get("example")
        text = body.get(
            "description", "A JSON object" + (f", such as `{_json(example)}`." if example else ".")
        )
        yield f"Body: {text[0].lower() + text[1:]}"
    generic = [
        status for status, response in operation["responses"].items() if response.get("$ref", "") in _ERRORS
    ]
    for status, response in operation["responses"].items():
        if status not in generic:
            answer = _resolve(spec, response)
            kinds = " or ".join(f"`{kind}`" for kind in answer.get("content", ()))
            text = answer["description"]
            yield f"Status {status}{', ' if kinds else ''}{kinds}: {text[0].lower() + text[1:]}"
    if generic:
        yield f"[Errors](#errors): {', '.join(generic)}."
    answer = _resolve(spec, operation["responses"].get("200", {}))
    if "headers" in answer:
        rows = [
            (_code(name), _kind(spec, each["schema"]), each["description"])
            for name, each in answer["headers"].items()
        ]
        yield _table(rows, "| header of 200 | type | |")
    schema = answer.get("content", {}).get("application/json", {}).get("schema", {})
    if "$ref" in schema and "Settings" in schema["$ref"]:
        name = schema["$ref"].rpartition("/")[2]
        yield f"Answer: [{name}](#{name.lower()})."
    elif "$ref" in schema:
        yield _table(_rows(spec, _resolve(spec, schema)), "| key of 200 | type | |")
    elif "properties" in schema and any("description" in each for each in schema["properties"].values()):
        yield _table(_rows(spec, schema), "| key of 200 | type | |")
    if "application/x-ndjson" in answer.get("content", {}):
        yield "Each line is a [Message](#message) or a [Gap](#gap)."


def _rows(spec: dict[str, Any], schema: dict[str, Any]) -> list[tuple[str, str, str]]:
    rows = []
    for name, each in schema["properties"].items():
        rows.append((_code(name), _kind(spec, each), each.get("description", "")))
        inner = _resolve(spec, each.get("items", {}))
        if "properties" in inner:
            rows += [
                (_code(f"{name}[].{key.strip('`')}"), kind, text) for key, kind, text in _rows(spec, inner)
            ]
    return rows


def _parameter_text(parameter: dict[str, Any]) -> str:
    schema, text = parameter["schema"], str(parameter["description"])
    if parameter.get("required"):
        text += " Required."
    if "default" in schema:
        text += f" Default: `{_json(schema['default'])}`."
    return text


def _kind(spec: dict[str, Any], schema: dict[str, Any]) -> str:
    if schema.get("$ref", "").endswith("/Position"):
        return "[position](#position)"
    schema = _resolve(spec, schema)
    if "anyOf" in schema:
        return " or ".join(_kind(spec, each) for each in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(_code(_json(each)) for each in schema["enum"])
    if "const" in schema:
        return _code(_json(schema["const"]))
    kinds = schema.get("type", "any")
    text = " or ".join(kinds) if isinstance(kinds, list) else str(kinds)
    if "minimum" in schema:
        text += (
            f", {schema['minimum']} to {schema['maximum']}"
            if "maximum" in schema
            else f", at least {schema['minimum']}"
        )
    return text


def _resolve(spec: dict[str, Any], thing: dict[str, Any]) -> dict[str, Any]:
    found = thing
    if "$ref" in thing:
        found = spec
        for part in thing["$ref"].removeprefix("#/").split("/"):
            found = found[part]
    return found


def _table(rows: Sequence[tuple[str, ...]], head: str = "| key | type | |") -> str:
    lines = [
        f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in row)} |"
        for row in rows
    ]
    return "\n".join([head, "|---" * (head.count("|") - 1) + "|", *lines])


def _code(text: str) -> str:
    return f"`{text}`"


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


if __name__ == "__main__":
    document = yaml.safe_load((REFERENCE / "openapi.yaml").read_text())
    (REFERENCE / "http-api.md").write_text(render(document))
