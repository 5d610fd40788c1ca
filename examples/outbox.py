"""What the outbox programs share: publish the rows of an outbox table, each once, in the order of their numbers.

A program that changes its data and publishes a message about it can crash in between. With an outbox, the message is a
row that is written in the transaction of the change. The relay publishes the rows.

The producer has a name, so the broker knows the number of the last message that it has stored. The relay gives the same
numbers to the rows, in a transaction of its own. So after any crash it knows which rows are published: those up to the
broker's number. Rows stay for a while after that, in case the broker loses messages in a power cut (--sync=interval) or
is restored from a backup: then its number is lower, and the relay publishes these rows again.

There must be one relay for each name. If a second one is started, the first one ends.
"""

import logging
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol

import trio_nsq
import trio_nsq.sync

KEPT_ROWS = 10_000
"""How many published rows stay."""
BATCH = 500

_logger = logging.getLogger("outbox")


class OutboxTable(Protocol):
    """The table. Each method is one transaction."""

    def number_rows(self, after: int) -> None:
        """Give numbers to the rows without one: the next ones after the greatest number, and after this one."""

    def rows_after(self, number: int, limit: int) -> Sequence[tuple[int, bytes]]:
        """Return the numbers and bodies of the rows after a number, in order."""

    def delete_up_to(self, number: int) -> None:
        """Delete the rows up to a number."""

    def wait(self) -> None:
        """Return when there may be new rows."""


class RowsMissing(Exception):
    """The broker has lost messages whose rows are deleted."""


def run(
    usage: str | None, open_outbox: Callable[[str], OutboxTable], database_error: type[Exception]
) -> NoReturn:
    """Run the relay that the command line asks for: the database, the topic, the broker's address, and perhaps --once.

    Args:
        usage: Shown if arguments are missing.
        open_outbox: Opens the table in the database of this name.
    """
    logging.basicConfig()
    arguments = [each for each in sys.argv[1:] if each != "--once"]
    if len(arguments) != 3:
        sys.exit(usage)
    database, topic, address = arguments
    once = "--once" in sys.argv
    try:
        count = relay(open_outbox(database), address, topic, name=f"outbox-{topic}", once=once)
    except (trio_nsq.NSQError, RowsMissing, database_error) as error:
        sys.exit(str(error))
    print(f"{count} rows published")
    sys.exit()


def relay(outbox: OutboxTable, address: str, topic: str, name: str, *, once: bool = False) -> int:
    """Publish the rows of an outbox to a topic, until another relay takes over.

    Args:
        address: The broker, `host:port`.
        name: The name of the producer: one for each outbox and topic.
        once: Return when all rows are published.

    Returns:
        How many were published.

    Raises:
        trio_nsq.ConnectionFailed: The broker cannot be reached at the start.
        trio_nsq.PublishFailed: Another relay has taken over, or the broker refuses a message.
        RowsMissing: See there.
    """
    published = 0
    with trio_nsq.sync.Producer(address, name=name, patience_s=60) as producer:
        stored = _stored(producer, topic)
        while True:
            outbox.number_rows(stored)
            rows = outbox.rows_after(stored, BATCH)
            if rows and rows[0][0] != stored + 1:
                raise RowsMissing(f"the broker has messages up to {stored}, the first row is {rows[0][0]}")
            try:
                producer.publish_many(topic, [body for _, body in rows])
            except trio_nsq.PublishFailed as failed:
                cause = failed.__cause__
                if isinstance(cause, trio_nsq.ProducerFenced | trio_nsq.BrokerError):
                    raise
                _logger.warning("trying again: %s", failed)
                stored = _stored(producer, topic)
                continue
            if rows:
                published += len(rows)
                stored = rows[-1][0]
                outbox.delete_up_to(stored - KEPT_ROWS)
            elif once:
                return published
            else:
                outbox.wait()


def _stored(producer: trio_nsq.sync.Producer, topic: str) -> int:
    """Return the number of the last message that the broker has; -1: none. Waits while the broker is down."""
    while True:
        try:
            number = producer.last_number(topic)
        except trio_nsq.PublishFailed as failed:
            if isinstance(failed.__cause__, trio_nsq.ProducerFenced | trio_nsq.BrokerError):
                raise
            _logger.warning("trying again: %s", failed)
        else:
            return -1 if number is None else number
