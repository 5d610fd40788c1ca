"""The writers of the data source `nsq`: Spark's tasks publish the rows of a DataFrame.

    frame.write.format("nsq").option("topic", "clicks").mode("append").save()
    frame.writeStream.format("nsq").option("topic", "clicks").option("checkpointLocation", "/data/cp").start()

The sink has these columns and no others:

    body      binary or string (UTF-8)   required
    topic     string                     null: the option `topic`
    defer_ms  a whole number             null and 0: no delay

A repeated task, and a query that repeats its last micro-batch, publish with the same producer name, so `qcli serve`
publishes no duplicates. The name has the job or query and the partition, but not the attempt. nsqd does not
deduplicate: publishing to it is at least once, and a warning is logged.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias
from uuid import uuid4

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from ...text.wording import count_of
from ..options import OptionError
from ..versions import StreamArrowWriter
from .options import BATCH_OPTIONS, STREAM_OPTIONS, SinkOptions, parse_job_id, parse_options
from .task import SinkError, SinkTask, TaskResult, publish

# Spark sets these in every task of a query. The id is in the checkpoint, so a restarted query has the same id.
_QUERY_ID, _MICRO_BATCH = "sql.streaming.queryId", "streaming.sql.batchId"

_NOTHING_TWICE = "without duplicates on 'qcli serve'"

_Messages: TypeAlias = list[WriterCommitMessage | None]
"""The results of the tasks; None for those that failed."""

_log = logging.getLogger(__name__)


class NsqWriter(DataSourceArrowWriter):
    """Writes a batch. `write` runs in the tasks, everything else on the driver.

    Raises:
        OptionError: An option or a column is invalid.
    """

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise OptionError("a topic cannot be overwritten, only appended to: mode('append')")
        self._options = parse_options(options, schema, BATCH_OPTIONS)
        self._job = parse_job_id(options)

    def write(self, iterator: Iterator[Any]) -> TaskResult:
        return publish(self._options, SinkTask(self._job, _task_context().partitionId()), iterator)

    def commit(self, messages: _Messages) -> None:
        """Warn about skipped rows, and about brokers that do not deduplicate."""
        _warn(self._options, messages)

    def abort(self, messages: _Messages) -> None:
        """Warn about messages that stay published."""
        again = "Repeating the write publishes them again"
        if _is_exactly_once(self._options, messages):
            write = f"Repeating the write with .option('jobId', '{self._job}')"
            again = f"{write} publishes the missing messages, {_NOTHING_TWICE}"
        _log.warning("nsq: the write failed: %s. %s.", _describe(messages), again)


class NsqStreamWriter(StreamArrowWriter):
    """Writes a stream. Arguments and errors as for `NsqWriter`."""

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise OptionError("the sink nsq supports only the output mode append: outputMode('append')")
        self._options = parse_options(options, schema, STREAM_OPTIONS)

    def write(self, iterator: Iterator[Any]) -> TaskResult:
        """Publish the rows of a partition of a micro-batch."""
        context = _task_context()
        query, micro_batch = (context.getLocalProperty(name) for name in (_QUERY_ID, _MICRO_BATCH))
        if query is None or micro_batch is None:
            if self._options.idempotent:
                raise SinkError(
                    "this Spark does not pass query and micro-batch to tasks: set idempotent=false"
                )
            query, micro_batch = uuid4().hex, "0"
        return publish(self._options, SinkTask(query, context.partitionId(), int(micro_batch)), iterator)

    def commit(self, messages: _Messages, batchId: int) -> None:
        _warn(self._options, messages)

    def abort(self, messages: _Messages, batchId: int) -> None:
        again = "the query publishes them again"
        if _is_exactly_once(self._options, messages):
            again = f"the query publishes the missing messages, {_NOTHING_TWICE}"
        what = "nsq: micro-batch %d failed: %s. Restarted with its checkpoint, %s."
        _log.warning(what, batchId, _describe(messages), again)


def _task_context() -> TaskContext:
    context = TaskContext.get()
    assert context is not None, "a task has one"
    return context


def _sum(messages: _Messages) -> TaskResult:
    total = TaskResult()
    for each in messages:
        if isinstance(each, TaskResult):
            total.messages += each.messages
            total.repeated += each.repeated
            total.empty += each.empty
            total.at_least_once |= each.at_least_once
    return total


def _is_exactly_once(options: SinkOptions, messages: _Messages) -> bool:
    return options.idempotent and not _sum(messages).at_least_once


def _describe(messages: _Messages) -> str:
    complete = sum(isinstance(each, TaskResult) for each in messages)
    count = _sum(messages).messages
    return (
        f"{complete} of {len(messages)} partitions are published, with {count_of(count, 'message')}, and possibly some "
        "of the others; they stay published"
    )


def _warn(options: SinkOptions, messages: _Messages) -> None:
    total = _sum(messages)
    if total.empty:
        _log.warning("nsq: %s rows without a body were skipped (emptyBodies=skip)", f"{total.empty:,}")
    if total.at_least_once and options.idempotent:
        _log.warning(
            "nsq: published at least once: %s does not deduplicate, unlike 'qcli serve', so repeated tasks publish "
            "duplicates; to accept this without a warning, set idempotent=false",
            ", ".join(sorted(total.at_least_once)),
        )
