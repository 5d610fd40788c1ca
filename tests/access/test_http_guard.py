"""The guard of HTTP requests with a real broker: bodies, pages, names of hosts, options, and limits for strangers."""

import json
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
import trio.testing

from access.support import (
    ALL_ROLES,
    AuthFile,
    Given,
    HTTPConnection,
    attempt,
    auth,
    bearer,
    everything,
    http_connected,
    request,
)
from broker.auth_server import answer, authorization, options, running_auth_server
from broker.support import PATIENCE_S, connected, mpub, pub, running_broker, settle, until
from trio_nsq.access.attempts import FIRST_DELAY_S, MAX_DELAY_S
from trio_nsq.broker import BoundAddresses
from trio_nsq.http.messages import Request, Response
from trio_nsq.protocol.limits import Limits

MIB = 1024 * 1024


@pytest.fixture
def clock() -> trio.testing.MockClock:
    """A clock that stands still until a test moves it."""
    return trio.testing.MockClock()


def auth_file(folder: Path) -> AuthFile:
    """Tokens for tests: one with all roles, and one for each role on the topic `mine`."""
    file = AuthFile(folder / "auth.toml")
    file.add_token("all", everything(*ALL_ROLES))
    for role in ALL_ROLES:
        file.add_token(role, Given([role], ["mine"]))
    return file


@asynccontextmanager
async def guarded(folder: Path, **more: Any) -> AsyncIterator[BoundAddresses]:
    """A broker with the auth file."""
    async with running_broker(folder / "d", auth_file=auth_file(folder).write(), **more) as bound:
        yield bound


@asynccontextmanager
async def connection_of(bound: BoundAddresses) -> AsyncIterator[HTTPConnection]:
    """A kept HTTP connection."""
    assert bound.http_address is not None
    async with http_connected(bound.http_address) as connection:
        yield connection


async def counts(bound: BoundAddresses, token: str | None = bearer("all")) -> dict[str, int]:
    """The messages published, by topic."""
    async with connection_of(bound) as connection:
        headers = {"Authorization": token} if token else {}
        stats = json.loads((await connection.request("GET", "/stats?format=json", headers)).body)
        return {topic["topic_name"]: topic["message_count"] for topic in stats["topics"]}


# ---------------------------------------------------------------------- bodies


@pytest.mark.parametrize("token", [None, "Bearer wrong", bearer("read")])
@pytest.mark.parametrize("framing", ["length", "chunked", "expect"])
async def test_a_body_is_not_read_before_the_check(tmp_path: Path, token: str | None, framing: str) -> None:
    size = 100 * MIB
    async with (
        guarded(tmp_path, limits=Limits(max_body_size=size)) as bound,
        connection_of(bound) as connection,
    ):
        headers = {"Content-Length": str(size)}
        if framing == "chunked":
            headers = {"Transfer-Encoding": "chunked"}
        if framing == "expect":
            headers["Expect"] = "100-continue"
        if token is not None:
            headers["Authorization"] = token
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        await connection.send(f"POST /mpub?topic=other HTTP/1.1\r\nHost: localhost\r\n{lines}\r\n".encode())
        refusal = await connection.answer()  # without a byte of the body
        assert refusal.status == (403 if token == bearer("read") else 401)
        assert refusal.headers["connection"] == "close"
        assert await connection.ends()


async def test_a_body_is_not_read_before_an_auth_server_answers(tmp_path: Path) -> None:
    """The connection is not read meanwhile: the sender is stopped by full sockets."""
    size = 100 * MIB
    async with running_auth_server() as server:
        server.gate = trio.Event()
        settings = {**options(server), "limits": Limits(max_body_size=size)}
        async with running_broker(tmp_path / "d", **settings) as bound, connection_of(bound) as connection:
            head = {"Authorization": "Bearer x", "Content-Length": str(size)}
            await connection.send(request("POST", "/mpub?topic=t", head))
            await until(lambda: len(server.queries) == 1)
            sent = 0
            with trio.move_on_after(0.2):
                while True:
                    await connection.send(bytes(64 * 1024))
                    sent += 64 * 1024
            assert sent < size // 2
            server.response = answer()
            server.gate.set()
            assert (await connection.answer()).status == 401
        assert len(server.queries) == 1


