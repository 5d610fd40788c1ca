"""Keep the balances of accounts in SQLite: python ledger.py FILE

The channel orders messages by account, so payments of an account are handled one after the other, and those of
different accounts at the same time. A payment has a number in its account. One that comes again changes nothing.
"""

import asyncio
import json
import random
import signal
import sqlite3
import sys
from typing import Any

import trio_nsq

SCHEMA = "CREATE TABLE IF NOT EXISTS accounts (name TEXT PRIMARY KEY, number INTEGER, balance INTEGER)"
PAY = "INSERT OR REPLACE INTO accounts VALUES (?, ?, ?)"


async def main(path: str) -> None:
    """Handle payments until SIGTERM."""
    database = sqlite3.connect(path)
    database.execute(SCHEMA)
    active: set[str] = set()

    async def pay(message: trio_nsq.Message, payment: dict[str, Any]) -> trio_nsq.Answer | None:
        account = payment["account"]
        assert account not in active, "two payments of an account at the same time"
        active.add(account)
        await asyncio.sleep(random.uniform(0, 0.005))  # a service is asked
        active.remove(account)
        if random.random() < 0.05:
            return trio_nsq.Retry(delay_s=0.05, backoff=False)  # holds later payments of this account only
        query = "SELECT number, balance FROM accounts WHERE name = ?"
        number, balance = database.execute(query, [account]).fetchone() or (0, 0)
        if payment["number"] <= number:
            return None  # delivered again
        if payment["number"] != number + 1:
            raise ValueError(f"payment {payment['number']} of account {account} overtook {number + 1}")
        with database:
            database.execute(PAY, [account, payment["number"], balance + payment["amount"]])
        return None

    async with trio_nsq.Consumer(
        "payments", "ledger", nsqd_tcp_addresses="127.0.0.1:4150", max_in_flight=50
    ) as consumer:
        await consumer.run(
            pay, decode=json.loads, concurrency=50, max_attempts=3, stop_on=(signal.SIGTERM,),
            dead_letter_topic="payments.failed",
        )  # fmt: skip


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
