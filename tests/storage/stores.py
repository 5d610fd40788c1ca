"""Object stores for the tests: versitygw and moto speak S3, Azurite is Azure's emulator; and a proxy for faults.

The first enforces signatures and conditions as S3 does; moto does not check signatures.
"""

import base64
import hashlib
import hmac
import http.client
import os
import re
import secrets
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest.mock import patch
from urllib.parse import parse_qsl, unquote

import pytest

from interop import build
from interop.peers import Child, free_ports
from spark.support import until
from trio_nsq.storage import access

KEY, SECRET, BUCKET = "testkey", "test+se/cret", "archive"
_ACCOUNT = "devstoreaccount1"
_ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The public key of every emulator."""
_PREFIXES = ("AWS_", "AZURE_", "AZURITE_", "GOOGLE_")


@dataclass(frozen=True)
class Store:
    """A running object store with an empty bucket.

    Attributes:
        place: The URI of the bucket.
        env: The environment to reach it.
        endpoint: `http://127.0.0.1:PORT`.
    """

    place: str
    env: dict[str, str]
    endpoint: str

    @contextmanager
    def here(self, **more: str) -> Iterator[None]:
        """Let this process reach the store, and no other one."""
        others = {name for name in os.environ if name.startswith(_PREFIXES) and name not in self.env}
        with patch.dict(os.environ, self.env | more), patch.dict(access.known, clear=True):
            for name in others - more.keys():
                del os.environ[name]
            yield

    def behind(self, endpoint: str) -> "Store":
        """Return the same store, reached through a proxy."""
        return Store(self.place, self.env | {"AWS_ENDPOINT_URL": endpoint}, endpoint)

    def new_place(self) -> str:
        """Return a place in the bucket that no other test uses."""
        return f"{self.place}/{secrets.token_hex(6)}"


@contextmanager
def versitygw(folder: Path) -> Iterator[Store]:
    """Run an S3 server that keeps its objects in a folder."""
    with _or_skip():
        program = build.versitygw()
    (port,) = free_ports(1)
    (folder / BUCKET).mkdir(parents=True)
    command: list[str | Path] = [program, "--port", f"127.0.0.1:{port}", "posix", folder]
    server = Child(command, {"ROOT_ACCESS_KEY": KEY, "ROOT_SECRET_KEY": SECRET})
    try:
        _wait_for(port)
        yield _s3(f"http://127.0.0.1:{port}")
    finally:
        server.close()


@contextmanager
def moto() -> Iterator[Store]:
    """Run moto's S3 server in this process."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        store = _s3(f"http://{host}:{port}")
        request = urllib.request.Request(f"{store.endpoint}/{BUCKET}", method="PUT")
        with urllib.request.urlopen(request) as answer:
            assert answer.status == 200
        yield store
    finally:
        server.stop()


def _s3(endpoint: str) -> Store:
    env = {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_CONFIG_FILE": "/nowhere",
        "AWS_SHARED_CREDENTIALS_FILE": "/nowhere",
    }
    return Store(f"s3://{BUCKET}", env, endpoint)


@contextmanager
def azurite() -> Iterator[Store]:
    """Run Azure's emulator, with its objects in memory."""
    with _or_skip():
        program = build.azurite()
    (port,) = free_ports(1)
    server = Child(
        [program, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence", "--silent"]
    )
    endpoint = f"http://127.0.0.1:{port}"
    try:
        _wait_for(port)
        _create_container(endpoint)
        env = {"AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": endpoint}
        yield Store(f"az://{BUCKET}", env, endpoint)
    finally:
        server.close()


def _create_container(endpoint: str) -> None:
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2023-11-03"}
    lines = [f"{name}:{value}" for name, value in headers.items()]
    signed = "\n".join(["PUT", *[""] * 11, *lines, f"/{_ACCOUNT}/{_ACCOUNT}/{BUCKET}", "restype:container"])
    digest = hmac.new(base64.b64decode(_ACCOUNT_KEY), signed.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {_ACCOUNT}:{base64.b64encode(digest).decode()}"
    url = f"{endpoint}/{_ACCOUNT}/{BUCKET}?restype=container"
    with urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers)) as answer:
        assert answer.status == 201


def _wait_for(port: int) -> None:
    """Wait until a server accepts connections."""

    def accepts() -> bool:
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return True
        return False

    until(accepts)


@contextmanager
def _or_skip() -> Iterator[None]:
    try:
        yield
    except build.PeerUnavailable as reason:
        if os.environ.get("CI") == "true":
            pytest.fail(f"a peer is missing: {reason}", pytrace=False)
        pytest.skip(str(reason))


# ---------------------------------------------------------------------- faults


@dataclass
class Fault:
    """What the proxy does with a request.

    Attributes:
        is_sent: Whether the store gets the request.
        status: The status to answer instead of the store's answer; None: none, the connection is closed.
        cuts: Half of the store's answer is sent, as if it were all.
        then: Called before that, for example to wait.
    """

    is_sent: bool = False
    status: int | None = None
    cuts: bool = False
    then: Callable[[], object] = lambda: None


Judge = Callable[[str, str], Fault | None]
"""Decides about a request with a method and a path; None: no fault."""


