"""The writers of the data source `nsq`: rows become messages, published by Spark's tasks.

    frame.write.format("nsq").option("topic", "clicks").mode("append").save()
    frame.writeStream.format("nsq").option("topic", "clicks").option("checkpointLocation", "/data/cp").start()

The columns of a sink, and there may be no others:

    body      binary or string (UTF-8)   required
    topic     string                     null: the option `topic`
    defer_ms  a whole number             null and 0: at once

A task that is tried again, and a query that repeats its last micro-batch, name themselves as before, and a broker of
ours publishes nothing twice: the name is of the job or query and the partition, and not of the attempt. A stock nsqd
remembers nothing; into it is at least once, and the log says so.

Nothing here imports pyarrow before rows are written, as in `data_source`.
"""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from uuid import uuid4

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import (
    BinaryType,
    ByteType,
    DataType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructType,
)

from ...client.http.retry import PATIENCE_S
from ...protocol.names import is_valid_name
from ..source.options import brokers_of, number_in, truth_in
from .task import BATCH_BYTES, SinkError, SinkOptions, SinkTask, TaskResult, publish

_MAX_JOB_ID = 48
"""So much is left of a producer's name."""
_JOB_ID = re.compile(r"[A-Za-z0-9._:-]+")
_TYPES: dict[str, tuple[type[DataType], ...]] = {
    "body": (BinaryType, StringType),
    "topic": (StringType,),
    "defer_ms": (ByteType, ShortType, IntegerType, LongType),
}
_MS_PER_S = 1000
_OPTIONS = {"topic", "nsqdhttpaddress", "batchbytes", "emptybodies", "idempotent", "patiencems"}
_BATCH_OPTIONS, _STREAM_OPTIONS = {"jobid"}, {"checkpointlocation"}
# Of Spark's driver, in every task of a query: the id is in the checkpoint, so a restarted query has the same.
_QUERY_ID, _MICRO_BATCH = "sql.streaming.queryId", "streaming.sql.batchId"

_NOTHING_TWICE = "to 'qcli serve' nothing twice"

_log = logging.getLogger(__name__)


# ---------------------------------------------------------------------- what Spark calls


