"""External auth servers (`--auth-http-address`) behind HTTP and TCP: their answers, time to live and absence."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
import trio
import trio.testing

from access.support import Answer, AuthFile, attempt, auth, authenticated, bearer, everything, http_connected
from broker.auth_server import AuthServer, answer, authorization, options, running_auth_server
from broker.support import connected, pub, running_broker
from trio_nsq.access.access import MAX_CACHED_ANSWERS, Access, AuthDenied
from trio_nsq.access.patterns import compile_glob
from trio_nsq.access.policy import Grant, Identity
from trio_nsq.broker import BoundAddresses
from trio_nsq.http.messages import Request, Response


@pytest.fixture
def clock() -> trio.testing.MockClock:
    """A clock that stands still until a test moves it."""
    return trio.testing.MockClock()


def by_secret(request: Request) -> Response:
    """An answer for each secret: roles on topics; 403 for others."""
    grants = {
        "publisher": [authorization("mine", ".*", "publish")],
        "reader": [{"topic": "mine", "channels": ["ch"], "permissions": ["read"]}],
        "manager": [{"topic": "mine", "channels": [".*"], "permissions": ["manage"]}],
        "admin": [{"topic": ".*", "channels": [".*"], "permissions": ["admin", "read"]}],
        "odd": [{"topic": "(mine)?", "channels": [".*"], "permissions": ["read"]}],
        "idle": [{"topic": ".*", "channels": [], "permissions": []}],
    }
    secret = request.query["secret"]
    return answer(*grants[secret], ttl=10, identity=secret) if secret in grants else Response.text("no", 403)


@asynccontextmanager
async def guarded(folder: Path, **more: Any) -> AsyncIterator[tuple[BoundAddresses, AuthServer]]:
    """A broker with an auth server that knows some secrets."""
    async with running_auth_server(by_secret) as server:
        async with running_broker(folder / "d", **{**options(server), **more}) as bound:
            yield bound, server


async def ask(
    bound: BoundAddresses, method: str, target: str, secret: str | None, body: bytes = b""
) -> Answer:
    """A request over a connection of its own."""
    assert bound.http_address is not None
    async with http_connected(bound.http_address) as connection:
        headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
        return await connection.request(method, target, headers, body)


@pytest.mark.parametrize(
    ("method", "target", "allowed"),
    [
        ("POST", "/pub?topic=mine", {"publisher"}),
        ("POST", "/pub?topic=other", set[str]()),
        ("POST", "/topic/create?topic=mine", {"manager"}),
        ("GET", "/topic/bounds?topic=mine", {"reader", "odd", "admin"}),
        ("GET", "/channel/settings?topic=mine&channel=ch", {"reader", "odd", "admin"}),
        ("GET", "/channel/settings?topic=mine&channel=else", {"odd", "admin"}),
        ("GET", "/dead_letters", {"admin"}),
        ("GET", "/metrics", {"admin"}),
        ("GET", "/config/log_level", {"admin"}),
        ("GET", "/info", {"publisher", "reader", "manager", "odd", "admin", "idle"}),
    ],
)
async def test_permissions_over_http(tmp_path: Path, method: str, target: str, allowed: set[str]) -> None:
    async with guarded(tmp_path) as (bound, _):
        for secret in ("publisher", "reader", "manager", "odd", "admin", "idle"):
            got = await ask(bound, method, target, secret, b"x")
            assert (got.status not in (401, 403)) is (secret in allowed), (secret, got)


async def test_a_client_without_roles_sees_no_topics(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (bound, _):
        assert (await ask(bound, "POST", "/pub?topic=mine", "publisher", b"x")).status == 200
        assert b"mine" in (await ask(bound, "GET", "/stats", "reader")).body
        assert b"mine" not in (await ask(bound, "GET", "/stats", "idle")).body


async def test_only_a_client_that_reads_all_topics_sees_the_disk(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (bound, _):
        for secret, sees in (("reader", False), ("idle", False), ("admin", True)):
            answer = await ask(bound, "GET", "/stats?format=json&include_disk=true", secret)
            assert (answer.status, b'"disk"' in answer.body) == (200, sees)


async def test_an_answer_is_used_for_its_time_to_live(tmp_path: Path, clock: trio.testing.MockClock) -> None:
    async with guarded(tmp_path) as (bound, server):
        for passed_s, queries in ((0, 1), (9.9, 1), (0.2, 2), (9.7, 2), (0.4, 3)):
            clock.jump(passed_s)
            for _ in range(2):
                assert (await ask(bound, "POST", "/pub?topic=mine", "publisher", b"x")).status == 200
            assert len(server.queries) == queries
        server.response = Response.text("no", 403)
        assert (await ask(bound, "POST", "/pub?topic=mine", "publisher", b"x")).status == 200
        clock.jump(11)
        async with trio.open_nursery() as nursery:

            async def refused() -> None:
                assert (
                    await ask(bound, "POST", "/pub?topic=mine", "publisher", b"x")
                ).message == "INVALID_TOKEN"
                nursery.cancel_scope.cancel()

            nursery.start_soon(refused)
            while True:
                await trio.testing.wait_all_tasks_blocked(0.01)
                clock.jump(0.1)


async def test_answers_are_kept_by_client(tmp_path: Path) -> None:
    """A server may give other answers for TLS, or for another address."""
    async with guarded(tmp_path) as (bound, server):
        for secret in ("publisher", "reader", "publisher", "reader"):
            await ask(bound, "GET", "/info", secret)
        asked = [parse_qs(query) for query in server.queries]
        assert [each["secret"] for each in asked] == [["publisher"], ["reader"]]
        assert {(each["remote_ip"][0], each["tls"][0]) for each in asked} == {("127.0.0.1", "false")}


async def test_strangers_are_no_reason_to_ask(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (bound, server):
        assert (await ask(bound, "GET", "/ping", "guess")).status == 200
        assert (await ask(bound, "GET", "/nowhere", "guess")).status == 404
        assert (await ask(bound, "PUT", "/ping", "guess")).status == 405
        assert (await ask(bound, "GET", "/info", None)).message == "AUTH_REQUIRED"
        assert (await ask(bound, "GET", "/info", "")).message == "INVALID_TOKEN"
        assert server.queries == []


async def test_a_secret_that_the_servers_refuse(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (bound, server):
        assert (await ask(bound, "GET", "/info", "guess")).message == "INVALID_TOKEN"
        async with connected(bound.tcp_address) as client:
            assert await attempt(client, auth("guess")) == "E_AUTH_FAILED AUTH failed"
        metrics = (await ask(bound, "GET", "/metrics", "admin")).body
        for protocol in (b"tcp", b"http"):
            assert b'nsq_auth_failures_total{protocol="%b",reason="auth_server"} 1.0' % protocol in metrics
        server.response = answer()
        async with connected(bound.tcp_address) as client:
            assert await attempt(client, auth("guess")) == "E_UNAUTHORIZED AUTH no authorizations found"


@pytest.mark.parametrize("failure", [Response.text("no", 500), Response.text("no"), answer(ttl=0)])
async def test_servers_that_do_not_work(tmp_path: Path, failure: Response) -> None:
    async with guarded(tmp_path) as (bound, server):
        server.response = failure
        got = await ask(bound, "POST", "/pub?topic=mine", "publisher", b"x")
        assert (got.status, got.message) == (503, "AUTH_UNAVAILABLE")
        assert (await ask(bound, "GET", "/ping", "publisher")).status == 200
        async with connected(bound.tcp_address) as client:
            assert await attempt(client, auth("publisher")) == "E_AUTH_FAILED AUTH failed"
        server.response = by_secret
        assert (await ask(bound, "POST", "/pub?topic=mine", "publisher", b"x")).status == 200


async def test_the_auth_file_is_asked_first(tmp_path: Path) -> None:
    file = AuthFile(tmp_path / "auth.toml")
    file.add_token("web", everything("publish"))
    async with guarded(tmp_path, auth_file=file.write()) as (bound, server):
        assert (await ask(bound, "POST", "/pub?topic=t", "web-secret", b"x")).status == 200
        async with connected(bound.tcp_address) as client:
            await authenticated(client, "web-secret")
            assert await attempt(client, pub("t", b"x")) == "OK"
        assert server.queries == []
        assert (await ask(bound, "POST", "/pub?topic=mine", "publisher", b"x")).status == 200
        async with connected(bound.tcp_address) as client:
            await authenticated(client, "publisher")
            assert await attempt(client, pub("mine", b"x")) == "OK"
        assert len(server.queries) == 2
        assert bearer("web") == "Bearer web-secret"


# ---------------------------------------------------------------------- the cache


class Service:
    """Auth servers that know every secret that does not begin with `bad`."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []

    async def query(
        self, *, remote_ip: str, tls: bool, common_name: str, secret: bytes
    ) -> tuple[Identity, float]:
        self.asked.append(secret)
        if secret.startswith(b"bad"):
            raise AuthDenied("no")
        grants = (Grant(frozenset({"read"}), (compile_glob("*"),), ()),)
        return Identity("x", "auth server", () if secret == b"none" else grants), trio.current_time() + 60


async def test_strangers_cannot_push_clients_out_of_the_cache() -> None:
    service = Service()
    access = Access(None, service)

    async def query(secret: bytes, remote_ip: str = "a") -> Identity | None:
        return await access.query_cached(remote_ip=remote_ip, tls=False, common_name="", secret=secret)

    assert await query(b"good") is not None
    for number in range(MAX_CACHED_ANSWERS + 1):
        assert await query(b"bad%d" % number) is None
        assert await query(b"none", str(number)) is None
    service.asked.clear()
    assert await query(b"good") is not None
    assert service.asked == []


async def test_the_cache_is_bounded_and_keeps_the_last_used() -> None:
    service = Service()
    access = Access(None, service)
    for number in range(2 * MAX_CACHED_ANSWERS):
        for secret in (b"used", b"%d" % number):
            await access.query_cached(remote_ip="a", tls=False, common_name="", secret=secret)
    assert service.asked.count(b"used") == 1
    service.asked.clear()
    await access.query_cached(remote_ip="a", tls=False, common_name="", secret=b"0")
    assert service.asked == [b"0"]
