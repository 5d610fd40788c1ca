"""A publish that has to wait for its topic is stored, counted, answered and refused like one that need not wait."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.api import Api, address, running_api
from broker.support import PATIENCE_S, connected, dpub, identify, mpub, pub, threads_done
from soak import examples
from trio_nsq.broker.state.settings import TopicSettings
from trio_nsq.broker.topic_registry import TopicRegistry
from trio_nsq.log import DiskLog

LIMIT = 6
"""Messages that a topic takes."""
LARGE = 100_000
"""Bytes of a body that HTTP handles in a task."""


@dataclass(frozen=True)
class Publish:
    """What a client publishes.

    Attributes:
        deferred: PUB becomes DPUB, `/pub` gets `defer`.
    """

    bodies: tuple[bytes, ...]
    deferred: bool

    def command(self, topic: str) -> bytes:
        if len(self.bodies) > 1:
            return mpub(topic, *self.bodies)
        (body,) = self.bodies
        return dpub(topic, 60_000, body) if self.deferred else pub(topic, body)


PUBLISHES = st.builds(
    Publish,
    st.lists(st.sampled_from([b"", b"x", b"body" * 100, b"x" * LARGE]), min_size=1, max_size=LIMIT + 2).map(
        tuple
    ),
    st.booleans(),
)
CLIENTS = st.tuples(
    st.sampled_from(["TCP", "TCP that survives", "HTTP"]), st.lists(PUBLISHES, min_size=1, max_size=4)
)


@pytest.fixture(scope="module")
def waited() -> Iterator[list[str]]:
    """The topics that publishes have waited for."""
    names: list[str] = []
    until_publishable = TopicRegistry.until_publishable

    async def noted(self: TopicRegistry, name: str, **options: Any) -> Any:
        names.append(name)
        return await until_publishable(self, name, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TopicRegistry, "until_publishable", noted)
        yield names


async def answers(api: Api, topic: str, kind: str, publishes: Sequence[Publish]) -> list[object]:
    """Return what a client gets, and how many messages the broker counts for it."""
    got: list[object] = []
    if kind == "HTTP":
        for publish in publishes:
            if len(publish.bodies) > 1:
                got.append(await api.post("/mpub", b"\n".join(publish.bodies), topic=topic))
            else:
                defer = {"defer": 60_000} if publish.deferred else {}
                got.append(await api.post("/pub", publish.bodies[0], topic=topic, **defer))
        return got
    async with connected(address(api)) as client:
        await client.send(identify(survive_refusals=kind == "TCP that survives", client_id=topic))
        await client.ok()
        await client.send(b"".join(publish.command(topic) for publish in publishes))
        for _ in publishes:
            got.append(frame := await client.frame())
            if frame is None:
                break
        producers = (await api.stats())["producers"] or []
        got += [producer["pub_counts"] for producer in producers if producer["client_id"] == topic]
    return got


def stored(data_path: Path, topic: str) -> list[object]:
    """Return the records of a topic."""
    log = DiskLog(data_path / "topics" / f"{topic}.topic")
    records = [
        (record.count, bytes(record.messages.data), record.due_ns > 0) for record in log.read(0, 1 << 30)
    ]
    log.close()
    return list(records)


@settings(max_examples=examples(12), deadline=None)
@given(st.lists(CLIENTS, min_size=1, max_size=5))
def test_slow_way_equals_the_fast_way(waited: list[str], clients: list[tuple[str, list[Publish]]]) -> None:
    def plain(of: object, topic: str) -> str:
        return repr(of).replace(topic, "TOPIC")

    async def check() -> None:
        waited.clear()
        with TemporaryDirectory() as folder, trio.fail_after(PATIENCE_S):
            data_path = Path(folder) / "d"
            async with running_api(data_path, topic_defaults=TopicSettings(max_messages=LIMIT)) as api:
                for number, (kind, publishes) in enumerate(clients):
                    assert (await api.post("/topic/create", topic=f"there{number}"))[0] == 200
                    fast = await answers(api, f"there{number}", kind, publishes)
                    slow = await answers(api, f"new{number}", kind, publishes)
                    assert plain(slow, f"new{number}") == plain(fast, f"there{number}")
                await threads_done()  # new topics are removed after the answer
                counts = {
                    topic["topic_name"]: (topic["message_count"], topic["message_bytes"], topic["depth"])
                    for topic in (await api.stats())["topics"]
                }
            for number in range(len(clients)):
                nothing = (0, 0, 0)
                assert counts.get(f"new{number}", nothing) == counts[f"there{number}"]
                # A new topic whose publishes are all refused is removed again.
                assert (f"new{number}" in counts) == (counts[f"there{number}"] != nothing)
                if f"new{number}" in counts:
                    assert stored(data_path, f"new{number}") == stored(data_path, f"there{number}")

    trio.run(check)
    kinds = {kind for kind, _ in clients}
    if "HTTP" not in kinds:
        assert not [name for name in waited if name.startswith("there")]
        first_bodies = [publishes[0].bodies for _, publishes in clients]
        assert len({name for name in waited if name.startswith("new")}) == sum(
            all(bodies) for bodies in first_bodies
        )
