"""Publish lines as they come, to whichever brokers are there: python examples/producer.py TOPIC ADDRESS... < FILE

Each line is published by itself, many at once; the client sends those that wait together. What a broker has certainly
not stored is published again, so that nothing is lost and nothing is stored twice without a word.
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
    """Publish standard input; returns the exit code."""
    outcome: Counter[str] = Counter()
    places = trio.Semaphore(AT_ONCE)
    try:
        async with trio_nsq.Producer(addresses) as producer, trio.open_nursery() as nursery:
            async for line in trio.wrap_file(sys.stdin.buffer):
                if body := line.removesuffix(b"\n"):  # NSQ has no empty messages
                    await places.acquire()
                    nursery.start_soon(publish, producer, topic, body, outcome, places)
    except (trio_nsq.ConnectionFailed, ValueError) as error:  # ValueError: no address
        print(error, file=sys.stderr)
        return 1
    print(", ".join(f"{count} {what}" for what, count in outcome.items()) or "nothing to publish")
    return 0 if outcome.keys() <= {"stored"} else 1


async def publish(
    producer: trio_nsq.Producer, topic: str, body: bytes, outcome: Counter[str], places: trio.Semaphore
) -> None:
    """Publish one message, again if it certainly was not stored, and count what became of it."""
    fate = "not stored"
    for _ in range(ATTEMPTS):
        try:
            await producer.publish(topic, body)
        except ValueError as error:  # a topic's name, or a message, that no broker takes
            fate = f"not sent ({error})"
            break
        except trio_nsq.PublishFailed as error:
            if (
                error.maybe_stored
            ):  # publishing it again might store it twice: that is for the program to decide
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
