"""Process the messages of a channel: python examples/consumer.py TOPIC/CHANNEL [--lookupd] ADDRESS...

The addresses are those of brokers (TCP), or with --lookupd those of discovery services (HTTP). Each message should be a
JSON object with a "name", which is greeted. Other messages fail, are retried with growing delays, and are published to
the topic TOPIC-failed after three attempts. On Ctrl-C or SIGTERM, active handlers finish, and all other messages are
returned to the channel.
"""

import json
import logging
import signal
import sys
from collections.abc import Sequence

import trio

import trio_nsq

SIGNALS = (signal.SIGINT, signal.SIGTERM)


async def main(source: str, lookupd: bool, addresses: Sequence[str]) -> int:
    """Process messages until a signal arrives; return the exit code."""
    topic, _, channel = source.partition("/")

    async def greet(message: trio_nsq.Message) -> None:
        print("hello,", json.loads(message.body)["name"], flush=True)

    try:
        consumer = trio_nsq.Consumer(
            topic,
            channel,
            nsqd_tcp_addresses=() if lookupd else addresses,
            lookupd_http_addresses=addresses if lookupd else (),
            max_in_flight=100,
            default_requeue_delay_s=0.1,
            backoff_multiplier_s=0.05,
        )
        async with consumer, trio.open_nursery() as nursery:
            nursery.start_soon(close_on_signal, consumer)
            await consumer.run(
                greet, concurrency=10, max_attempts=3, dead_letter_topic=f"{topic}-failed", auto_touch=True
            )
            nursery.cancel_scope.cancel()
    except (trio_nsq.ConnectionFailed, ValueError) as error:  # ValueError: an invalid name or address
        print(error, file=sys.stderr)
        return 1
    stats = consumer.stats()
    print(f"{stats.finished} done, {stats.requeued} put back", file=sys.stderr)
    return 0


async def close_on_signal(consumer: trio_nsq.Consumer) -> None:
    """Close the consumer on a signal, which ends `run`."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # a second signal would interrupt the orderly shutdown
    with trio.open_signal_receiver(*SIGNALS) as signals:
        await anext(signals)
    await consumer.aclose()


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
        sys.exit()
    words = [word for word in sys.argv[1:] if word != "--lookupd"]
    if len(words) < 2 or "/" not in words[0]:
        sys.exit(__doc__)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    sys.exit(trio.run(main, words[0], "--lookupd" in sys.argv, words[1:]))
