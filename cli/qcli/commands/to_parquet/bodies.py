"""The options of bodies: their format, and where the schemas of Avro and Protobuf bodies come from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...framework.errors import ExitCode, Failure
from ...framework.options import all_of, given_flags, option, several
from ..shared.engine import failure_from
from .field_options import Column

if TYPE_CHECKING:
    from trio_nsq.bodies.registry import RegistryAccess
    from trio_nsq.spark.bodies.schema import SchemaSource
    from trio_nsq.spark.schemas.column_types import ColumnType

FILES, SCHEMAS = "Files", "Avro and Protobuf"
FORMATS = ("binary", "text", "json", "avro", "protobuf")
_FILE = click.Path(exists=True, dir_okay=False)
_PATH = click.Path(exists=True, dir_okay=False, path_type=Path)
_OF_REGISTRIES = (
    "subject",
    "registry_secret_file",
    "registry_tls_root_ca_file",
    "registry_tls_cert",
    "registry_tls_key",
    "registry_tls_insecure_skip_verify",
)


def registry_url(text: str) -> str:
    from trio_nsq.http.urls import URL

    try:
        URL.parse(text)
    except ValueError as error:
        raise click.BadParameter(f"The URL cannot be used: {error}.") from None
    if "?" in text or "#" in text:  # paths of the API are added to it
        raise click.BadParameter("The URL cannot have a query, nor a part after #.")
    return text


format_options = all_of(
    option(
        FILES,
        "--body-format",
        type=click.Choice(FORMATS),
        metavar="FORMAT",
        help="json, avro, protobuf: write the fields of bodies as columns. text: bodies as strings. binary, the "
        "default: bodies as bytes.",
    ),
    option(FILES, "--text", is_flag=True, help="The same as --body-format text.", brief=True),
    option(FILES, "--json", "as_json", is_flag=True, help="The same as --body-format json."),
)

schema_options = all_of(
    option(
        SCHEMAS,
        "--message",
        default="",
        metavar="NAME",
        help="Decode this Protobuf message of the schema; needed if the schema has several.",
        brief=True,
    ),
    option(
        SCHEMAS,
        "--registry",
        type=registry_url,
        metavar="URL",
        help="Bodies begin with the id of their schema in the schema registry at this URL (Confluent's API). Without "
        "--schema, the columns are those of the latest schema of --subject.",
        brief=True,
    ),
    option(
        SCHEMAS,
        "--subject",
        metavar="NAME",
        help="Take the columns from this subject of the registry; {topic} stands for the topic. Default: "
        "{topic}-value.",
        brief=True,
    ),
    several(
        SCHEMAS,
        "--writer-schema",
        "writer_schemas",
        type=_PATH,
        metavar="FILE",
        brief=True,
        help="Decode bodies in Avro's single-object encoding also if they were written with this schema. Several: with "
        "commas, or repeat the option.",
    ),
    option(
        SCHEMAS,
        "--registry-secret-file",
        type=_FILE,
        metavar="FILE",
        brief=True,
        help="Authenticate at the registry with the first line of this file: USER:PASSWORD, or a bearer token.",
    ),
    option(
        SCHEMAS,
        "--registry-tls-root-ca-file",
        type=_FILE,
        metavar="FILE",
        brief=True,
        help="Trust the CAs in this PEM file for the registry, instead of the system's.",
    ),
    option(
        SCHEMAS,
        "--registry-tls-cert",
        type=_FILE,
        metavar="FILE",
        brief=True,
        help="Send the client certificate in this PEM file to the registry.",
    ),
    option(
        SCHEMAS,
        "--registry-tls-key",
        type=_FILE,
        metavar="FILE",
        brief=True,
        help="Read the certificate's key from this PEM file, if it is not in the same file.",
    ),
    option(
        SCHEMAS,
        "--registry-tls-insecure-skip-verify",
        is_flag=True,
        brief=True,
        help="Skip the verification of the registry's certificate.",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyOptions:
    """The parameters of the format of bodies, and of their schemas."""

    body_format: str | None
    text: bool
    as_json: bool
    columns: list[Column] | None
    schema: Path | None
    keep_body: bool
    message: str
    registry: str | None
    subject: str | None
    writer_schemas: tuple[Path, ...]
    registry_secret_file: str | None
    registry_tls_root_ca_file: str | None
    registry_tls_cert: str | None
    registry_tls_key: str | None
    registry_tls_insecure_skip_verify: bool

    @property
    def form_of_bodies(self) -> str:
        """The value of `BodyFormat`."""
        if self.body_format is not None:
            return self.body_format
        return "text" if self.text else "json" if self.as_json or self.schema is not None else "binary"

    @property
    def has_columns(self) -> bool:
        """Whether fields of bodies have columns."""
        return self.form_of_bodies in ("json", "avro", "protobuf")

    def schema_fields(self) -> list[tuple[str, ColumnType]]:
        """Return the fields of the schema of JSON bodies; empty without one. Raises BadParameter."""
        if self.schema is None or self.form_of_bodies != "json":
            return []
        from trio_nsq.spark.schemas.documents import schema_columns
        from trio_nsq.spark.schemas.errors import SchemaError

        try:
            return schema_columns(self.schema.read_bytes())
        except OSError as error:
            reason = f"cannot read {self.schema}: {error.strerror}."
        except SchemaError as error:
            reason = f"{self.schema}: {error}."
        raise click.BadParameter(reason, param_hint="'--schema'")

    def check_bodies(self) -> None:
        """Raises UsageError for options of bodies that exclude each other."""
        formats = {
            "--text": self.text,
            "--json": self.as_json,
            "--body-format": self.body_format is not None,
        }
        if len(flags := [flag for flag, is_given in formats.items() if is_given]) > 1:
            raise click.UsageError(f"{' and '.join(flags)} exclude each other.")
        form = self.form_of_bodies
        if self.columns and not self.has_columns:
            raise click.UsageError(
                "--columns are fields of bodies: say --json, or --body-format avro or protobuf."
            )
        if self.keep_body and not self.has_columns:
            raise click.UsageError(
                "--keep-body is for --json, and for --body-format avro and protobuf: without them, the column body is "
                "always written."
            )
        if form not in ("avro", "protobuf"):
            for flag in given_flags("message", "registry", "writer_schemas", *_OF_REGISTRIES):
                raise click.UsageError(
                    f"{flag} is for Avro and Protobuf bodies: say --body-format avro or protobuf."
                )
            return
        if self.schema is None and self.registry is None:
            raise click.UsageError(f"--body-format {form} needs a schema: give --schema or --registry.")
        if self.registry is None:
            for flag in given_flags(*_OF_REGISTRIES):
                raise click.UsageError(f"{flag} is for --registry.")
        if self.registry is not None and self.registry_secret_file is not None:
            from trio_nsq.http.urls import URL

            if URL.parse(self.registry).credentials:
                raise click.UsageError(
                    "--registry has a user and a password, and --registry-secret-file excludes them: give one of them."
                )
        if self.schema is not None and self.subject is not None:
            raise click.UsageError(
                "--schema and --subject exclude each other: the columns are those of one schema."
            )
        if self.message and form == "avro":
            raise click.UsageError("--message is for --body-format protobuf.")
        if self.writer_schemas and (form != "avro" or self.registry is not None):
            raise click.UsageError("--writer-schema is for --body-format avro without --registry.")
        if self.registry_tls_key and not self.registry_tls_cert:
            raise click.UsageError("--registry-tls-key needs a certificate: give --registry-tls-cert, too.")

    def schema_source(self) -> SchemaSource | None:
        """Return where schemas of bodies come from; None: bodies need none. Raises Failure: a file cannot be used."""
        kind = self.form_of_bodies
        if kind not in ("avro", "protobuf"):
            return None
        from trio_nsq.bodies.errors import BodySchemaError
        from trio_nsq.spark.bodies.schema import SUBJECT, SchemaSource, read_schema

        schema = None
        if self.schema is not None:
            try:
                schema = read_schema(kind, self.schema, self.message, self.writer_schemas)
            except BodySchemaError as error:
                raise failure_from(error) from error
        access = None if self.registry is None else self._registry_access(self.registry)
        return SchemaSource(kind, schema, access, self.subject or SUBJECT, self.message)

    def _registry_access(self, url: str) -> RegistryAccess:
        from trio_nsq.access.secret import NO_SECRET, Secret, SecretFileError, read_secret_file
        from trio_nsq.bodies.registry import RegistryAccess
        from trio_nsq.client.connection.tls import TLSFiles

        secret, file = NO_SECRET, self.registry_secret_file
        if file is not None:
            try:
                secret = Secret(read_secret_file(file))
            except SecretFileError as error:
                text = str(error).removeprefix("auth_secret_file ")
                raise Failure(f"--registry-secret-file {text}.", ExitCode.USAGE) from error
        tls = TLSFiles(
            self.registry_tls_root_ca_file,
            self.registry_tls_cert,
            self.registry_tls_key,
            self.registry_tls_insecure_skip_verify,
        )
        return RegistryAccess(url, secret, tls)
