"""Keep a copy of all prices in the memory of each process: python prices.py

Each process reads the log of the topic from its start, and follows it. So it needs no channel, and misses no change,
also while it has lost the connection. A line of standard input is an item; its price is printed.
"""

import asyncio
import json
import sys

import trio_nsq

prices: dict[str, float] = {}


async def follow(is_current: asyncio.Event) -> None:
    """Apply all changes, without end. Set the event when the changes that existed at the start are applied."""
    async with trio_nsq.TopicReader("127.0.0.1:4151", "prices") as reader:  # ends at the current end
        while found := await reader.receive():
            apply(found)
    is_current.set()
    async with trio_nsq.TopicReader("127.0.0.1:4151", "prices", start=reader.position, follow=True) as reader:
        while found := await reader.receive():
            apply(found)


def apply(found: list[trio_nsq.RecordBatch | trio_nsq.Gap]) -> None:
    """Apply the changes of these messages."""
    for each in found:
        if isinstance(each, trio_nsq.Gap):  # discarded by retention, or damaged
            print(f"messages before {each.next_sequence} are {each.reason}", file=sys.stderr)
            continue
        for body in each.messages.bodies():
            change = json.loads(body)
            prices[change["item"]] = change["price"]


async def main() -> None:
    """Answer until the end of standard input."""
    is_current = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(follow(is_current))
        await is_current.wait()
        while line := await asyncio.to_thread(sys.stdin.readline):
            item = line.strip()
            print(f"{item}: {prices.get(item, 'no price')}", flush=True)
        following.cancel()


if __name__ == "__main__":
    asyncio.run(main())
