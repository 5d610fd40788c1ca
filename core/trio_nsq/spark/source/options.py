"""What a user of the data source `nsq` may ask for when reading; the options are in docs/spark.md.

Nothing here imports pyarrow: Spark imports this to look up any source.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
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

from ...client.http.retry import PATIENCE_S
from ...protocol.errors import NSQError
from ..broker_log import BrokerLog, broker_label

_MS_PER_S = 1000
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
    """An option is wrong, or messages that were asked for are not there any more; the text says which."""


class ReadMode(Enum):
    """What the source is used for; the value is what a user writes."""

    BATCH = "spark.read"
    STREAM = "spark.readStream"


_BOTH = frozenset(ReadMode)
_OPTIONS = {
    "topic": _BOTH,
    "nsqdHttpAddress": _BOTH,
    "startingOffsets": _BOTH,
    "startingTimestamp": _BOTH,
    "endingOffsets": frozenset({ReadMode.BATCH}),
    "endingTimestamp": frozenset({ReadMode.BATCH}),
    "maxOffsetsPerTrigger": frozenset({ReadMode.STREAM}),
    "minPartitions": _BOTH,
    "columns": _BOTH,
    "failOnDataLoss": _BOTH,
    "patienceMs": _BOTH,
}
_KNOWN = {name.lower(): (name, uses) for name, uses in _OPTIONS.items()}
_SPARKS_OWN = "path"
"""What `load("...")` gives is an option, too; there is no such thing as a path here."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What is to be read; can be pickled.

    Attributes:
        topic: Its name.
        brokers: Where each is asked, by what it is called in rows and offsets; in the order in which they were given.
        starting, ending: Positions, see docs/reading.md, or a JSON object of one for each broker.
        most_offsets: The most sequences in a trigger; None: all there are.
        least_partitions: Into as many tasks, about; 0: one for each broker.
        fails_on_loss: Whether it is an error if messages that were asked for are not there any more.
        patience_s: So long is a broker that went away waited for.
    """

    topic: str
    brokers: Mapping[str, str]
    starting: str = "earliest"
    ending: str = "latest"
    most_offsets: int | None = None
    least_partitions: int = 0
    fails_on_loss: bool = True
    patience_s: float = PATIENCE_S

    @classmethod
    def parse(cls, options: Mapping[str, str], use: ReadMode) -> "ReadOptions":
        """Of Spark's options, whose names are in any case. Raises SourceError."""
        _check_names(options, use)
        topic = options.get("topic")
        if not topic:
            raise SourceError("the source nsq needs the option topic")
        most = number_in(options, "maxOffsetsPerTrigger", least=1)
        patience_ms = number_in(options, "patienceMs", least=0)
        return cls(
            topic,
            brokers_of(options.get("nsqdHttpAddress") or "127.0.0.1:4151"),
            _position(options, "starting", "earliest"),
            _position(options, "ending", "latest"),
            most,
            number_in(options, "minPartitions", least=0) or 0,
            truth_in(options, "failOnDataLoss", default=True),
            PATIENCE_S if patience_ms is None else patience_ms / _MS_PER_S,
        )

    def log(self, broker: str) -> BrokerLog:
        """The topic's log on a broker."""
        return BrokerLog(self.brokers[broker], self.topic, patience_s=self.patience_s)


def schema_of_columns(options: Mapping[str, str]) -> StructType:
    """The columns that the option `columns` names, or all. Raises SourceError: there is no such column."""
    names = [name.strip() for name in (options.get("columns") or ",".join(_TYPES)).split(",")]
    for name in names:
        if name not in _TYPES:
            raise SourceError(f"the source nsq has no column {name}; it has {', '.join(_TYPES)}")
    return StructType([StructField(name, _TYPES[name], name == "attempts") for name in names])


def position_on(position: str, broker: str, address: str) -> str:
    """What was asked for, for one broker. Raises SourceError: the JSON object does not say.

    A value may also be what a stream's progress says of the broker, an object with a `sequence`.
    """
    if not position.startswith("{"):
        return position
    try:
        by_broker = json.loads(position)
        found = by_broker[broker] if broker in by_broker else by_broker[address]
        return str(found["sequence"] if isinstance(found, dict) else found)
    except ValueError:
        raise SourceError(f"the offsets are not JSON: {position}") from None
    except KeyError:
        raise SourceError(f"the offsets do not say anything of the broker {broker}") from None


def _check_names(options: Mapping[str, str], use: ReadMode) -> None:
    for name in sorted(options):
        lower = name.lower()
        if lower == _SPARKS_OWN:
            continue
        if lower not in _KNOWN:
            raise SourceError(f"the source nsq has no option {name}; it has {', '.join(_OPTIONS)}")
        spelling, uses = _KNOWN[lower]
        if use not in uses:
            raise SourceError(
                f"the option {spelling} is for {' and '.join(each.value for each in uses)} only"
            )


def brokers_of(addresses: str) -> dict[str, str]:
    """HTTP addresses that are separated by commas, by what each is called. Raises SourceError: one names no port."""
    found = {}
    for address in (each.strip().removeprefix("http://") for each in addresses.split(",")):
        if "/" not in address.removeprefix("https://") and not address.rpartition(":")[2].isdecimal():
            raise SourceError(
                f"the option nsqdHttpAddress wants host:port, several with commas: {addresses!r}"
            )
        found[broker_label(address)] = address
    return found


def _position(options: Mapping[str, str], which: str, default: str) -> str:
    """What was asked for: a position, or a JSON object with one for each broker."""
    offsets, timestamp_ms = options.get(f"{which}Offsets"), number_in(options, f"{which}Timestamp", least=0)
    if timestamp_ms is None:
        return (offsets or default).strip()
    if offsets is not None:
        raise SourceError(f"{which}Offsets and {which}Timestamp exclude each other")
    seconds, ms = divmod(timestamp_ms, _MS_PER_S)
    return f"@{seconds}.{ms:03d}"


def number_in(options: Mapping[str, str], name: str, least: int) -> int | None:
    """An option that is a whole number, if it is there. Raises SourceError."""
    text = options.get(name)
    if text is None:
        return None
    if not text.strip().isdecimal() or int(text) < least:
        raise SourceError(f"the option {name} wants a whole number, {least} or more: {text!r}")
    return int(text)


def truth_in(options: Mapping[str, str], name: str, *, default: bool) -> bool:
    """An option that is true or false. Raises SourceError."""
    text = (options.get(name) or str(default)).strip().lower()
    if text not in ("true", "false"):
        raise SourceError(f"the option {name} wants true or false: {text!r}")
    return text == "true"
