"""The tasks of the worker processes of the tests: `taskiq worker integrations.taskiq_worker:broker`."""

import asyncio
import os
from pathlib import Path

from trio_nsq.integrations.taskiq import NSQBroker

LEDGER = Path(os.environ["LEDGER"])
broker = NSQBroker(os.environ["NSQD"], topic="jobs", max_in_flight=4, msg_timeout_s=1)


@broker.task("record")
async def record(number: int, wait_s: float = 0.0) -> None:
    """Append a line when the task begins, and one when it ends."""
    await _append(f"begin {number}")
    await asyncio.sleep(wait_s)
    await _append(f"end {number}")


async def _append(line: str) -> None:
    with LEDGER.open("a") as ledger:
        ledger.write(f"{line}\n")
