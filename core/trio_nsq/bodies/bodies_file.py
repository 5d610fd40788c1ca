"""The file with the formats, schemas and masks of bodies, for the console and for commands that show messages.

[[topic]]
name = "orders-*"              # a topic, or a pattern; of several that match, the first one counts
format = "avro"                # auto, avro, protobuf or messagepack
schema = "orders.avsc"         # relative to this file
mask = ["user.email", "card=last4"]

[[topic]]
name = "*"
registry = "https://registry.example.com"
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from ..access.patterns import Pattern, compile_glob
from ..access.secret import NO_SECRET, Secret
from ..client.connection.tls import TLSFiles
from ..filters.masks import Mask, parse_masks
from ..http.urls import URL
from ..platform.extras import install_hint
from ..protocol.errors import NSQError
from .compression import Compression, check_packages
from .errors import BodySchemaError
from .reading import PLAIN, BodyReader, Decoder, Format

MAX_FILE_BYTES = 1024 * 1024
_KEYS = dict.fromkeys(
    (
        "name",
        "format",
        "compression",
        "schema",
        "writer_schemas",
        "message",
        "registry",
        "registry_secret_file",
        "registry_tls_root_ca_file",
        "mask",
    )
)
_Word = TypeVar("_Word", bound=StrEnum)


class BodiesFileError(NSQError, ValueError):
    """The file cannot be used. The text names the file, the topic and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BodySettings:
    """How the bodies of some topics are encoded.

    Attributes:
        schema: A file with an Avro schema, or what `protoc --descriptor_set_out` wrote; None: none.
        writer_schemas: Files with Avro schemas of older bodies, for those in the single-object encoding.
        message: The Protobuf message; empty: the only one of the schema.
        registry: The URL of a schema registry whose framing bodies have; empty: none.
        registry_secret_file: `USER:PASSWORD` or a bearer token for the registry; None: none.
        registry_ca_file: The CAs of the registry; None: the system's.
    """

    format: Format = Format.AUTO
    compression: Compression = Compression.AUTO
    schema: Path | None = None
    writer_schemas: Sequence[Path] = ()
    message: str = ""
    registry: str = ""
    registry_secret_file: Path | None = None
    registry_ca_file: Path | None = None
    masks: Sequence[tuple[str, Mask]] = ()

    def reader(self) -> BodyReader:
        """Return what reads these bodies. Raises BodySchemaError: a setting or a file cannot be used."""
        has_schema = bool(self.schema or self.registry)
        if has_schema and self.format not in (Format.AVRO, Format.PROTOBUF):
            raise BodySchemaError("a schema or registry needs the format avro or protobuf")
        if self.schema and self.registry:
            raise BodySchemaError("schema and registry exclude each other: the registry has the schemas")
        if self.format is Format.AVRO and not has_schema:
            raise BodySchemaError("the format avro needs a schema or a registry")
        if self.writer_schemas and (self.format is not Format.AVRO or not self.schema):
            raise BodySchemaError("writer_schemas are for the format avro with a schema")
        if self.message and (self.format is not Format.PROTOBUF or not self.schema):
            raise BodySchemaError("message is for the format protobuf with a schema")
        if (self.registry_secret_file or self.registry_ca_file) and not self.registry:
            raise BodySchemaError("the files of a registry need its URL")
        check_packages(self.compression)
        found = BodyReader(self.compression, self._decoder(), self.masks)
        if not found.finds_masked:
            raise BodySchemaError(
                "without a schema or registry, the fields of Protobuf bodies have numbers: write masks such as 2.1"
            )
        return found

    def _decoder(self) -> Decoder | None:
        try:
            match self.format:
                case Format.AVRO:
                    from .decoders import avro_bodies

                    return avro_bodies(self.schema, self.writer_schemas, self._access())
                case Format.PROTOBUF:
                    from .decoders import protobuf_bodies

                    return protobuf_bodies(self.schema, self.message, self._access())
                case Format.MESSAGEPACK:
                    from .messagepack import MessagePackBodies

                    return MessagePackBodies()
        except ModuleNotFoundError as exc:
            raise BodySchemaError(
                f"{self.format} bodies need the extra 'schemas', which is not installed ({exc}): "
                f"{install_hint('schemas')}"
            ) from exc
        return None

    def _access(self) -> Any:
        if not self.registry:
            return None
        from .registry import RegistryAccess

        try:
            URL.parse(self.registry)
        except ValueError as exc:
            raise BodySchemaError(f"the URL of the registry cannot be used: {exc}") from exc
        secret = Secret("", str(self.registry_secret_file)) if self.registry_secret_file else NO_SECRET
        ca_file = str(self.registry_ca_file) if self.registry_ca_file else None
        return RegistryAccess(self.registry, secret, TLSFiles(ca_file), secret_option="registry_secret_file")


