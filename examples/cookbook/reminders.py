"""Send reminders at their times: python reminders.py add SECONDS TEXT | run

The broker keeps a reminder until it is due, also over restarts. The program keeps nothing.
"""

import asyncio
import json
import signal
import sys
import time
from typing import Any

import trio_nsq

NSQD = "127.0.0.1:4150"
LONGEST_S = 360 * 86400
"""Less than --max-defer of the broker, which is a year."""


async def add(in_s: float, text: str) -> None:
    """Store a reminder that is due after this time."""
    body = json.dumps({"due": time.time() + in_s, "text": text}).encode()
    async with trio_nsq.Producer(NSQD) as producer:
        await producer.publish("reminders", body, defer_s=min(in_s, LONGEST_S))


async def run() -> None:
    """Send the reminders that are due, until SIGTERM."""
    async with trio_nsq.Producer(NSQD) as producer:

        async def send(message: trio_nsq.Message, reminder: dict[str, Any]) -> None:
            left_s = reminder["due"] - time.time()
            if left_s > 1:  # more than a year: defer the rest
                await producer.publish("reminders", message.body, defer_s=min(left_s, LONGEST_S))
                return
            print(f"reminder: {reminder['text']}", flush=True)

        async with trio_nsq.Consumer("reminders", "send", nsqd_tcp_addresses=NSQD) as consumer:
            await consumer.run(
                send,
                decode=json.loads,
                concurrency=10,
                max_attempts=20,
                dead_letter_topic="reminders.failed",
                stop_on=(signal.SIGTERM,),
            )


if __name__ == "__main__":
    if sys.argv[1:] == ["run"]:
        asyncio.run(run())
    elif len(sys.argv) == 4 and sys.argv[1] == "add":
        asyncio.run(add(float(sys.argv[2]), sys.argv[3]))
    else:
        sys.exit(__doc__)
