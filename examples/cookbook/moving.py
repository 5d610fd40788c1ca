"""Consume from an nsqd and its successor until the nsqd is empty: python moving.py TOPIC/CHANNEL NSQD-HTTP ADDRESS...

The addresses are the TCP addresses of both. Move the producers while this runs. It ends when the nsqd has neither a
message of the topic, in any state, nor a producer: then stop the nsqd, and start a worker of the other broker only.
"""

import asyncio
import json
import sys
from urllib.request import urlopen

import trio_nsq


def has_left(topic: str, nsqd_http_address: str) -> int:
    """Return how many messages and producers of the topic the nsqd has."""
    with urlopen(f"http://{nsqd_http_address}/stats?format=json&topic={topic}", timeout=10) as answer:
        stats = json.load(answer)
    counts = [count for each in stats["producers"] or () for count in each["pub_counts"] or ()]
    left = sum(count["topic"] == topic for count in counts)
    for found in stats["topics"]:
        left += found["depth"]
        for each in found["channels"]:
            left += each["depth"] + each["in_flight_count"] + each["deferred_count"]
    return int(left)


async def main(source: str, nsqd_http_address: str, addresses: list[str]) -> None:
    """Handle messages of both brokers until the nsqd has none."""
    topic, _, channel = source.partition("/")

    async def handle(message: trio_nsq.Message) -> None:
        print(f"{message.body.decode()} from {message.nsqd_address}", flush=True)

    async with trio_nsq.Consumer(
        topic, channel, nsqd_tcp_addresses=addresses, max_in_flight=100, connect_timeout_s=60
    ) as consumer:

        async def end_when_moved() -> None:
            while await asyncio.to_thread(has_left, topic, nsqd_http_address):
                await asyncio.sleep(0.2)
            await consumer.drain()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(end_when_moved())
            await consumer.run(handle, concurrency=10)
    print("the nsqd is empty")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
