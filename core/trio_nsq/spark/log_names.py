"""Name the logs of a job: each has one name, whatever the addresses where it is found, and is read at one of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..client.reading.broker_log import Bounds
from ..fleet.log_identity import FoundAt, LogMark, known_as, missing_at
from ..protocol.errors import NSQError
from .logs import LogPlace

_DIGITS = 8


@dataclass(slots=True)
class NamedLogs:
    """The result of `name_logs`.

    Attributes:
        places: Where to read each log, with its label, by label.
        strangers: The labels of known logs that are not found, and another log is at their address: it is in `places`.
        failures: The logs that cannot be read, and why.
    """

    places: dict[str, LogPlace] = field(default_factory=dict)
    strangers: set[str] = field(default_factory=set)
    failures: list[tuple[LogPlace, Exception]] = field(default_factory=list)


def name_logs(found: Sequence[tuple[LogPlace, Bounds]], known: Mapping[str, LogMark]) -> NamedLogs:
    """Give logs the labels by which they are known; new logs get the label of their address.

    A log that is found at several addresses is read at one of them. A new log may have the address at which another one
    was found first: if that is read elsewhere now, the label of the new one continues with its incarnation.

    Args:
        found: The logs that answer, with their bounds.
        known: The logs that were read before, by label.
    """
    named, marks = NamedLogs(), dict(known)
    bounds_of: dict[str, Bounds] = {}
    homeless: list[tuple[LogPlace, Bounds]] = []
    for place, bounds in found:
        try:
            label = known_as(place.open(), bounds, place.where, marks)
            if label is None and place.where in marks:
                homeless.append((place, bounds))
                continue
            label = label or place.where
            mark = marks.get(label, LogMark())
            marks[label] = replace(mark, incarnation=bounds.incarnation or mark.incarnation)
            _add(named, bounds_of, place.named(label, bounds.incarnation), bounds)
        except (NSQError, OSError) as error:
            named.failures.append((place, error))
    for place, bounds in homeless:
        # If the other log is not found, it may be gone for good: the caller refuses what has its label now.
        moved = place.where in named.places and bounds.incarnation is not None
        label = f"{place.where}-{(bounds.incarnation or '')[:_DIGITS]}" if moved else place.where
        if label not in named.places and not moved:
            named.strangers.add(label)
        try:
            _add(named, bounds_of, place.named(label, bounds.incarnation), bounds)
        except (NSQError, OSError) as error:
            named.failures.append((place, error))
    return named


def _add(named: NamedLogs, bounds_of: dict[str, Bounds], place: LogPlace, bounds: Bounds) -> None:
    """Add a log, or prefer the address where it has more messages. Raises CopyDiffers, and the errors of the logs."""
    label = place.label
    if (other := named.places.get(label)) is not None:
        found = FoundAt(place.where, place.open(), bounds)
        if missing_at(FoundAt(other.where, other.open(), bounds_of[label]), found) == 0:
            return
    named.places[label], bounds_of[label] = place, bounds
