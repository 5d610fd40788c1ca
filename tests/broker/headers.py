"""Commands and frames of messages with headers, as any client could make them: bytes by `struct`."""

import json
from collections.abc import Mapping
from struct import pack, unpack, unpack_from

from broker.api import Api
from broker.support import RawClient, identify

Headers = Mapping[str, str]


def text_of(headers: Headers) -> bytes:
    """Return headers as the wire has them."""
    return "".join(f"{name}:{value}\n" for name, value in headers.items()).encode()


def hpub(topic: str, *messages: tuple[bytes, Headers], defer_ms: int = 0) -> bytes:
    """Return an HPUB command of bodies with their headers."""
    return raw_hpub(topic, *((body, text_of(headers)) for body, headers in messages), defer_ms=defer_ms)


def raw_hpub(topic: str, *messages: tuple[bytes, bytes], defer_ms: int = 0) -> bytes:
    """As `hpub`, with any bytes for the headers."""
    content = hpub_body(*messages)
    defer = f" {defer_ms}" if defer_ms else ""
    return b"HPUB %s%s\n%s%s" % (topic.encode(), defer.encode(), pack(">i", len(content)), content)


def hpub_body(*messages: tuple[bytes, bytes]) -> bytes:
    """Return the body of an HPUB, which is that of `POST /hpub`."""
    encoded = [pack(">H", len(text)) + text + body for body, text in messages]
    return pack(">i", len(encoded)) + b"".join(pack(">i", len(each)) + each for each in encoded)


async def ask_for_headers(client: RawClient) -> None:
    """IDENTIFY as a client that wants headers."""
    await client.send(identify(message_headers=True, feature_negotiation=True))
    frame = await client.frame()
    assert frame is not None
    assert frame[1].endswith(b',"message_headers":true}')


class Delivered:
    """A message as one frame delivered it; `headers` is None if the frame has no place for them."""

    def __init__(self, frame: tuple[int, bytes]) -> None:
        kind, data = frame
        assert kind in (2, 3)
        self.timestamp_ns, self.attempts, self.id = unpack(">qH16s", data[:26])
        self.headers: dict[str, str] | None = None
        self.body = data[26:]
        if kind == 3:
            (size,) = unpack_from(">H", data, 26)
            lines = data[28 : 28 + size].decode().split("\n")
            assert lines.pop() == ""
            self.headers = {line.partition(":")[0]: line.partition(":")[2] for line in lines}
            self.body = data[28 + size :]

    @property
    def content(self) -> tuple[bytes, dict[str, str] | None]:
        return self.body, self.headers


async def delivered(client: RawClient) -> Delivered:
    """Return the next message, with or without headers."""
    frame = await client.frame()
    assert frame is not None, "the broker has closed the connection"
    return Delivered(frame)


async def contents(client: RawClient, count: int) -> list[tuple[bytes, dict[str, str] | None]]:
    """Return the next messages, finish them."""
    found = []
    for _ in range(count):
        message = await delivered(client)
        await client.send(b"FIN %s\n" % message.id)
        found.append(message.content)
    return found


async def read_headers(api: Api, topic: str) -> list[dict[str, str]]:
    """Return the headers of all messages in a topic's log."""
    answer = await api.get("/topic/read", topic=topic)
    assert answer.status_code == 200, answer.text
    return [json.loads(line).get("headers", {}) for line in answer.text.splitlines()]
