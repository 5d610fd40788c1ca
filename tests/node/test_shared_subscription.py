"""Consumers on the shared port of a node: they get the messages of all processes."""

import hashlib
import http.client
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from broker.certificates import Certificates
from broker.support import PATIENCE_S, RawClient, Received, connected, identify
from broker.upgrading import upgrade
from node.support import Node, running_node, wait_until
from trio_nsq.protocol.encode import encode_auth

BOTH = (0, 1)


@asynccontextmanager
async def consumer(node: Node, ready: int, **fields: Any) -> AsyncIterator[RawClient]:
    """Connect a consumer of `t/c` to the shared port."""
    async with connected(node.tcp) as client:
        if fields:
            await client.send(identify(**fields))
            await client.frame()
        await client.subscribe("t", "c", ready)
        yield client


async def receive(client: RawClient, count: int, *, finish: bool = True) -> list[Received]:
    """Receive messages, and answer heartbeats."""
    found: list[Received] = []
    with trio.fail_after(PATIENCE_S):
        while len(found) < count:
            message = await client.message()
            found.append(message)
            if finish:
                await client.send(b"FIN %s\n" % message.id)
    return found


def fill(node: Node, each: int) -> set[bytes]:
    """Publish this many messages at each process alone."""
    for index in BOTH:
        node.publish_at(index, "t", *(f"{index}-{number}" for number in range(each)))
    return {f"{index}-{number}".encode() for index in BOTH for number in range(each)}


def is_empty(node: Node) -> bool:
    """Whether all messages are finished."""
    found = node.channel("t", "c")
    return not (found["depth"] or found["in_flight_count"] or found["deferred_count"])


async def test_gets_the_messages_of_all_processes(tmp_path: Path) -> None:
    with running_node(tmp_path) as node:
        expected = fill(node, 20)
        async with consumer(node, 5, client_id="me", user_agent="test/1") as client:
            assert {each.body for each in await receive(client, 40)} == expected
            await trio.to_thread.run_sync(wait_until, lambda: is_empty(node))
            parts = [node.channel("t", "c", index) for index in BOTH]
            assert [part["message_count"] for part in parts] == [20, 20]
            for part in parts:
                (listed,) = part["clients"]
                assert (listed["client_id"], listed["user_agent"]) == ("me", "test/1")
                assert listed["remote_address"] == parts[0]["clients"][0]["remote_address"]
            assert sum(part["clients"][0]["ready_count"] for part in parts) == 5
        await trio.to_thread.run_sync(wait_until, lambda: node.channel("t", "c")["client_count"] == 0)


async def test_is_disconnected_at_all_processes(tmp_path: Path) -> None:
    with running_node(tmp_path) as node:
        expected = fill(node, 1)
        async with consumer(node, 5, client_id="me") as client, consumer(node, 0, client_id="you") as other:
            await receive(client, 2, finish=False)

            def disconnect() -> tuple[int, bytes]:
                return node.post("/channel/disconnect?topic=t&channel=c&client=me")

            status, body = await trio.to_thread.run_sync(disconnect)
            assert status == 200
            assert [each["client_id"] for each in json.loads(body)["disconnected"]] == ["me"]
            assert await client.frame() is None
            await other.send(b"RDY 5\n")
            assert {each.body for each in await receive(other, 2)} == expected
            await trio.to_thread.run_sync(wait_until, lambda: node.channel("t", "c")["client_count"] == 2)
            assert json.loads((await trio.to_thread.run_sync(disconnect))[1])["message"] == "CLIENT_NOT_FOUND"


async def test_with_fewer_places_than_processes(tmp_path: Path) -> None:
    """RDY 1: the place goes from one process to the other, also while both have messages."""
    with running_node(tmp_path) as node:
        expected = fill(node, 6)
        async with consumer(node, 1) as client:
            assert {each.body for each in await receive(client, 12)} == expected
            later = fill(node, 1)  # the same bodies again, when it was idle
            assert {each.body for each in await receive(client, 2)} == later


async def test_a_message_that_is_not_answered_does_not_keep_the_place(tmp_path: Path) -> None:
    with running_node(tmp_path) as node:
        node.publish_at(0, "t", "stuck")
        fields = {"feature_negotiation": True, "msg_timeout": 1000}
        async with consumer(node, 1, **fields) as client, consumer(node, 0, **fields) as other:
            (stuck,) = await receive(client, 1, finish=False)
            await other.send(b"RDY 2\n")  # it gets the message after its timeout
            (again,) = await receive(other, 1)
            assert (again.body, again.attempts) == (b"stuck", 2)
            await other.send(b"RDY 0\n")
            node.publish_at(1, "t", "next")
            assert [each.body for each in await receive(client, 1)] == [b"next"]
            await client.send(b"FIN %s\n" % stuck.id)
            assert await client.error() == f"E_FIN_FAILED FIN {stuck.id.decode()} failed ID not in flight"


async def test_requeue_and_touch_reach_the_process(tmp_path: Path) -> None:
    with running_node(tmp_path) as node:
        fill(node, 1)
        async with consumer(node, 2) as client:
            first = await receive(client, 2, finish=False)
            for message in first:
                await client.send(b"TOUCH %s\nREQ %s 0\n" % (message.id, message.id))
            again = await receive(client, 2)
            assert {each.id for each in again} == {each.id for each in first}
            assert [each.attempts for each in again] == [2, 2]
            for verb in (b"FIN", b"TOUCH"):
                await client.send(b"%s 0123456789abcdef\n" % verb)
                assert (await client.error()).startswith(f"E_{verb.decode()}_FAILED")
            await client.send(b"CLS\n")
            assert await client.frame() == (0, b"CLOSE_WAIT")
        assert is_empty(node)


