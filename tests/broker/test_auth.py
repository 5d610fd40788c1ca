"""Tests for AUTH in a broker with auth servers."""

from pathlib import Path

import pytest
import trio
import trio.testing

from broker.auth_server import (
    answer,
    auth,
    authenticated,
    authorization,
    options,
    running_auth_server,
)
from broker.certificates import Certificates
from broker.headers import hpub
from broker.support import connected, dpub, identify, mpub, pub, running_broker, settle
from broker.upgrading import negotiate, upgrade
from trio_nsq.http.messages import Response


@pytest.fixture
def clock() -> trio.testing.MockClock:
    """A clock that moves only when a test moves it."""
    return trio.testing.MockClock()


async def test_allowed_commands_work(tmp_path: Path) -> None:
    async with running_auth_server() as server, running_broker(tmp_path / "d", **options(server)) as bound:
        async with connected(bound.tcp_address) as client:
            assert (await negotiate(client))["auth_required"] is True
            reply = await authenticated(client, b"a secret")
            assert reply == (
                b'{"identity":"tester","identity_url":"http://127.0.0.1/tester","permission_count":1}'
            )
            assert server.queries == ["common_name=&remote_ip=127.0.0.1&secret=a+secret&tls=false"]
            await client.subscribe("t", "c", ready_count=10)
            await client.send(pub("t", b"1") + mpub("t", b"2", b"3") + dpub("t", 0, b"4"))
            for _ in range(3):
                await client.ok()
            assert [(await client.message()).body for _ in range(4)] == [b"1", b"2", b"3", b"4"]
            assert len(server.queries) == 1


@pytest.mark.parametrize(
    ("verb", "command"),
    [
        ("PUB", pub("t", b"x")),
        ("MPUB", mpub("t", b"x")),
        ("DPUB", dpub("t", 1, b"x")),
        ("HPUB", hpub("t", (b"x", {"a": "1"}))),
        ("SUB", b"SUB t c\n"),
    ],
)
async def test_commands_before_auth_are_refused(tmp_path: Path, verb: str, command: bytes) -> None:
    async with running_auth_server() as server, running_broker(tmp_path / "d", **options(server)) as bound:
        async with connected(bound.tcp_address) as client:
            await client.send(command)
            assert await client.error() == f"E_AUTH_FIRST AUTH required before {verb}"
        assert server.queries == []


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (pub("other", b"x"), 'PUB on "other" ""'),
        (mpub("other", b"x"), 'MPUB on "other" ""'),
        (dpub("other", 1, b"x"), 'DPUB on "other" ""'),
        (pub("t.not", b"x"), 'PUB on "t.not" ""'),
        (b"SUB other c\n", 'SUB on "other" "c"'),
        (b"SUB t c\n", 'SUB on "t" "c"'),
    ],
)
async def test_forbidden_commands_are_refused_without_effect(
    tmp_path: Path, command: bytes, text: str
) -> None:
    only_publish = answer(authorization("t", ".*", "publish"))
    async with running_auth_server(only_publish) as server:
        async with running_broker(tmp_path / "d", **options(server)) as bound:
            async with connected(bound.tcp_address) as client:
                await authenticated(client)
                await client.send(pub("t", b"1") + command)
                await client.ok()
                assert await client.error() == f"E_UNAUTHORIZED AUTH failed for {text}"
                assert await client.frame() is None
        assert sorted(path.name for path in (tmp_path / "d" / "topics").iterdir()) == ["t.topic"]


@pytest.mark.parametrize(
    ("response", "error"),
    [
        (answer(), "E_UNAUTHORIZED AUTH no authorizations found"),
        (answer(authorization(), ttl=0), "E_AUTH_FAILED AUTH failed"),
        (Response.text("no", 500), "E_AUTH_FAILED AUTH failed"),
    ],
)
async def test_failed_auth(tmp_path: Path, response: Response, error: str) -> None:
    async with running_auth_server(response) as server:
        async with running_broker(tmp_path / "d", **options(server)) as bound:
            async with connected(bound.tcp_address) as client:
                await client.send(auth(b"secret"))
                assert await client.error() == error
                assert await client.frame() is None


