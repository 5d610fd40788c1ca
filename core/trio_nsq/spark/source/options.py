"""The options of the source `nsq`; docs/reference/spark-data-source.md describes them.

Spark imports this to look up any data source, so it does not import pyarrow.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ...client.connection.tls import TLSFiles
from ...event_loop.retries import PATIENCE_S
from ...protocol.errors import NSQError
from ...protocol.names import is_valid_name
from ...storage.storage_uri import shown_place
from ...text.durations import parse_duration_ns
from ..logs import BrokerPlace, LogPlace
from ..options import (
    ACCESS_OPTIONS,
    MS_PER_S,
    BrokerAccess,
    OptionError,
    parse_access,
    parse_addresses,
    parse_brokers,
    parse_choice,
    parse_number,
    parse_patience,
)
from ..versions import HAS_FILTERS, HAS_READ_LIMITS, VERSION
from .body_schemas import SCHEMA_OPTIONS

_NS_PER_S = 10**9
DISCOVERY_INTERVAL_S = 10.0
MAX_TRIGGER_DELAY = "15m"
"""The same as Kafka's source."""


class SourceError(NSQError):
    """Requested messages are no longer retained, or a checkpoint does not match; the text has the details."""


class ReadMode(Enum):
    """Batch or stream; the value is the user's expression."""

    BATCH = "spark.read"
    STREAM = "spark.readStream"


_LIMITS = ("maxOffsetsPerTrigger", "maxBytesPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay")
_OPTIONS: dict[str, ReadMode | None] = {
    "topic": None,
    "subscribe": None,
    "subscribePattern": None,
    "nsqdHttpAddress": None,
    "lookupdHttpAddress": None,
    "segments": None,
    "discoveryIntervalMs": ReadMode.STREAM,
    "startingOffsets": None,
    "startingTimestamp": None,
    "startingOffsetsByTimestamp": None,
    "endingOffsets": ReadMode.BATCH,
    "endingTimestamp": ReadMode.BATCH,
    "endingOffsetsByTimestamp": ReadMode.BATCH,
    **dict.fromkeys(_LIMITS, ReadMode.STREAM),
    "channel": ReadMode.STREAM,
    "minPartitions": None,
    "maxRecordsPerPartition": None,
    "pushFilters": ReadMode.BATCH,
    "columns": None,
    "format": None,
    **dict.fromkeys(SCHEMA_OPTIONS),
    "includeHeaders": None,
    "failOnDataLoss": None,
    "patienceMs": None,
    **dict.fromkeys(ACCESS_OPTIONS),
}
"""The options, each with the mode it is for; None: both."""
_SPELLINGS = {name.lower(): name for name in _OPTIONS}
_SPARKS_OWN = "path"
"""Spark adds this option for `load("...")`; it is ignored."""
_OF_TABLE = "option."
"""Spark adds this prefix to the options of a table of its catalog."""


@dataclass(frozen=True, slots=True)
class Subscription:
    """The topics of a query.

    Attributes:
        topics: Their names; empty: `pattern` selects them.
        pattern: A regular expression that matches whole names.
        single: Whether the option `topic` names the only one. Then offsets do not name topics.
    """

    topics: tuple[str, ...]
    pattern: str = ""
    single: bool = False

    def includes(self, topic: str) -> bool:
        """Whether the query reads a topic."""
        return topic in self.topics if self.topics else re.fullmatch(self.pattern, topic) is not None


