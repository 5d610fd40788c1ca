"""Handle the orders of a channel: python examples/worker.py TOPIC/CHANNEL ADDRESS... [--trio]

An order is a JSON object with an id. If its handler fails, it is tried again after 0.1, 0.2, 0.4, ... seconds, and is
published to the topic TOPIC-failed at the fifth failure. What is not JSON is published there at once. On SIGTERM and
Ctrl-C, active handlers finish, and all other messages return to the broker.
"""

import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from typing import Any

import trio

import trio_nsq


async def handle(message: trio_nsq.Message, order: dict[str, Any]) -> None:
    """Handle an order. It may come twice, such as after a lost connection."""
    print(f"handled {order['id']}", flush=True)


async def main(source: str, addresses: Sequence[str]) -> None:
    """Handle orders until a signal arrives. Runs under asyncio and trio."""
    topic, _, channel = source.partition("/")
    failed = f"{topic}-failed"

    def on_failure(message: trio_nsq.Message, error: Exception) -> trio_nsq.Answer:
        if isinstance(error, trio_nsq.DecodeFailed):
            return trio_nsq.DeadLetter(failed, str(error))
        return trio_nsq.Retry(delay_s=0.05 * 2 ** min(message.attempts, 10), backoff=False)

    async with trio_nsq.Consumer(
        topic, channel, nsqd_tcp_addresses=addresses, max_in_flight=100, connect_timeout_s=60
    ) as consumer:
        await consumer.run(
            handle,
            decode=json.loads,
            on_failure=on_failure,
            concurrency=100,
            max_attempts=5,
            dead_letter_topic=failed,
            stop_on=(signal.SIGTERM, signal.SIGINT),
        )


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    if len(words) < 2 or "/" not in words[0]:
        sys.exit(__doc__)
    try:
        if "--trio" in sys.argv:
            trio.run(main, words[0], words[1:])
        else:
            asyncio.run(main(words[0], words[1:]))
    except (trio_nsq.ConnectionFailed, ValueError) as error:  # ValueError: an invalid name or address
        sys.exit(str(error))
