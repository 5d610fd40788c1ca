"""The checks of `qcli nodes --check`: what is wrong with a fleet, one problem at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import click

from trio_nsq.fleet.cluster import problems_of as problems_of_cluster
from trio_nsq.fleet.dead_letters import CHANNEL as DEAD_LETTERS
from trio_nsq.fleet.snapshot import BrokerState
from trio_nsq.fleet.stats import Queue, TopicStats
from trio_nsq.text.durations import duration_text
from trio_nsq.text.numbers import parse_decimal
from trio_nsq.text.wording import count_of

from ...framework.output import size
from ...framework.params import Source, byte_size
from ...records.brokers import ProblemRecord
from ...terminal.figures import age
from .survey import Survey


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
            percent = parse_decimal(text[:-1])
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


KEYS = tuple(ProblemRecord.__annotations__)


@dataclass(frozen=True)
class Problem:
    """Something that is wrong.

    Attributes:
        check: The check that failed: reachable, health, registered, cluster, archive, disk, age, depth or
            brokers.
        address: The broker or service; empty if it is about all of them.
        text: What is wrong.
        about: The topic, `TOPIC/CHANNEL`, or the cluster; empty if it is about the whole server.
    """

    check: str
    address: str
    text: str
    about: str = ""

    def record(self) -> ProblemRecord:
        return {"check": self.check, "address": self.address, "about": self.about, "problem": self.text}

    def line(self) -> str:
        address = "" if self.address in self.text else self.address
        where = " ".join(filter(None, (address, self.about)))
        return f"{self.check}: {where}: {self.text}" if where else f"{self.check}: {self.text}"


def problems_of(survey: Survey, limits: Limits) -> Iterator[Problem]:
    """Yield the problems of a fleet: first servers that do not answer, then those of each broker."""
    for address, failure in survey.failures.items():
        yield Problem("reachable", address, failure.brief)
    answering = [broker for broker in survey.brokers if broker.reachable]
    if limits.brokers is not None and len(answering) < limits.brokers:
        yield Problem("brokers", "", f"{len(answering)} answer, fewer than {limits.brokers}")
    for broker in survey.brokers:
        yield from _of_broker(broker, survey, limits)


def _of_broker(broker: BrokerState, survey: Survey, limits: Limits) -> Iterator[Problem]:
    if broker.health != "OK":
        yield Problem("health", broker.address, broker.health.removeprefix("NOK - "))
    if missing := broker.missing_at(survey.asked_lookupds):
        yield Problem("registered", broker.address, f"not registered at {' '.join(missing)}")
    if (cluster := broker.cluster) is not None:
        for problem in problems_of_cluster(cluster):
            yield Problem("cluster", broker.address, problem, cluster["cluster"])
    if (archive := broker.archive) is not None and archive.problem:
        yield Problem("archive", broker.address, archive.problem)
    if limits.free is not None:
        yield from _disk(broker, limits.free)
    for name, topic in broker.topics.items():
        yield from _of_topic(broker.address, name, topic, limits)


def _disk(broker: BrokerState, least: Space) -> Iterator[Problem]:
    disk = broker.disk
    if disk is not None and disk.free_bytes < max(least.bytes, disk.total_bytes * least.percent / 100):
        free = f"{size(disk.free_bytes)} of {size(disk.total_bytes)} free ({disk.free_share:.1%})"
        yield Problem("disk", broker.address, f"{free}, less than {least}")


def _of_topic(address: str, name: str, topic: TopicStats, limits: Limits) -> Iterator[Problem]:
    queues: list[tuple[str | None, Queue]] = [(None, topic.queue), *topic.channels.items()]
    for channel, queue in queues:
        about, age_ms = str(Source(name, channel)), queue.oldest_age_ms
        if limits.depth is not None and queue.depth > limits.depth:
            waiting = f"{count_of(queue.depth, 'message')} {'waits' if queue.depth == 1 else 'wait'}"
            yield Problem("depth", address, f"{waiting}, more than {limits.depth:,}", about)
        if limits.age_ms is None or age_ms is None or channel == DEAD_LETTERS:
            continue  # they wait for a person, however long
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
        if limit is not None and broker.reachable and not _tells(broker, what)
    ]


def _tells(broker: BrokerState, what: str) -> bool:
    if what == "disk space":
        return broker.disk is not None
    channels = (channel for topic in broker.topics.values() for channel in topic.channels.values())
    return all("oldest_message_age_ms" in channel.raw for channel in channels)
