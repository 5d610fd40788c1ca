"""Publish the rows of an outbox table in PostgreSQL: python examples/outbox_postgres.py DSN TOPIC ADDRESS [--once]

The program that changes the data writes a row in the same transaction, as `place_order` does. See outbox.py.

Transactions commit in another order than their rows got their ids. So the relay must not remember an id, but gives
numbers to the rows that it sees.
"""

from collections.abc import Sequence

import psycopg

from outbox import run

POLL_S = 1.0
SCHEMA = """
CREATE TABLE IF NOT EXISTS orders (id bigint PRIMARY KEY, item text NOT NULL);
CREATE TABLE IF NOT EXISTS outbox (id bigserial PRIMARY KEY, number bigint UNIQUE, body bytea NOT NULL);
CREATE INDEX IF NOT EXISTS outbox_without_number ON outbox (id) WHERE number IS NULL;
"""
NUMBER_ROWS = """
WITH first AS (SELECT greatest(%s, coalesce(max(number), -1)) + 1 AS number FROM outbox),
     rows AS (SELECT id, row_number() OVER (ORDER BY id) - 1 AS place FROM outbox WHERE number IS NULL)
UPDATE outbox SET number = first.number + rows.place FROM first, rows WHERE outbox.id = rows.id
"""


def connect(dsn: str) -> psycopg.Connection:
    """Connect, and create the tables; each statement outside of a transaction is one of its own."""
    database = psycopg.connect(dsn, autocommit=True)
    with database.transaction():
        database.execute("SELECT pg_advisory_xact_lock(4711)")  # two programs may start at the same time
        database.execute(SCHEMA)
    return database


def place_order(database: psycopg.Connection, number: int, item: str) -> None:
    """Store an order and the message about it: both, or none."""
    with database.transaction():
        database.execute("INSERT INTO orders (id, item) VALUES (%s, %s)", (number, item))
        database.execute("INSERT INTO outbox (body) VALUES (%s)", (f"order {number}: {item}".encode(),))
        database.execute("NOTIFY outbox")


class PostgresOutbox:
    """See `OutboxTable`."""

    def __init__(self, database: psycopg.Connection) -> None:
        self._database = database
        database.execute("LISTEN outbox")

    def number_rows(self, after: int) -> None:
        with self._database.transaction():
            # A relay that was replaced may still be at this.
            self._database.execute("LOCK TABLE outbox IN SHARE ROW EXCLUSIVE MODE")
            self._database.execute(NUMBER_ROWS, (after,))

    def rows_after(self, number: int, limit: int) -> Sequence[tuple[int, bytes]]:
        query = "SELECT number, body FROM outbox WHERE number > %s ORDER BY number LIMIT %s"
        return [(row[0], bytes(row[1])) for row in self._database.execute(query, (number, limit))]

    def delete_up_to(self, number: int) -> None:
        self._database.execute("DELETE FROM outbox WHERE number <= %s", (number,))

    def wait(self) -> None:
        for _ in self._database.notifies(timeout=POLL_S, stop_after=1):
            pass


if __name__ == "__main__":
    run(__doc__, lambda dsn: PostgresOutbox(connect(dsn)), psycopg.Error)
