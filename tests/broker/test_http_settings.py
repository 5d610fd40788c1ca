"""Tests for /topic/settings and /channel/settings."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest

from broker.api import Api, running_api
from trio_nsq.broker.state.settings import ChannelSettings, TopicSettings

TOPIC = "/topic/settings?topic=t"
CHANNEL = "/channel/settings?topic=t&channel=c"


async def put(api: Api, target: str, changes: dict[str, Any]) -> httpx.Response:
    return await api.send("PUT", target, body=json.dumps(changes).encode())


async def test_settings_are_read_and_changed(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.post("/topic/create", topic="t")
        await api.post("/channel/create", topic="t", channel="c")
        assert (await api.send("GET", TOPIC)).json() == asdict(TopicSettings())
        assert (await api.send("GET", CHANNEL)).json() == asdict(ChannelSettings())
        changed = await put(api, TOPIC, {"ttl_ms": 5})
        assert (changed.status_code, changed.json()) == (200, asdict(TopicSettings(ttl_ms=5)))
        changed = await put(api, CHANNEL, {"max_attempts": 3, "dead_letter_topic": "t.dead"})
        assert changed.json() == asdict(ChannelSettings(3, "t.dead"))
        changed = await put(api, CHANNEL, {"order_by": "header:user"})
        assert changed.json() == asdict(ChannelSettings(3, "t.dead", "header:user"))
        stats = (await api.get("/stats", format="json")).json()["topics"][0]["channels"][0]
        assert (stats["order_by"], stats["blocked_count"]) == ("header:user", 0)
        refused = await put(api, CHANNEL, {"order_by": "user"})
        assert refused.status_code == 400
        assert "INVALID_SETTING: order_by is 'user'; it must be json:FIELD" in refused.json()["message"]
        assert (await put(api, TOPIC, {})).json() == asdict(TopicSettings(ttl_ms=5))


async def test_dry_run_changes_nothing_and_reports_what_would_be_dropped(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.post("/topic/create", topic="t")
        await api.post("/channel/create", topic="t", channel="c")
        await api.send("POST", "/mpub?topic=t", body=b"1\n2\n3")
        dry = f"{TOPIC}&dry_run=true"
        changes = {"max_messages": 1, "when_full": "drop-oldest"}
        told = await put(api, dry, changes)
        settings = TopicSettings(max_messages=1, when_full="drop-oldest")
        assert told.json() == asdict(settings) | {"dropped": 2, "dry_run": True}
        assert (await put(api, dry, {"ttl_ms": 3_600_000})).json()["dropped"] == 0
        assert (await api.send("GET", TOPIC)).json() == asdict(TopicSettings())
        assert (await put(api, dry, {"ttl_ms": -1})).status_code == 400
        assert (await put(api, f"{TOPIC}&dry_run=false", changes)).json() == asdict(settings)


async def test_dry_run_for_a_channel_changes_nothing(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.post("/topic/create", topic="t")
        await api.post("/channel/create", topic="t", channel="c")
        dry = f"{CHANNEL}&dry_run=true"
        told = await put(api, dry, {"max_attempts": 3, "dead_letter_topic": "dead"})
        settings = ChannelSettings(3, "dead")
        assert (told.status_code, told.json()) == (200, asdict(settings) | {"dropped": 0, "dry_run": True})
        assert (await api.send("GET", CHANNEL)).json() == asdict(ChannelSettings())
        for refused in ({"max_attempts": -1}, {"dead_letter_topic": "t"}):
            assert (await put(api, dry, refused)).status_code == 400
        await put(api, CHANNEL, {"dead_letter_topic": "dead"})
        await api.post("/topic/create", topic="dead")
        await api.post("/channel/create", topic="dead", channel="d")
        back = {"dead_letter_topic": "t"}
        refused_loop = await put(api, "/channel/settings?topic=dead&channel=d&dry_run=true", back)
        assert refused_loop.status_code == 400
        assert refused_loop.text == (await put(api, "/channel/settings?topic=dead&channel=d", back)).text


async def test_settings_survive_a_restart(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.post("/topic/create", topic="t")
        await api.post("/channel/create", topic="t", channel="c")
        await put(api, TOPIC, {"retention_bytes": -1})
        await put(api, CHANNEL, {"max_attempts": 3})
    async with running_api(tmp_path / "d") as api:
        assert (await api.send("GET", TOPIC)).json() == asdict(TopicSettings(retention_bytes=-1))
        assert (await api.send("GET", CHANNEL)).json() == asdict(ChannelSettings(max_attempts=3))
        assert (await put(api, TOPIC, {"retention_bytes": None})).json() == asdict(TopicSettings())


@pytest.mark.parametrize(
    ("target", "body", "status", "error"),
    [
        ("/topic/settings", b"{}", 400, "MISSING_ARG_TOPIC"),
        ("/topic/settings?topic=none", b"{}", 404, "TOPIC_NOT_FOUND"),
        ("/channel/settings?topic=t", b"{}", 400, "MISSING_ARG_CHANNEL"),
        ("/channel/settings?topic=t&channel=none", b"{}", 404, "CHANNEL_NOT_FOUND"),
        (TOPIC, b"", 400, "INVALID_BODY: not valid JSON"),
        (TOPIC, b"[" * 60_000, 400, "INVALID_BODY: not valid JSON"),
        (CHANNEL, b'{"a":' * 12_000, 400, "INVALID_BODY: not valid JSON"),
        (TOPIC, b"[]", 400, "INVALID_BODY: not a JSON object"),
        (TOPIC, b'{"ttl_ms":-1}', 400, "INVALID_SETTING: ttl_ms is -1; it must be a whole number, 0 or more"),
        (CHANNEL, b'{"ttl":1}', 400, "INVALID_SETTING: unknown setting ttl; the settings are max_attempts, "
         "dead_letter_topic, order_by, rate_limit_per_s, expire_idle_ms"),
    ],
)  # fmt: skip
async def test_invalid_settings(tmp_path: Path, target: str, body: bytes, status: int, error: str) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.post("/topic/create", topic="t")
        await api.post("/channel/create", topic="t", channel="c")
        answer = await api.send("PUT", target, body=body)
        assert (answer.status_code, answer.json()) == (status, {"message": error})