async def test_an_auth_server_s_yes_lets_the_body_in(tmp_path: Path) -> None:
    async with running_auth_server() as server:
        async with (
            running_broker(tmp_path / "d", **options(server)) as bound,
            connection_of(bound) as connection,
        ):
            head = {"Authorization": "Bearer x", "Content-Length": str(MIB), "Expect": "100-continue"}
            await connection.send(request("POST", "/pub?topic=t", head))
            assert await connection.exactly(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
            await connection.send(bytes(MIB))
            assert (await connection.answer()).status == 200
            assert (
                await connection.request("POST", "/pub?topic=t", head | {"Content-Length": "1"}, b"x")
            ).status == 200
            assert len(server.queries) == 1
        assert (tmp_path / "d/topics/t.topic").exists()


async def test_the_body_of_a_publish_before_auth_is_not_read(tmp_path: Path) -> None:
    async with guarded(tmp_path) as bound:
        for verb in (b"PUB mine", b"MPUB mine", b"DPUB mine 1"):
            async with connected(bound.tcp_address) as client:
                assert (
                    await attempt(client, verb + b"\n\0\0\0\x09")
                    == f"E_AUTH_FIRST AUTH required before {verb.split()[0].decode()}"
                )
                assert await client.frame() is None


# ---------------------------------------------------------------------- many requests on a connection


async def test_pipelined_requests_with_different_tokens(tmp_path: Path) -> None:
    async with guarded(tmp_path) as bound, connection_of(bound) as connection:
        tokens = ["all", "publish", "publish", "all", "publish", "all"]
        topics = ["other", "mine", "mine", "other", "other", "mine"]
        await connection.send(
            b"".join(
                request("POST", f"/pub?topic={topic}", {"Authorization": bearer(token)}, b"x")
                for token, topic in zip(tokens, topics, strict=True)
            )
        )
        answers = [await connection.answer() for _ in range(5)]
        assert [each.status for each in answers] == [200, 200, 200, 200, 403]
        assert answers[-1].message == "FORBIDDEN: this needs the role publish on topic other"
        assert await connection.ends()
        assert await counts(bound) == {"mine": 2, "other": 2}


async def test_a_token_is_not_kept_for_the_next_request(tmp_path: Path) -> None:
    async with guarded(tmp_path) as bound, connection_of(bound) as connection:
        assert (await connection.request("GET", "/info", {"Authorization": bearer("all")})).status == 200
        assert (await connection.request("GET", "/ping")).status == 200
        assert (await connection.request("GET", "/info")).message == "AUTH_REQUIRED"


async def test_pipelined_requests_that_auth_servers_decide(tmp_path: Path) -> None:
    def respond(asked: Request) -> Response:
        topics = {"a": "a", "b": "b"}
        secret = asked.query["secret"]
        return answer(authorization(topics[secret])) if secret in topics else Response.text("no", 403)

    async with running_auth_server(respond) as server:
        async with (
            running_broker(tmp_path / "d", **options(server)) as bound,
            connection_of(bound) as connection,
        ):
            await connection.send(
                b"".join(
                    request("POST", f"/pub?topic={topic}", {"Authorization": f"Bearer {token}"}, b"x")
                    for token, topic in ("aa", "bb", "aa", "ab", "aa")
                )
            )
            statuses = [(await connection.answer()).status for _ in range(4)]
            assert statuses == [200, 200, 200, 403]


# ---------------------------------------------------------------------- web pages


FOREIGN = [
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Referer": "http://evil.example/page"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
]


def basic(name: str) -> str:
    """The Authorization header of a token as the password of Basic."""
    return f"Basic {b64encode(f'user:{name}-secret'.encode()).decode()}"


@pytest.mark.parametrize("page", FOREIGN)
async def test_foreign_pages_change_nothing(tmp_path: Path, page: dict[str, str]) -> None:
    async with running_broker(tmp_path / "d") as bound:
        async with connection_of(bound) as connection:
            assert (await connection.request("POST", "/pub?topic=t", {}, b"x")).status == 200
            assert (await connection.request("GET", "/stats", page)).status == 200
        for method, target in (
            ("POST", "/topic/delete?topic=t"),
            ("POST", "/pub?topic=t"),
            ("GET", "/debug/tasks"),
        ):
            async with connection_of(bound) as connection:
                refusal = await connection.request(method, target, page, b"x" if "pub" in target else b"")
                assert (refusal.status, refusal.message.partition(":")[0]) == (403, "NOT_FOR_WEB_PAGES")
                assert not any(name.startswith("access-control") for name in refusal.headers)
        assert await counts(bound, None) == {"t": 1}


@pytest.mark.parametrize("page", FOREIGN)
async def test_browsers_repeat_basic_credentials_so_they_prove_nothing_about_a_page(
    tmp_path: Path, page: dict[str, str]
) -> None:
    async with guarded(tmp_path) as bound:
        for authorization_header, status in ((basic("all"), 403), (bearer("all"), 200)):
            async with connection_of(bound) as connection:
                headers = {"Authorization": authorization_header, **page}
                assert (await connection.request("POST", "/pub?topic=t", headers, b"x")).status == status
        async with connection_of(bound) as connection:
            headers = {"Authorization": basic("all")}
            assert (await connection.request("POST", "/pub?topic=t", headers, b"x")).status == 200
        assert await counts(bound) == {"t": 2}


async def test_a_rebound_name_reads_nothing(tmp_path: Path) -> None:
    rebound = {"Host": "evil.example:4151", "Accept-Language": ""}
    async with running_broker(tmp_path / "d", http_allowed_hosts=("broker.example",)) as bound:
        for method, target in (
            ("GET", "/ping"),
            ("GET", "/stats"),
            ("POST", "/pub?topic=t"),
            ("OPTIONS", "*"),
        ):
            async with connection_of(bound) as connection:
                refusal = await connection.request(method, target, rebound)
                assert (refusal.status, refusal.message.partition(":")[0]) == (403, "HOST_NOT_ALLOWED")
        for allowed in ({"Host": "broker.example", "Accept-Language": "en"}, {"Host": "evil.example:4151"}):
            async with connection_of(bound) as connection:
                assert (await connection.request("GET", "/ping", allowed)).status == 200
        async with connection_of(bound) as connection:  # two hosts
            await connection.send(b"GET /stats HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
            assert (await connection.answer()).status in (400, 403)


async def test_a_token_allows_any_host(tmp_path: Path) -> None:
    rebound = {"Host": "queue.example", "Accept-Language": "en"}
    async with guarded(tmp_path) as bound:
        for token, status in ((bearer("all"), 200), (basic("all"), 200), (None, 403), ("Bearer wrong", 403)):
            async with connection_of(bound) as connection:
                headers = rebound | ({"Authorization": token} if token else {})
                assert (await connection.request("GET", "/stats", headers)).status == status


async def test_preflights_get_no_permission(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d") as bound, connection_of(bound) as connection:
        headers = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
        preflight = await connection.request("OPTIONS", "/topic/delete", headers)
        assert preflight.status == 200
        assert not any(name.startswith("access-control") for name in preflight.headers)


# ---------------------------------------------------------------------- options


async def test_read_only(tmp_path: Path) -> None:
    async with guarded(tmp_path, http_read_only=True) as bound:
        for method, target, status in (
            ("POST", "/pub?topic=mine", 403),
            ("PUT", "/config/log_level", 403),
            ("POST", "/topic/create?topic=mine", 403),
            ("GET", "/stats", 200),
            ("GET", "/debug/memory", 200),
            ("POST", "/nothing", 404),
        ):
            async with connection_of(bound) as connection:
                got = await connection.request(method, target, {"Authorization": bearer("all")}, b"x")
                assert got.status == status, target
                if status == 403:
                    assert got.message == "READ_ONLY: this server runs with --http-read-only"
        async with connected(bound.tcp_address) as client:  # it is HTTP that is read-only
            await attempt(client, auth("all-secret"))
            assert await attempt(client, pub("mine", b"x")) == "OK"


@pytest.mark.parametrize(("is_open", "status"), [(True, 200), (False, 401)])
async def test_open_metrics(tmp_path: Path, is_open: bool, status: int) -> None:
    async with guarded(tmp_path, http_open_metrics=is_open) as bound, connection_of(bound) as connection:
        assert (await connection.request("GET", "/metrics")).status == status


async def test_unix_sockets_need_a_token_but_no_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with guarded(tmp_path, http_address="./http", tcp_address="./tcp"):
        transport = httpx.AsyncHTTPTransport(uds="./http")
        async with httpx.AsyncClient(transport=transport, base_url="http://any.example") as client:
            assert (await client.get("/ping")).status_code == 200
            assert (await client.get("/info")).status_code == 401
            assert (await client.get("/info", headers={"Authorization": bearer("read")})).status_code == 200
            refused = await client.get("/info", headers={"Authorization": "Bearer wrong"})
            assert refused.json() == {"message": "INVALID_TOKEN"}


async def test_config_shows_no_secret(tmp_path: Path) -> None:
    async with running_auth_server() as server:
        more = {"auth_http_addresses": (f"http://user:hidden@{server.address}/auth?key=hidden",)}
        async with guarded(tmp_path, **more) as bound, connection_of(bound) as connection:
            for name in ("auth_http_addresses", "auth_file", "tls_key", "nsqlookupd_tcp_addresses"):
                shown = await connection.request("GET", f"/config/{name}", {"Authorization": bearer("all")})
                assert b"hidden" not in shown.body
                assert b"all-secret" not in shown.body
                assert b"sha256" not in shown.body


# ---------------------------------------------------------------------- who sees what


async def test_stats_show_only_topics_that_a_client_has_a_role_on(tmp_path: Path) -> None:
    async with guarded(tmp_path) as bound, connected(bound.tcp_address) as client:
        await attempt(client, auth("all-secret"))
        assert await attempt(client, pub("mine", b"x")) == "OK"
        assert await attempt(client, mpub("other", b"x", b"y")) == "OK"
        await client.subscribe("mine", "ch")
        for name, clients in (("read", 1), ("publish", None)):
            for target in (
                "/stats?format=json",
                "/stats?format=json&topic=mine",
                "/stats?format=json&channel=ch",
            ):
                async with connection_of(bound) as connection:
                    stats = json.loads(
                        (await connection.request("GET", target, {"Authorization": bearer(name)})).body
                    )
                assert [topic["topic_name"] for topic in stats["topics"]] == ["mine"]
                assert "other" not in json.dumps(stats)
                assert stats["producers"] is None
                shown = stats["topics"][0]["channels"][0]["clients"]
                assert (len(shown) if shown is not None else None) == clients
            async with connection_of(bound) as connection:
                answers = [
                    await connection.request(
                        "GET", f"/stats?topic={topic}&format={form}", {"Authorization": bearer(name)}
                    )
                    for topic in ("other", "absent")
                    for form in ("json", "text")
                ]
                for each in answers:
                    assert b"other" not in each.body
        async with connection_of(bound) as connection:
            everything_shown = await connection.request(
                "GET", "/stats?format=json", {"Authorization": bearer("all")}
            )
            assert [t["topic_name"] for t in json.loads(everything_shown.body)["topics"]] == ["mine", "other"]


async def test_ping_tells_strangers_no_reason(tmp_path: Path) -> None:
    """The reason can name a topic."""
    (tmp_path / "d/topics/private.topic").mkdir(parents=True)
    (tmp_path / "d/topics/private.topic/state.json").write_text("damaged")
    async with guarded(tmp_path) as bound:
        for token, shown in ((None, False), (bearer("read"), False), (bearer("all"), True)):
            async with connection_of(bound) as connection:
                headers = {"Authorization": token} if token else {}
                ping = await connection.request("GET", "/ping", headers)
                assert ping.status == 500
                assert (b"private" in ping.body) is shown
                assert ping.body.startswith(b"NOK")
        async with connection_of(bound) as connection:
            stats = await connection.request("GET", "/stats?format=json", {"Authorization": bearer("read")})
            assert b"private" not in stats.body


# ---------------------------------------------------------------------- failed logins


async def test_failed_logins_are_delayed_and_valid_ones_are_not(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    async with guarded(tmp_path) as bound:
        for number in range(8):
            async with connection_of(bound) as bad, connection_of(bound) as good:
                await bad.send(request("GET", "/info", {"Authorization": "Bearer wrong"}))
                answers: list[int] = []

                async def wait(connection: HTTPConnection = bad, to: list[int] = answers) -> None:
                    to.append((await connection.answer()).status)

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(wait)
                    await settle()
                    delay_s = min(FIRST_DELAY_S * 2**number, MAX_DELAY_S)
                    clock.jump(delay_s * 0.99)
                    await settle()
                    assert answers == []
                    assert (
                        await good.request("GET", "/info", {"Authorization": bearer("all")})
                    ).status == 200
                    clock.jump(delay_s * 0.01 + 0.001)
                assert answers == [401]


async def test_failed_logins_over_tcp_are_delayed_and_valid_ones_are_not(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    async with guarded(tmp_path) as bound:
        for number in range(3):
            async with connected(bound.tcp_address) as bad, connected(bound.tcp_address) as good:
                await bad.send(auth("wrong"))
                refused: list[str] = []

                async def wait(client: Any = bad, to: list[str] = refused) -> None:
                    to.append(await client.error())

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(wait)
                    await settle()
                    clock.jump(FIRST_DELAY_S * 2**number - 0.001)
                    await settle()
                    assert refused == []
                    assert "permission_count" in await attempt(good, auth("all-secret"))
                    clock.jump(0.002)
                assert refused == ["E_AUTH_FAILED AUTH failed: the token is unknown, expired or revoked"]


async def test_metrics_count_failed_logins(tmp_path: Path) -> None:
    async with guarded(tmp_path) as bound:
        async with connection_of(bound) as connection:
            assert (await connection.request("GET", "/info", {"Authorization": "Basic !"})).status == 401
        async with connection_of(bound) as connection:
            assert (await connection.request("GET", "/info")).status == 401  # no login
        async with connected(bound.tcp_address) as client:
            assert (await attempt(client, auth("wrong"))).startswith("E_AUTH_FAILED")
        async with connection_of(bound) as connection:
            metrics = (
                await connection.request("GET", "/metrics", {"Authorization": bearer("all")})
            ).body.decode()
        lines = {line for line in metrics.splitlines() if line.startswith("nsq_auth_failures_total")}
        assert lines == {
            'nsq_auth_failures_total{protocol="tcp",reason="token"} 1.0',
            'nsq_auth_failures_total{protocol="http",reason="token"} 1.0',
            'nsq_auth_failures_total{protocol="tcp",reason="auth_server"} 0.0',
            'nsq_auth_failures_total{protocol="http",reason="auth_server"} 0.0',
        }


async def test_a_client_that_does_not_authenticate_is_closed(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    async with guarded(tmp_path) as bound:
        async with connected(bound.tcp_address) as silent, connected(bound.tcp_address) as known:
            # Without heartbeats nothing else would close it.
            for client in (silent, known):
                assert await attempt(client, b'IDENTIFY\n\0\0\0\x19{"heartbeat_interval":-1}') == "OK"
            await attempt(known, auth("all-secret"))
            clock.jump(61)
            with trio.fail_after(PATIENCE_S):
                assert await silent.frame() is None
            assert await attempt(known, pub("mine", b"x")) == "OK"


async def test_logs_have_no_secret(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    async with running_auth_server(Response.text("hidden-answer", 403)) as server:
        more = {"auth_http_addresses": (f"http://user:hidden-password@{server.address}/auth?key=hidden-key",)}
        async with guarded(tmp_path, **more) as bound:
            for header in ("Bearer hidden-token", "Basic aGlkZGVuLXVzZXI6aGlkZGVuLXRva2Vu", bearer("all")):
                async with connection_of(bound) as connection:
                    await connection.request("GET", "/info", {"Authorization": header})
            for secret in ("hidden-secret", "all-secret"):
                async with connected(bound.tcp_address) as client:
                    await attempt(client, auth(secret))
            assert len(server.queries) == 3
    logged = caplog.text
    assert "hidden" not in logged
    assert "all-secret" not in logged
    assert "aGlkZGVu" not in logged


async def test_a_console_that_authenticates_itself_is_not_delayed(tmp_path: Path) -> None:
    """It delays its viewers itself, by their addresses. Other clients gain nothing by the header."""
    async with guarded(tmp_path) as bound:
        for console, is_delayed in (("all", False), ("mine", True), ("unknown", True), ("all", False)):
            headers = {"Authorization": "Bearer wrong", "NSQ-Console-Authorization": bearer(console)}
            began_s = trio.current_time()
            for _ in range(3):
                async with connection_of(bound) as connection:
                    assert (await connection.request("GET", "/access", headers)).status == 401
            assert (trio.current_time() - began_s > 0.25) is is_delayed, console
        async with connection_of(bound) as connection:
            metrics = await connection.request("GET", "/metrics", {"Authorization": bearer("all")})
        assert b'nsq_auth_failures_total{protocol="http",reason="token"} 12' in metrics.body
