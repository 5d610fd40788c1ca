"""Every endpoint and command with every role, over TCP, HTTP and HTTPS. `access.table` has the rules."""

import itertools
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from cryptography import x509

from access.support import (
    ALL_ROLES,
    Answer,
    AuthFile,
    Given,
    HTTPConnection,
    attempt,
    auth,
    bearer,
    naively_allows,
    naively_allows_everywhere,
)
from access.table import COMMANDS, ENDPOINTS, Row
from broker.certificates import Certificates
from broker.headers import hpub, hpub_body
from broker.support import RawClient, connected, dpub, identify, mpub, pub, running_broker
from broker.upgrading import upgrade
from soak import SOAK
from trio_nsq.broker import BoundAddresses, BrokerOptions
from trio_nsq.broker.api.server import make_router
from trio_nsq.broker.server import Server
from trio_nsq.broker.storage.data_folder import DataFolder
from trio_nsq.protocol.states import LEGAL_STATES

TOKENS: dict[str, tuple[Given, ...]] = {
    "nothing": (),
    "all": (Given(ALL_ROLES),),
    "mixed": (Given(["read"], ["mine"]), Given(["manage"], ["other"])),
    **{role: (Given([role]),) for role in ALL_ROLES},
    **{f"{role}-mine": (Given([role], ["mine"]),) for role in ALL_ROLES},
    **{f"{role}-channel": (Given([role], ["mine"], ["ch"]),) for role in ALL_ROLES},
    **{f"{role}-pattern": (Given([role], ["*i*"], ["c*"]),) for role in ALL_ROLES},
}
TARGETS = [("mine", "ch"), ("other", "ch"), ("mine", "else")]
QUERIES = {
    "/debug/profile": "seconds=0",
    "/topic/producer": "producer=p",
    "/topic/producer/forget": "producer=p",
    "/channel/seek": "to=0",
    "/channel/deferred/cancel": f"id={'0' * 16}",
}
"""What a request needs besides names. `seconds=0` is answered with 400, when the guard has let it pass."""
BODIES = {
    "/pub": b"x",
    "/mpub": b"x\ny",
    "/hpub": hpub_body((b"x", b"a:1\n")),
    "/channel/pub": b"x",
    "/topic/settings": b"{}",
    "/channel/settings": b"{}",
}


Ask = Callable[..., Awaitable[Answer]]
"""Sends a request: its method, target, authorization and body."""


def allowed(row: Row, grants: tuple[Given, ...], topic: str, channel: str) -> bool:
    """Whether the row lets a client with these grants send a request."""
    if row.role in ("open", "any"):
        return True
    if row.scope == "all":
        return naively_allows_everywhere(grants, row.role)
    return naively_allows(grants, row.role, topic, channel if row.scope == "channel" else None)


def target_of(path: str, topic: str, channel: str) -> str:
    """The target of a request to an endpoint."""
    more = QUERIES.get(path, "")
    path = path.replace("{opt}", "log_level").replace("{profile}", "heap")
    return f"{path}?topic={topic}&channel={channel}&{more}"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Certificates of the broker and its clients."""
    return Certificates(tmp_path_factory.mktemp("certificates"))


def subject_of(certificate: Path) -> str:
    """The subject of the first certificate of a PEM file."""
    return x509.load_pem_x509_certificate(certificate.read_bytes()).subject.rfc4514_string()


def client_contexts(certificates: Certificates, file: AuthFile) -> Iterator[tuple[str, ssl.SSLContext]]:
    """Clients' certificates with the grants of some tokens, which are added to the file."""
    for name in ("all", "publish", "consume-mine", "read-channel", "manage-mine", "admin"):
        paths = certificates.client_files(f"{name}-certificate")
        file.add_certificate(f"{name}-certificate", subject_of(paths[0]), *TOKENS[name])
        context = ssl.create_default_context(cafile=certificates.ca_path)
        context.load_cert_chain(*paths)
        yield name, context


