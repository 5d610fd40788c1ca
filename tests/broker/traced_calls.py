"""A program that prints which functions of the library a PUB and a FIN call: `python -m broker.traced_calls always`.

JSON: {"PUB": [[file, function], ...], "FIN": ...}, files relative to the library, in the order of the calls.
"""

import json
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import trio

import trio_nsq
from broker.support import connected, pub, running_broker, threads_done

SOURCES = f"{Path(trio_nsq.__file__).parent}/"
calls: list[tuple[str, str]] = []


def profile(frame: FrameType, event: str, arg: Any) -> None:
    """Note a call."""
    if event == "call" and frame.f_code.co_filename.startswith(SOURCES):
        calls.append((frame.f_code.co_filename.removeprefix(SOURCES), frame.f_code.co_qualname))


async def trace(folder: Path, sync: str) -> dict[str, list[tuple[str, str]]]:
    """The calls of one PUB, up to the consumer, and of one FIN."""
    async with running_broker(folder, sync=sync) as bound:
        async with connected(bound.tcp_address) as publisher, connected(bound.tcp_address) as consumer:
            await consumer.subscribe("t", "c", ready_count=10)
            await publisher.publish("t", b"makes the topic")
            await consumer.message()
            await threads_done()
            calls.clear()
            await publisher.send(pub("t", b"x"))
            message = await consumer.message()
            await publisher.ok()
            await threads_done()
            of_pub = calls.copy()
            calls.clear()
            await consumer.send(b"FIN %s\n" % message.id)
            await threads_done()
            return {"PUB": of_pub, "FIN": calls.copy()}


if __name__ == "__main__":
    threading.setprofile(profile)
    sys.setprofile(profile)
    with tempfile.TemporaryDirectory() as scratch:
        print(json.dumps(trio.run(trace, Path(scratch) / "d", sys.argv[1])))
