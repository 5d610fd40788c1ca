"""A client of a schema registry with Confluent's HTTP API: Confluent's, Karapace, Apicurio (`/apis/ccompat/v7`)."""

import base64
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import quote

import trio

from ..access.secret import NO_SECRET, Secret, SecretFileError, authorization, warn_in_clear
from ..client.connection.tls import TLSFiles
from ..event_loop.fan_out import start
from ..event_loop.retries import PATIENCE_S, Retry
from ..http.client import HTTPClient, InvalidRequest, NotHTTP, Reply, RequestFailed
from ..http.urls import URL
from ..protocol.address import format_address, without_secrets
from ..protocol.limits import MIB
from ..protocol.untrusted_json import decode_json
from .errors import RegistryError, RegistryUnavailable, SchemaNotFound

CONNECT_TIMEOUT_S = 5.0
REQUEST_TIMEOUT_S = 30.0
_MAX_ANSWER_BYTES = 16 * MIB
_ACCEPT = "application/vnd.schemaregistry.v1+json, application/vnd.schemaregistry+json, application/json"
_NO_SCHEMA = frozenset({40401, 40402, 40403})
"""The error codes for an unknown subject, version and schema."""
_IDS = "/schemas/ids/"
_TYPES = "/schemas/types"
_BUSY = frozenset({408, 429, 500, 502, 503, 504})
_MAX_REFERENCES = 1000
_MAX_DEPTH = 50
_MAX_REASON = 200
MAX_UNKNOWN = 10_000
UNKNOWN_S = 300.0
"""How long an unknown id is not asked for again, in seconds: bodies with random ids would flood the registry."""
MAX_UNKNOWN_ASKED = 100
UNKNOWN_ASKED_S = 60.0
"""After `MAX_UNKNOWN_ASKED` unknown ids within this time, in seconds, others than `LIKELY_IDS` count as unknown without
a request."""
LIKELY_IDS = 10_000
"""Ids up to so many above the greatest known one are always asked for, and all ids while none is known.

Registries count ids up: a schema that was registered meanwhile has such an id, and its bodies are valid.
"""


@dataclass(frozen=True, slots=True)
class RegistryAccess:
    """Where a registry is, and how to authenticate. Can be pickled; the repr shows neither the secret nor the URL.

    Attributes:
        url: Its URL, with the path of the API if it has one. A user and password in it are sent as Basic authorization,
            instead of the secret.
        secret: `USER:PASSWORD`, sent as Basic authorization, or a bearer token.
        tls: For https.
        patience_s: How long to retry while the registry does not answer, in seconds.
        request_timeout_s: The limit for one request, in seconds.
        secret_option: What the file of the secret is called where the user gives it, for errors.
    """

    url: str = field(repr=False)
    secret: Secret = NO_SECRET
    tls: TLSFiles = field(default_factory=TLSFiles)
    patience_s: float = PATIENCE_S
    request_timeout_s: float = REQUEST_TIMEOUT_S
    secret_option: str = "--registry-secret-file"

    @property
    def shown(self) -> str:
        """The URL without secrets."""
        return without_secrets(self.url).rstrip("/")


@dataclass(frozen=True, slots=True)
class RegisteredSchema:
    """A schema of the registry.

    Attributes:
        id: Its id.
        kind: `AVRO`, `PROTOBUF` or `JSON`.
        text: The schema.
        references: The schemas that it uses, by the names that it has for them, each after those that it uses itself.
    """

    id: int
    kind: str
    text: str
    references: Mapping[str, str] = field(default_factory=dict)


