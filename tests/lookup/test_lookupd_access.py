"""Tests for who may do what at a discovery service: every endpoint and command, every role, plain text and TLS.

An endpoint or command without a row here fails.
"""

import ssl
from collections.abc import AsyncIterator, Set
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
import trio
from trio.testing import MockClock

from broker.certificates import Certificates
from broker.support import PATIENCE_S
from lookup.support import (
    Lookupd,
    auth,
    grant,
    identify,
    ours,
    producer,
    raw_connection,
    token_of,
    write_auth_file,
)
from trio_nsq.access.audit import AuditLog
from trio_nsq.access.policy import ROLES
from trio_nsq.lookup import protocol
from trio_nsq.lookup.service.http_api import make_router
from trio_nsq.lookup.service.registry import Registry

EVERYBODY: Set[str | None] = {None, "stranger", *ROLES, "elsewhere"}
ANY_ROLE: Set[str | None] = {*ROLES, "elsewhere"}
"""`elsewhere` has every role, on other topics."""

ENDPOINTS: dict[tuple[str, str], Set[str | None]] = {
    ("GET", "/ping"): EVERYBODY,
    ("GET", "/info"): ANY_ROLE,
    ("GET", "/access"): ANY_ROLE,
    ("GET", "/topics"): ANY_ROLE,
    ("GET", "/channels?topic=clicks"): ANY_ROLE,
    ("GET", "/lookup?topic=clicks"): ANY_ROLE - {"elsewhere"},  # 404
    ("GET", "/nodes"): ANY_ROLE,
    ("GET", "/debug"): set(),  # needs admin on all topics: see test_admin_of_everything
    ("POST", "/topic/create?topic=clicks"): {"manage"},
    ("POST", "/topic/delete?topic=clicks"): {"manage"},
    ("POST", "/topic/tombstone?topic=clicks&node=b:4151"): {"manage"},
    ("POST", "/channel/create?topic=clicks&channel=c"): {"manage"},
    ("POST", "/channel/delete?topic=clicks&channel=c"): {"manage"},
}

COMMANDS: dict[str, Set[str | None]] = {
    "PING": EVERYBODY,
    "AUTH": {*ROLES, "elsewhere"},
    "IDENTIFY": {"register", "elsewhere"},
    "REGISTER": {"register"},
    "UNREGISTER": {"register", "elsewhere"},  # of its own registrations
}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def clock() -> MockClock:
    """A clock that jumps over the delays of failed logins, but not while data is between sockets."""
    return MockClock(autojump_threshold=0.02)


@pytest.fixture
def auth_file(tmp_path: Path) -> Path:
    entries: dict[str, str] = {role: grant(role, topics="clicks*") for role in ROLES}
    entries |= {"elsewhere": grant(*ROLES, topics="orders"), "root": grant(*ROLES)}
    return write_auth_file(tmp_path / "auth.toml", entries)


def token_for(who: str | None) -> bytes | None:
    return None if who is None else token_of(who)


@asynccontextmanager
async def http(
    lookupd: Lookupd, token: bytes | None = None, tls: ssl.SSLContext | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"Authorization": f"Bearer {token.decode()}"} if token is not None else {}
    url = f"{'https' if tls else 'http'}://{lookupd.http_address}"
    async with httpx.AsyncClient(
        base_url=url, headers=headers, verify=tls or False, timeout=PATIENCE_S
    ) as client:
        yield client


def test_every_endpoint_has_a_row() -> None:
    registry = Registry(
        inactive_timeout_s=1, tombstone_lifetime_s=1, max_registrations=1, max_topics=9, max_channels=9
    )
    routes = {(route.method, route.path) for route in make_router(registry, AuditLog()).routes}
    assert routes == {(method, target.partition("?")[0]) for method, target in ENDPOINTS}


