"""The options of commands that decode message bodies: `peek` and `tail`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trio_nsq.protocol.message_json import body_field

from ...framework.errors import Failure
from ...framework.options import Decorator, all_of, given_flags, option
from ...framework.output import print_diagnostic
from .messages import body_of

if TYPE_CHECKING:
    from trio_nsq.bodies.bodies_file import TopicReaders

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_FORMATS = ("auto", "avro", "protobuf", "messagepack")


def body_options(section: str) -> Decorator:
    """The options, under a heading."""
    return all_of(
        option(
            section,
            "--body-format",
            type=click.Choice(_FORMATS),
            help="Decode bodies, and write them as JSON. auto: decompress them, and decode Avro files.",
        ),
        option(
            section,
            "--schema",
            type=_FILE,
            metavar="FILE",
            brief=True,
            help="Decode with this Avro schema, or with what protoc --descriptor_set_out wrote.",
        ),
        option(
            section,
            "--message",
            default="",
            metavar="NAME",
            brief=True,
            help="Decode this Protobuf message of the schema.",
        ),
        option(
            section,
            "--registry",
            default="",
            metavar="URL",
            brief=True,
            help="Decode with the schemas of this registry, whose ids are in the bodies.",
        ),
        option(
            section,
            "--bodies-file",
            type=_FILE,
            metavar="FILE",
            brief=True,
            help="Decode and mask bodies as this file says, which the web console uses, too.",
        ),
    )


class DecodedBodies:
    """Decodes the bodies of messages. The first body that cannot be decoded is reported; it stays as it is."""

    def __init__(self, readers: TopicReaders) -> None:
        self._readers = readers
        self._has_reported = False

    def of(self, topic: str, bodies: Iterable[bytes]) -> list[bytes]:
        """Return bodies of a topic, decoded."""
        reader = self._readers.of(topic)
        return [self._content(topic, reader.read(body)) for body in bodies]

    def in_records(self, records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return messages that are JSON records, with decoded bodies."""
        found = []
        for record in records:
            (body,) = self.of(str(record["topic"]), [body_of(record)])
            found.append(
                {name: value for name, value in record.items() if name != "body_base64"} | body_field(body)
            )
        return found

    def _content(self, topic: str, found: Any) -> bytes:
        if not self._has_reported and (found.problem or not found.is_complete):
            self._has_reported = True
            problem = found.problem or "It is too large: only its beginning is written."
            print_diagnostic(
                f"Warning: a body of topic {topic} is not decoded, perhaps others too. {problem}"
            )
        content: bytes = found.content
        return content


def decoded_bodies(
    body_format: str | None, schema: Path | None, message: str, registry: str, bodies_file: Path | None
) -> DecodedBodies | None:
    """Return what decodes bodies; None: they stay as they are. Raises UsageError, Failure."""
    if bodies_file is not None:
        if given := given_flags("body_format", "schema", "message", "registry"):
            raise click.UsageError(f"--bodies-file and {given[0]} exclude each other.")
    elif body_format is None:
        if given := given_flags("schema", "message", "registry"):
            raise click.UsageError(f"{given[0]} is for --body-format avro or protobuf.")
        return None
    from trio_nsq.access.patterns import ALL, compile_glob
    from trio_nsq.bodies.bodies_file import BodiesFileError, BodySettings, TopicReaders, read_bodies_file
    from trio_nsq.bodies.errors import BodySchemaError
    from trio_nsq.bodies.reading import Format

    if body_format == "avro" and not given_flags("schema", "registry"):
        raise click.UsageError("--body-format avro needs --schema or --registry.")
    if body_format in ("auto", "messagepack") and (given := given_flags("schema", "message", "registry")):
        raise click.UsageError(f"{given[0]} is for --body-format avro or protobuf.")
    try:
        if bodies_file is not None:
            return DecodedBodies(read_bodies_file(bodies_file))
        settings = BodySettings(
            format=Format(body_format or "auto"), schema=schema, message=message, registry=registry
        )
        return DecodedBodies(TopicReaders([(compile_glob(ALL), settings.reader())]))
    except BodiesFileError as error:
        raise Failure(f"--bodies-file: {error}.") from error
    except BodySchemaError as error:
        text = str(error)
        raise Failure(f"{text[:1].upper()}{text[1:]}.") from error
