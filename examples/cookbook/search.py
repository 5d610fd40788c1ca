"""Build a search index of orders in SQLite: python search.py index FILE | find FILE WORD

An operator moves the channel to yesterday. The program handles old messages and new ones in the same way. It stores a
batch, and then finishes it. A batch that comes again replaces the same rows.
"""

import asyncio
import json
import signal
import sqlite3
import sys

import trio_nsq


def connect(path: str) -> sqlite3.Connection:
    """Open the index."""
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE IF NOT EXISTS orders (id INTEGER PRIMARY KEY, item TEXT, at_ns INTEGER)")
    return database


async def index(path: str) -> None:
    """Index messages until SIGTERM."""
    database = connect(path)
    async with trio_nsq.Consumer(
        "orders", "search", nsqd_tcp_addresses="127.0.0.1:4150", max_in_flight=1000
    ) as consumer:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, consumer.close_soon)
        async for batch in consumer.batches(max_messages=500, max_wait_s=0.1):
            rows = []
            for body, at_ns in zip(batch.bodies, batch.timestamps_ns, strict=True):
                order = json.loads(body)
                rows.append((order["id"], order["item"], at_ns))
            with database:
                database.executemany("INSERT OR REPLACE INTO orders VALUES (?, ?, ?)", rows)
            batch.finish()


def find(path: str, word: str) -> None:
    """Print the orders of an item."""
    query = "SELECT id, item FROM orders WHERE item LIKE ? ORDER BY id"
    for number, item in connect(path).execute(query, [f"%{word}%"]):
        print(f"order {number}: {item}")


if __name__ == "__main__":
    if sys.argv[1] == "index":
        asyncio.run(index(sys.argv[2]))
    else:
        find(sys.argv[2], sys.argv[3])
