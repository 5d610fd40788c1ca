"""The options and the columns of the source `nsq`; docs/reference/spark-data-source.md describes them.

Spark imports this to look up any data source, so it does not import pyarrow.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from pyspark.sql.types import (
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from ...client.connection.reconnect import PATIENCE_S
from ...client.reading.broker_log import BrokerLog
from ...protocol.errors import NSQError
from ..options import (
    ACCESS_OPTIONS,
    MS_PER_S,
    BrokerAccess,
    OptionError,
    parse_access,
    parse_brokers,
    parse_choice,
    parse_number,
    parse_patience,
)
from ..versions import HAS_READ_LIMITS, VERSION

_TYPES = {
    "topic": StringType(),
    "broker": StringType(),
    "seq": LongType(),
    "id": StringType(),
    "ts_ns": LongType(),
    "ts": TimestampType(),
    "attempts": IntegerType(),
    "body": BinaryType(),
}


class SourceError(NSQError):
    """Requested messages are no longer retained, or a checkpoint does not match; the text has the details."""


class ReadMode(Enum):
    """Batch or stream; the value is the user's expression."""

    BATCH = "spark.read"
    STREAM = "spark.readStream"


_OPTIONS: dict[str, ReadMode | None] = {
    "topic": None,
    "nsqdHttpAddress": None,
    "startingOffsets": None,
    "startingTimestamp": None,
    "endingOffsets": ReadMode.BATCH,
    "endingTimestamp": ReadMode.BATCH,
    "maxOffsetsPerTrigger": ReadMode.STREAM,
    "minPartitions": None,
    "columns": None,
    "failOnDataLoss": None,
    "patienceMs": None,
    **dict.fromkeys(ACCESS_OPTIONS),
}
"""The options, each with the mode it is for; None: both."""
_LIMITS = {"maxOffsetsPerTrigger"}
"""The options that need `HAS_READ_LIMITS`."""
_SPELLINGS = {name.lower(): name for name in _OPTIONS}
_SPARKS_OWN = "path"
"""Spark adds this option for `load("...")`; it is ignored."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The options of a read. Can be pickled.

    Attributes:
        brokers: The addresses of the brokers, by their labels in rows and offsets, in the given order.
        starting, ending: Positions, see docs/how-to/read-and-replay.md, or a JSON object with a position for
            each broker.
        max_offsets: The most sequences in a trigger; None: no limit.
        min_partitions: The approximate number of tasks; 0: one for each broker.
        fail_on_data_loss: Whether messages that are no longer retained are an error.
        patience_s: How long to wait for an unreachable broker.
        access: TLS and the secret.
    """

    topic: str
    brokers: Mapping[str, str]
    starting: str = "earliest"
    ending: str = "latest"
    max_offsets: int | None = None
    min_partitions: int = 0
    fail_on_data_loss: bool = True
    patience_s: float = PATIENCE_S
    access: BrokerAccess = field(default_factory=BrokerAccess)

    @classmethod
    def parse(cls, options: Mapping[str, str], use: ReadMode) -> "ReadOptions":
        """Parse Spark's options, whose names are case-insensitive. Raises OptionError."""
        _check_names(options, use)
        topic = options.get("topic")
        if not topic:
            raise OptionError("the source nsq needs the option topic")
        return cls(
            topic,
            parse_brokers(options),
            _position(options, "starting", "earliest"),
            _position(options, "ending", "latest"),
            parse_number(options, "maxOffsetsPerTrigger", minimum=1),
            parse_number(options, "minPartitions", minimum=0) or 0,
            parse_choice(options, "failOnDataLoss", "true", "false") == "true",
            parse_patience(options),
            parse_access(options),
        )

    def log(self, broker: str) -> BrokerLog:
        """Return the topic's log on a broker."""
        access = self.access
        return BrokerLog(self.brokers[broker], self.topic, access.tls, self.patience_s, access.secret)


def schema_of_columns(options: Mapping[str, str]) -> StructType:
    """Return the columns of the option `columns`, or all. Raises OptionError if a column does not exist."""
    names = [name.strip() for name in (options.get("columns") or ",".join(_TYPES)).split(",")]
    for name in names:
        if name not in _TYPES:
            raise OptionError(f"the source nsq has no column {name}; it has {', '.join(_TYPES)}")
    return StructType([StructField(name, _TYPES[name], name == "attempts") for name in names])


def position_on(position: str, broker: str, address: str) -> str:
    """Return the position for one broker. Raises OptionError if the JSON object has none.

    The JSON object may also be the offset of a stream, which has an object with a `sequence` for each broker.
    """
    if not position.startswith("{"):
        return position
    try:
        by_broker = json.loads(position)
        found = by_broker[broker] if broker in by_broker else by_broker[address]
        return str(found["sequence"] if isinstance(found, dict) else found)
    except ValueError:
        raise OptionError(f"the offsets are not JSON: {position}") from None
    except KeyError:
        raise OptionError(f"the offsets have no entry for the broker {broker}") from None


def _check_names(options: Mapping[str, str], use: ReadMode) -> None:
    for name in sorted(options):
        lower = name.lower()
        if lower == _SPARKS_OWN:
            continue
        if lower not in _SPELLINGS:
            raise OptionError(f"the source nsq has no option {name}; it has {', '.join(_OPTIONS)}")
        only = _OPTIONS[_SPELLINGS[lower]]
        if only not in (None, use):
            raise OptionError(f"the option {_SPELLINGS[lower]} is for {only.value} only")
        if _SPELLINGS[lower] in _LIMITS and not HAS_READ_LIMITS:
            raise OptionError(
                f"the option {_SPELLINGS[lower]} needs Spark 4.2 or newer; this is Spark {VERSION}"
            )


def _position(options: Mapping[str, str], which: str, default: str) -> str:
    """Return the starting or ending position, or a JSON object with one for each broker."""
    offsets = options.get(f"{which}Offsets")
    timestamp_ms = parse_number(options, f"{which}Timestamp", minimum=0)
    if timestamp_ms is None:
        return (offsets or default).strip()
    if offsets is not None:
        raise OptionError(f"{which}Offsets and {which}Timestamp exclude each other")
    seconds, ms = divmod(timestamp_ms, MS_PER_S)
    return f"@{seconds}.{ms:03d}"
