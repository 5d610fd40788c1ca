"""Tests for the status and error code of every error of every endpoint, compared with nsqd."""

import http.client
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from broker.api import DONE, OK, running_api
from broker.support import HeldFiles, settle
from interop.peers import Broker, nsqd, qcli_serve

TOPICS = {
    "": "no topic",
    "topic=": "empty",
    "topic=a%7Cb": "invalid",
    "topic=unknown": "unknown",
    "topic=known": "known",
}
CHANNELS = ["", "channel=", "channel=a%7Cb", "channel=unknown", "channel=known"]
ON_TOPICS = ["empty", "pause", "unpause", "delete"]
ON_CHANNELS = ["create", "empty", "pause", "unpause", "delete"]

MISTAKES = [
    *[("POST", f"/topic/{verb}?{topic}") for verb in ("create", *ON_TOPICS) for topic in list(TOPICS)[:4]],
    *[
        ("POST", f"/channel/{verb}?{topic}&{channel}")
        for verb in ON_CHANNELS
        for topic in TOPICS
        for channel in CHANNELS
        if (topic, channel) != ("topic=known", "channel=known")
    ],
    *[
        (method, path)
        for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH")
        for path in (
            *(
                "/ping",
                "/info",
                "/stats",
                "/pub",
                "/mpub",
                "/topic/create",
                "/channel/create",
                "/config/log_level",
            ),
            *("/config/nope", "/config/", "/config", "/topic", "/channel/", "/debug/freememory"),
        )
        if (method, path) not in {("GET", "/stats"), ("GET", "/info"), ("POST", "/debug/freememory")}
    ],
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Broker, Broker]]:
    folder = tmp_path_factory.mktemp("brokers")
    with nsqd(folder / "nsqd") as theirs, qcli_serve(folder / "ours") as ours:
        yield theirs, ours


def answer(broker: Broker, method: str, target: str) -> tuple[int, str | None, str | None, bytes]:
    """Return the status, Allow, Content-Type and body."""
    connection = http.client.HTTPConnection(broker.http_address, timeout=20)
    try:
        connection.request(method, target)
        reply = connection.getresponse()
        return reply.status, reply.getheader("Allow"), reply.getheader("Content-Type"), reply.read()
    finally:
        connection.close()


@pytest.mark.interop
def test_every_error_is_answered_as_by_nsqd(pair: tuple[Broker, Broker]) -> None:
    found: list[dict[str, object]] = []
    for broker in pair:
        answers: dict[str, object] = {}
        for method, target in MISTAKES:
            broker.create("known", "known")  # an unknown channel may have been created
            answers[f"{method} {target}"] = answer(broker, method, target)
        found.append(answers)
    theirs, ours = found
    assert len(theirs) == len(MISTAKES)
    assert ours == theirs


async def test_topic_being_deleted_is_exiting(tmp_path: Path) -> None:
    files = HeldFiles()
    async with running_api(tmp_path / "d", files=files) as api, trio.open_nursery() as nursery:
        await api.tcp.publish("t", b"makes the segment")
        files.hold("sync")
        nursery.start_soon(api.tcp.publish, "t", b"under way")
        await files.reached()
        deleted: list[tuple[int, str]] = []

        async def delete() -> None:
            deleted.append(await api.post("/topic/delete", topic="t"))

        nursery.start_soon(delete)
        await settle()
        exiting = (503, "EXITING")
        assert await api.post("/pub", b"x", topic="t") == exiting
        assert await api.post("/mpub", b"x", topic="t") == exiting
        assert await api.post("/topic/create", topic="t") == exiting
        files.release()
        while not deleted:
            await settle()
        assert deleted == [DONE]
        assert await api.post("/pub", b"x", topic="t") == OK