async def test_auth_twice(tmp_path: Path) -> None:
    async with running_auth_server() as server, running_broker(tmp_path / "d", **options(server)) as bound:
        async with connected(bound.tcp_address) as client:
            await authenticated(client)
            await client.send(auth(b"secret"))
            assert await client.error() == "E_INVALID AUTH already set"


async def test_auth_without_auth_servers(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.send(auth(b"secret"))
        assert await client.error() == "E_AUTH_DISABLED AUTH disabled"


async def test_authorization_is_renewed_after_its_ttl(tmp_path: Path, clock: trio.testing.MockClock) -> None:
    async with running_auth_server(answer(authorization(), ttl=10)) as server:
        async with running_broker(tmp_path / "d", **options(server)) as bound:
            async with connected(bound.tcp_address) as client:
                await authenticated(client)
                clock.jump(9.9)
                await client.publish("t", b"1")
                assert len(server.queries) == 1
                clock.jump(0.1)
                await client.publish("t", b"2")
                assert len(server.queries) == 2
                assert server.queries[0] == server.queries[1]
                server.response = answer(authorization("else"), ttl=10)
                await client.publish("t", b"3")
                clock.jump(10)
                await client.send(pub("t", b"4"))
                assert await client.error() == 'E_UNAUTHORIZED AUTH failed for PUB on "t" ""'


async def test_subscription_continues_after_the_ttl(tmp_path: Path, clock: trio.testing.MockClock) -> None:
    async with running_auth_server(answer(authorization(), ttl=10)) as server:
        async with running_broker(tmp_path / "d", **options(server)) as bound:
            async with connected(bound.tcp_address) as client, connected(bound.tcp_address) as other:
                await authenticated(client)
                await authenticated(other)
                await client.subscribe("t", "c", ready_count=10)
                server.response = answer()
                await other.publish("t", b"1")
                first = await client.message()
                clock.jump(11)
                await client.send(b"FIN %b\n" % first.id)
                await client.send(b"TOUCH 0123456789abcdef\n")
                assert (await client.error()).startswith("E_TOUCH_FAILED")


async def test_unreachable_auth_server_at_a_renewal(tmp_path: Path, clock: trio.testing.MockClock) -> None:
    async with running_auth_server(answer(authorization(), ttl=10)) as server:
        async with running_broker(tmp_path / "d", **options(server)) as bound:
            async with connected(bound.tcp_address) as client:
                await authenticated(client)
                clock.jump(10)
                server.response = Response.text("not now", 503)
                await client.send(pub("t", b"x"))
                assert await client.error() == "E_AUTH_FAILED AUTH failed"


async def test_other_clients_are_served_during_a_query(tmp_path: Path) -> None:
    async with running_auth_server() as server, running_broker(tmp_path / "d", **options(server)) as bound:
        async with connected(bound.tcp_address) as early, connected(bound.tcp_address) as late:
            await authenticated(early)
            server.gate = trio.Event()
            await late.send(auth(b"secret") + pub("t", b"late"))
            await settle()
            await early.publish("t", b"early")
            server.gate.set()
            assert (await late.frame() or (1,))[0] == 0
            await late.ok()


async def test_stop_does_not_wait_for_the_auth_server(tmp_path: Path) -> None:
    async with running_auth_server() as server:
        async with running_broker(tmp_path / "d", **options(server)) as bound:
            async with connected(bound.tcp_address) as client:
                server.gate = trio.Event()
                await client.send(auth(b"secret"))
                await settle()
                assert len(server.queries) == 1


async def test_query_has_tls_and_the_certificate_name(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path / "certificates")
    policy = {"tls_client_auth_policy": "require-verify", "tls_root_ca_file": certificates.ca_path}
    async with running_auth_server() as server:
        settings = {**certificates.options, **policy, **options(server)}
        async with running_broker(tmp_path / "d", **settings) as bound:
            async with connected(bound.tcp_address) as client:
                await upgrade(client, certificates.client_context("alice"), "snappy")
                await authenticated(client)
                assert server.queries == ["common_name=alice&remote_ip=127.0.0.1&secret=secret&tls=true"]


async def test_auth_without_identify(tmp_path: Path) -> None:
    async with running_auth_server() as server, running_broker(tmp_path / "d", **options(server)) as bound:
        async with connected(bound.tcp_address) as client:
            await authenticated(client)
            await client.send(identify())
            await client.ok()
            await client.publish("t", b"x")