@asynccontextmanager
async def secured_broker(
    folder: Path, certificates: Certificates, **options: Any
) -> AsyncIterator["Secured"]:
    """A broker with an auth file, TLS, two topics and a channel of each."""
    file = AuthFile(folder / "auth.toml")
    for name, grants in TOKENS.items():
        file.add_token(name, *grants)
    file.add_token("expired", Given(ALL_ROLES), expires="2020-01-01T00:00:00Z")
    contexts = dict(client_contexts(certificates, file))
    given = {
        "auth_file": file.write(),
        "tls_client_auth_policy": "verify-if-given",
        "tls_root_ca_file": certificates.ca_path,
        **certificates.options,
        **options,
    }
    async with running_broker(folder / "d", **given) as bound:
        secured = Secured(bound, certificates.client_context(), contexts)
        if "tls_required" not in options:
            for topic in ("mine", "other"):
                for path in ("/topic/create", "/channel/create"):
                    answer = await secured.ask(
                        "http", "POST", f"{path}?topic={topic}&channel=ch", bearer("all")
                    )
                    assert answer.status == 200, answer
        yield secured


class Secured:
    """A running broker; `contexts` are those of clients with certificates, by the name of their grants."""

    def __init__(
        self, bound: BoundAddresses, context: ssl.SSLContext, contexts: dict[str, ssl.SSLContext]
    ) -> None:
        self.bound = bound
        self.context = context
        self.contexts = contexts

    @asynccontextmanager
    async def http(self, transport: str, certificate: str = "") -> AsyncIterator[HTTPConnection]:
        """A connection over `http` or `https`."""
        address = self.bound.https_address if transport == "https" else self.bound.http_address
        assert address is not None
        host, _, port = address.rpartition(":")
        stream: Any = await trio.open_tcp_stream(host, int(port))
        if transport == "https":
            context = self.contexts[certificate] if certificate else self.context
            stream = trio.SSLStream(stream, context, server_hostname="127.0.0.1", https_compatible=True)
        async with stream:
            yield HTTPConnection(stream)

    async def ask(
        self,
        transport: str,
        method: str,
        target: str,
        authorization: str | None = None,
        body: bytes = b"",
        certificate: str = "",
    ) -> Answer:
        """Send one request over a connection of its own."""
        headers = {} if authorization is None else {"Authorization": authorization}
        async with self.http(transport, certificate) as connection:
            return await connection.request(method, target, headers, body)

    @asynccontextmanager
    async def asking(self, transport: str, certificate: str = "") -> AsyncIterator[Ask]:
        """What sends requests over one connection, and over another one when the broker has closed it."""
        async with AsyncExitStack() as stack:
            connection: HTTPConnection | None = None

            async def ask(
                method: str, target: str, authorization: str | None = None, body: bytes = b""
            ) -> Answer:
                nonlocal connection
                if connection is None:
                    connection = await stack.enter_async_context(self.http(transport, certificate))
                headers = {} if authorization is None else {"Authorization": authorization}
                answer = await connection.request(method, target, headers, body)
                if answer.headers.get("connection") == "close":
                    connection = None
                return answer

            yield ask

    @asynccontextmanager
    async def tcp(self, transport: str, certificate: str = "") -> AsyncIterator[RawClient]:
        """A connection over `tcp` or `tls`."""
        async with connected(self.bound.tcp_address) as client:
            if transport == "tls":
                await upgrade(client, self.contexts[certificate] if certificate else self.context, None)
            yield client

    async def state(self) -> Any:
        """Topics, channels, depths and settings."""
        answer = await self.ask("http", "GET", "/stats?format=json&include_mem=false", bearer("all"))
        return json.loads(answer.body)["topics"]


# ---------------------------------------------------------------------- the table is complete


async def test_every_endpoint_has_a_row(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path / "d", None)
    async with trio.open_nursery() as nursery:
        options = BrokerOptions(data_path=tmp_path / "d")
        server = Server(options, folder, nursery)
        routes = make_router(server, BoundAddresses("127.0.0.1:1", "127.0.0.1:2")).routes
    folder.close()
    assert {(route.method, route.path) for route in routes} == ENDPOINTS.keys()
    assert len(routes) == len(ENDPOINTS)
    limits = {
        "4 KiB": 4 * 1024,
        "64 KiB": 64 * 1024,
        "--max-msg-size": options.limits.max_msg_size,
        "--max-body-size": options.limits.max_body_size,
    }
    for route in routes:
        assert route.rule is not None, route
        assert route.max_body_bytes == limits[ENDPOINTS[route.method, route.path].body], route


def test_every_command_has_a_row() -> None:
    assert {verb.decode() for verb in LEGAL_STATES} == COMMANDS.keys()


# ---------------------------------------------------------------------- HTTP