def test_every_command_has_a_row() -> None:
    assert COMMANDS.keys() == set(protocol.VERBS)
    assert {kind.__name__.upper() for kind in get_args(protocol.Command)} == set(protocol.VERBS)


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("who", [None, "stranger", *ROLES, "elsewhere"])
async def test_endpoints(
    auth_file: Path, certificates: Certificates, who: str | None, encrypted: bool, clock: MockClock
) -> None:
    tls = certificates.client_context() if encrypted else None
    async with (
        ours(auth_file=auth_file, **certificates.options) as lookupd,
        producer(lookupd, token=token_of("root")) as one,
        http(lookupd, token_for(who), tls) as client,
    ):
        for (method, target), allowed in ENDPOINTS.items():
            await one.register("REGISTER clicks c")
            answer = await client.request(method, target)
            if who in allowed:
                expected = 200
            elif who not in ANY_ROLE:
                expected = 401
            else:
                expected = 404 if target.startswith("/lookup") else 403
            assert answer.status_code == expected, (method, target, answer.text)


async def test_without_an_auth_file_everybody_may_do_everything() -> None:
    async with ours() as lookupd, producer(lookupd) as one, http(lookupd) as client:
        for method, target in ENDPOINTS:
            await one.register("REGISTER clicks c")
            assert (await client.request(method, target)).status_code == 200


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("who", [None, "stranger", *ROLES, "elsewhere"])
async def test_commands(
    auth_file: Path, certificates: Certificates, who: str | None, encrypted: bool, clock: MockClock
) -> None:
    tls = certificates.client_context() if encrypted else None
    token = token_for(who)
    async with ours(auth_file=auth_file, **certificates.options) as lookupd:
        for verb, allowed in COMMANDS.items():
            async with raw_connection(lookupd.tcp_address, tls) as client:
                login = auth(token) if token is not None else b""
                steps = {
                    "PING": [b"PING\n"],
                    "AUTH": [login or auth(b"")],
                    "IDENTIFY": [login, identify()],
                    "REGISTER": [login, identify(), b"REGISTER clicks\n"],
                    "UNREGISTER": [login, identify(), b"UNREGISTER clicks\n"],
                }[verb]
                await client.stream.send_all(b"  V1")
                response: bytes | None = b""
                for step in filter(None, steps):
                    await client.stream.send_all(step)
                    response = await client.response()
                    if response is None or response.startswith(b"E_"):
                        break
                assert response is not None
                assert response.startswith(b"E_") == (who not in allowed), (verb, response)


async def test_admin_of_everything(auth_file: Path) -> None:
    async with (
        ours(auth_file=auth_file) as lookupd,
        producer(lookupd, token=token_of("root")) as one,
        http(lookupd, token_of("root")) as client,
    ):
        await one.register("REGISTER clicks")
        assert "topic:clicks:" in (await client.get("/debug")).json()


async def test_answers_have_only_topics_that_the_client_sees(auth_file: Path) -> None:
    async with (
        ours(auth_file=auth_file) as lookupd,
        producer(lookupd, token=token_of("root"), broadcast_address="both") as both,
        producer(lookupd, token=token_of("root"), broadcast_address="hidden") as hidden,
        http(lookupd, token_of("consume")) as client,
        http(lookupd, token_of("root")) as root,
    ):
        await both.register("REGISTER clicks c", "REGISTER secret d")
        await hidden.register("REGISTER secret d")
        assert (await client.get("/topics")).json() == {"topics": ["clicks"]}
        assert (await client.get("/channels?topic=secret")).json() == {"channels": []}
        assert (await client.get("/lookup?topic=secret")).status_code == 404
        (node,) = (await client.get("/nodes")).json()["producers"]
        assert (node["broadcast_address"], node["topics"], node["tombstones"]) == (
            "both",
            ["clicks"],
            [False],
        )
        assert len((await root.get("/nodes")).json()["producers"]) == 2


# ------------------------------------------------------------------------------------------------ registration


