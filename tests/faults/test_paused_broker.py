"""A stopped broker: answers that clients sent meanwhile count, and clients get the lost time back."""

import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from broker.support import RawClient, connected, identify, mpub, running_broker, settle
from interop.peers import qcli_serve

COUNT = 100
TIMEOUT_S = 4.0
"""A client on a busy machine, started before the pause, needs some of it to answer after the pause."""
PAUSE_S = 4.6


@asynccontextmanager
async def consuming(address: str, topic: str) -> AsyncIterator[tuple[RawClient, list[bytes]]]:
    """A consumer with messages in flight that time out soon, and their ids."""
    async with connected(address) as client:
        await client.send(identify(msg_timeout=int(TIMEOUT_S * 1000)))
        await client.ok()
        await client.subscribe(topic, "c", ready_count=COUNT)
        await client.send(mpub(topic, *[b"x"] * COUNT))
        ids: list[bytes] = []
        frame_ok = False
        while len(ids) < COUNT or not frame_ok:
            frame = await client.frame()
            assert frame is not None
            if frame[0] == 2:
                ids.append(frame[1][10:26])
            else:
                assert frame[1] == b"OK"
                frame_ok = True
        yield client, ids


async def finish_all(client: RawClient, ids: list[bytes]) -> None:
    await client.send(b"".join(b"FIN %s\n" % each for each in ids))


async def nothing_came(client: RawClient) -> None:
    """Check that there is no error and no message again before the answer to the next command."""
    await client.send(b"CLS\n")
    assert await client.frame() == (0, b"CLOSE_WAIT")


async def test_clients_of_a_stopped_process(tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "d") as broker:
        async with (
            consuming(broker.tcp_address, "answered") as (answered, answered_ids),
            consuming(broker.tcp_address, "late") as (late, late_ids),
            consuming(broker.tcp_address, "silent") as (silent, silent_ids),
        ):
            broker.process.send_signal(signal.SIGSTOP)
            await finish_all(answered, answered_ids)
            time.sleep(PAUSE_S)  # real time for the other process; nothing else runs here
            broker.process.send_signal(signal.SIGCONT)
            # A client in the same paused virtual machine answers after it, in what was left of its time.
            timeouts = broker.channel_stats("late", "c")["timeout_count"]
            await finish_all(late, late_ids)
            await nothing_came(answered)
            await nothing_came(late)
            assert {(await silent.message()).id for _ in silent_ids} == set(silent_ids)
        assert timeouts == 0
        for topic in ("answered", "late"):
            stats = broker.channel_stats(topic, "c")
            assert (stats["depth"], stats["in_flight_count"], stats["timeout_count"]) == (0, 0, 0)


async def test_clients_while_the_event_loop_is_held_up(tmp_path: Path) -> None:
    """By a disk that hangs in a sync, or by other programs."""
    async with running_broker(tmp_path / "d") as bound, consuming(bound.tcp_address, "t") as (client, ids):
        time.sleep(PAUSE_S)  # the broker runs in the same event loop
        await settle()
        await finish_all(client, ids)
        await nothing_came(client)
