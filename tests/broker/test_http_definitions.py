"""Tests for /definitions and /channel/disconnect."""

from pathlib import Path

import httpx

from access.support import AuthFile, Given, everything
from broker.api import Api, running_api
from broker.support import connected, identify
from trio_nsq.broker.state.settings import TopicSettings

CHANNEL = {"topic": "t", "channel": "c"}


async def test_definitions_have_what_is_set(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d", topic_defaults=TopicSettings(max_messages=9)) as api:
        for topic in ("t", "a", "gone#ephemeral"):
            await api.post("/topic/create", topic=topic)
        for channel in ("c", "b", "gone#ephemeral"):
            await api.post("/channel/create", topic="t", channel=channel)
        await api.send("PUT", "/topic/settings?topic=t", body=b'{"ttl_ms": 5, "max_bytes": 0}')
        await api.send("PUT", "/channel/settings?topic=t&channel=c", body=b'{"max_attempts": 3}')
        await api.post("/channel/pause", topic="t", channel="c")
        await api.post("/topic/pause", topic="a")
        assert (await api.get("/definitions")).json() == {
            "topics": [
                {"topic_name": "a", "paused": True, "settings": {}, "channels": []},
                {
                    "topic_name": "t",
                    "paused": False,
                    "settings": {"ttl_ms": 5, "max_bytes": 0},
                    "channels": [
                        {"channel_name": "b", "paused": False, "settings": {}},
                        {"channel_name": "c", "paused": True, "settings": {"max_attempts": 3}},
                    ],
                },
            ]
        }
        await api.send("PUT", "/topic/settings?topic=t", body=b'{"ttl_ms": null, "max_bytes": null}')
        assert (await api.get("/definitions")).json()["topics"][1]["settings"] == {}


async def test_definitions_have_only_what_a_client_may_read(tmp_path: Path) -> None:
    auth = AuthFile(tmp_path / "auth.toml")
    auth.add_token("some", Given(["read"], ["t"], ["c"]))
    auth.add_token("all", everything("read", "manage"))
    async with running_api(tmp_path / "d", auth_file=auth.write()) as api:

        async def send(name: str, method: str, target: str) -> httpx.Response:
            return await api.send(method, target, {"Authorization": f"Bearer {name}-secret"})

        for kind, names in (("topic", "topic=t"), ("topic", "topic=u"), ("channel", "topic=t&channel=c")):
            assert (await send("all", "POST", f"/{kind}/create?{names}")).status_code == 200
        await send("all", "POST", "/channel/create?topic=t&channel=d")
        for name, seen in (("all", {"t": ["c", "d"], "u": []}), ("some", {"t": ["c"]})):
            topics = (await send(name, "GET", "/definitions")).json()["topics"]
            assert seen == {
                each["topic_name"]: [channel["channel_name"] for channel in each["channels"]]
                for each in topics
            }


async def disconnect(api: Api, **query: str) -> tuple[int, list[str]]:
    """Disconnect consumers of a channel. Returns the status, and their ids."""
    response = await api.client.post("/channel/disconnect", params=CHANNEL | query)
    return response.status_code, [each["client_id"] for each in response.json().get("disconnected", ())]


async def test_consumers_are_disconnected_and_their_messages_delivered_again(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        address = api.tcp_address
        async with connected(address) as first, connected(address) as second, connected(address) as other:
            for client, name in ((first, "first"), (second, "second"), (other, "other")):
                await client.send(identify(client_id=name))
                await client.ok()
            await first.subscribe("t", "c", 5)
            await api.post("/pub", b"body", topic="t")
            assert (await first.message()).attempts == 1
            await second.subscribe("t", "c")
            await other.subscribe("t", "other")
            assert await disconnect(api, client="first") == (200, ["first"])
            assert await first.frame() is None
            await second.send(b"RDY 1\n")
            assert (await second.message()).body == b"body"
            (described,) = (await api.channel("t", "c"))["clients"]
            assert await disconnect(api, client=described["remote_address"]) == (200, ["second"])
            assert await second.frame() is None
            assert (await api.channel("t", "c"))["in_flight_count"] == 0
            await other.nothing_more()


async def test_all_consumers_are_disconnected(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        async with connected(api.tcp_address) as first, connected(api.tcp_address) as second:
            for client in (first, second):
                await client.send(identify(client_id="same"))
                await client.ok()
                await client.subscribe("t", "c")
            assert await disconnect(api) == (200, ["same", "same"])
            assert [await first.frame(), await second.frame()] == [None, None]
        assert await disconnect(api) == (200, [])
        assert await api.post("/channel/disconnect", topic="t", channel="c", client="same") == (
            404,
            "CLIENT_NOT_FOUND",
        )
        assert await api.post("/channel/disconnect", topic="t", channel="d") == (404, "CHANNEL_NOT_FOUND")