async def test_an_uncounted_requeue_reaches_the_process(tmp_path: Path) -> None:
    with running_node(tmp_path) as node:
        fill(node, 1)
        async with consumer(node, 2, feature_negotiation=True, uncounted_requeues=True) as client:
            for message in await receive(client, 2, finish=False):
                await client.send(b"REQ %s 0 uncounted\n" % message.id)
            assert [each.attempts for each in await receive(client, 2)] == [1, 1]


async def test_what_the_client_finished_before_it_left_is_finished(tmp_path: Path) -> None:
    with running_node(tmp_path) as node:
        fill(node, 30)
        async with consumer(node, 60) as client:
            found = await receive(client, 60, finish=False)
            await client.send(b"".join(b"FIN %s\n" % each.id for each in found))
        await trio.to_thread.run_sync(wait_until, lambda: node.channel("t", "c")["client_count"] == 0)
        assert is_empty(node)
        assert node.channel("t", "c")["requeue_count"] == 0


async def test_goes_on_after_the_end_of_a_process(tmp_path: Path) -> None:
    with running_node(tmp_path) as node:
        async with consumer(node, 10) as client:
            (passing,) = [index for index in BOTH if connections(node, index) == 2]
            ended = node.kill(1 - passing)
            await trio.to_thread.run_sync(node.until_restarted, 1 - passing, ended)
            await trio.to_thread.run_sync(wait_until, lambda: connections(node, 1 - passing) == 1)
            expected = fill(node, 5)
            assert {each.body for each in await receive(client, 10)} == expected
            await trio.to_thread.run_sync(wait_until, lambda: is_empty(node))


def connections(node: Node, index: int) -> int:
    """Return how many TCP clients a process has: the one that passes a client on counts it, too."""
    metrics = node.get("/metrics", node.processes[index]["http_address"])[1].decode()
    (line,) = [line for line in metrics.splitlines() if line.startswith("nsq_connections ")]
    return int(float(line.split()[1]))


async def test_refusals_of_a_process_reach_the_client(tmp_path: Path) -> None:
    with running_node(tmp_path, 2, "--max-channel-consumers", "1") as node:
        async with consumer(node, 1), connected(node.tcp) as second:
            await second.send(b"SUB t c\n")
            assert "E_SUB_FAILED" in await second.error()


async def test_with_tls_and_tokens(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path / "certificates")
    auth_file = tmp_path / "auth.toml"
    hashed = hashlib.sha256(b"secret").hexdigest()
    auth_file.write_text(
        f'[[token]]\nname = "me"\nhash = "sha256:{hashed}"\n'
        'grants = [{ roles = ["publish", "consume", "read"], topics = ["t"] }]\n'
    )
    flags = [f"--{name.replace('_', '-')}={path}" for name, path in certificates.options.items()]
    flags += ["--tls-required=tcp-https", "--https-address=127.0.0.1:0", f"--auth-file={auth_file}"]
    with running_node(tmp_path, 2, *flags) as node:
        for index in BOTH:
            at = node.processes[index]["http_address"]
            assert node.request("POST", "/pub?topic=t", b"x", at=at, token="secret")[0] == 200
            assert node.request("POST", "/pub?topic=t", b"x", at=at)[0] == 401
        async with connected(node.tcp) as client:
            await upgrade(client, certificates.client_context(), None)
            await client.send(b"SUB t c\n")
            assert (await client.error()).startswith("E_AUTH_FIRST")
        async with connected(node.tcp) as client:
            await upgrade(client, certificates.client_context(), None)
            await client.send(encode_auth(b"secret"))
            assert (await client.frame() or (1, b""))[0] == 0
            await client.subscribe("t", "c", 4)
            assert [each.body for each in await receive(client, 2)] == [b"x", b"x"]
        status, body = node.request("GET", "/stats?format=json", token="secret")
        assert (status, json.loads(body)["topics"][0]["message_count"]) == (200, 2)
        assert node.get("/stats")[0] == 401
        host, _, port = node.https.rpartition(":")
        context = certificates.client_context()
        secure = http.client.HTTPSConnection(host, int(port), context=context, timeout=PATIENCE_S)
        secure.request("GET", "/ping")
        assert secure.getresponse().read() == b"OK"
        secure.close()
        assert node.request("POST", "/topic/pause?topic=t", token="secret")[0] == 403


async def test_is_disconnected_when_its_channel_is_deleted(tmp_path: Path) -> None:
    with running_node(tmp_path) as node:
        async with consumer(node, 1) as client:
            assert node.post("/channel/delete?topic=t&channel=c") == (200, b"")
            while (frame := await client.frame()) is not None:
                assert frame == (0, b"_heartbeat_")
        assert node.channel("t", "c") == {}


async def test_delivers_large_messages(tmp_path: Path) -> None:
    bodies = {bytes([65 + number]) * size for number, size in enumerate((1, 262_110, 262_114, 1_000_000, 5))}
    with running_node(tmp_path) as node:
        for body in bodies:
            assert node.post("/pub?topic=t", body, node.processes[1]["http_address"]) == (200, b"OK")
        async with consumer(node, 10) as client:
            assert {each.body for each in await receive(client, len(bodies))} == bodies
