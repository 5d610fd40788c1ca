"""Brokers that answer nonsense: the pages name them, and show the messages of the others."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from broker.api import running_api
from console.message_support import http_address, listed, running_console
from trio_nsq.bodies.bodies_file import TopicReaders
from trio_nsq.console.messages.bodies import TopicBodies
from trio_nsq.console.messages.message import Message, rows_of
from trio_nsq.log.records import RecordBatch
from trio_nsq.protocol import pack_messages

CHANNELS = [{"channel_name": "c"}]
SANE: dict[str, bytes] = {
    "/info": json.dumps({"version": "9", "start_time": 1, "tcp_port": "x"}).encode(),
    "/stats": json.dumps({"health": "OK", "topics": [{"topic_name": "t", "channels": CHANNELS}]}).encode(),
    "/topic/bounds": json.dumps(
        {"first_sequence": 0, "next_sequence": 5, "at_sequence": 5, "bytes": 100}
    ).encode(),
}
DEEP = b"[" * 100_000
BOUNDS: list[Any] = [
    b"",
    b"x",
    DEEP,
    b"[]",
    b'"x"',
    b"{}",
    json.dumps({"first_sequence": "0", "next_sequence": 5, "at_sequence": 5, "bytes": 0}).encode(),
    json.dumps({"first_sequence": -1, "next_sequence": 5, "at_sequence": 5, "bytes": 0}).encode(),
    json.dumps({"first_sequence": 0, "next_sequence": 2**70, "at_sequence": 5, "bytes": 0}).encode(),
    json.dumps({"first_sequence": 0, "next_sequence": True, "at_sequence": 5, "bytes": 0}).encode(),
    json.dumps({"first_sequence": 0, "next_sequence": 5, "at_sequence": 1e300, "bytes": None}).encode(),
]
READS = [
    b"",
    b"x",
    b"NSQB" + b"\xff" * 100,
    b"\x89NSQLOG\n" + b"\x00" * 100,
    b'{"topic": "t"}\n',
    b"\x00" * 3_000_000,
]
PEEKS = [
    b"x\n",
    DEEP + b"\n",
    b"[]\n",
    b"{}\n",
    b'{"state": "fresh", "sequence": Infinity, "timestamp_ns": 1, "attempts": 1, "due_ns": null, "body": ""}\n',
    b'{"state": "fresh", "sequence": 1, "id": "1", "timestamp_ns": 1, "attempts": 1, "due_ns": null, "body": 7}\n',
    b'{"state": "<b>", "sequence": 1, "id": "1", "timestamp_ns": 1, "attempts": 1, "due_ns": null, "body": "x"}\n',
    b'{"state": "fresh", "gap": "<b>", "first_sequence": "x"}\n',
]


@asynccontextmanager
async def lying_broker(answers: Mapping[str, bytes]) -> AsyncIterator[str]:
    """Run a server that gives these answers by path, and yield its address."""

    async def serve(stream: trio.SocketStream) -> None:
        async with stream:
            data = b""
            while True:
                while b"\r\n\r\n" not in data:
                    more = await stream.receive_some()
                    if not more:
                        return
                    data += more
                head, _, data = data.partition(b"\r\n\r\n")
                path = head.split()[1].decode().partition("?")[0]
                body = answers.get(path)
                status = b"404 Not Found" if body is None else b"200 OK"
                headers = (
                    b"X-NSQ-First-Sequence: 0\r\nX-NSQ-End-Sequence: 5\r\n" if path == "/topic/read" else b""
                )
                await stream.send_all(
                    b"HTTP/1.1 %s\r\nContent-Length: %d\r\n%s\r\n%s"
                    % (status, len(body or b""), headers, body or b"")
                )

    async def forgiving(stream: trio.SocketStream) -> None:
        try:
            await serve(stream)
        except trio.BrokenResourceError:
            pass  # the console has seen enough

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, forgiving, 0, host="127.0.0.1"))
        yield "%s:%d" % listener.socket.getsockname()[:2]
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("path", "answers"), [("/topic/bounds", BOUNDS), ("/topic/read", READS), ("/channel/peek", PEEKS)]
)
async def test_nonsense_harms_nothing(tmp_path: Path, path: str, answers: list[bytes]) -> None:
    lies = dict(SANE)
    async with running_api(tmp_path / "d") as good, lying_broker(lies) as liar:
        await good.post("/topic/create", topic="t")
        await good.post("/channel/create", topic="t", channel="c")
        await good.tcp.publish("t", b"good")
        async with running_console([http_address(good), liar]) as site:
            for answer in answers:
                lies[path] = answer
                pages = ["/topics/t/messages", "/topics/t/messages?order=oldest", "/topics/t/messages?q=o"]
                if path == "/channel/peek":
                    pages = ["/topics/t/c/messages"]
                for each in pages:
                    page = await site.page(each)
                    assert (http_address(good), 0) in listed(page), answer[:50]
                    assert liar in page.text
                    assert "b" not in page.tags
                for each in ("/topics/t/messages/1", "/topics/t/messages/1/body"):
                    assert (await site.get(each, broker=liar)).status_code in (200, 404, 502)


METADATA = [
    b"x",
    DEEP,
    b"[]",
    b'{"channel": 5}',
    b'{"dead_letters": 5}',
    b'{"dead_letters": {"topic": {}, "channel": "c", "messages": [["1", 1, 1, 1, "requeued"]]}}',
    b'{"dead_letters": {"topic": "t", "channel": "c", "messages": [["1", "<b>", [], null, "requeued"]]}}',
    b'{"dead_letters": {"topic": "t", "channel": "c", "messages": [["1", 1, 1, 1, "bored"]]}}',
    b'{"producer": []}',
]


@pytest.mark.parametrize("metadata", METADATA)
def test_metadata_that_cannot_be_read_is_left_out(metadata: bytes) -> None:
    batch = RecordBatch(0, 1, 2**64 - 1, 0, pack_messages([b"body"]), metadata)
    (row,) = rows_of("b", [batch], 0, 1, 0, TopicBodies(TopicReaders(), "t", 10))
    assert isinstance(row, Message)
    assert (row.body, row.channel, row.origin, row.producer) == (b"body", None, None, None)
