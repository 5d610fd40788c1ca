"""A substitute for Spark that calls the reader of streams of the data source `nsq`, and helpers for its tests."""

import json
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyspark.sql.datasource import CaseInsensitiveDict

from cli.support import Cli
from interop.peers import Broker, qcli_serve
from spark.support import until
from trio_nsq.spark.data_source import NsqDataSource
from trio_nsq.spark.source.stream import NsqStreamReader

Row = tuple[Any, ...]


def reader(**options: str) -> NsqStreamReader:
    source = NsqDataSource(CaseInsensitiveDict({"columns": "broker,seq", **options}))
    return source.streamReader(source.schema())


class Query:
    """Calls a reader as Spark does: offsets are compared as JSON text; one reader plans, and a copy of
    another reads. `checkpoint` outlives the query. Rows have the columns broker and seq, unless there is an option.
    """

    def __init__(self, checkpoint: list[str], **options: str) -> None:
        self.checkpoint = checkpoint
        self.control = reader(**options)
        self.tasks: NsqStreamReader = pickle.loads(pickle.dumps(reader(**options)))

    def until_now(self) -> "Query":
        """Plan a batch up to the current end."""
        self.control.prepareForTriggerAvailableNow()
        return self

    def plan(self) -> bool:
        """Save the end of the next batch in the checkpoint; return False if there is no new data."""
        start = self._start(len(self.checkpoint))
        limit = self.control.getDefaultReadLimit()
        end = json.dumps(self.control.latestOffset(json.loads(start), limit))
        if end == start:
            return False
        self.checkpoint.append(end)
        return True

    def rows(self) -> list[Row]:
        """Run the last saved batch, possibly again."""
        start, end = self._start(len(self.checkpoint) - 1), self.checkpoint[-1]
        found: list[Row] = []
        for planned in self.control.partitions(json.loads(start), json.loads(end)):
            partition = pickle.loads(pickle.dumps(planned))
            for batch in self.tasks.read(partition):
                found += zip(*batch.to_pydict().values(), strict=True)
        return found

    def batch(self) -> list[Row] | None:
        """Run one trigger; return None if there is no batch."""
        return self.rows() if self.plan() else None

    def batches(self) -> list[list[Row]]:
        """Run batches until there is no new data."""
        return list(iter(self.batch, None))

    def _start(self, number: int) -> str:
        return self.checkpoint[number - 1] if number else json.dumps(self.control.initialOffset())


def await_rows(query: Query, count: int) -> list[Row]:
    """Run batches until they have had this many rows."""
    found: list[Row] = []

    def has_all() -> bool:
        found.extend(query.batch() or [])
        return len(found) >= count

    until(has_all)
    return found


def sequences(rows: list[Row] | None) -> list[int]:
    """Return the last column of rows, in order."""
    assert rows is not None
    return sorted(row[-1] for row in rows)


def options_for(qcli: Cli, topic: str) -> dict[str, str]:
    return {"topic": topic, "nsqdHttpAddress": qcli.http_address}


@contextmanager
def broker_on(data: Path, port: str = "0", *flags: str) -> Iterator[tuple[Broker, str]]:
    """Run a broker on a port."""
    with qcli_serve(data, f"--http-address=127.0.0.1:{port}", *flags) as broker:
        yield broker, broker.http_address.rpartition(":")[2]
