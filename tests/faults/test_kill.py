"""kill -9 under load, with a ledger outside the broker of what was acknowledged and what was delivered.

A handful of kills by default; `FAULT_KILLS=50` for the long form.
"""

import os
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio

from broker.support import RawClient, connected
from interop.peers import Broker, qcli_serve

KILLS = int(os.environ.get("FAULT_KILLS", "4"))


@dataclass
class Ledger:
    """What happened, as the clients saw it."""

    attempted: set[bytes] = field(default_factory=set)
    acknowledged: set[bytes] = field(default_factory=set)
    delivered: Counter[bytes] = field(default_factory=Counter)
    batches: list[list[bytes]] = field(default_factory=list)
    twice_in_one_life: list[bytes] = field(default_factory=list)
    next_number: int = 0

    def batch(self, chance: random.Random) -> list[bytes]:
        """New messages, noted as attempted."""
        bodies = []
        for _ in range(chance.randint(1, 50)):
            bodies.append(b"%d " % self.next_number + bytes(chance.randint(0, 500)))
            self.next_number += 1
        self.attempted.update(bodies)
        self.batches.append(bodies)
        return bodies


async def publish(client: RawClient, ledger: Ledger, chance: random.Random) -> None:
    while True:
        bodies = ledger.batch(chance)
        await client.publish("t", *bodies)
        ledger.acknowledged.update(bodies)


async def consume(client: RawClient, ledger: Ledger, life: set[bytes]) -> None:
    await client.subscribe("t", "c", ready_count=200)
    while True:
        message = await client.message()
        if message.body in life:
            ledger.twice_in_one_life.append(message.body)
        life.add(message.body)
        ledger.delivered[message.body] += 1
        await client.send(b"FIN " + message.id + b"\n")


async def one_life(broker: Broker, ledger: Ledger, chance: random.Random) -> None:
    """Load on a broker until it is killed, at some moment of the load."""
    wanted = len(ledger.acknowledged) + chance.randint(200, 3000)
    life: set[bytes] = set()

    async def until_killed(role: str) -> None:
        try:
            async with connected(broker.tcp_address) as client:
                if role == "publish":
                    await publish(client, ledger, chance)
                else:
                    await consume(client, ledger, life)
        except (AssertionError, OSError, trio.BrokenResourceError):
            assert broker.process.poll() is not None or killed, "the connection ended before the broker did"

    killed = False
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for role in ("publish", "publish", "consume", "consume"):
                nursery.start_soon(until_killed, role)
            while len(ledger.acknowledged) < wanted:
                await trio.lowlevel.checkpoint()
            killed = True
            broker.process.kill()
            await trio.to_thread.run_sync(broker.process.wait)


async def drain(broker: Broker, ledger: Ledger) -> None:
    """Receive everything that is left."""
    async with connected(broker.tcp_address) as client:
        await client.subscribe("t", "c", ready_count=2500)
        with trio.fail_after(60):
            while broker.channel_stats("t", "c")["depth"]:
                await receive_one(client, ledger)
            await client.send(b"CLS\n")
            while (frame := await client.frame()) != (0, b"CLOSE_WAIT"):
                assert frame is not None
                ledger.delivered[frame[1][26:]] += 1


async def receive_one(client: RawClient, ledger: Ledger) -> None:
    message = await client.message()
    ledger.delivered[message.body] += 1
    await client.send(b"FIN " + message.id + b"\n")


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["always", "interval"])
async def test_nothing_acknowledged_is_lost(tmp_path: Path, sync: str) -> None:
    ledger = Ledger()
    chance = random.Random(7)
    for _ in range(KILLS):
        with qcli_serve(tmp_path / "d", "--sync", sync) as broker:
            await one_life(broker, ledger, chance)
    with qcli_serve(tmp_path / "d", "--sync", sync) as broker:
        await drain(broker, ledger)
    delivered = set(ledger.delivered)
    assert ledger.acknowledged <= delivered, (
        f"{len(ledger.acknowledged - delivered)} acknowledged, not delivered"
    )
    assert delivered <= ledger.attempted
    assert not ledger.twice_in_one_life
    torn = [batch for batch in ledger.batches if 0 < len(delivered & set(batch)) < len(batch)]
    assert not torn, "an MPUB was stored in part"
