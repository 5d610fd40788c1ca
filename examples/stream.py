"""Count the words of a topic in SQLite, each message once: python examples/stream.py FILE TOPIC HTTP-ADDRESS [--trio]

The counts and the position in the topic change in one transaction. So a program that was killed continues where its
counts are, and needs no table of keys as `inbox.py`. One program reads the topic, in its order, and no channel.
Give the topic a retention time: a broker that keeps no finished messages may discard some before they are read.
"""

import asyncio
import logging
import sqlite3
import sys
from collections.abc import Sequence

import trio

import trio_nsq

SCHEMA = """
CREATE TABLE IF NOT EXISTS counts (word TEXT PRIMARY KEY, count INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS position (one INTEGER PRIMARY KEY CHECK (one = 1), next INTEGER NOT NULL);
INSERT OR IGNORE INTO position VALUES (1, 0);
"""


def connect(path: str) -> sqlite3.Connection:
    """Open the database."""
    database = sqlite3.connect(path, timeout=60)
    database.execute("PRAGMA journal_mode=WAL")
    database.executescript(SCHEMA)
    return database


def store(database: sqlite3.Connection, found: Sequence[trio_nsq.RecordBatch | trio_nsq.Gap]) -> None:
    """Count the words of these messages, and store the position after them, in one transaction."""
    with database:
        for each in found:
            if isinstance(each, trio_nsq.Gap):
                logging.warning("%s were %s", range(each.first_sequence, each.next_sequence), each.reason)
                continue
            for body in each.messages.bodies():
                database.execute(
                    "INSERT INTO counts VALUES (?, 1) ON CONFLICT (word) DO UPDATE SET count = count + 1",
                    (body.decode(),),
                )
        database.execute("UPDATE position SET next = ?", (found[-1].next_sequence,))


async def main(path: str, topic: str, address: str) -> None:
    """Count without end. Runs under asyncio and trio."""
    database = connect(path)
    (start,) = database.execute("SELECT next FROM position").fetchone()
    async with trio_nsq.TopicReader(address, topic, start=start, follow=True) as reader:
        while found := await reader.receive():
            store(database, found)


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    if len(words) != 3:
        sys.exit(__doc__)
    try:
        if "--trio" in sys.argv:
            trio.run(main, words[0], words[1], words[2])
        else:
            asyncio.run(main(words[0], words[1], words[2]))
    except (trio_nsq.NSQError, ValueError, sqlite3.Error) as error:
        sys.exit(str(error))
