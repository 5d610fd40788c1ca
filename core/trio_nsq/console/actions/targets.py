"""Which brokers an action asks. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..fleet.snapshot import BrokerState, Snapshot

IS_NSQD = "it is an nsqd, which cannot do this"


@dataclass(frozen=True, slots=True)
class Targets:
    """The brokers that have a topic or channel, or may have it.

    Attributes:
        addresses: Brokers of this project, to be asked.
        left_out: Why other brokers are not asked, by address.
    """

    addresses: list[str] = field(default_factory=list)
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def only_nsqd(self) -> bool:
        """Whether the topic is on nsqd only, so that the feature does not exist for it."""
        return not self.addresses and bool(self.left_out)


def ours_with(snapshot: Snapshot, topic: str, channel: str = "") -> Targets:
    """Return the brokers that can do what nsqd cannot.

    A broker that does not answer is asked if it had the topic before, so that the failure is shown.
    """
    addresses: list[str] = []
    left_out: dict[str, str] = {}
    for address, broker in snapshot.brokers.items():
        if not _has(broker, topic, channel):
            if not broker.reachable and not broker.answered_at_s:
                left_out[address] = f"it does not answer: {broker.error}" if broker.error else "not asked yet"
        elif broker.is_nsqd:
            left_out[address] = IS_NSQD
        else:
            addresses.append(address)
    return Targets(addresses, left_out)


def _has(broker: BrokerState, topic: str, channel: str) -> bool:
    found = broker.topics.get(topic)
    return found is not None and (not channel or channel in found.channels)
