"""Random topics are moved in random steps, while both brokers are killed: each channel gets exactly what was left."""

import random
import shutil
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import trio

from broker.api import Api, running_api
from broker.letters import client_of
from broker.moving import Mover, waiting
from broker.support import PATIENCE_S
from soak import some

HOUR_MS = 3_600_000
CHANNELS = ("a", "b", "c")
STEPS = 40

Left = Counter[tuple[str, int | None]]
"""Messages of a channel: body and due time."""


class Life:
    """A broker that can be killed: then another one starts on a copy of its files."""

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._copies = 0

    async def start(self) -> Api:
        """Start a broker on the current files."""
        options: dict[str, Any] = {"checkpoint_interval_ms": HOUR_MS, "max_bytes_per_file": 3000}
        return await self._stack.enter_async_context(running_api(self._folder, **options))

    async def kill(self) -> Api:
        """Return a broker as it would be after a kill now."""
        self._copies += 1
        copy = self._folder.with_name(f"{self._folder.name[0]}{self._copies}")
        shutil.copytree(self._folder, copy)
        self._folder = copy
        return await self.start()


async def fill(api: Api, chance: random.Random) -> None:
    """Publish to the topic, and let consumers finish and requeue some messages."""
    for number in range(STEPS):
        act = chance.choice(["pub", "pub", "mpub", "defer", "one", "consume", "consume"])
        if act in ("pub", "defer"):
            defer = HOUR_MS + number if act == "defer" else 0
            assert (await api.post("/pub", b"%s %d" % (act.encode(), number), topic="t", defer=defer))[
                0
            ] == 200
        elif act == "mpub":
            lines = b"\n".join(b"mpub %d.%d" % (number, each) for each in range(chance.randint(1, 9)))
            assert (await api.post("/mpub", lines, topic="t"))[0] == 200
        elif act == "one":
            channel, defer = chance.choice(CHANNELS), chance.choice([0, HOUR_MS])
            body = b"only %d" % number
            assert (await api.post("/channel/pub", body, topic="t", channel=channel, defer=defer))[0] == 200
        else:
            await consume(api, chance, chance.choice(CHANNELS))


async def consume(api: Api, chance: random.Random, channel: str) -> None:
    """Receive some messages, and finish, requeue or defer each; what is unanswered returns at the end."""
    ready = (await api.channel("t", channel))["depth"]
    if not ready:
        return
    async with client_of(api) as client:
        await client.subscribe("t", channel, count := min(ready, chance.randint(1, 12)))
        for _ in range(count):
            message = await client.message()
            answer = chance.choice(
                [b"FIN %s\n", b"FIN %s\n", b"REQ %s 0\n", b"REQ %s 3600000\n", b"TOUCH %s\n"]
            )
            await client.send(answer % message.id)
    with trio.fail_after(PATIENCE_S):
        while (await api.channel("t", channel))["in_flight_count"]:
            await trio.lowlevel.checkpoint()


async def left(api: Api, channel: str) -> Left:
    return Counter((each["body"], each["due_ns"]) for each in await waiting(api, "t", channel))


@pytest.mark.parametrize("seed", some(range(4)))
async def test_random_moves(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    async with AsyncExitStack() as stack:
        lives = {name: Life(tmp_path / name, stack) for name in ("source", "target")}
        source, target = await lives["source"].start(), await lives["target"].start()
        for api in (source, target):
            await api.post("/topic/create", topic="t")
            for channel in CHANNELS:
                await api.post("/channel/create", topic="t", channel=channel)
        await fill(source, chance)
        await target.post("/pub", b"there", topic="t")
        expected = {channel: await left(source, channel) for channel in CHANNELS}
        for found in expected.values():
            found["there", None] += 1
        if chance.random() < 0.5:
            await source.post("/topic/pause", topic="t")
            for number in range(chance.randint(1, 5)):
                await source.post("/pub", b"paused %d" % number, topic="t")
                for found in expected.values():
                    found[f"paused {number}", None] += 1
        mover = Mover(source, target)
        await mover.drain()
        streams: list[str | None] = [*CHANNELS, None]
        chance.shuffle(streams)
        await mover.begin()
        moved: dict[str | None, int | None] = {}
        killed = 0
        while streams:
            if chance.random() < 0.15 and killed < 6:  # a kill of a broker, or of the program alone
                killed += 1
                victim = chance.choice(["source", "target", "neither"])
                if victim == "source":
                    mover.source = await lives["source"].kill()
                    await mover.drain()
                elif victim == "target":
                    mover.target = await lives["target"].kill()
                moved.clear()
                await mover.begin()
            stream = chance.choice(streams)
            if stream not in moved:
                moved[stream] = await mover.number(stream)
            batch = await mover.next(stream, moved[stream], chance.choice([1, 50, 300, 100_000]))
            assert batch.status_code == 200, batch.text
            if "NSQ-Move-Through" not in batch.headers:
                streams.remove(stream)
                continue
            answer = await mover.store(stream, batch.content)
            assert answer.status_code == 200, answer.text
            if chance.random() < 0.2:
                assert (await mover.store(stream, batch.content)).json()["stored"] == 0
            if chance.random() < 0.8:  # otherwise the answer is lost
                moved[stream] = int(batch.headers["NSQ-Move-Through"])
            else:
                del moved[stream]
        for stream in (*CHANNELS, None):  # a kill may have undone confirmations
            await mover.stream(stream)
        assert await mover.end() == (200, "")
        await mover.source.post("/topic/unpause", topic="t")
        for channel in CHANNELS:
            assert await left(mover.target, channel) == expected[channel], f"channel {channel}"
            assert not await left(mover.source, channel)