@dataclass(frozen=True, slots=True)
class TriggerLimits:
    """The limits of a micro-batch.

    Attributes:
        max_offsets, max_bytes: The most sequences and bytes, of all logs together; None: no limit.
        min_offsets: The sequences to wait for; 0: do not wait.
        max_delay_s: The longest time to wait for them.
    """

    max_offsets: int | None = None
    max_bytes: int | None = None
    min_offsets: int = 0
    max_delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The options of a read. Can be pickled.

    Attributes:
        brokers: The addresses of the brokers, by their labels in rows and offsets, in the given order.
        lookupds: The HTTP addresses of discovery services, which find more brokers.
        segments: Folders to read instead of brokers, as `[BROKER=]FOLDER`.
        discovery_interval_s: How often a stream looks for more brokers and topics.
        starting, ending: Positions, see docs/how-to/read-and-replay.md, or a JSON object with positions for brokers.
        channel: The channel that a stream moves along; empty: none.
        min_partitions: The approximate number of tasks; 0: by size.
        max_records: The most sequences of a task; None: by size.
        push_filters: Whether filters of a query restrict what is read.
        fail_on_data_loss: Whether messages that are no longer retained are an error.
        patience_s: How long to wait for an unreachable broker.
        access: TLS and the secret.
    """

    subscription: Subscription
    brokers: Mapping[str, str]
    lookupds: tuple[str, ...] = ()
    segments: tuple[str, ...] = ()
    discovery_interval_s: float = DISCOVERY_INTERVAL_S
    starting: str = "earliest"
    ending: str = "latest"
    limits: TriggerLimits = TriggerLimits()
    channel: str = ""
    min_partitions: int = 0
    max_records: int | None = None
    push_filters: bool = False
    fail_on_data_loss: bool = True
    patience_s: float = PATIENCE_S
    access: BrokerAccess = field(default_factory=BrokerAccess)

    @classmethod
    def parse(cls, options: Mapping[str, str], use: ReadMode | None = None) -> "ReadOptions":
        """Parse Spark's options, whose names are case-insensitive.

        Args:
            use: Options for another mode are refused; None: not known yet.

        Raises:
            OptionError: An option is invalid.
        """
        _check_names(options, use)
        lookupds = _parse_lookupds(options)
        segments = _parse_segments(options)
        no_brokers = segments or (lookupds and not options.get("nsqdHttpAddress"))
        interval_ms = parse_number(options, "discoveryIntervalMs", minimum=1)
        channel = options.get("channel") or ""
        if channel and not is_valid_name(channel):
            raise OptionError(f"the option channel: {channel} is not a valid channel name")
        return cls(
            _parse_subscription(options),
            {} if no_brokers else parse_brokers(options),
            lookupds,
            segments,
            DISCOVERY_INTERVAL_S if interval_ms is None else interval_ms / MS_PER_S,
            _position(options, "starting", "earliest"),
            _position(options, "ending", "latest"),
            _parse_limits(options),
            channel,
            parse_number(options, "minPartitions", minimum=0) or 0,
            parse_number(options, "maxRecordsPerPartition", minimum=1),
            _parse_push_filters(options),
            parse_choice(options, "failOnDataLoss", "true", "false") == "true",
            parse_patience(options),
            parse_access(options),
        )

    def place(self, topic: str, broker: str) -> LogPlace:
        """Return the place of a topic on a broker, which is known by its label. Raises SegmentsError, StorageError."""
        if self.segments:
            from ..segments.places import TopicNotThere, places_of

            for place in places_of(self.segments, topic):
                if place.label == broker:
                    return place
            raise TopicNotThere(f"the option segments has no topic {topic} of {broker}")
        address = self.brokers.get(broker, broker)
        return BrokerPlace(address, topic, self.access.tls, self.patience_s, self.access.secret)


def position_on(
    position: str, topic: str, broker: str, address: str, incarnation: str | None = None
) -> str | None:
    """Return the position in one log; None if the JSON object has none for it. Raises OptionError.

    The JSON object has an entry for each broker; with several topics, an object of these for each topic. An entry is a
    position, or that of a stream's offset, an object with a `sequence`, which may name the identity of its log.

    Args:
        incarnation: The identity of the log; None: unknown.
    """
    if not position.startswith("{"):
        return position
    try:
        found: Any = json.loads(position)
        if isinstance(of_topic := found.get(topic), dict):
            found = of_topic
        by_identity = {each.get("incarnation"): each for each in found.values() if isinstance(each, dict)}
        if incarnation is not None and incarnation in by_identity:
            entry = by_identity[incarnation]
        else:
            entry = found[broker] if broker in found else found[address]
            if isinstance(entry, dict) and None not in (incarnation, entry.get("incarnation")):
                return None  # of another log, which had this address
        if isinstance(entry, dict):
            entry = entry["sequence"] if "sequence" in entry else entry["start"]
        return str(entry)
    except ValueError:
        raise OptionError(f"the offsets are not JSON: {position}") from None
    except KeyError:
        return None


def check_is_no_table(options: Mapping[str, str]) -> None:
    """Check that these are not the options of a table of Spark's catalog. Raises OptionError."""
    if any(name.lower().startswith(_OF_TABLE) for name in options):
        raise OptionError(
            "Spark does not pass the options of a table to Python data sources when it reads: create the table "
            "without options and give them in SELECT ... WITH (...), or create a temporary view"
        )


def _check_names(options: Mapping[str, str], use: ReadMode | None) -> None:
    for name in sorted(options):
        lower = name.lower()
        if lower == _SPARKS_OWN:
            continue
        if lower not in _SPELLINGS:
            raise OptionError(f"the source nsq has no option {name}; it has {', '.join(_OPTIONS)}")
        only = _OPTIONS[_SPELLINGS[lower]]
        if only is not None and use not in (None, only):
            raise OptionError(f"the option {_SPELLINGS[lower]} is for {only.value} only")


