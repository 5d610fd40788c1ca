"""Copy a topic of several brokers to one: python examples/fan_in.py TOPIC/CHANNEL TARGET ADDRESS... [--trio]

A message is finished when the target has stored it. So none is lost, and one whose answer is lost is copied twice.
"""

import asyncio
import logging
import signal
import sys
from collections.abc import Sequence

import trio

import trio_nsq


async def main(source: str, target: str, addresses: Sequence[str]) -> None:
    """Copy messages until SIGTERM or Ctrl-C. Runs under asyncio and trio."""
    topic, _, channel = source.partition("/")
    async with (
        trio_nsq.Producer(target, connect_timeout_s=60) as producer,
        trio_nsq.Consumer(
            topic, channel, nsqd_tcp_addresses=addresses, max_in_flight=1000, connect_timeout_s=60
        ) as consumer,
    ):
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: consumer.close_soon())  # ends the loop
        async for batch in consumer.batches(max_messages=200, max_wait_s=0.05):
            try:
                await producer.publish_many(topic, batch.bodies, headers=batch.headers)
            except trio_nsq.PublishFailed as error:
                logging.warning("%s", error)
                batch.requeue(delay_s=0.2, backoff=False)
            else:
                batch.finish()


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    if len(words) < 3 or "/" not in words[0]:
        sys.exit(__doc__)
    try:
        if "--trio" in sys.argv:
            trio.run(main, words[0], words[1], words[2:])
        else:
            asyncio.run(main(words[0], words[1], words[2:]))
    except (trio_nsq.ConnectionFailed, ValueError) as error:  # ValueError: an invalid name or address
        sys.exit(str(error))
