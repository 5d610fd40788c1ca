"""Publish the rows of an outbox table in SQLite: python examples/outbox_sqlite.py FILE TOPIC ADDRESS [--once]

The program that changes the data writes a row in the same transaction, as `place_order` does. See outbox.py.
"""

import sqlite3
import time
from collections.abc import Sequence

from outbox import run

POLL_S = 0.05
SCHEMA = """
CREATE TABLE IF NOT EXISTS orders (id INTEGER PRIMARY KEY, item TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS outbox (id INTEGER PRIMARY KEY, number INTEGER UNIQUE, body BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS outbox_without_number ON outbox (id) WHERE number IS NULL;
"""


def connect(path: str) -> sqlite3.Connection:
    """Open the database. Its journal lets the relay read while another program writes."""
    database = sqlite3.connect(path, timeout=60, isolation_level=None)
    database.execute("PRAGMA journal_mode=WAL")
    database.executescript(SCHEMA)
    return database


def place_order(database: sqlite3.Connection, number: int, item: str) -> None:
    """Store an order and the message about it: both, or none."""
    with database:
        database.execute("BEGIN IMMEDIATE")
        database.execute("INSERT INTO orders (id, item) VALUES (?, ?)", (number, item))
        database.execute("INSERT INTO outbox (body) VALUES (?)", (f"order {number}: {item}".encode(),))


class SQLiteOutbox:
    """See `OutboxTable`."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def number_rows(self, after: int) -> None:
        with self._database as database:
            database.execute("BEGIN IMMEDIATE")
            (last,) = database.execute("SELECT max(number) FROM outbox").fetchone()
            first = max(after, -1 if last is None else last) + 1
            rows = database.execute("SELECT id FROM outbox WHERE number IS NULL ORDER BY id").fetchall()
            numbered = [(first + place, row_id) for place, (row_id,) in enumerate(rows)]
            database.executemany("UPDATE outbox SET number = ? WHERE id = ?", numbered)

    def rows_after(self, number: int, limit: int) -> Sequence[tuple[int, bytes]]:
        query = "SELECT number, body FROM outbox WHERE number > ? ORDER BY number LIMIT ?"
        return self._database.execute(query, (number, limit)).fetchall()

    def delete_up_to(self, number: int) -> None:
        self._database.execute("DELETE FROM outbox WHERE number <= ?", (number,))

    def wait(self) -> None:
        time.sleep(POLL_S)


if __name__ == "__main__":
    run(__doc__, lambda path: SQLiteOutbox(connect(path)), sqlite3.Error)