class SchemaRegistry:
    """Asks a registry for schemas. It blocks, and keeps the answers by id: a schema with an id never changes.

    It may not be shared by threads. It keeps no connection, so it may be used after a fork.

    Args:
        clock: Returns a time in seconds, for `UNKNOWN_S` and `UNKNOWN_ASKED_S`.
        max_unknown: How many unknown ids are kept.

    Attributes:
        files: What `descriptors` has made of Protobuf schemas, by id: a file, or the error.
    """

    def __init__(
        self,
        access: RegistryAccess,
        clock: Callable[[], float] = time.monotonic,
        max_unknown: int = MAX_UNKNOWN,
    ) -> None:
        self.access = access
        self.files: dict[int, Any] = {}
        self._clock = clock
        self._max_unknown = max_unknown
        self._schemas: dict[tuple[int, bool], RegisteredSchema] = {}
        self._unknown: dict[tuple[int, bool], tuple[float, SchemaNotFound]] = {}  # oldest first
        self._unknown_at: deque[float] = deque(maxlen=MAX_UNKNOWN_ASKED)  # when unknown ids were asked for
        self._greatest_id: int | None = None  # of known schemas
        self._is_registry: bool | None = None  # None: not known yet

    def schema(self, schema_id: int, *, serialized: bool = False) -> RegisteredSchema:
        """Return the schema with an id.

        Args:
            serialized: Whether to ask for the descriptors of a Protobuf schema, in base64, instead of its source.
                Only Confluent's registry has them; others return the source, or what is neither.

        Raises:
            SchemaNotFound: There is none, or it was not asked for: see `UNKNOWN_ASKED_S` and `LIKELY_IDS`.
            RegistryUnavailable, RegistryError, TLSFilesError: The registry cannot be asked.
        """
        key = schema_id, serialized
        if (known := self._schemas.get(key)) is not None:
            return known
        now = self._clock()
        if (unknown := self._unknown.get(key)) is not None and now < unknown[0] + UNKNOWN_S:
            raise unknown[1].with_traceback(None)
        if not self._is_likely(schema_id) and self._is_flooded(now):
            raise SchemaNotFound(
                f"the schema registry {self.access.shown} is not asked for {_IDS}{schema_id}: it has none of the last "
                f"{MAX_UNKNOWN_ASKED} ids that were asked for within {UNKNOWN_ASKED_S:.0f} s"
            )
        try:
            answer = self._get(f"{_IDS}{schema_id}", serialized=serialized)
            known = self._keep(self._parsed(schema_id, answer, serialized=serialized), serialized=serialized)
        except SchemaNotFound as error:
            self._unknown.pop(key, None)
            self._unknown[key] = now, error
            self._unknown_at.append(now)
            if len(self._unknown) > self._max_unknown:
                del self._unknown[next(iter(self._unknown))]
            raise
        return known

    def latest(self, subject: str) -> RegisteredSchema:
        """Return the latest schema of a subject. Raises as `schema`."""
        answer = self._get(f"/subjects/{quote(subject, safe='')}/versions/latest")
        return self._keep(self._parsed(answer.get("id"), answer))

    def _keep(self, found: RegisteredSchema, *, serialized: bool = False) -> RegisteredSchema:
        self._schemas[found.id, serialized] = found
        self._greatest_id = max(found.id, self._greatest_id or 0)
        return found

    def _is_likely(self, schema_id: int) -> bool:
        return self._greatest_id is None or schema_id <= self._greatest_id + LIKELY_IDS

    def _is_flooded(self, now: float) -> bool:
        return len(self._unknown_at) == MAX_UNKNOWN_ASKED and now < self._unknown_at[0] + UNKNOWN_ASKED_S

    def _parsed(
        self, schema_id: object, answer: Mapping[str, Any], *, serialized: bool = False
    ) -> RegisteredSchema:
        kind, text = answer.get("schemaType") or "AVRO", answer.get("schema")
        if not isinstance(schema_id, int) or not isinstance(kind, str) or not isinstance(text, str):
            raise self._invalid("it has no schema")
        self._is_registry = True
        references: dict[str, str] = {}
        self._add_references(answer, references, serialized=serialized)
        return RegisteredSchema(schema_id, kind, text, references)

    def _add_references(
        self, answer: Mapping[str, Any], found: dict[str, str], depth: int = 0, *, serialized: bool
    ) -> None:
        listed = answer.get("references") or []
        if not isinstance(listed, list):
            raise self._invalid("its references are no list")
        for each in listed:
            try:
                name, subject, version = str(each["name"]), str(each["subject"]), int(each["version"])
            except (TypeError, KeyError, ValueError):
                raise self._invalid("it has a reference without name, subject or version") from None
            if name in found:
                continue
            if depth >= _MAX_DEPTH or len(found) >= _MAX_REFERENCES:
                raise self._invalid("it has too many references")
            there = self._get(
                f"/subjects/{quote(subject, safe='')}/versions/{version}", serialized=serialized
            )
            self._add_references(there, found, depth + 1, serialized=serialized)
            if not isinstance(text := there.get("schema"), str):
                raise self._invalid("it has no schema")
            found[name] = text

    def _invalid(self, why: str) -> RegistryError:
        return RegistryError(f"the answer of the schema registry {self.access.shown} cannot be used: {why}")

    # ------------------------------------------------------------------ requests

    def _get(self, path: str, *, serialized: bool = False) -> Mapping[str, Any]:
        """Return the object of an answer. Retries while the registry does not answer. Raises as `schema`."""
        path += "?format=serialized" if serialized else ""
        retry = Retry(self.access.patience_s)
        while True:
            try:
                return self._get_once(path)
            except RegistryUnavailable:
                if not retry.pause():
                    raise

    def _get_once(self, path: str) -> Mapping[str, Any]:
        status, answer = self._answer(path)
        found = answer if isinstance(answer, dict) else {}
        if status == 200:
            if not found:
                raise self._invalid(
                    f"it is not a JSON object. The URL may be that of another service: {path}"
                )
            return found
        raise self._refusal(status, found, path)

    def _answer(self, path: str) -> tuple[int, Any]:
        """Return the status and the JSON value of an answer; None if it has none. Raises as `schema`."""
        access = self.access
        try:
            # In a thread: an exception of a signal handler in trio's own code would be an internal error of trio.
            reply = start(partial(trio.run, self._ask, path)).result()
        except (InvalidRequest, NotHTTP) as exc:
            raise RegistryError(f"the schema registry {access.shown} cannot be used: {exc}") from exc
        except SecretFileError as exc:
            why = str(exc).removeprefix("auth_secret_file ")
            raise RegistryError(
                f"the schema registry {access.shown} cannot be used: {access.secret_option} {why}"
            ) from exc
        except RequestFailed as exc:
            raise RegistryUnavailable(f"the schema registry {access.shown} does not answer: {exc}") from exc
        try:
            return reply.status, decode_json(reply.body)
        except ValueError:
            return reply.status, None

    def _refusal(self, status: int, answer: Mapping[str, Any], path: str) -> RegistryError:
        shown, code = self.access.shown, answer.get("error_code")
        reason = " ".join(str(answer.get("message") or "").split())[:_MAX_REASON]
        if status == 404 and (code in _NO_SCHEMA or (path.startswith(_IDS) and self._is_at_url())):
            return SchemaNotFound(f"the schema registry {shown} has no {path}: {reason or code or 404}")
        if status in _BUSY:
            return RegistryUnavailable(f"the schema registry {shown} answers with status {status}: {reason}")
        if status in (401, 403):
            return RegistryError(
                f"the schema registry {shown} refuses access (status {status}): give its secret with "
                f"{self.access.secret_option}"
            )
        if status == 404:
            return RegistryError(
                f"{shown} has no {path} (status 404): it is not the URL of a schema registry. Apicurio's has the path "
                "/apis/ccompat/v7"
            )
        return RegistryError(f"the schema registry {shown} refused {path} (status {status}): {reason}")

    def _is_at_url(self) -> bool:
        """Whether the URL is that of a registry: some registries answer 404 without a code, as other servers do."""
        if self._is_registry is None:
            status, types = self._answer(_TYPES)
            if status in _BUSY:
                raise RegistryUnavailable(
                    f"the schema registry {self.access.shown} answers with status {status}"
                )
            self._is_registry = status == 200 and isinstance(types, list)
        return self._is_registry

    async def _ask(self, path: str) -> Reply:
        access = self.access
        url = access.url.rstrip("/") + path
        client = HTTPClient(
            connect_timeout_s=min(CONNECT_TIMEOUT_S, access.request_timeout_s),
            request_timeout_s=access.request_timeout_s,
            max_answer_bytes=_MAX_ANSWER_BYTES,
            tls=access.tls.context() if url.startswith("https:") else None,
        )
        headers = {"Accept": _ACCEPT}
        secret = access.secret.read()
        if secret:
            headers["Authorization"] = _authorization(secret)
        _warn_in_clear(url, has_secret=bool(secret))
        try:
            return await client.request("GET", url, headers=headers)
        finally:
            await client.aclose()


def _authorization(secret: str) -> str:
    if ":" in secret:
        return f"Basic {base64.b64encode(secret.encode('utf-8', 'surrogateescape')).decode()}"
    return authorization(secret)


def _warn_in_clear(url: str, *, has_secret: bool) -> None:
    try:
        parsed = URL.parse(url)
    except ValueError:
        return  # the request fails
    if parsed.scheme == "http" and (has_secret or parsed.credentials):
        warn_in_clear(format_address(parsed.host, parsed.port))
