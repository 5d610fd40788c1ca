"""Tests for queries to a discovery service about brokers: those of a topic, and all."""

import json
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
import trio
import trio.testing
import trustme

from lookup.support import Runs, ours, producer, real
from trio_nsq.api.lookupd import Node, ProducerAddress
from trio_nsq.http.messages import HTTPError, Request, Response
from trio_nsq.http.routing import Route, Router
from trio_nsq.http.serving import serve_connection
from trio_nsq.lookup.hosts import host_filter
from trio_nsq.lookup.query import MAX_ANSWER_BYTES, LookupFailed, lookup_nodes, lookup_topic
from trio_nsq.protocol import NSQError

FIELDS = {
    "remote_address": "10.0.0.1:5",
    "hostname": "h",
    "broadcast_address": "b",
    "tcp_port": 4150,
    "http_port": 4151,
    "version": "1.3.0",
}
ADDRESS = ProducerAddress("b", 4150, 4151)


@asynccontextmanager
async def answering(response: Response, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Run a server with this answer for the topic `a b`; yields `host:port`."""

    async def lookup(request: Request) -> Response:
        assert request.query == {"topic": "a b"}
        return response

    async def nodes(request: Request) -> Response:
        assert request.query == {}
        return response

    router = Router([Route("GET", "/lookup", lookup), Route("GET", "/nodes", nodes)])

    async def serve(stream: trio.SocketStream) -> None:
        secure = trio.SSLStream(stream, tls, server_side=True) if tls else stream
        await serve_connection(secure, router, peer="")

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(
            lambda task_status: trio.serve_tcp(serve, 0, host="127.0.0.1", task_status=task_status)
        )
        yield "127.0.0.1:%d" % listener.socket.getsockname()[1]
        nursery.cancel_scope.cancel()


async def ask(address: str, tls: ssl.SSLContext | None = None) -> list[ProducerAddress]:
    return await lookup_topic(address, "a b", timeout_s=5, tls=tls)


@pytest.mark.parametrize("lookupds", [pytest.param(real, marks=pytest.mark.interop), ours])
async def test_query(lookupds: Runs) -> None:
    async with lookupds() as lookupd:
        assert await lookup_topic(lookupd.http_address, "t", timeout_s=5) == []
        async with producer(lookupd, broadcast_address="x") as one:
            await one.register("REGISTER t c")
            (found,) = await lookup_topic(lookupd.http_address, "t", timeout_s=5)
            assert found == ProducerAddress("x", 4150, 4151)
            assert await lookup_topic(f"http://{lookupd.http_address}/", "t", timeout_s=5) == [found]


@pytest.mark.parametrize("lookupds", [pytest.param(real, marks=pytest.mark.interop), ours])
async def test_query_for_all_brokers(lookupds: Runs) -> None:
    async with lookupds() as lookupd:
        assert await lookup_nodes(lookupd.http_address, timeout_s=5) == []
        async with producer(lookupd, broadcast_address="x") as one, producer(lookupd, tcp_port=9):
            for topic in ("deleted", "kept"):
                await one.register(f"REGISTER {topic}")
            async with httpx.AsyncClient(base_url=f"http://{lookupd.http_address}") as http:
                (await http.post("/topic/tombstone?topic=deleted&node=x:4151")).raise_for_status()
            found = await lookup_nodes(lookupd.http_address, timeout_s=5)
    assert {each.tcp_port: (each.tombstones, each.draining) for each in found} == {
        4150: (frozenset({"deleted"}), False),
        9: (frozenset(), False),
    }


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, Node("b", 4150, 4151, version="1.3.0")),
        ({"topics": None, "tombstones": None, "version": None}, Node("b", 4150, 4151)),
        (
            {"topics": ["t", "u", "v"], "tombstones": [True, False, True], "draining": True},
            Node("b", 4150, 4151, ("t", "u", "v"), frozenset({"t", "v"}), draining=True, version="1.3.0"),
        ),
        ({"topics": ["t"], "tombstones": []}, Node("b", 4150, 4151, ("t",), version="1.3.0")),
    ],
)
async def test_fields_of_all_brokers(fields: dict[str, object], expected: Node) -> None:
    async with answering(Response.json({"producers": [FIELDS | fields]})) as address:
        assert await lookup_nodes(address, timeout_s=5) == [expected]


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (HTTPError(404, "TOPIC_NOT_FOUND").response(), "it is not an nsqlookupd: use the HTTP port"),
        (Response.json({"producers": [FIELDS | {"draining": "yes"}]}), "draining is of the wrong type"),
        (Response.json({"producers": [FIELDS | {"tombstones": [1]}]}), "tombstones is of the wrong type"),
    ],
)
async def test_invalid_answer_about_all_brokers(response: Response, reason: str) -> None:
    async with answering(response) as address:
        with pytest.raises(LookupFailed, match=reason):
            await lookup_nodes(address, timeout_s=5)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"channels": [], "producers": [FIELDS]}, [ADDRESS]),
        ({"channels": ["c"], "producers": []}, []),
        ({"producers": None}, []),
        (
            {"status_code": 200, "status_txt": "OK", "data": {"channels": [], "producers": [FIELDS]}},
            [ADDRESS],
        ),
        ({"status_code": 404, "status_txt": "TOPIC_NOT_FOUND", "data": None}, []),
        ({"status_code": 500, "status_txt": "INVALID_ARG_TOPIC", "data": None}, []),
        (
            {"producers": [{"address": "old", "tcp_port": 4150}]},
            [ProducerAddress("old", 4150, 0)],
        ),
    ],
)
async def test_answers_of_old_and_new_versions(answer: object, expected: list[ProducerAddress]) -> None:
    async with answering(Response.json(answer)) as address:
        assert await ask(address) == expected


async def test_broker_with_an_invalid_address_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    producers = [FIELDS | {"tcp_port": 70000}, FIELDS, FIELDS | {"broadcast_address": ""}]
    async with answering(Response.json({"producers": producers})) as address:
        assert await ask(address) == [ADDRESS]
    assert len(caplog.records) == 2


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (HTTPError(404, "NOT_FOUND").response(), "it is not an nsqlookupd: use the HTTP port"),
        (Response.text("not found", 404), "it is not an nsqlookupd: use the HTTP port"),
        (HTTPError(500, "INTERNAL_ERROR").response(), "got response 500"),
        (Response.text("<html>"), "the answer is not valid"),
        (Response.json([]), "the answer is not valid: not a JSON object"),
        (Response.json({"producers": [FIELDS | {"tcp_port": "4150"}]}), "tcp_port is of the wrong type"),
        (Response.json({"status_code": 500, "status_txt": "X", "data": None}), "status_code 500 'X'"),
        (Response.text(json.dumps({"producers": "x" * MAX_ANSWER_BYTES})), "longer than 5242880 bytes"),
    ],
)
async def test_invalid_answer_names_the_service(response: Response, reason: str) -> None:
    async with answering(response) as address:
        with pytest.raises(LookupFailed, match=reason) as failed:
            await ask(address)
    assert str(failed.value).startswith(f"nsqlookupd {address}: ")
    assert (failed.value.address, isinstance(failed.value, NSQError)) == (address, True)


@pytest.mark.parametrize(
    "address", ["127.0.0.1:1", "nowhere.invalid:4161", "http://", "ftp://a:1", "a b:1", "xn--:1", ""]
)
async def test_unreachable_service(address: str) -> None:
    with pytest.raises(LookupFailed) as failed:
        await ask(address)
    assert failed.value.reason


async def test_silent_service(autojump_clock: trio.testing.MockClock) -> None:
    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(
            lambda task_status: trio.serve_tcp(
                lambda _stream: trio.sleep_forever(), 0, host="127.0.0.1", task_status=task_status
            )
        )
        address = "127.0.0.1:%d" % listener.socket.getsockname()[1]
        with pytest.raises(LookupFailed, match="no answer within 5 s"):
            await ask(address)
        nursery.cancel_scope.cancel()


async def test_query_over_tls() -> None:
    authority = trustme.CA()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(server)
    client = ssl.create_default_context()
    authority.configure_trust(client)
    async with answering(Response.json({"producers": [FIELDS]}), tls=server) as address:
        with pytest.raises(LookupFailed, match=r"(?i)certificate"):
            await ask(f"https://{address}")
        assert await ask(f"https://{address}", client) == [ADDRESS]


# ------------------------------------------------------------------------------------------------ tokens


@asynccontextmanager
async def asking_for(token: str | None, seen: list[str | None]) -> AsyncIterator[int]:
    """Run a service on all interfaces that requires this token, or none; yields its port.

    `seen` gets the Authorization header of each request.
    """

    async def lookup(request: Request) -> Response:
        seen.append(request.headers.get("authorization"))
        if token is not None and seen[-1] != f"Bearer {token}":
            raise HTTPError(401, "AUTH_REQUIRED" if seen[-1] is None else "INVALID_TOKEN")
        return Response.json({"channels": [], "producers": []})

    async def serve(stream: trio.SocketStream) -> None:
        await serve_connection(stream, Router([Route("GET", "/lookup", lookup)]))

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(
            lambda task_status: trio.serve_tcp(serve, 0, host="0.0.0.0", task_status=task_status)
        )
        yield listener.socket.getsockname()[1]
        nursery.cancel_scope.cancel()


async def test_token_is_sent_over_loopback() -> None:
    seen: list[str | None] = []
    async with asking_for("t0ken", seen) as port:
        assert await lookup_topic(f"127.0.0.1:{port}", "t", timeout_s=5, token="t0ken") == []
        for token, text in (("", "401: AUTH_REQUIRED"), ("other", "401: INVALID_TOKEN")):
            with pytest.raises(LookupFailed, match=text) as caught:
                await lookup_topic(f"127.0.0.1:{port}", "t", timeout_s=5, token=token)
            assert "other" not in str(caught.value)
    assert seen == ["Bearer t0ken", None, "Bearer other"]


@pytest.mark.parametrize(
    ("required", "headers"), [(None, [None]), ("t0ken", [None, "Bearer t0ken"])], ids=["not asked", "asked"]
)
async def test_token_is_sent_in_clear_to_others_only_if_they_ask(
    required: str | None, headers: list[str | None], caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[str | None] = []
    async with asking_for(required, seen) as port:
        # By its form, this name is another machine's.
        address = f"{socket.gethostname()}:{port}"
        assert await lookup_topic(address, "t", timeout_s=5, token="t0ken") == []
    assert seen == headers
    warned = [record.getMessage() for record in caplog.records if record.name == "trio_nsq.security"]
    assert [text.split()[5] for text in warned] == ([address] if required else [])


@pytest.mark.parametrize(
    ("patterns", "allowed", "refused"),
    [
        ([], ["any"], []),
        (["a.example.com"], ["a.example.com", "A.Example.com."], ["b.example.com", "xa.example.com", "a"]),
        (["*.example.com", "10.1.*"], ["a.b.example.com", "10.1.2.3"], ["example.com", "210.1.2.3"]),
        (["fe80::1", "[::2]"], ["fe80::1", "::2"], ["fe80::10"]),
        (["a.c"], ["a.c"], ["abc"]),
    ],
)
def test_allowed_hosts(patterns: list[str], allowed: list[str], refused: list[str]) -> None:
    allow = host_filter(patterns)
    assert all(map(allow, allowed))
    assert not any(map(allow, refused))
