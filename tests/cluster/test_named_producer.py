"""A producer with a name in a cluster: each message is stored once, also if another member takes over meanwhile."""

from pathlib import Path

import trio

from broker.support import PATIENCE_S
from cluster.running import running_members
from interop.peers import free_ports
from trio_nsq import Producer


async def test_each_message_is_stored_once_over_switches(tmp_path: Path) -> None:
    """The new leader knows the last number, and which run of the producer gave it."""
    ports = free_ports(2)
    addresses = [f"127.0.0.1:{port}" for port in ports]
    count = 0
    async with running_members(tmp_path, f"static:{','.join(addresses)}") as members:
        one = await members.start("one", http_address=addresses[0])
        await one.until(lambda about: bool(about["reason"] == "there is no leader"))
        assert (await one.client.post("/cluster/promote")).status_code == 200
        await one.leads()
        two = await members.start("two", http_address=addresses[1])
        await one.in_sync(2)
        async with (
            Producer(
                two.bound.tcp_address, name="writer", patience_s=PATIENCE_S, reconnect_max_s=0.1
            ) as producer,
            trio.open_nursery() as nursery,
        ):
            done = trio.Event()

            async def publish() -> None:
                nonlocal count
                while not done.is_set():
                    await producer.publish_many("t", [b"%d" % (count + number) for number in range(10)])
                    count += 10

            async def progress() -> None:
                before = count
                with trio.fail_after(PATIENCE_S):
                    while count <= before + 10:
                        await trio.sleep(0.001)

            nursery.start_soon(publish)
            for leader in (two, one):
                await progress()
                assert (await one.client.post("/cluster/switch")).status_code == 200
                await leader.leads()
                await leader.in_sync(2)
            await progress()
            done.set()
        assert await one.bodies("t") == [str(number) for number in range(count)]
