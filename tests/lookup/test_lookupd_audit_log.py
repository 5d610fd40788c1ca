"""The audit log of the discovery service."""

import json
from pathlib import Path
from typing import Any

import httpx
import trio

from broker.auth_server import auth
from broker.support import PATIENCE_S
from client.support.tokens import SECRETS, UNKNOWN, AuthFile
from lookup.support import Lookupd, RawProducer, identify, ours


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the lines, without their times and the ports of clients."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        assert line.pop("time").endswith("Z")
        assert line.pop("address").startswith("127.0.0.1:")
    return lines


async def converse(lookupd: Lookupd, *commands: bytes) -> list[bytes | None]:
    """Send commands over a new connection; return their responses."""
    host, _, port = lookupd.tcp_address.rpartition(":")
    async with await trio.open_tcp_stream(host, int(port)) as stream:
        client = RawProducer(stream)
        await stream.send_all(b"  V1" + b"".join(commands))
        return [await client.response() for _ in commands]


async def test_refused_brokers(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    file = AuthFile(tmp_path)
    file.path.write_text(
        file.path.read_text().replace('["register"], topics = ["*"]', '["register"], topics = ["t"]')
    )
    async with ours(auth_file=file.path, audit_log=str(path)) as lookupd:
        await converse(lookupd, identify())
        await converse(lookupd, auth(UNKNOWN.encode()))
        await converse(lookupd, auth(SECRETS["publish"].encode()), identify())
        answers = await converse(
            lookupd, auth(SECRETS["register"].encode()), identify(), b"REGISTER t\n", b"REGISTER other c\n"
        )
    assert answers[2] == b"OK"
    assert lines_of(path) == [
        {"event": "refused", "action": "IDENTIFY", "error": "E_AUTH_FIRST"},
        {"event": "login_failed", "action": "AUTH", "error": "E_AUTH_FAILED"},
        {
            "event": "refused",
            "name": "publish",
            "source": "token",
            "action": "IDENTIFY",
            "error": "E_UNAUTHORIZED",
        },
        {
            "event": "refused",
            "name": "register",
            "source": "token",
            "action": "REGISTER",
            "topic": "other",
            "channel": "c",
            "error": "E_UNAUTHORIZED",
        },
    ]


async def test_requests(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    file = AuthFile(tmp_path)
    async with ours(auth_file=file.path, audit_log=str(path)) as lookupd:
        async with httpx.AsyncClient(base_url=f"http://{lookupd.http_address}", timeout=PATIENCE_S) as client:
            for role, method, target in [
                ("manage", "POST", "/topic/create?topic=t"),
                ("manage", "POST", "/topic/tombstone?topic=t&node=b:4151"),
                ("manage", "POST", "/channel/delete?topic=t&channel=c"),
                ("read", "GET", "/topics"),
                ("read", "POST", "/topic/delete?topic=t"),
            ]:
                headers = {"Authorization": f"Bearer {SECRETS[role]}"}
                await client.request(method, target, headers=headers)
    who = {"name": "manage", "source": "token"}
    assert lines_of(path) == [
        {"event": "action", **who, "action": "POST /topic/create", "topic": "t", "status": 200},
        {
            "event": "action",
            **who,
            "action": "POST /topic/tombstone",
            "topic": "t",
            "node": "b:4151",
            "status": 200,
        },
        {
            "event": "action",
            **who,
            "action": "POST /channel/delete",
            "topic": "t",
            "channel": "c",
            "status": 404,
            "error": "CHANNEL_NOT_FOUND",
        },
        {
            "event": "refused",
            "name": "read",
            "source": "token",
            "action": "POST /topic/delete",
            "topic": "t",
            "status": 403,
            "error": "FORBIDDEN",
        },
    ]
