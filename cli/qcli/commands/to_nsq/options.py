"""The command line of `qcli to-nsq` as one object, and its checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from trio_nsq.protocol.names import is_valid_name

from ...broker.connection_options import ConnectOptions
from ...framework.options import given
from ...framework.params import parsed
from ..shared.client_options import ClientOption, check_keyword_arguments, keyword_arguments
from ..shared.consuming import Consuming, https_or_nothing, named_brokers

if TYPE_CHECKING:
    from trio_nsq.connectors.source.options import BrokerAddresses
    from trio_nsq.connectors.to_nsq.options import CopyOptions
    from trio_nsq.filters.bodies import Filter
    from trio_nsq.filters.conditions import Condition, Path

MODES = ("hostpool", "round-robin", "epsilon-greedy")
NOT_JSON = ("dead-letter", "pass", "drop")
DESTINATION_OPTION = "--destination-nsqd-tcp-address"


def condition(text: str) -> Condition:
    from trio_nsq.filters.conditions import parse_condition

    return parsed(parse_condition, text)


def fields(text: str) -> tuple[Path, ...]:
    from trio_nsq.filters.conditions import parse_path

    return tuple(parsed(parse_path, each.strip()) for each in text.split(","))


def pattern(text: str) -> Any:
    import os

    from trio_nsq.filters.bodies import compile_pattern

    try:
        return compile_pattern(os.fsencode(text))
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not a regular expression (RE2): {error}.") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class NsqCommand:
    consuming: Consuming
    destination_topic: str | None
    destination_tcp_addresses: tuple[str, ...]
    destination_http_addresses: tuple[str, ...]
    mode: str
    producer_opts: tuple[ClientOption, ...]
    matching: Any
    conditions: tuple[Condition, ...]
    field_lists: tuple[tuple[Path, ...], ...]
    not_json: str
    not_json_topic: str | None
    require_json_field: str
    require_json_value: str
    whitelist_json_fields: tuple[str, ...]
    allows_gaps: bool
    without_headers: bool
    follow: bool
    form: str
    status_interval_ms: int
    status_every: int
    quiet: bool

    def options(self) -> CopyOptions:
        """Return the options of the connector.

        Raises:
            UsageError: Options are missing, exclude each other, or have a wrong value.
            Failure: A file for TLS or the secret cannot be used.
        """
        from trio_nsq.client.publishing.options import ProducerSettings
        from trio_nsq.connectors.host_pool import Mode
        from trio_nsq.connectors.to_nsq.options import CopyOptions

        source = self.consuming.source_options()
        if not (self.destination_tcp_addresses or self.destination_http_addresses):
            raise click.UsageError(f"Missing option '{DESTINATION_OPTION}': name the broker to copy to.")
        check_keyword_arguments(ProducerSettings, self.producer_opts)
        connecting = ConnectOptions.of_command()
        of_destinations = keyword_arguments(self.producer_opts)
        producer: Any = {**connecting.options(), **of_destinations}
        if "auth_secret_file" in of_destinations:
            producer["auth_secret"] = of_destinations.get("auth_secret", "")
        has_tls = connecting.has_tls or any(name.startswith("tls") for name in of_destinations)
        if of_destinations.get("tls_v1") is False:  # TLS for the sources only
            has_tls, producer["tls_context"] = False, None
        found = CopyOptions(
            source=source,
            destinations=self._destinations(connecting),
            topic=self.destination_topic,
            mode=Mode(self.mode),
            filter=self._filter(),
            not_json_topic=self.not_json_topic,
            requires_http=bool(given("destination_http_addresses")),
            allows_gaps=self.allows_gaps,
            with_headers=not self.without_headers,
            follow=self.follow,
            producer=producer,
            https_address=https_or_nothing if has_tls else str,
        )
        self._check_not_json_topic(found)
        return found

    def _destinations(self, connecting: ConnectOptions) -> tuple[BrokerAddresses, ...]:
        tcp, http = self.destination_tcp_addresses, self.destination_http_addresses
        return named_brokers(tcp, http, connecting, are_paired=True)

    def _filter(self) -> Filter:
        from trio_nsq.filters.bodies import Filter, OtherBodies
        from trio_nsq.filters.conditions import has_member, member_equals
        from trio_nsq.filters.fields import FieldList

        conditions = list(self.conditions)
        if self.require_json_field:
            name, value = self.require_json_field, self.require_json_value
            conditions.append(member_equals(name, value) if value else has_member(name))
        elif self.require_json_value:
            raise click.UsageError("--require-json-value needs --require-json-field.")
        paths = [path for each in self.field_lists for path in each]
        paths += [(name,) for name in self.whitelist_json_fields]
        found = Filter(
            self.matching, conditions, FieldList(paths) if paths else None, OtherBodies(self.not_json)
        )
        if not found.needs_json and given("not_json", "not_json_topic"):
            raise click.UsageError("--not-json is for --where and --fields: no option reads bodies as JSON.")
        return found

    def _check_not_json_topic(self, options: CopyOptions) -> None:
        """Raises UsageError if the topic for bodies that are not JSON has no valid name."""
        from trio_nsq.filters.bodies import OtherBodies

        if not options.filter.needs_json or options.filter.others is not OtherBodies.DEAD_LETTER:
            return
        for topic in options.source.topics or ("",):
            name = options.not_json_topic_for(topic)
            if topic and not is_valid_name(name):
                raise click.UsageError(
                    f"{name!r}, the topic for bodies that are not JSON, is no valid name: give --not-json-topic."
                )