def questions(row: Row, transport: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """The tokens and targets to ask an endpoint with.

    Short form: the other roles' tokens for one topic or channel lack the role, as their tokens for everything do.
    """
    for name in TOKENS:
        role, _, limits = name.partition("-")
        if SOAK or not limits:
            yield from ((name, target) for target in (TARGETS[:1] if transport == "https" else TARGETS))
        elif role == row.role and transport == "http":
            yield from ((name, target) for target in TARGETS)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["http", "https"])
async def test_every_endpoint_with_every_token(
    tmp_path: Path, certificates: Certificates, transport: str
) -> None:
    async with secured_broker(tmp_path, certificates) as secured:
        before = await secured.state()
        wrong = []
        # First all that is refused: it must change nothing.
        async with secured.asking(transport) as ask:  # a connection may have many identities
            for expected in (False, True):
                for (method, path), row in ENDPOINTS.items():
                    for name, (topic, channel) in questions(row, transport):
                        if allowed(row, TOKENS[name], topic, channel) is not expected:
                            continue
                        target = target_of(path, topic, channel)
                        answer = await ask(method, target, bearer(name), BODIES.get(path, b""))
                        passed = answer.status not in (401, 403)
                        if passed is not expected:
                            wrong.append((method, path, name, topic, channel, answer))
                        elif not passed:
                            assert answer.status == 403
                            assert answer.message.startswith("FORBIDDEN: this needs the role "), answer
                            assert "www-authenticate" not in answer.headers
                if not expected:
                    assert await secured.state() == before
        assert wrong == []


@pytest.mark.slow
async def test_every_endpoint_with_a_certificate(tmp_path: Path, certificates: Certificates) -> None:
    async with secured_broker(tmp_path, certificates) as secured:
        for certificate in secured.contexts if SOAK else ("all", "read-channel", "manage-mine"):
            async with secured.asking("https", certificate) as ask:
                for (method, path), row in ENDPOINTS.items():
                    for topic, channel in TARGETS:
                        target = target_of(path, topic, channel)
                        answer = await ask(method, target, None, BODIES.get(path, b""))
                        expected = allowed(row, TOKENS[certificate], topic, channel)
                        passed = answer.status not in (401, 403)
                        assert passed is expected, (method, path, certificate, answer)


@pytest.mark.slow
async def test_every_endpoint_without_a_valid_token(tmp_path: Path, certificates: Certificates) -> None:
    async with secured_broker(tmp_path, certificates) as secured, trio.open_nursery() as nursery:
        before = await secured.state()

        async def refused(
            method: str, path: str, row: Row, transport: str, token: str | None, code: str
        ) -> None:
            target = target_of(path, "mine", "ch")
            answer = await secured.ask(transport, method, target, token, BODIES.get(path, b""))
            if row.role == "open":
                assert answer.status == 200
                return
            assert (answer.status, answer.message) == (401, code), (method, path, token)
            assert answer.headers["www-authenticate"].startswith("Bearer ")
            assert answer.headers["connection"] == "close"

        async with trio.open_nursery() as nursery:  # at once, because failed logins are delayed
            for (method, path), row in ENDPOINTS.items():
                for transport in ("http", "https"):
                    for token, code in (
                        (None, "AUTH_REQUIRED"),
                        (bearer("wrong"), "INVALID_TOKEN"),
                        (bearer("expired"), "INVALID_TOKEN"),
                        ("Basic !", "INVALID_TOKEN"),
                    ):
                        nursery.start_soon(refused, method, path, row, transport, token, code)
        assert await secured.state() == before


async def test_every_endpoint_demands_tls(tmp_path: Path, certificates: Certificates) -> None:
    async with secured_broker(tmp_path, certificates, tls_required="true") as secured:
        for method, path in ENDPOINTS:
            target = target_of(path, "mine", "ch")
            answer = await secured.ask("http", method, target, bearer("all"), BODIES.get(path, b""))
            assert (answer.status, answer.message) == (403, "TLS_REQUIRED")
        answer = await secured.ask("https", "GET", "/ping")
        assert answer.status == 200


