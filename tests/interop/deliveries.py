"""Bodies to send through a broker and a client, and checks that all are delivered and the channel is empty."""

import random
import time
from collections import Counter

from interop.peers import CLIENT_DEADLINE_S, Broker, Delivery


def some_bodies(count: int) -> list[bytes]:
    """Return ``count`` bodies, the same on every call: every byte value, text, 1 byte to 64 KiB, two identical."""
    rng = random.Random(count)
    special = [
        b"\0",
        b"\n",
        bytes(range(256)),
        "Zwölf Boxkämpfer jagen Viktor, 十二人のボクサー, 🥊\r\n".encode(),
        b"FIN 0123456789abcdef\n",
        rng.randbytes(65536),
        b"the same twice",
        b"the same twice",
    ]
    sizes = [int(2 ** rng.uniform(0, 14)) for _ in range(count - len(special))]
    return special + [rng.randbytes(size) for size in sizes]


def counted(bodies: list[bytes], attempts: int = 1) -> Counter[Delivery]:
    """Return the deliveries that a consumer gets for these bodies, in any order."""
    return Counter(Delivery(body, attempts) for body in bodies)


def assert_drained(broker: Broker, topic: str, channel: str) -> None:
    """Check that the channel is empty and has nothing in flight.

    The broker does not acknowledge FIN, so the client may exit before the broker reads its last FINs. Poll until then.
    """
    names = ("depth", "in_flight_count", "deferred_count")
    deadline = time.monotonic() + CLIENT_DEADLINE_S
    while any(left := {name: broker.channel_stats(topic, channel)[name] for name in names}.values()):
        assert time.monotonic() < deadline, left