class NsqWriter(DataSourceArrowWriter):
    """Of a batch. Made, told to commit and told to abort on the driver; writes in the tasks.

    Args:
        options: Of the user.
        schema: Of the rows.
        overwrite: Whether Spark was told to.

    Raises:
        SinkError, SourceError: An option or a column is wrong.
    """

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise SinkError("a topic cannot be overwritten, only appended to: mode('append')")
        self._sink = sink_of(options, schema, _BATCH_OPTIONS)
        self._job = _job_id(options)

    def write(self, iterator: Iterator[Any]) -> TaskResult:
        """Publish the rows of a partition."""
        context = _task_context()
        return publish(self._sink, SinkTask(self._job, context.partitionId()), iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Say what is not as one might think."""
        _tell(self._sink, _sum(messages))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Say what is published all the same."""
        done = _sum(messages)
        again = (
            f"the same write, with .option('jobId', '{self._job}'), publishes what is missing, and {_NOTHING_TWICE}"
            if self._sink.idempotent and not done.forgetful
            else "the same write publishes them again"
        )
        _log.warning("nsq: the write failed: %s. And %s.", _what_stays(messages, done), again)


class NsqStreamWriter(DataSourceStreamArrowWriter):
    """Of a stream. Arguments and errors as those of `NsqWriter`."""

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise SinkError("the sink nsq knows no output mode but append: outputMode('append')")
        self._sink = sink_of(options, schema, _STREAM_OPTIONS)

    def write(self, iterator: Iterator[Any]) -> TaskResult:
        """Publish the rows of a partition of a micro-batch."""
        context = _task_context()
        query, micro_batch = (context.getLocalProperty(name) for name in (_QUERY_ID, _MICRO_BATCH))
        if query is None or micro_batch is None:
            if self._sink.idempotent:
                raise SinkError(
                    "this Spark does not tell its tasks the query and the micro-batch: idempotent=false"
                )
            query, micro_batch = uuid4().hex, "0"
        return publish(self._sink, SinkTask(query, context.partitionId(), int(micro_batch)), iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Say what is not as one might think."""
        _tell(self._sink, _sum(messages))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Say what is published all the same."""
        done = _sum(messages)
        again = (
            f"the query publishes what is missing, and {_NOTHING_TWICE}"
            if self._sink.idempotent and not done.forgetful
            else "the query publishes them again"
        )
        stays = _what_stays(messages, done)
        _log.warning(
            "nsq: micro-batch %d failed: %s. Started again with its checkpoint, %s.", batchId, stays, again
        )


def _task_context() -> TaskContext:
    context = TaskContext.get()
    assert context is not None, "a task has one"
    return context


def _sum(messages: Iterable[WriterCommitMessage | None]) -> TaskResult:
    done = TaskResult()
    for each in messages:
        if isinstance(each, TaskResult):
            done.messages += each.messages
            done.repeated += each.repeated
            done.empty += each.empty
            done.forgetful |= each.forgetful
    return done


def _what_stays(messages: Sequence[WriterCommitMessage | None], done: TaskResult) -> str:
    whole = sum(isinstance(each, TaskResult) for each in messages)
    return (
        f"{whole} of {len(messages)} partitions are published, with {done.messages:,} messages, and perhaps some of "
        "the others; that stays"
    )


def _tell(sink: SinkOptions, done: TaskResult) -> None:
    if done.empty:
        _log.warning("nsq: %s rows without a body were left out (emptyBodies=skip)", f"{done.empty:,}")
    if done.forgetful and sink.idempotent:
        _log.warning(
            "nsq: published at least once: %s does not remember what it has published, as 'qcli serve' does, so what a "
            "task repeats is there twice; idempotent=false says that this may be, and ends this warning",
            ", ".join(sorted(done.forgetful)),
        )


# ---------------------------------------------------------------------- options and columns


def sink_of(options: Mapping[str, str], schema: StructType, more_options: set[str]) -> SinkOptions:
    """What a user wants.

    Args:
        options: Theirs.
        schema: Of the rows.
        more_options: Names of options that are known besides those of every sink.

    Raises:
        SinkError, SourceError: Something is wrong.
    """
    unknown = {name.lower() for name in options} - _OPTIONS - more_options
    if "jobid" in unknown:
        raise SinkError("the option jobId is for batch writes: a stream is known by its checkpoint")
    if unknown:
        raise SinkError(f"the sink nsq has no option {', '.join(sorted(unknown))}")
    topic = options.get("topic") or ""
    if topic and not is_valid_name(topic):
        raise SinkError(f"the option topic: {topic} is no name of a topic")
    columns = _columns(schema)
    if not topic and "topic" not in columns:
        raise SinkError("the sink nsq needs the option topic, or a column topic")
    patience_ms = number_in(options, "patienceMs", least=0)
    return SinkOptions(
        tuple(brokers_of(options.get("nsqdHttpAddress") or "127.0.0.1:4151").values()),
        topic,
        columns,
        number_in(options, "batchBytes", least=1) or BATCH_BYTES,
        _skips_empty(options),
        truth_in(options, "idempotent", default=True),
        PATIENCE_S if patience_ms is None else patience_ms / _MS_PER_S,
    )


def _columns(schema: StructType) -> tuple[str, ...]:
    names = tuple(name.lower() for name in schema.names)
    has = f"the columns of the sink nsq are {', '.join(_TYPES)}"
    if others := [name for name, lower in zip(schema.names, names, strict=True) if lower not in _TYPES]:
        raise SinkError(f"{has}, and there is none for {', '.join(others)}: select those it has")
    if len(set(names)) < len(names):
        raise SinkError(f"{has}, each once")
    if "body" not in names:
        raise SinkError(f"{has}, and body has to be there")
    for name, column in zip(names, schema.fields, strict=True):
        if not isinstance(column.dataType, _TYPES[name]):
            wanted = " or ".join(kind.typeName() for kind in _TYPES[name])
            raise SinkError(
                f"the column {name} has to be {wanted}, and is {column.dataType.simpleString()}: cast it"
            )
    return names


def _skips_empty(options: Mapping[str, str]) -> bool:
    value = (options.get("emptyBodies") or "fail").strip().lower()
    if value not in ("fail", "skip"):
        raise SinkError(f"the option emptyBodies wants fail or skip: {value!r}")
    return value == "skip"


def _job_id(options: Mapping[str, str]) -> str:
    job = options.get("jobId")
    if job is None:
        return str(uuid4())
    if len(job) > _MAX_JOB_ID or not _JOB_ID.fullmatch(job):
        raise SinkError(
            f"the option jobId has to be 1 to {_MAX_JOB_ID} of A-Z a-z 0-9 . _ : -, and is {job!r}"
        )
    return job
