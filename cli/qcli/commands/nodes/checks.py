"""The checks of `qcli nodes --check`: what is wrong with a fleet, one problem at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import click

from trio_nsq.durations import duration_text

from ...framework.output import size
from ...framework.params import byte_size
from ...terminal.figures import age
from .survey import BrokerState, Survey

DEAD_LETTERS = "dead-letters"
"""The channel of dead-letter topics: its messages wait for a person, however long."""


class Space(NamedTuple):
    """A limit of free space: bytes, or a share of the disk in percent."""

    bytes: int = 0
    percent: float = 0

    def __str__(self) -> str:
        return f"{self.percent:g}%" if self.percent else size(self.bytes)


def space(text: str) -> Space:
    """Parse a size such as `10GiB`, or a share such as `5%`."""
    if text.endswith("%"):
        try:
            percent = float(text[:-1])
        except ValueError:
            percent = -1
        if not 0 <= percent <= 100:
            raise click.BadParameter(f"{text!r} is not a share such as 5%.")
        return Space(percent=percent)
    try:
        limit = byte_size(text)
    except click.BadParameter:
        limit = -1
    if limit < 0:
        raise click.BadParameter(f"{text!r} is not a size such as 10GiB, nor a share such as 5%.")
    return Space(bytes=limit)


@dataclass(frozen=True)
class Limits:
    """The thresholds; None: not checked.

    Attributes:
        depth: The most messages that may be ready in a channel, or wait in a topic, on one broker.
        age_ms: The highest age of a channel's oldest message.
        free: The least free space on the disk of a broker.
        brokers: The least number of brokers that answer.
    """

    depth: int | None = None
    age_ms: int | None = None
    free: Space | None = None
    brokers: int | None = None


KEYS = ("check", "address", "about", "problem")
"""The keys of a problem's record."""


@dataclass(frozen=True)
class Problem:
    """Something that is wrong.

    Attributes:
        check: The check that failed: reachable, health, registered, disk, age, depth or brokers.
        address: The broker or service; empty if it is about all of them.
        text: What is wrong.
        about: The topic, or `TOPIC/CHANNEL`; empty if it is about the whole server.
    """

    check: str
    address: str
    text: str
    about: str = ""

    def record(self) -> dict[str, Any]:
        """Return the problem as a flat object."""
        values = (self.check, self.address, self.about, self.text)
        return dict(zip(KEYS, values, strict=True))

    def line(self) -> str:
        """Return the problem as a line."""
        address = "" if self.address in self.text else self.address
        where = " ".join(filter(None, (address, self.about)))
        return f"{self.check}: {where}: {self.text}" if where else f"{self.check}: {self.text}"


def problems_of(survey: Survey, limits: Limits) -> Iterator[Problem]:
    """Yield the problems of a fleet: first servers that do not answer, then those of each broker."""
    for address, failure in survey.failures.items():
        yield Problem("reachable", address, failure.brief)
    answering = [broker for broker in survey.brokers if broker.failure is None]
    if limits.brokers is not None and len(answering) < limits.brokers:
        yield Problem("brokers", "", f"{len(answering)} answer, fewer than {limits.brokers}")
    for broker in survey.brokers:
        yield from _of_broker(broker, survey, limits)


def _of_broker(broker: BrokerState, survey: Survey, limits: Limits) -> Iterator[Problem]:
    health = str(broker.stats.get("health", "OK"))
    if health != "OK":
        yield Problem("health", broker.address, health.removeprefix("NOK - "))
    missing = [address for address in survey.asked_lookupds if address not in broker.registrations]
    if missing and not broker.is_draining:
        yield Problem("registered", broker.address, f"not registered at {' '.join(missing)}")
    if limits.free is not None:
        yield from _disk(broker, limits.free)
    for topic in broker.topics:
        yield from _of_topic(broker.address, topic, limits)


def _disk(broker: BrokerState, least: Space) -> Iterator[Problem]:
    disk = broker.stats.get("disk") or {}
    free, total = disk.get("free_bytes"), disk.get("total_bytes")
    if free is not None and total and free < max(least.bytes, total * least.percent / 100):
        text = f"{size(free)} of {size(total)} free ({free / total:.1%}), less than {least}"
        yield Problem("disk", broker.address, text)


def _of_topic(address: str, topic: Mapping[str, Any], limits: Limits) -> Iterator[Problem]:
    name = str(topic["topic_name"])
    queues = [(name, topic), *((f"{name}/{each['channel_name']}", each) for each in topic["channels"] or ())]
    for about, queue in queues:
        depth, age_ms = int(queue["depth"]), queue.get("oldest_message_age_ms")
        if limits.depth is not None and depth > limits.depth:
            yield Problem("depth", address, f"{depth:,} messages wait, more than {limits.depth:,}", about)
        if limits.age_ms is None or age_ms is None or queue.get("channel_name") == DEAD_LETTERS:
            continue
        if age_ms > limits.age_ms:
            ages = f"{age(age_ms)} old, more than {duration_text(limits.age_ms)}"
            yield Problem("age", address, f"the oldest message is {ages}", about)


def unchecked(survey: Survey, limits: Limits) -> list[str]:
    """Return a sentence for each check that is not possible on a broker, such as an nsqd."""
    wanted = {"disk space": limits.free, "ages of messages": limits.age_ms}
    return [
        f"{what} not checked on {broker.address}, which does not tell: is it an nsqd?"
        for what, limit in wanted.items()
        for broker in survey.brokers
        if limit is not None and broker.failure is None and not _tells(broker, what)
    ]


def _tells(broker: BrokerState, what: str) -> bool:
    if what == "disk space":
        return (broker.stats.get("disk") or {}).get("free_bytes") is not None
    return all("oldest_message_age_ms" in channel for channel in broker.channels)