async def test_names_that_are_missing_need_the_role_everywhere(
    tmp_path: Path, certificates: Certificates
) -> None:
    """Otherwise `/dead_letters` without a topic would tell all of them."""
    async with secured_broker(tmp_path, certificates) as secured, secured.asking("http") as ask:
        for (method, path), row in ENDPOINTS.items():
            if row.scope == "all":
                continue
            targets = [path, f"{path}?topic=", f"{path}?topic=&topic=mine"]
            if row.scope == "channel":
                targets += [
                    f"{path}?topic=mine",
                    f"{path}?channel=ch",
                    f"{path}?topic=mine&channel=&channel=ch",
                ]
            for target in targets:
                for name in (f"{row.role}-mine", f"{row.role}-channel", f"{row.role}-pattern"):
                    answer = await ask(method, target, bearer(name), b"{}")
                    assert answer.status == 403, (target, name)
                answer = await ask(method, target, bearer(row.role), b"{}")
                assert answer.status not in (401, 403), (target, answer)


async def test_the_first_of_repeated_names_counts(tmp_path: Path, certificates: Certificates) -> None:
    async with secured_broker(tmp_path, certificates) as secured:
        token = bearer("publish-mine")
        for query in ("topic=mine&topic=other", "topic=%6dine&topic=other", "topic=mine&TOPIC=other"):
            assert (await secured.ask("http", "POST", f"/pub?{query}", token, b"x")).status == 200
        for query in (
            "topic=other&topic=mine",
            "topic=mine%00",
            "topic=Mine",
            "topic=mine+",
            "%74opic=other",
        ):
            assert (await secured.ask("http", "POST", f"/pub?{query}", token, b"x")).status == 403, query
        depths = {topic["topic_name"]: topic["message_count"] for topic in await secured.state()}
        assert depths == {"mine": 3, "other": 0}


async def test_other_spellings_of_a_path_are_no_way_round(tmp_path: Path, certificates: Certificates) -> None:
    async with secured_broker(tmp_path, certificates) as secured:
        before = await secured.state()
        for target in (
            "/TOPIC/delete",
            "//topic/delete",
            "/topic/delete/",
            "/./topic/delete",
            "/x/../topic/delete",
            "/topic//delete",
            "/topic/%64elete",
            "/%74opic/delete",
            "http://localhost/topic/delete",
            "http://evil.example/topic/delete",
        ):
            for token in (None, bearer("read")):
                answer = await secured.ask("http", "POST", f"{target}?topic=mine", token)
                assert answer.status in (307, 401, 403), target
                if answer.status == 307:
                    assert answer.headers["location"] == "/topic/delete?topic=mine"
        for method in ("GET", "HEAD", "PUT", "DELETE", "PATCH", "TRACE"):
            async with secured.http("http") as connection:
                await connection.send(
                    f"{method} /topic/delete?topic=mine HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
                )
                head = bytes(await connection.stream.receive_some())
            assert head.startswith(b"HTTP/1.1 405 "), method
        for header in ("X-HTTP-Method-Override", "X-Original-URL", "X-Forwarded-For", "X-Remote-User"):
            async with secured.http("http") as connection:
                answer = await connection.request("POST", "/topic/delete?topic=mine", {header: "DELETE"})
                assert answer.status == 401
        assert await secured.state() == before


async def test_who_may_not_know_a_topic_cannot_tell_whether_it_exists(
    tmp_path: Path, certificates: Certificates
) -> None:
    async with secured_broker(tmp_path, certificates) as secured, secured.asking("http") as ask:
        for (method, path), row in ENDPOINTS.items():
            if row.role in ("open", "any") or row.scope == "all":
                continue
            token = bearer(f"{row.role}-mine")
            there, absent = [
                await ask(method, target_of(path, topic, "ch"), token, BODIES.get(path, b""))
                for topic in ("other", "absent")
            ]
            assert there.status == absent.status == 403
            assert there.body.replace(b"other", b"absent") == absent.body


# ---------------------------------------------------------------------- TCP


def command(verb: str, topic: str, channel: str) -> bytes:
    """A command that is answered at once."""
    return {
        "PUB": pub(topic, b"x"),
        "MPUB": mpub(topic, b"x", b"y"),
        "DPUB": dpub(topic, 1, b"x"),
        "HPUB": hpub(topic, (b"x", {"a": "1"})),
        "SUB": f"SUB {topic} {channel}\n".encode(),
    }[verb]


VERBS = ("PUB", "MPUB", "DPUB", "HPUB", "SUB")
AFTER_SUB = {
    "RDY": b"RDY 1\n",
    "FIN": b"FIN 0123456789abcdef\n",
    "REQ": b"REQ 0123456789abcdef 0\n",
    "TOUCH": b"TOUCH 0123456789abcdef\n",
    "CLS": b"CLS\n",
}