def _parse_subscription(options: Mapping[str, str]) -> Subscription:
    given = [name for name in ("topic", "subscribe", "subscribePattern") if options.get(name)]
    if not given:
        raise OptionError("the source nsq needs the option topic, subscribe or subscribePattern")
    if len(given) > 1:
        raise OptionError(f"the options {' and '.join(given)} exclude each other")
    text = options[given[0]]
    if given == ["subscribePattern"]:
        try:
            re.compile(text)
        except re.error as error:
            raise OptionError(
                f"the option subscribePattern is not a regular expression: {text!r}: {error}"
            ) from None
        return Subscription((), text)
    topics = (text,) if given == ["topic"] else tuple(dict.fromkeys(map(str.strip, text.split(","))))
    for topic in topics:
        if not is_valid_name(topic):
            raise OptionError(f"the option {given[0]}: {topic!r} is not a valid topic name")
    return Subscription(topics, single=given == ["topic"])


def _parse_lookupds(options: Mapping[str, str]) -> tuple[str, ...]:
    text = options.get("lookupdHttpAddress")
    if not text:
        return ()
    access = parse_access(options)
    if access.secret and access.tls != TLSFiles():
        raise OptionError(
            "the option lookupdHttpAddress finds ports of plain HTTP, over which the secret would not be encrypted: "
            "give the brokers with nsqdHttpAddress=https://host:port"
        )
    return tuple(parse_addresses("lookupdHttpAddress", text).values())


def _parse_segments(options: Mapping[str, str]) -> tuple[str, ...]:
    text = options.get("segments")
    if not text:
        return ()
    for name in ("nsqdHttpAddress", "lookupdHttpAddress", "channel"):
        if options.get(name):
            raise OptionError(f"the options segments and {name} exclude each other")
    found = tuple(dict.fromkeys(map(str.strip, text.split(","))))
    for place in found:
        if shown_place(place) != place:
            raise OptionError(
                "the option segments must not have keys or secrets, because Spark shows it: give them in the "
                "environment, or in Spark's configuration"
            )
    return found


def _parse_push_filters(options: Mapping[str, str]) -> bool:
    wanted = parse_choice(options, "pushFilters", "false", "true") == "true"
    if wanted and not HAS_FILTERS:
        raise OptionError(f"the option pushFilters needs Spark 4.1 or newer; this is Spark {VERSION}")
    return wanted


def _parse_limits(options: Mapping[str, str]) -> TriggerLimits:
    given = [name for name in _LIMITS if options.get(name)]
    if given and not HAS_READ_LIMITS:
        raise OptionError(f"the option {given[0]} needs Spark 4.2 or newer; this is Spark {VERSION}")
    delay = options.get("maxTriggerDelay") or MAX_TRIGGER_DELAY
    try:
        max_delay_s = parse_duration_ns(delay) / _NS_PER_S
    except ValueError as error:
        raise OptionError(f"the option maxTriggerDelay: {error}") from None
    limits = TriggerLimits(
        parse_number(options, "maxOffsetsPerTrigger", minimum=1),
        parse_number(options, "maxBytesPerTrigger", minimum=1),
        parse_number(options, "minOffsetsPerTrigger", minimum=0) or 0,
        max_delay_s,
    )
    if limits.max_offsets is not None and limits.min_offsets > limits.max_offsets:
        raise OptionError("minOffsetsPerTrigger is greater than maxOffsetsPerTrigger")
    return limits


def _position(options: Mapping[str, str], which: str, default: str) -> str:
    """Return the starting or ending position, or a JSON object with positions."""
    names = [f"{which}{what}" for what in ("Offsets", "Timestamp", "OffsetsByTimestamp")]
    given = [name for name in names if options.get(name) is not None]
    if len(given) > 1:
        raise OptionError(f"{given[0]} and {given[1]} exclude each other")
    timestamp_ms = parse_number(options, names[1], minimum=0)
    if timestamp_ms is not None:
        return _time(timestamp_ms)
    if (timestamps := options.get(names[2])) is not None:
        return _times(names[2], timestamps)
    return (options.get(names[0]) or default).strip()


def _time(timestamp_ms: int) -> str:
    seconds, ms = divmod(timestamp_ms, MS_PER_S)
    return f"@{seconds}.{ms:03d}"


def _times(name: str, text: str) -> str:
    """Convert a JSON object with Unix milliseconds for brokers, or with such objects for topics, to positions."""

    def convert(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: convert(each) for key, each in value.items()}
        if type(value) is not int or value < 0:
            raise ValueError
        return _time(value)

    try:
        found = json.loads(text)
        if not isinstance(found, dict):
            raise ValueError
        return json.dumps(convert(found))
    except (ValueError, RecursionError):
        raise OptionError(
            f'the option {name} is a JSON object with Unix milliseconds for each broker, such as {{"host:4151": '
            f"1767225600000}}: {text}"
        ) from None
