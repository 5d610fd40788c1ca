"""Finds the topics of a `to-parquet` of several topics, and the brokers that have each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trio_nsq.connectors.source.topic_choice import TopicChoice, topics_of
from trio_nsq.protocol.names import is_ephemeral
from trio_nsq.spark.export.job import ExportMemory
from trio_nsq.spark.export.topics import TopicSource
from trio_nsq.spark.logs import BrokerPlace
from trio_nsq.spark.segments.places import places_of, topics_in

from ...broker.admin_client import AdminClient
from ...broker.at_once import at_once
from ...broker.brokers import Brokers, distinct_brokers
from ...broker.connection_options import ConnectOptions
from ...framework.errors import Failure
from .brokers import check_encryption
from .options import ToParquetOptions, request_for

if TYPE_CHECKING:
    from trio_nsq.api.lookupd import Node
    from trio_nsq.spark.export.request import ExportRequest
    from trio_nsq.spark.logs import LogPlace


@dataclass(frozen=True, slots=True)
class TopicSection:
    """Some of the topics of a command, with the same options.

    Attributes:
        name: The section of the configuration file; empty: the command line.
        request: For all of them, see `request_for`.
        is_of_one_folder: Whether the folder is that of the only topic.
    """

    options: ToParquetOptions
    request: ExportRequest
    name: str = ""
    is_of_one_folder: bool = False

    @classmethod
    def of(cls, options: ToParquetOptions) -> TopicSection:
        """Return the section of the current command line."""
        return cls(options, options.request())


class TopicFinder:
    """Finds topics and their logs, each time anew.

    A topic belongs to the section that names it, otherwise to the first one whose pattern matches.

    Attributes:
        failures: Why brokers or discovery services could not be asked the last time, by address: topics that only they
            have are missing.
        without_broker: Named topics that no discovery service knows.
        sections: The section of each topic.
    """

    def __init__(self, sections: Sequence[TopicSection]) -> None:
        self.failures: dict[str, Failure] = {}
        self.without_broker: list[str] = []
        self.sections: dict[str, TopicSection] = {}
        self._sections = sections
        self._memories: dict[str, ExportMemory] = {}
        self._named = {topic for section in sections for topic in section.options.topics}
        self._has_found = False
        self._first_heard: set[str] = set()  # the given brokers that answer for the first time in this call
        # As discovery services and brokers have told last, by both.
        self._topics_at: dict[tuple[str, str], list[str]] = {}
        # The brokers of a list of addresses, in this call of `find`.
        self._asked: dict[tuple[str, ...], tuple[str, ...]] = {}

    def options_of(self, topic: str) -> ToParquetOptions:
        """Return the options of a topic that was found."""
        return self.sections[topic].options

    def find(self) -> list[TopicSource]:
        """Return the topics, with those that are new since the last time.

        Raises:
            Failure: There are none, because no broker or no discovery service answers.
            NSQError, OSError: An archive cannot be read.
        """
        self.failures.clear()
        self._asked.clear()
        self._first_heard.clear()
        self.without_broker = []
        found: dict[str, TopicSource] = {}
        for section in self._sections:
            for topic, places in self._find(section):
                if topic in found:
                    continue
                self.sections[topic] = section
                request = request_for(section.request, topic, is_only=section.is_of_one_folder)
                memory = self._memories.setdefault(topic, self._new_memory(places))
                found[topic] = TopicSource(request, places, memory)
        if self.failures and not found:
            raise next(iter(self.failures.values()))
        self._has_found = True
        return list(found.values())

    def _new_memory(self, places: Sequence[LogPlace]) -> ExportMemory:
        """Return the memory of a topic that was not known. Logs that come later are exported from their start.

        Those of a broker that did not answer before may be old.
        """
        old = (
            place.where
            for place in places
            if isinstance(place, BrokerPlace) and place.address in self._first_heard
        )
        return ExportMemory(has_planned=self._has_found, seen=set(old))

    def _find(self, section: TopicSection) -> Iterator[tuple[str, Sequence[LogPlace]]]:
        options = section.options
        choice = TopicChoice(
            options.topics, options.topic_pattern, lambda topic: is_ephemeral(topic) or topic in self._named
        )
        if options.from_segments:
            listed = (topic for text in options.from_segments for topic in topics_in(text) if topic in choice)
            for topic in dict.fromkeys([*options.topics, *listed]):
                yield topic, places_of(options.from_segments, topic)
            return
        # With the hosts: a section must not use the brokers that only another one allows.
        services = ",".join(options.lookupd_addresses)
        if services:
            services = " ".join([services, *options.lookupd_allowed_hosts])
        brokers = self._brokers_of(options, services)
        having: dict[str, list[str]] = {} if services else {topic: list(brokers) for topic in options.topics}
        for broker in brokers:
            for topic in self._topics_at.get((services, broker), ()):
                if topic in choice and topic not in (() if services else options.topics):
                    having.setdefault(topic, []).append(broker)
        self.without_broker += [topic for topic in options.topics if topic not in having]
        for topic in sorted(having, key=lambda topic: topic not in options.topics):
            yield topic, [options.place(address, topic) for address in having[topic]]

    def _brokers_of(self, options: ToParquetOptions, services: str) -> tuple[str, ...]:
        """Ask the brokers of a section for their topics, or its discovery services, unless another section did."""
        asked = (services,) if services else options.nsqd_http_addresses
        if asked not in self._asked:
            brokers = asked
            if services:
                self._ask_services(options, services)
                brokers = tuple(broker for source, broker in self._topics_at if source == services)
            self._asked[asked] = distinct_brokers(brokers)
            if not services and any(each.options.topic_pattern is not None for each in self._sections):
                self._ask_brokers(self._asked[asked])
        return self._asked[asked]

    def _ask_services(self, options: ToParquetOptions, services: str) -> None:
        """Ask discovery services. A broker that they have forgotten keeps its topics: it may be down."""
        check_encryption(ConnectOptions.of_command())
        try:
            nodes = Brokers((), options.lookupd_addresses, options.lookupd_allowed_hosts).nodes()
        except Failure as failure:
            self.failures[services] = failure
            return
        listed: dict[str, list[Node]] = {}
        for node in nodes:
            if node.http_address is not None:
                listed.setdefault(node.http_address, []).append(node)
        for address, found in listed.items():  # a service that was restarted may not know all topics yet
            self._topics_at[services, address] = sorted(topics_of(found))

    def _ask_brokers(self, brokers: Sequence[str]) -> None:
        def ask(address: str) -> list[str]:
            return [topic["topic_name"] for topic in AdminClient(address).stats()["topics"]]

        for broker, answer in at_once(brokers, ask).items():
            if isinstance(answer, Failure):
                self.failures[broker] = answer
            else:
                if ("", broker) not in self._topics_at:
                    self._first_heard.add(broker)
                self._topics_at["", broker] = answer