async def check_commands(secured: Secured, transport: str, name: str, certificate: str = "") -> None:
    """Send every command as a client with the grants of this name, and compare with the table."""
    for verb in VERBS:
        row = COMMANDS[verb]
        for topic, channel in TARGETS:
            async with secured.tcp(transport, certificate) as client:
                if not certificate:
                    reply = await attempt(client, auth(f"{name}-secret"))
                    assert json.loads(reply) == {
                        "identity": name,
                        "identity_url": "",
                        "permission_count": len(TOKENS[name]),
                    }
                answer = await attempt(client, command(verb, topic, channel))
                if allowed(row, TOKENS[name], topic, channel):
                    assert answer == "OK", (verb, name, topic, channel)
                    continue
                asked = f'"{topic}" "{channel if verb == "SUB" else ""}"'
                assert answer == f"E_UNAUTHORIZED AUTH failed for {verb} on {asked}"
                assert await client.frame() is None


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["tcp", "tls"])
async def test_every_command_with_every_token(
    tmp_path: Path, certificates: Certificates, transport: str
) -> None:
    async with secured_broker(tmp_path, certificates) as secured:
        for name in TOKENS:
            if SOAK or transport == "tcp" or "-" not in name:
                await check_commands(secured, transport, name)


async def test_producer_with_a_name_with_every_token(tmp_path: Path, certificates: Certificates) -> None:
    async with secured_broker(tmp_path, certificates) as secured:
        for name, (topic, channel) in itertools.product([None, *TOKENS], TARGETS):
            async with secured.tcp("tcp") as client:
                await attempt(
                    client, identify(feature_negotiation=True, producer="p", producer_instance=name or "i")
                )
                claim = f"PRODUCER {topic}\n".encode()
                if name is None:
                    assert await attempt(client, claim) == "E_AUTH_FIRST AUTH required before PRODUCER"
                    continue
                await attempt(client, auth(f"{name}-secret"))
                answer = await attempt(client, claim)
                if allowed(COMMANDS["PRODUCER"], TOKENS[name], topic, channel):
                    assert "number" in json.loads(answer)
                else:
                    assert answer == f'E_UNAUTHORIZED AUTH failed for PRODUCER on "{topic}" ""'


async def test_every_command_with_a_certificate(tmp_path: Path, certificates: Certificates) -> None:
    async with secured_broker(tmp_path, certificates) as secured:
        for name in secured.contexts:
            await check_commands(secured, "tls", name, name)


@pytest.mark.parametrize("transport", ["tcp", "tls"])
async def test_every_command_without_a_valid_token(
    tmp_path: Path, certificates: Certificates, transport: str
) -> None:
    async with secured_broker(tmp_path, certificates) as secured:
        before = await secured.state()
        for verb in VERBS:
            async with secured.tcp(transport) as client:
                answer = await attempt(client, command(verb, "mine", "ch"))
                assert answer == f"E_AUTH_FIRST AUTH required before {verb}"
                assert await client.frame() is None

        async def refused(secret: str) -> None:
            async with secured.tcp(transport) as client:
                # What follows in the same segment is not executed.
                answer = await attempt(client, auth(secret) + pub("mine", b"x"))
                assert answer == "E_AUTH_FAILED AUTH failed: the token is unknown, expired or revoked"
                assert await client.frame() is None

        async with trio.open_nursery() as nursery:
            for secret in ("wrong-secret", "expired-secret", "all", "ALL-secret", "all-secret\n", "\0"):
                nursery.start_soon(refused, secret)
        assert await secured.state() == before


@pytest.mark.parametrize("secret", [None, "consume-secret", "publish-secret"])
async def test_commands_that_follow_sub_need_it(
    tmp_path: Path, certificates: Certificates, secret: str | None
) -> None:
    async with secured_broker(tmp_path, certificates) as secured:
        assert AFTER_SUB.keys() | set(VERBS) | {"IDENTIFY", "AUTH", "NOP", "PRODUCER"} == COMMANDS.keys()
        for verb, data in AFTER_SUB.items():
            async with secured.tcp("tcp") as client:
                if secret is not None:
                    await attempt(client, auth(secret))
                assert await attempt(client, data) == f"E_INVALID cannot {verb} in current state"
        async with secured.tcp("tcp") as client:
            await client.send(b"NOP\n")
            assert await attempt(client, auth("all-secret") if secret is None else auth(secret))


async def test_auth_without_authentication(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        assert await attempt(client, auth("all-secret")) == "E_AUTH_DISABLED AUTH disabled"