async def test_a_topic_that_is_not_allowed_leaves_the_others_registered(
    auth_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        ours(auth_file=auth_file) as lookupd,
        producer(lookupd, token=token_of("register")) as one,
        http(lookupd, token_of("root")) as client,
    ):
        responses = await one.ask(b"REGISTER clicks-1\nREGISTER orders c\nREGISTER clicks-2\nPING\n")
        refusal = b"E_UNAUTHORIZED REGISTER needs the role register on topic orders"
        assert responses == [b"OK", refusal, b"OK", b"OK"]
        assert (await client.get("/topics")).json() == {"topics": ["clicks-1", "clicks-2"]}
    assert "needs the role register on topic orders" in caplog.text


async def test_an_address_belongs_to_the_identity_that_has_registered_it(tmp_path: Path) -> None:
    file = write_auth_file(tmp_path / "auth.toml", {"one": grant("register"), "two": grant("register")})
    async with ours(auth_file=file) as lookupd:
        async with producer(lookupd, token=token_of("one"), broadcast_address="Host.example."):
            async with producer(lookupd, token=token_of("one"), broadcast_address="host.example"):
                pass  # the same broker may connect again before its first connection has ended
            async with raw_connection(lookupd.tcp_address) as thief:
                await thief.stream.send_all(
                    b"  V1" + auth(token_of("two")) + identify(broadcast_address="host.example")
                )
                assert await thief.response() == b"OK"
                taken = b"E_UNAUTHORIZED IDENTIFY: host.example:4150 is registered by another identity"
                assert await thief.response() == taken
            async with producer(
                lookupd, token=token_of("two"), broadcast_address="host.example", tcp_port=4250
            ):
                pass  # another port is another broker
        async with producer(lookupd, token=token_of("two"), broadcast_address="host.example"):
            pass  # the address is free


async def test_auth_has_its_place(auth_file: Path) -> None:
    valid = auth(token_of("register"))
    for commands, error in (
        (valid + valid, b"E_INVALID AUTH already set"),
        (valid + identify() + valid, b"E_INVALID cannot AUTH after IDENTIFY"),
        (b"AUTH\n\x00\x00\x10\x01", b"E_BAD_BODY AUTH body too big 4097 > 4096"),
        (b"AUTH\n\xff\xff\xff\xff", b"E_BAD_BODY AUTH invalid body size -1"),
        (b"AUTH\n\x00\x00\x00\x05", b"E_BAD_BODY AUTH failed to read body"),
        (b"REGISTER clicks\n", b"E_INVALID client must IDENTIFY"),
    ):
        async with (
            ours(auth_file=auth_file) as lookupd,
            raw_connection(lookupd.tcp_address) as client,
        ):
            await client.stream.send_all(b"  V1" + commands)
            assert isinstance(client.stream, trio.SocketStream)
            await client.stream.send_eof()
            responses = []
            while (response := await client.response()) is not None:
                responses.append(response)
            assert responses[-1] == error


async def test_failed_logins_are_delayed_more_and_more(auth_file: Path, autojump_clock: MockClock) -> None:
    async with ours(auth_file=auth_file) as lookupd:
        delays = []
        for _ in range(4):
            began_s = trio.current_time()
            async with raw_connection(lookupd.tcp_address) as client:
                await client.stream.send_all(b"  V1" + auth(b"guess"))
                assert (await client.response() or b"").startswith(b"E_AUTH_FAILED")
            delays.append(trio.current_time() - began_s)
        assert delays == sorted(delays)
        assert delays[-1] >= 2 * delays[1]


async def test_a_service_without_authentication_accepts_every_token() -> None:
    async with ours() as lookupd, producer(lookupd, token=b"unused") as one:
        await one.register("REGISTER t")


# ------------------------------------------------------------------------------------------------ reload and expiry


