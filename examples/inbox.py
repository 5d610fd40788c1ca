"""Count messages in SQLite, each once: python examples/inbox.py FILE TOPIC/CHANNEL ADDRESS... [--idle]

A broker delivers a message again if the answer to it is lost, or the program was killed before it answered. The effects
of a message and its key are stored in one transaction, so a message whose key is there has had its effects.

The key is what the publisher says that the message is: here, the body up to a colon, such as `order 17`. The message id
of the broker is a key, too, as long as a message is published once and does not move to another broker.

Rows of the inbox can be deleted when their messages cannot be delivered any more.
"""

import sqlite3
import sys
import time
from collections.abc import Sequence

import trio_nsq
import trio_nsq.sync

KEPT_S = 7 * 24 * 3600
SCHEMA = """
CREATE TABLE IF NOT EXISTS sold (item TEXT PRIMARY KEY, count INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS inbox (key TEXT PRIMARY KEY, at REAL NOT NULL);
CREATE INDEX IF NOT EXISTS inbox_at ON inbox (at);
"""


def connect(path: str) -> sqlite3.Connection:
    """Open the database."""
    database = sqlite3.connect(path, timeout=60, isolation_level=None)
    database.execute("PRAGMA journal_mode=WAL")
    database.executescript(SCHEMA)
    return database


def handle(database: sqlite3.Connection, bodies: Sequence[bytes]) -> int:
    """Store the effects of those messages that had none yet; return how many they are. One transaction."""
    new = 0
    with database:
        database.execute("BEGIN IMMEDIATE")
        for body in bodies:
            key, _, item = body.decode().partition(": ")
            found = database.execute("INSERT OR IGNORE INTO inbox VALUES (?, ?)", (key, time.time()))
            if found.rowcount:
                new += 1
                database.execute(
                    "INSERT INTO sold VALUES (?, 1) ON CONFLICT (item) DO UPDATE SET count = count + 1",
                    (item,),
                )
        database.execute("DELETE FROM inbox WHERE at < ?", (time.time() - KEPT_S,))
    return new


def main(path: str, source: str, addresses: Sequence[str], *, idle: bool) -> int:
    """Handle messages; with `idle`, until none arrives for half a second. Return the exit code."""
    topic, _, channel = source.partition("/")
    database = connect(path)
    new = total = 0
    try:
        with trio_nsq.sync.Consumer(
            topic,
            channel,
            nsqd_tcp_addresses=addresses,
            max_in_flight=500,
            idle_timeout_s=0.5 if idle else None,
        ) as consumer:
            for batch in consumer.batches(max_messages=100, max_wait_s=0.05):
                new += handle(database, batch.bodies)
                total += len(batch)
                batch.finish()
    except (trio_nsq.NSQError, ValueError, sqlite3.Error) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass  # unfinished messages were returned to the broker
    print(f"{total} messages, {new} of them new")
    return 0


if __name__ == "__main__":
    arguments = [each for each in sys.argv[1:] if each != "--idle"]
    if len(arguments) < 3:
        sys.exit(__doc__)
    sys.exit(main(arguments[0], arguments[1], arguments[2:], idle="--idle" in sys.argv))
