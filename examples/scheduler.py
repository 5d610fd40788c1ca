"""Publish a message at each full interval, once: python examples/scheduler.py TOPIC HTTP-ADDRESS INTERVAL_S

The time divided by the interval is the number of the message, and the broker stores each number once. So the program
keeps nothing: after a restart it continues after the last number, with the messages that it has missed. Run two of them
on two machines: if one is lost, the other one goes on, and no message comes twice. The first one starts alone: if two
begin a new topic together, the first messages may be missing.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from trio_nsq import BrokerUnreachable, IdempotentProducer, RequestRefused

T = TypeVar("T")


def main(topic: str, address: str, interval_s: float) -> None:
    """Publish without end."""
    with IdempotentProducer(address, topic, "scheduler") as producer:
        last = repeated(producer.last_number)
        number = int(time.time() / interval_s) if last is None else last + 1
        while True:
            due = number * interval_s
            time.sleep(max(due - time.time(), 0))
            body = json.dumps({"number": number, "due": due}).encode()
            repeated(partial(producer.publish, [body], number))
            number += 1


def repeated(ask: Callable[[], T]) -> T:
    """Ask the broker until it answers."""
    while True:
        try:
            return ask()
        except (BrokerUnreachable, RequestRefused) as error:
            print(error, file=sys.stderr)
            time.sleep(0.5)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    try:
        main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
    except ValueError as error:  # an invalid name or address
        sys.exit(str(error))
    except KeyboardInterrupt:
        pass