async def test_a_revoked_broker_is_disconnected(auth_file: Path) -> None:
    async with (
        ours(auth_file=auth_file) as lookupd,
        producer(lookupd, token=token_of("register")) as revoked,
        producer(lookupd, token=token_of("root"), broadcast_address="other") as other,
        http(lookupd, token_of("root")) as client,
    ):
        await revoked.register("REGISTER clicks")
        await other.register("REGISTER clicks")
        write_auth_file(auth_file, {"root": grant(*ROLES)})
        assert lookupd.reload is not None
        await lookupd.reload()
        assert await revoked.response() is None
        (left,) = (await client.get("/lookup?topic=clicks")).json()["producers"]
        assert left["broadcast_address"] == "other"
        assert await other.ask(b"PING\n") == [b"OK"]


async def test_a_broker_loses_the_topics_that_it_may_no_longer_register(auth_file: Path) -> None:
    async with (
        ours(auth_file=auth_file) as lookupd,
        producer(lookupd, token=token_of("register")) as one,
        http(lookupd, token_of("root")) as client,
    ):
        await one.register("REGISTER clicks", "REGISTER clicks-2")
        entries = {"register": grant("register", topics="clicks"), "root": grant(*ROLES)}
        write_auth_file(auth_file, entries)
        assert lookupd.reload is not None
        await lookupd.reload()
        await one.register("REGISTER clicks c")
        (node,) = (await client.get("/nodes")).json()["producers"]
        assert node["topics"] == ["clicks"]


async def test_an_expired_token(tmp_path: Path) -> None:
    lines = f"expires = 2001-01-01T00:00:00Z\n{grant('register')}"
    file = write_auth_file(tmp_path / "auth.toml", {"old": lines})
    async with ours(auth_file=file) as lookupd, raw_connection(lookupd.tcp_address) as client:
        await client.stream.send_all(b"  V1" + auth(token_of("old")))
        assert (await client.response() or b"").startswith(b"E_AUTH_FAILED")


async def test_an_auth_file_that_cannot_be_used_changes_nothing(
    auth_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with ours(auth_file=auth_file) as lookupd, producer(lookupd, token=token_of("register")) as one:
        auth_file.write_text("[[token]]\nnme = 1")
        assert lookupd.reload is not None
        await lookupd.reload()
        await one.register("REGISTER clicks")
    assert "the previous files stay in use" in caplog.text


# ------------------------------------------------------------------------------------------------ web pages


async def test_foreign_web_pages_change_nothing() -> None:
    async with ours() as lookupd, http(lookupd) as client:
        page = {"Origin": "http://evil.example"}
        answer = await client.post("/topic/create?topic=t", headers=page)
        assert (answer.status_code, answer.json()["message"].partition(":")[0]) == (403, "NOT_FOR_WEB_PAGES")
        answer = await client.get("/topics", headers={"Host": "evil.example", "Accept-Language": "en"})
        assert (answer.status_code, answer.json()["message"].partition(":")[0]) == (403, "HOST_NOT_ALLOWED")
        assert (await client.get("/topics")).json() == {"topics": []}
        # Not a browser: NSQ's clients under an alias of the service.
        assert (await client.get("/topics", headers={"Host": "evil.example"})).json() == {"topics": []}


async def test_names_of_the_service() -> None:
    names: dict[str, Any] = {"http_allowed_hosts": ("alias.example",), "broadcast_address": "lookupd.example"}
    async with ours(**names) as lookupd, http(lookupd) as client:
        for host in ("alias.example", "lookupd.example:4161", "127.0.0.1", "localhost"):
            assert (await client.get("/topics", headers={"Host": host})).status_code == 200


async def test_read_only() -> None:
    async with ours(http_read_only=True) as lookupd, producer(lookupd) as one, http(lookupd) as client:
        for method, target in ENDPOINTS:
            await one.register("REGISTER clicks c")
            answer = await client.request(method, target)
            assert answer.status_code == (200 if method == "GET" else 403)
