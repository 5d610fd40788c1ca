"""Reads the statistics of one broker or several, again and again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...framework.errors import Failure
from ...framework.params import Source
from .rows import Row, Sampler, summed

if TYPE_CHECKING:
    from ...broker.admin_client import AdminClient


class Reports:
    """Looks at one broker or several, again and again.

    Args:
        brokers: Whom to ask.
        source: What is wanted; None: everything.

    Attributes:
        address: Of the brokers, for messages.
    """

    def __init__(self, brokers: Sequence[AdminClient], source: Source | None) -> None:
        self.address = " and ".join(broker.address for broker in brokers)
        self._brokers = brokers
        self._source = source
        self._sampler = Sampler(source)

    def take(self) -> list[Row]:
        """Look once.

        Raises:
            Failure: With the code for an unreachable broker, or because what is wanted is on none of them.
        """
        wanted = self._source or (None, None)
        topics = summed([broker.stats(*wanted)["topics"] for broker in self._brokers])
        rows = self._sampler.rows(topics, time.monotonic())
        if self._source is not None and not rows:
            kind = "topic" if self._source.channel is None else "channel"
            raise Failure(f"There is no {kind} {self._source} on {self.address}.")
        return rows
