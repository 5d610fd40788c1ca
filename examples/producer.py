"""Publish lines of stdin to the available brokers: python examples/producer.py TOPIC ADDRESS... < FILE

An address is that of a broker, host:port, or of a discovery service, http://host:port, which knows brokers.

Each line is one message; many are published concurrently, and the client batches them. If a message was certainly not
stored, it is published again; if it may have been stored, it is only reported, so that there are no silent duplicates.
"""

import sys
from collections import Counter
from collections.abc import Sequence

import trio

import trio_nsq

AT_ONCE = 200
ATTEMPTS = 5
PAUSE_S = 0.5


async def main(topic: str, addresses: Sequence[str]) -> int:
    """Publish the lines of stdin; return the exit code."""
    outcome: Counter[str] = Counter()
    places = trio.Semaphore(AT_ONCE)
    try:
        services = [address for address in addresses if "://" in address]
        brokers = [address for address in addresses if "://" not in address]
        async with (
            trio_nsq.Producer(brokers, lookupd_http_addresses=services) as producer,
            trio.open_nursery() as nursery,
        ):
            async for line in trio.wrap_file(sys.stdin.buffer):
                if body := line.removesuffix(b"\n"):  # NSQ has no empty messages
                    await places.acquire()
                    nursery.start_soon(publish, producer, topic, body, outcome, places)
    except (trio_nsq.ConnectionFailed, ValueError) as error:  # ValueError: an invalid address
        print(error, file=sys.stderr)
        return 1
    print(", ".join(f"{count} {what}" for what, count in outcome.items()) or "nothing to publish")
    return 0 if outcome.keys() <= {"stored"} else 1


async def publish(
    producer: trio_nsq.Producer, topic: str, body: bytes, outcome: Counter[str], places: trio.Semaphore
) -> None:
    """Publish one message, again if it was certainly not stored, and count the outcome."""
    fate = "not stored"
    for _ in range(ATTEMPTS):
        try:
            await producer.publish(topic, body)
        except ValueError as error:  # an invalid topic name or message
            fate = f"not sent ({error})"
            break
        except trio_nsq.PublishFailed as error:
            if error.maybe_stored:  # publishing it again could store it twice; the caller decides
                fate = "perhaps stored"
                break
            await trio.sleep(PAUSE_S)
        else:
            fate = "stored"
            break
    outcome[fate] += 1
    places.release()


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
        sys.exit()
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.exit(trio.run(main, sys.argv[1], sys.argv[2:]))