class Proxy(ThreadingHTTPServer):
    """A proxy in front of an object store.

    Attributes:
        judge: Decides about each request; called by several threads.
        ignored: Headers that the store does not get.
        requests: `METHOD path` of all requests.
        received_bytes: The size of their bodies.
    """

    daemon_threads = True

    def __init__(self, store: Store) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.judge: Judge = lambda method, path: None
        self.ignored: frozenset[str] = frozenset()
        self.requests: list[str] = []
        self.received_bytes = 0
        self.target = store.endpoint.removeprefix("http://")
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that were killed."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def handle_request(self) -> None:
        method, path = self.command, self.path
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.requests.append(f"{method} {path}")
        self.server.received_bytes += len(body)
        fault = self.server.judge(method, path)
        status, content = 503, b"<Error><Code>SlowDown</Code></Error>"
        headers: list[tuple[str, str]] = []
        if fault is None or fault.is_sent:
            status, headers, content = self._forward(method, path, body)
        if fault is not None:
            fault.then()
            if fault.cuts:
                content = content[: len(content) // 2]
            elif fault.status is None:
                self.close_connection = True
                return
            else:
                status, headers = fault.status, []
                content = b"<Error><Code>SlowDown</Code></Error>"
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in ("connection", "transfer-encoding", "content-length", "date", "server"):
                self.send_header(name, value)
        length = {name.lower(): value for name, value in headers}.get("content-length")
        self.send_header("Content-Length", length if method == "HEAD" and length else str(len(content)))
        self.end_headers()
        if method != "HEAD":
            self.wfile.write(content)

    def _forward(self, method: str, path: str, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(self.server.target, timeout=60)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in self.server.ignored:
                    connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_request

    def log_message(self, *args: object) -> None:
        """Write no log."""


@contextmanager
def proxy(store: Store) -> Iterator[Proxy]:
    """Run a proxy in front of a store."""
    with Proxy(store) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield running
        finally:
            running.shutdown()
            thread.join()


# ---------------------------------------------------------------------- Google


class _Google(ThreadingHTTPServer):
    """An imitation of the part of Google Cloud Storage's XML interface that obstore uses, with objects in memory.

    No emulator could be used: fake-gcs-server has no conditions in this interface. So this shows that generations are
    passed on, not what Google does.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _GoogleHandler)
        self.objects: dict[str, tuple[int, bytes]] = {}
        self.lock = threading.Lock()


class _GoogleHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Google

    def handle_request(self) -> None:
        path, _, query = self.path.partition("?")
        name = unquote(path).removeprefix(f"/{BUCKET}").removeprefix("/")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.server.lock:
            if not name:
                return self._answer(200, self._listed(dict(parse_qsl(query))))
            found = self.server.objects.get(name)
            if self.command == "PUT":
                wanted = self.headers.get("x-goog-if-generation-match")
                if wanted is not None and int(wanted) != (found[0] if found else 0):
                    return self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
                found = self.server.objects[name] = (found[0] if found else 1000) + 1, body
                return self._answer(200, b"", found)
            if found is None:
                return self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            if self.command == "DELETE":
                del self.server.objects[name]
                return self._answer(204, b"")
        first, last = 0, len(found[1])
        if "Range" in self.headers:
            first, last = map(int, re.findall(r"\d+", self.headers["Range"]))
        wanted = self.headers.get("If-Match")
        if wanted is not None and wanted != _tag(found):
            return self._answer(412, b"")
        self._answer(206 if "Range" in self.headers else 200, found[1][first : last + 1], found, first)
        return None

    def _listed(self, asked: dict[str, str]) -> bytes:
        after, prefix = asked.get("start-after", ""), asked.get("prefix", "")
        rows = [
            f"<Contents><Key>{name}</Key><LastModified>2026-01-01T00:00:00Z</LastModified><Size>{len(data)}</Size>"
            f"<ETag>{_tag((generation, data))}</ETag></Contents>"
            for name, (generation, data) in sorted(self.server.objects.items())
            if name.startswith(prefix) and name > after
        ]
        return f"<ListBucketResult>{''.join(rows)}</ListBucketResult>".encode()

    def _answer(
        self, status: int, content: bytes, found: tuple[int, bytes] | None = None, first: int = 0
    ) -> None:
        self.send_response(status)
        if found is not None:
            self.send_header("ETag", _tag(found))
            self.send_header("x-goog-generation", str(found[0]))
            self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
            size = len(found[1])
            if status == 206:
                self.send_header("Content-Range", f"bytes {first}-{first + len(content) - 1}/{size}")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_PUT = do_DELETE = do_HEAD = handle_request

    def log_message(self, *args: object) -> None:
        """Write no log."""


def _tag(found: tuple[int, bytes]) -> str:
    return f'"{hashlib.md5(found[1]).hexdigest()}"'


@contextmanager
def google() -> Iterator[Store]:
    """Run an imitation of Google Cloud Storage in this process."""
    with _Google() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            env = {"GOOGLE_BASE_URL": endpoint, "GOOGLE_BEARER_TOKEN": "token"}
            yield Store(f"gs://{BUCKET}", env, endpoint)
        finally:
            server.shutdown()
            thread.join()
