"""The options of Avro and Protobuf bodies: where their schema comes from.

The driver reads the schema when a query is planned, and the tasks get its text with their columns: they need none of
the driver's files.

Spark imports this to look up any data source, so it imports no decoder and no client of registries.
"""

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...http.urls import URL
from ..bodies.schema import SUBJECT, BodySchema, SchemaSource, parse_schema, read_schema
from ..export.layout import BodyFormat
from ..options import OptionError, parse_patience, parse_secret, parse_tls

if TYPE_CHECKING:
    from ...bodies.registry import RegistryAccess

_OF_REGISTRY = (
    "subject",
    "registrySecret",
    "registrySecretFile",
    "registryTlsRootCaFile",
    "registryTlsCert",
    "registryTlsKey",
    "registryTlsInsecureSkipVerify",
)
SCHEMA_OPTIONS = ("schema", "message", "writerSchemas", "registry", *_OF_REGISTRY)
"""The options for `format=avro` and `format=protobuf` only."""
_BASE64 = "base64:"
_TOPIC = "{topic}"


def parse_schema_source(options: Mapping[str, str], form: BodyFormat) -> SchemaSource | None:
    """Return where the schema of the bodies comes from; None: they have none.

    Raises:
        OptionError: An option is invalid, or is missing.
        BodySchemaError: The schema cannot be read or used.
    """
    given = [name for name in SCHEMA_OPTIONS if options.get(name)]
    if not form.has_schema:
        if given:
            raise OptionError(f"the option {given[0]} is for format=avro and format=protobuf")
        return None
    schema, url = options.get("schema"), options.get("registry")
    if not schema and not url:
        raise OptionError(f"format={form} needs a schema: give the option schema or registry")
    if not url and (of_registry := [name for name in _OF_REGISTRY if name in given]):
        raise OptionError(f"the option {of_registry[0]} is for the option registry")
    if schema and options.get("subject"):
        raise OptionError(
            "the options schema and subject exclude each other: the columns are those of one schema"
        )
    message, writers = options.get("message") or "", options.get("writerSchemas")
    if message and form is BodyFormat.AVRO:
        raise OptionError("the option message is for format=protobuf")
    if writers and (form is not BodyFormat.AVRO or url):
        raise OptionError("the option writerSchemas is for format=avro without the option registry")
    found = None
    if schema:
        found = _schema(form, schema, message)
        if writers:
            found = replace(found, writers=tuple(_schema(form, each).text for each in _split(writers)))
    if not url:
        return SchemaSource(form, found)
    return SchemaSource(form, found, _registry(options, url), options.get("subject") or SUBJECT, message)


def reader_schema(source: SchemaSource, topics: tuple[str, ...]) -> BodySchema:
    """Return the schema of the columns.

    Args:
        topics: The topics of the query; empty: a pattern selects them.

    Raises:
        OptionError: The topics may have different schemas.
        BodySchemaError, RegistryError: There is no schema, or it cannot be used.
    """
    if source.given is None and _TOPIC in source.subject and len(topics) != 1:
        raise OptionError(
            "the query may read several topics, whose columns are those of one schema: give the option schema, or the "
            f"option subject without {_TOPIC}"
        )
    return source.reader(topics[0] if topics else "")


def _schema(form: BodyFormat, text: str, message: str = "") -> BodySchema:
    """Return a schema that an option has: its text, or the file with it on the driver's machine."""
    if form is BodyFormat.AVRO and text.lstrip()[:1] in ("{", "["):
        return parse_schema(form, text.encode(), message)
    if text.startswith(_BASE64):
        try:
            data = base64.b64decode(text.removeprefix(_BASE64), validate=True)
        except binascii.Error as error:
            raise OptionError(f"the option schema is not valid after {_BASE64}: {error}") from None
        return parse_schema(form, data, message)
    return read_schema(form, Path(text), message)


def _split(text: str) -> list[str]:
    """Return the elements of a JSON list of schemas, or of a list of files with commas. Raises OptionError."""
    if not text.lstrip().startswith("["):
        return [each.strip() for each in text.split(",")]
    try:
        return [json.dumps(each) for each in json.loads(text)]
    except (ValueError, RecursionError) as error:
        raise OptionError(f"the option writerSchemas is no JSON list of schemas: {error}") from None


def _registry(options: Mapping[str, str], url: str) -> "RegistryAccess":
    from ...bodies.registry import RegistryAccess

    try:
        parsed = URL.parse(url)
    except ValueError as error:
        raise OptionError(f"the option registry: {error}") from None
    if parsed.credentials:
        raise OptionError(
            "the option registry must not have a user or password, because Spark shows it: give USER:PASSWORD with "
            "registrySecretFile"
        )
    if "?" in url or "#" in url:  # paths of the API are added to it
        raise OptionError("the option registry cannot have a query, nor a part after #")
    secret = parse_secret(options, "registrySecret")
    tls, patience_s = parse_tls(options, "registryTls"), parse_patience(options)
    option = "the option registrySecretFile"
    return RegistryAccess(url, secret, tls, patience_s, secret_option=option)
