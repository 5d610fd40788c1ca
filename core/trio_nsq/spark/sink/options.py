"""The options and the columns of the sink `nsq`.

Spark imports this to look up any data source, so it does not import pyarrow.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from uuid import uuid4

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

from ...event_loop.retries import PATIENCE_S
from ...protocol.names import is_valid_name
from ..options import (
    ACCESS_OPTIONS,
    BrokerAccess,
    OptionError,
    parse_access,
    parse_brokers,
    parse_choice,
    parse_number,
    parse_patience,
)
from .batches import BLOCK_BYTES, BLOCK_ROWS

BATCH_BYTES = 1024 * 1024
"""The default size of a request: a fifth of the brokers' default limit."""
MAX_CONNECTIONS = 32
_MAX_JOB_ID = 48
"""The name of a producer has at most 64 characters."""
_JOB_ID = re.compile(r"[A-Za-z0-9._:-]+")
_TYPES: dict[str, tuple[type[DataType], ...]] = {
    "body": (BinaryType, StringType),
    "topic": (StringType,),
    "defer_ms": (ByteType, ShortType, IntegerType, LongType),
}
_OPTIONS = {"topic", "nsqdhttpaddress", "batchbytes", "emptybodies", "idempotent", "patiencems"}
_OPTIONS |= {name.lower() for name in ACCESS_OPTIONS}
BATCH_OPTIONS, STREAM_OPTIONS = frozenset({"jobid"}), frozenset({"checkpointlocation"})


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """The options of a write, for its tasks. Can be pickled.

    Attributes:
        addresses: The HTTP addresses of the brokers; partitions are assigned to them in turn.
        topic: The topic of rows without a topic; empty: all rows have one.
        columns: The columns of the rows, in order, in lower case.
        batch_bytes: The approximate size of a request.
        skips_empty: Whether rows without a body are skipped; otherwise they are errors.
        idempotent: Whether repeated tasks publish no duplicates.
        patience_s: How long to wait for a broker that is unreachable or full.
        access: TLS and the secret.
        block_rows, block_bytes: See `BLOCK_ROWS`; the same for all attempts of a task.
        max_connections: The limit of open connections of a task that publishes to many topics.
    """

    addresses: tuple[str, ...]
    topic: str
    columns: tuple[str, ...]
    batch_bytes: int = BATCH_BYTES
    skips_empty: bool = False
    idempotent: bool = True
    patience_s: float = PATIENCE_S
    access: BrokerAccess = field(default_factory=BrokerAccess)
    block_rows: int = BLOCK_ROWS
    block_bytes: int = BLOCK_BYTES
    max_connections: int = MAX_CONNECTIONS


def parse_options(
    options: Mapping[str, str], schema: StructType, more_options: frozenset[str]
) -> SinkOptions:
    """Check the options and columns of a write.

    Args:
        more_options: `BATCH_OPTIONS` or `STREAM_OPTIONS`.

    Raises:
        OptionError: An option or a column is invalid.
    """
    unknown = {name.lower() for name in options} - _OPTIONS - more_options
    if "jobid" in unknown:
        raise OptionError("the option jobId is for batch writes: a stream is identified by its checkpoint")
    if unknown:
        raise OptionError(f"the sink nsq has no option {', '.join(sorted(unknown))}")
    topic = options.get("topic") or ""
    if topic and not is_valid_name(topic):
        raise OptionError(f"the option topic: {topic} is not a valid topic name")
    columns = _check_columns(schema)
    if not topic and "topic" not in columns:
        raise OptionError("the sink nsq needs the option topic, or a column topic")
    return SinkOptions(
        tuple(parse_brokers(options).values()),
        topic,
        columns,
        parse_number(options, "batchBytes", minimum=1) or BATCH_BYTES,
        parse_choice(options, "emptyBodies", "fail", "skip") == "skip",
        parse_choice(options, "idempotent", "true", "false") == "true",
        parse_patience(options),
        parse_access(options),
    )


def _check_columns(schema: StructType) -> tuple[str, ...]:
    names = tuple(name.lower() for name in schema.names)
    has = f"the columns of the sink nsq are {', '.join(_TYPES)}"
    if others := [name for name, lower in zip(schema.names, names, strict=True) if lower not in _TYPES]:
        raise OptionError(f"{has}, not {', '.join(others)}: drop these columns")
    if len(set(names)) < len(names):
        raise OptionError(f"{has}, each once")
    if "body" not in names:
        raise OptionError(f"{has}, and body is required")
    for name, column in zip(names, schema.fields, strict=True):
        if not isinstance(column.dataType, _TYPES[name]):
            wanted = " or ".join(kind.typeName() for kind in _TYPES[name])
            raise OptionError(
                f"the column {name} must be {wanted}, not {column.dataType.simpleString()}: cast it"
            )
    return names


def parse_job_id(options: Mapping[str, str]) -> str:
    """Return the id of a batch write; a new one if the option is not set. Raises OptionError."""
    job = options.get("jobId")
    if job is None:
        return str(uuid4())
    if len(job) > _MAX_JOB_ID or not _JOB_ID.fullmatch(job):
        raise OptionError(f"the option jobId must be 1 to {_MAX_JOB_ID} of A-Z a-z 0-9 . _ : -, not {job!r}")
    return job
