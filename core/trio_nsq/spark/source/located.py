"""Find the logs of a stream's offset among the places of the query: a broker may have another address now."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...client.errors import BrokerUnreachable, RequestRefused
from ...client.reading.broker_log import Bounds
from ..log_names import name_logs
from ..logs import LogPlace
from .fleet import LogKey
from .offsets import LogOffset, LogOffsets


@dataclass(slots=True)
class Located:
    """The result of `locate`.

    Attributes:
        places: Where to read each log, by its key in offsets. Places that have not answered are there by their address.
        aliases: Keys of the offset that are other names of logs in `places`: they have no messages of their own.
        strangers: Keys of logs that are not found, and `places` has another log that is at their address.
        away: The error of a place that has not answered: logs of the offset that are missing here may be there.
        are_sure: Whether all places have answered, and all their logs are known.
    """

    places: dict[LogKey, LogPlace] = field(default_factory=dict)
    aliases: set[LogKey] = field(default_factory=set)
    strangers: set[LogKey] = field(default_factory=set)
    away: BrokerUnreachable | None = None
    are_sure: bool = True

    def has(self, key: LogKey) -> bool:
        """Whether a log of the offset is found, or its place has not answered."""
        return key in self.aliases or (key in self.places and key not in self.strangers)


def bounds_at(key: LogKey, place: LogPlace) -> Bounds | None:
    """Return the bounds of a log; None: the broker does not have the topic."""
    try:
        return place.open().bounds()
    except RequestRefused as error:
        if error.is_without_topic:
            return None
        raise


def is_address(key: LogKey) -> bool:
    """Whether the name of a log is an address: see `name_logs`."""
    return key.broker.rpartition(":")[2].isdecimal() or "/" in key.broker


def locate(
    places: Mapping[LogKey, LogPlace],
    answers: Mapping[LogKey, Bounds],
    away: Mapping[LogKey, BrokerUnreachable],
    offset: LogOffsets,
) -> Located:
    """Give the places of a query the keys that their logs have in an offset.

    Args:
        places: By topic and address.
        answers: The bounds of the logs at places that answered and have the topic.
        away: The places that did not answer.

    Raises:
        LogReplaced: Two logs are copies that differ.
    """
    located = Located(
        away=next(iter(away.values()), None),
        are_sure=all(key in answers and answers[key].incarnation for key in places),
    )
    for topic in {key.topic for key in places}:
        found = [(places[key], answers[key]) for key in places if key.topic == topic and key in answers]
        known = {
            key.broker: position.mark
            for key, position in offset.items()
            if key.topic == topic and isinstance(position, LogOffset)
        }
        named = name_logs(found, known)
        for _, error in named.failures:
            if not isinstance(error, BrokerUnreachable):
                raise error
            located.are_sure, located.away = False, error
        located.places |= {LogKey(topic, label): place for label, place in named.places.items()}
        located.strangers |= {LogKey(topic, label) for label in named.strangers}
        located.aliases |= {
            LogKey(topic, place.where)
            for place, bounds in found
            if place.where not in named.places
            and _is_alias(place, bounds, offset.get(LogKey(topic, place.where)))
        }
    for key, place in places.items():
        # A broker without the topic does not have the log that was found at its address, which may be at another one.
        if key in away or (key not in answers and (located.away is None or key not in offset)):
            located.places.setdefault(key, place)
    return located


def _is_alias(place: LogPlace, bounds: Bounds, position: object) -> bool:
    """Whether the position by the address of a log, which has another name, is one in this log."""
    if not isinstance(position, LogOffset):
        return position is not None  # it was never reached
    mark = position.mark
    return mark.is_same(bounds) or not mark.end or mark.has_message_of(place.open(), bounds)


def with_names_of(offset: LogOffsets, earlier: LogOffsets, places: Mapping[LogKey, LogPlace]) -> LogOffsets:
    """Return an earlier offset with the names that its logs have in a later one. Raises the errors of the logs."""
    found = dict(earlier)
    for key, position in offset.items():
        if key in earlier or not isinstance(position, LogOffset):
            continue
        for other, before in earlier.items():
            if (
                other.topic == key.topic
                and other not in offset
                and isinstance(before, LogOffset)
                and _is_same(before, position, places.get(key))
            ):
                found[key] = found.pop(other)
                break
    return found


def _is_same(before: LogOffset, position: LogOffset, place: LogPlace | None) -> bool:
    """Whether two positions are in one log; `place` is where it is now."""
    if None not in (before.incarnation, position.incarnation):
        return before.incarnation == position.incarnation
    if place is None:
        return False
    log = place.open()
    return before.mark.has_message_of(log, log.bounds())
