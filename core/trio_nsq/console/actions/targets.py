"""Which brokers an action asks. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...fleet.snapshot import BrokerState, Snapshot
from ..upstream.client import Results, UpstreamError
from .report import Report

IS_NSQD = "it is an nsqd, which cannot do this"
_NO_ANSWER = "it does not answer: "


@dataclass(frozen=True, slots=True)
class Targets:
    """The brokers that have a topic or channel, or may have it.

    Attributes:
        addresses: Brokers of this project, to be asked.
        failing: Why others of them are not: they did not answer the last poll. Asking them would only delay the rest,
            and what an action does there cannot be shown before.
        left_out: Why other brokers take no part, by address.
    """

    addresses: list[str] = field(default_factory=list)
    failing: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def only_nsqd(self) -> bool:
        """Whether the topic is on nsqd only, so that the feature does not exist for it."""
        return not self.addresses and not self.failing and IS_NSQD in self.left_out.values()

    @property
    def missing(self) -> dict[str, str]:
        """Why brokers are not asked that may have what is asked for: they do not answer now, or never did."""
        never = {a: why.removeprefix(_NO_ANSWER) for a, why in self.left_out.items() if why != IS_NSQD}
        return {**self.failing, **never}

    def only(self, address: str) -> "Targets":
        """Return the one broker that a viewer named.

        Raises:
            UpstreamError: It does not answer.
            ValueError: It cannot do this, or has no such topic or channel.
        """
        if address in self.addresses:
            return Targets([address])
        why = self.failing.get(address, self.left_out.get(address))
        if why == IS_NSQD:
            raise ValueError(f"{address}: {IS_NSQD}")
        if why is not None:
            raise UpstreamError(address, why)
        raise ValueError(f"the broker {address[:200]!r} is not known, or has no such topic or channel")

    def failures(self, *errors: Mapping[str, UpstreamError]) -> dict[str, str]:
        """Return why brokers do not answer, those included that have just failed."""
        return {
            **self.failing,
            **{address: error.reason for each in errors for address, error in each.items()},
        }

    def report(self, results: Results[str], *errors: Mapping[str, UpstreamError]) -> Report:
        """Return the report of an action; `errors` are those of brokers that failed before it."""
        report = Report.of(results, self.left_out)
        return Report(report.done, {**self.failures(*errors), **report.failed}, report.left_out)


def ours_with(snapshot: Snapshot, topic: str, channel: str = "") -> Targets:
    """Return the brokers that can do what nsqd cannot."""
    addresses: list[str] = []
    failing: dict[str, str] = {}
    left_out: dict[str, str] = {}
    for address, broker in snapshot.brokers.items():
        if not _has(broker, topic, channel):
            if not broker.reachable and not broker.answered_at_s:
                left_out[address] = f"{_NO_ANSWER}{broker.error}" if broker.error else "not asked yet"
        elif broker.is_nsqd:
            left_out[address] = IS_NSQD
        elif not broker.reachable:
            failing[address] = broker.error
        else:
            addresses.append(address)
    return Targets(addresses, failing, left_out)


def reachable(snapshot: Snapshot) -> tuple[list[str], dict[str, str]]:
    """Return the brokers that answered the last poll, and why the others did not."""
    brokers = snapshot.brokers.values()
    failing = {broker.address: broker.error or "not asked yet" for broker in brokers if not broker.reachable}
    return [broker.address for broker in brokers if broker.reachable], failing


def _has(broker: BrokerState, topic: str, channel: str) -> bool:
    found = broker.topics.get(topic)
    return found is not None and (not channel or channel in found.channels)