class TopicReaders:
    """The readers of all topics.

    Args:
        entries: Patterns of topics, with what reads their bodies; the first one that matches counts.
    """

    def __init__(self, entries: Sequence[tuple[Pattern, BodyReader]] = ()) -> None:
        self._entries = entries

    @property
    def have_masks(self) -> bool:
        """Whether fields of any topic are masked."""
        return any(reader.is_masked for _, reader in self._entries)

    def of(self, topic: str, origin: str = "") -> BodyReader:
        """Return what reads the bodies of a topic.

        Args:
            origin: The topic that a dead letter comes from: its fields are masked in the dead-letter topic, too.
        """
        own, there = self._entry(topic), self._entry(origin) if origin else None
        if own is None or there is None:
            return there or own or PLAIN
        # Its body is the one that it was there: another schema could give the masked field another name.
        if there.has_format or (there.is_masked and own.has_format):
            return there.masked_also_by(own.masks)
        return own.masked_also_by(there.masks)

    def of_unknown_origin(self, topic: str, origin: str = "") -> BodyReader:
        """Return what reads bodies that may come from any topic: it masks the fields of all.

        If other topics have masks, bodies are not decoded: the schema of one topic could give the masked field of
        another one another name.

        Args:
            origin: The last topic on the way from there, if it is known.
        """
        found = own = self.of(topic, origin)
        entry = self._entry(topic)
        others = [reader for _, reader in self._entries if reader is not entry and reader.is_masked]
        for reader in others:
            found = found.masked_also_by(reader.masks)
        return BodyReader(masks=found.masks) if others else own

    def _entry(self, topic: str) -> BodyReader | None:
        return next((reader for pattern, reader in self._entries if pattern.fullmatch(topic)), None)


def read_bodies_file(file: Path) -> TopicReaders:
    """Read a file, see above. Raises BodiesFileError."""
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except OSError as exc:
        raise BodiesFileError(f"cannot read {file}: {exc.strerror}") from exc
    try:
        if len(data) > MAX_FILE_BYTES:
            raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
        found = tomllib.loads(data.decode())
        _refuse_unknown(found, {"topic": None})
        tables = found.get("topic", [])
        if not isinstance(tables, list):
            raise ValueError("topic is not a list: write [[topic]]")
        return TopicReaders([_entry(table, file.parent) for table in tables])
    except (ValueError, RecursionError) as exc:
        raise BodiesFileError(f"{file} is not valid: {exc}") from exc


def _entry(table: object, folder: Path) -> tuple[Pattern, BodyReader]:
    if not isinstance(table, Mapping):
        raise ValueError("topic is not a list of tables: write [[topic]]")
    name = _text(table, "name")
    if not name:
        raise ValueError('a [[topic]] has no name: give a topic, or a pattern such as name = "orders-*"')
    try:
        _refuse_unknown(table, _KEYS)
        pattern = compile_glob(name)
        settings = BodySettings(
            format=_word(table, "format", Format),
            compression=_word(table, "compression", Compression),
            schema=_path(table, "schema", folder),
            writer_schemas=[folder / each for each in _texts(table, "writer_schemas", '["old.avsc"]')],
            message=_text(table, "message"),
            registry=_text(table, "registry"),
            registry_secret_file=_path(table, "registry_secret_file", folder),
            registry_ca_file=_path(table, "registry_tls_root_ca_file", folder),
            masks=parse_masks(_texts(table, "mask", '["user.email"]'), Mask.HIDE),
        )
        return pattern, settings.reader()
    except (ValueError, NSQError) as exc:
        raise ValueError(f"topic {name!r}: {exc}") from exc


def _texts(table: Mapping[str, Any], key: str, example: str) -> list[str]:
    found = table.get(key, [])
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise ValueError(f"{key} is not a list of strings such as {example}")
    return found


def _text(table: Mapping[str, Any], key: str) -> str:
    if not isinstance(found := table.get(key, ""), str):
        raise ValueError(f"{key} is not a string")
    return found


def _path(table: Mapping[str, Any], key: str, folder: Path) -> Path | None:
    return folder / found if (found := _text(table, key)) else None


def _word(table: Mapping[str, Any], key: str, words: type[_Word]) -> _Word:
    found = _text(table, key) or "auto"
    try:
        return words(found)
    except ValueError:
        raise ValueError(f"{found!r} is not one of {', '.join(words)}") from None


def _refuse_unknown(table: Mapping[str, Any], known: Mapping[str, None]) -> None:
    # A misspelt mask must not mask nothing.
    if unknown := sorted(table.keys() - known.keys()):
        raise ValueError(f"unknown key {unknown[0]}; the keys are {', '.join(known)}")
