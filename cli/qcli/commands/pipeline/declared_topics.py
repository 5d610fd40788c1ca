"""Finds the topics that declare a table, and the brokers that have each."""

from __future__ import annotations

from collections.abc import Iterable

import click

from trio_nsq.api import broker as api
from trio_nsq.fleet.declared_tables import declared_tables
from trio_nsq.protocol.tables import DeclaredTable
from trio_nsq.spark.export.job import ExportMemory
from trio_nsq.spark.export.topics import TopicSource

from ...broker.admin_client import AdminClient
from ...broker.at_once import at_once
from ...broker.brokers import Brokers, distinct_brokers
from ...broker.connection_options import ConnectOptions
from ...broker.failures import Refused
from ...framework.errors import Failure
from ...framework.output import print_diagnostic
from ..to_parquet.brokers import check_encryption
from ..to_parquet.options import ToParquetOptions
from .options import NO_TABLE
from .sections import TableSections


class DeclaredTopics:
    """Finds the topics with a table, each time anew, and deletes the channels of those that have none any longer.

    A broker that does not answer has what it had the last time.

    Attributes:
        failures: Why brokers or discovery services could not be asked, by address, and why tables cannot be written, by
            topic.
        without_broker: Always empty: a topic is found at a broker.
    """

    def __init__(self, sections: TableSections) -> None:
        self.failures: dict[str, Failure] = {}
        self.without_broker: list[str] = []
        self._sections = sections
        self._options = sections.options
        self._listed: list[str] = []  # by discovery services, also those that they have forgotten
        self._tables: dict[str, dict[str, str]] = {}  # of each topic of each broker, empty without one
        self._keeping: dict[str, set[str]] = {}  # the topics with the channel, of each broker
        self._current: dict[str, DeclaredTable] = {}
        self._memories: dict[tuple[str, DeclaredTable], ExportMemory] = {}
        self._told: set[str] = set()  # topics with a channel and without a table
        self._has_found = False  # anything, or told that there is nothing yet

    def find(self) -> list[TopicSource]:
        """Return the topics. Raises Failure: no broker and no discovery service has answered yet."""
        self.failures.clear()
        self._ask()
        if self.failures and not self._tables:
            raise next(iter(self.failures.values()))
        declared = declared_tables(self._tables, self._current, self._sections.allowed)
        problems, found = dict(declared.problems), []
        for topic, table in declared.tables.items():
            try:
                found.append(self._source(topic, table))
            except click.UsageError as error:
                problems[topic] = f"{topic}: {error.format_message()}"
        self.failures |= {topic: Failure(text) for topic, text in problems.items()}
        self._note_changes(
            {source.request.topic: declared.tables[source.request.topic] for source in found}, problems
        )
        if not (self._has_found or found or problems):
            self._note(f"{NO_TABLE}. This command waits for one.")
        self._has_found = True
        return found

    def options_of(self, topic: str) -> ToParquetOptions:
        """Return the options of a topic that was found."""
        return self._sections.options_of(topic, self._current[topic])

    def _source(self, topic: str, table: DeclaredTable) -> TopicSource:
        request, options = self._sections.request(topic, table), self._sections.options_of(topic, table)
        having = [address for address, topics in self._tables.items() if topic in topics]
        memory = self._memories.setdefault((topic, table), ExportMemory())
        return TopicSource(request, [options.place(address, topic) for address in having], memory)

    # ------------------------------------------------------------------ brokers

    def _ask(self) -> None:
        def ask(address: str) -> tuple[dict[str, str], set[str]]:
            topics = AdminClient(address).stats()["topics"]
            keeping = {
                topic["topic_name"]
                for topic in topics
                if any(each["channel_name"] == self._options.channel for each in topic["channels"])
            }
            return {topic["topic_name"]: topic.get("table", "") for topic in topics}, keeping

        for broker, answer in at_once(distinct_brokers(self._brokers()), ask).items():
            if isinstance(answer, Failure):
                self.failures[broker] = answer
            else:
                self._tables[broker], self._keeping[broker] = answer

    def _brokers(self) -> Iterable[str]:
        services = self._options.lookupd_addresses
        if not services:
            return self._options.nsqd_http_addresses
        check_encryption(ConnectOptions.of_command())
        try:
            nodes = Brokers((), services, self._options.lookupd_allowed_hosts).nodes()
        except Failure as failure:
            self.failures[",".join(services)] = failure
            nodes = []
        listed = (node.http_address for node in nodes if node.http_address is not None)
        self._listed = list(dict.fromkeys([*self._listed, *listed]))
        return self._listed

    # ------------------------------------------------------------------ changes

    def _note_changes(self, tables: dict[str, DeclaredTable], problems: Iterable[str]) -> None:
        """Report what has changed. Topics with a problem still declare a table."""
        before = self._current
        self._current = {topic: before[topic] for topic in problems if topic in before} | tables
        self._memories = {
            key: each for key, each in self._memories.items() if self._current.get(key[0]) == key[1]
        }
        for topic, table in tables.items():
            if topic not in before:
                self._note(f"{topic} is written to {table}.")
            elif before[topic] != table:
                self._note(
                    f"{topic} is written to {table}, with all retained messages. {before[topic]} has the messages "
                    "up to the last round."
                )
        for topic in before.keys() - self._current.keys():
            self._note(
                f"{topic} declares no table any longer. {before[topic]} has the messages up to the last round."
            )
            self._delete_channel(topic)
        self._tell_channels(problems)

    def _delete_channel(self, topic: str) -> None:
        """Delete the channel, which would keep messages for nothing."""
        for broker, topics in self._keeping.items():
            if topic not in topics:
                continue
            try:
                AdminClient(broker).ask(api.act("delete", topic, self._options.channel))
                topics.discard(topic)
            except Refused as error:
                if not error.text.endswith("_NOT_FOUND"):
                    self._warn_of_channel(topic, broker, error)
            except Failure as error:
                self._warn_of_channel(topic, broker, error)

    def _warn_of_channel(self, topic: str, broker: str, error: Failure) -> None:
        self._told.add(topic)
        channel = f"{topic}/{self._options.channel}"
        print_diagnostic(
            f"Warning: channel {channel} on {broker} cannot be deleted, and keeps messages: {error.brief} Delete it: "
            f"qcli channel delete {channel}"
        )

    def _tell_channels(self, problems: Iterable[str]) -> None:
        """Warn once of channels that keep messages for a table that was removed while this command did not run."""
        keeping = {topic for topics in self._keeping.values() for topic in topics}
        for topic in sorted(keeping - self._current.keys() - set(problems) - self._told):
            self._told.add(topic)
            channel = f"{topic}/{self._options.channel}"
            print_diagnostic(
                f"Warning: {topic} declares no table, and its channel {self._options.channel} keeps messages. Delete "
                f"it, if it is from an earlier run: qcli channel delete {channel}"
            )

    def _note(self, text: str) -> None:
        if not self._options.quiet:
            print_diagnostic(f"Note: {text}")
