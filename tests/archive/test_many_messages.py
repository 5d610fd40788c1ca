"""Many messages: archived before each OK, the machine is lost, and every one is restored once.

A few by default; `ARCHIVE_MESSAGES=10000000` for the long form.
"""

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from shutil import rmtree

import httpx
import pytest

from cli.support import Cli
from interop.peers import Broker, qcli_serve

MESSAGES = int(os.environ.get("ARCHIVE_MESSAGES", "40000"))
PRODUCERS = 4
BATCH = min(5000, MESSAGES // PRODUCERS // 4)
PAGE = 100_000
PADDING_BYTES = 40
SEGMENTS = 12
"""About so many; in a long run, a restore reads most of them, a checkpoint, and operations."""
OFFLINE = Cli("", "")


def publish(broker: Broker, producer: int) -> int:
    """Publish the numbered messages of a producer; returns how many."""
    count, chance = MESSAGES // PRODUCERS, Random(producer)
    for first in range(0, count, BATCH):
        numbers = range(first, min(first + BATCH, count))
        lines = "\n".join(
            f"{producer} {number} {chance.randbytes(PADDING_BYTES).hex()}" for number in numbers
        )
        broker.post("/mpub", lines.encode(), topic="t")
    return count


def bodies(broker: Broker) -> Iterator[str]:
    """Read the whole topic, in order."""
    base = f"http://{broker.http_address}/topic/read?topic=t&count={PAGE}"
    with httpx.Client(timeout=120) as client:
        after = 0
        while True:
            found = 0
            with client.stream("GET", f"{base}&from={after}") as answer:
                for line in answer.iter_lines():
                    message = json.loads(line)
                    if "body" in message:
                        found += 1
                        after = message["sequence"] + 1
                        yield message["body"]
            if not found:
                return


@pytest.mark.slow
def test_each_of_many_messages_is_restored_once(tmp_path: Path) -> None:
    data, archive = tmp_path / "data", tmp_path / "archive"
    flags = (f"--max-bytes-per-file={max(100_000, MESSAGES * 110 // SEGMENTS)}", f"--archive={archive}")
    with qcli_serve(data, *flags, "--archive-before-ok") as broker:
        broker.post("/topic/create", b"", topic="t")
        broker.post("/channel/create", b"", topic="t", channel="c")
        with ThreadPoolExecutor(PRODUCERS) as pool:
            total = sum(pool.map(lambda producer: publish(broker, producer), range(PRODUCERS)))
        broker.process.kill()
        broker.process.wait()
    rmtree(data)
    verified = OFFLINE("archive", "verify", str(archive))
    assert verified.code == 0, verified
    restored = OFFLINE("archive", "restore", str(archive), "--data-path", str(data))
    assert restored.code == 0, restored
    print(restored.out.decode())
    assert OFFLINE("log", "verify", str(data)).code == 0
    with qcli_serve(data, *flags) as broker:
        (topic,) = json.loads(broker.http("GET", "/stats", format="json"))["topics"]
        assert topic["channels"][0]["depth"] == total
        next_number = [0] * PRODUCERS
        for body in bodies(broker):
            producer, number = map(int, body.split()[:2])
            assert number == next_number[producer]
            next_number[producer] += 1
        assert next_number == [total // PRODUCERS] * PRODUCERS
