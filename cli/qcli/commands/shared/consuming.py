"""The options of the commands that consume topics for a long time: `to-file`, `to-http` and `to-nsq`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from trio_nsq.protocol.address import is_unix_path, next_port
from trio_nsq.protocol.names import is_valid_name

from ...broker.address_options import (
    check_tcp_address,
    http_addresses,
    lookupd_addresses,
    tcp_addresses,
)
from ...broker.brokers import chosen
from ...broker.connection_options import ConnectOptions, tcp_connection
from ...broker.failures import connection_failure, http_failure, lookupd_unreachable
from ...broker.name_completion import complete_topic
from ...framework.errors import ExitCode, Failure
from ...framework.options import Decorator, all_of, option, several
from ...framework.params import Integer, is_https, positive_duration, topic_name
from .client_options import ClientOption, check_keyword_arguments, consumer_option, keyword_arguments

if TYPE_CHECKING:
    from trio_nsq.connectors.source.options import BrokerAddresses, SourceOptions

SOURCE = "Which messages"
_F = TypeVar("_F", bound=Callable[..., Any])
_NAMES = (
    *("topics", "old_topics", "topic_pattern", "topic_refresh_ms", "channel", "nsqd_tcp_addresses"),
    *("nsqd_http_addresses", "lookupd_addresses", "lookupd_allowed_hosts", "max_in_flight", "consumer_opts"),
    *("http_address", "at_least_once", "connect_timeout_ms", "request_timeout_ms"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Consuming:
    """What to consume, from which brokers: the values of `consuming_options`."""

    topics: tuple[str, ...]
    old_topics: tuple[str, ...]
    topic_pattern: str | None
    topic_refresh_ms: int
    channel: str
    nsqd_tcp_addresses: tuple[str, ...]
    nsqd_http_addresses: tuple[str, ...]
    lookupd_addresses: tuple[str, ...]
    lookupd_allowed_hosts: tuple[str, ...]
    max_in_flight: int
    consumer_opts: tuple[ClientOption, ...]
    http_address: str | None
    at_least_once: bool
    connect_timeout_ms: int = 2000
    request_timeout_ms: int = 5000

    @property
    def all_topics(self) -> tuple[str, ...]:
        """The topics that are named, each once."""
        return tuple(dict.fromkeys([*self.topics, *self.old_topics]))

    @property
    def max_attempts(self) -> int | None:
        """The Go client's `max_attempts`; None: not given."""
        return self._opt("max_attempts")

    def _opt(self, name: str) -> int | None:
        found: int | None = keyword_arguments(self.consumer_opts).get(name)
        return found

    def source_options(self) -> SourceOptions:
        """Return the options for `run_sources`.

        Raises:
            UsageError: No topic is named, or a value is wrong.
            Failure: A file for TLS or the secret cannot be used.
        """
        from trio_nsq.connectors.source.options import SourceOptions

        if not self.all_topics and self.topic_pattern is None:
            raise click.UsageError("Missing argument 'TOPIC...': name topics, or give --topic-pattern.")
        from trio_nsq.client.consuming.options import ConsumerSettings

        known = [each for each in self.consumer_opts if each.name not in ("max_attempts", "max_in_flight")]
        check_keyword_arguments(ConsumerSettings, known)
        connecting = ConnectOptions.of_command()
        brokers, lookupds = self._brokers(connecting)
        consumer: Any = {  # the names were checked
            **connecting.options(),
            "lookupd_allowed_hosts": self.lookupd_allowed_hosts,
            **{each.name: each.value for each in known},
        }
        return SourceOptions(
            channel=self.channel,
            topics=self.all_topics,
            topic_pattern=self.topic_pattern,
            topic_refresh_s=self.topic_refresh_ms / 1000,
            brokers=brokers,
            lookupd_http_addresses=lookupds,
            max_in_flight=self._opt("max_in_flight") or self.max_in_flight,
            at_least_once=self.at_least_once,
            consumer=consumer,
            https_address=https_or_nothing if connecting.has_tls else str,
            http_connect_timeout_s=self.connect_timeout_ms / 1000,
            http_request_timeout_s=self.request_timeout_ms / 1000,
        )

    def _brokers(self, connecting: ConnectOptions) -> tuple[tuple[BrokerAddresses, ...], tuple[str, ...]]:
        """Return the brokers and the discovery services to use. Raises UsageError: an address is wrong."""
        ctx = click.get_current_context()
        typed = ParameterSource.COMMANDLINE
        if (
            ctx.get_parameter_source("nsqd_http_addresses") is typed
            and ctx.get_parameter_source("nsqd_tcp_addresses") is not typed
        ):
            addresses, lookupds = chosen(ctx)
            return named_brokers((), addresses, connecting, are_paired=False), lookupds
        addresses, lookupds = chosen(ctx, "nsqd_tcp_addresses")
        if not addresses:  # the HTTP addresses are those of the brokers that are named by their TCP addresses
            return (), lookupds
        for address in addresses:
            check_tcp_address(address)
        sources = {ctx.get_parameter_source(name) for name in ("nsqd_tcp_addresses", "nsqd_http_addresses")}
        are_paired = len(sources) == 1 and ParameterSource.DEFAULT not in sources
        return named_brokers(addresses, self.nsqd_http_addresses, connecting, are_paired=are_paired), lookupds


def named_brokers(
    tcp: Sequence[str], http: Sequence[str], connecting: ConnectOptions, *, are_paired: bool
) -> tuple[BrokerAddresses, ...]:
    """Return brokers that are named by their TCP addresses, or without these by their HTTP addresses.

    Args:
        are_paired: Whether both lists come from the same place. If they have the same length, they have the same order.
    """
    from trio_nsq.connectors.source.options import BrokerAddresses

    if not tcp:
        return tuple(BrokerAddresses("", (each,)) for each in http)
    usable = [each for each in http if is_https(each) or is_unix_path(each) or not connecting.encrypts_tcp]
    pairs = http if are_paired and len(http) == len(tcp) else [""] * len(tcp)
    return tuple(
        BrokerAddresses(
            address, tuple(dict.fromkeys([*usable, next_port(address)])), pair if pair in usable else ""
        )
        for address, pair in zip(tcp, pairs, strict=True)
    )


def source_failure(error: Exception, *, reads_logs: bool = True) -> Failure | None:
    """Return the failure for an error of `run_sources`; None: the error is a defect.

    Args:
        reads_logs: Whether the command has `--at-least-once`.
    """
    from trio_nsq.access.secret import SecretFileError
    from trio_nsq.client import BrokerUnreachable, ConnectionFailed, RequestRefused
    from trio_nsq.fleet.log_identity import CopyDiffers
    from trio_nsq.lookup.query import LookupFailed

    if isinstance(error, ConnectionFailed):
        if isinstance(error.__cause__, LookupFailed):
            return lookupd_unreachable(error.address, error.reason)
        if isinstance(error.__cause__, BrokerUnreachable):
            return http_failure(error.__cause__)
        return connection_failure(error)
    if isinstance(error, SecretFileError):
        return Failure(f"{error}.")
    if isinstance(error, CopyDiffers):
        text = str(error)
        return Failure(f"{text[0].upper()}{text[1:]}.", ExitCode.PARTIAL)
    if not isinstance(error, RequestRefused | BrokerUnreachable):
        return None
    failure = http_failure(error)
    if reads_logs and isinstance(error, RequestRefused) and error.text.startswith("FORBIDDEN"):
        return Failure(f"{failure.message} Or use --at-least-once, which needs the role consume only.")
    return failure


def https_or_nothing(address: str) -> str:
    """Return the HTTPS address of a broker, empty if there is none; TLS is asked for."""
    if is_https(address) or is_unix_path(address):
        return address
    from ...broker.https_ports import https_address

    return https_address(address)


def _pattern(text: str) -> str:
    import re2  # type: ignore[import-untyped]  # no types are published

    options = re2.Options()
    options.log_errors = False  # RE2 would write them to stderr
    try:
        re2.compile(text, options)
    except re2.error as error:
        reason = error.args[0].decode(errors="replace")
        raise click.BadParameter(f"{text!r} is not a regular expression (RE2): {reason}.") from None
    return text


def _channel(text: str) -> str:
    if not is_valid_name(text):
        raise click.BadParameter(f"{text!r} is not a valid channel name.")
    return text


def _http_timeouts() -> list[Decorator]:
    return [
        option(
            "Connection",
            f"--http-client-{name}-timeout",
            f"{name}_timeout_ms",
            type=positive_duration,
            default=default,
            brief=True,
            help=f"Wait so long for {what} over HTTP.",
        )
        for name, default, what in (
            ("connect", "2s", "a connection to a broker"),
            ("request", "5s", "a broker's answer"),
        )
    ]


def pattern_options(verb: str) -> Decorator:
    """`--topic-pattern` and `--topic-refresh`; the verb begins the help of the former."""
    return all_of(
        option(
            SOURCE,
            "--topic-pattern",
            type=_pattern,
            metavar="REGEX",
            help=f"{verb} all topics whose name matches, also those created later.",
        ),
        option(
            SOURCE,
            "--topic-refresh",
            "topic_refresh_ms",
            type=positive_duration,
            default="1m",
            brief=True,
            help="Look for new topics and brokers at this interval.",
        ),
    )


def consuming_options(channel: str, *, reads_logs: bool = True, max_in_flight: int = 200) -> Decorator:
    """Return the options and the argument TOPIC... as one decorator; the command gets `consuming: Consuming`.

    Args:
        channel: The default of `--channel`.
        reads_logs: Whether the command reads logs where it can, so that there are `--at-least-once` and the timeouts of
            HTTP requests to brokers.
    """
    by_log = "If the log is read instead, the channel marks the position." if reads_logs else ""
    options = all_of(
        click.argument(
            "topics", metavar="TOPIC...", nargs=-1, type=topic_name, shell_complete=complete_topic
        ),
        several(
            SOURCE,
            "--topic",
            "old_topics",
            type=topic_name,
            metavar="TOPIC",
            hidden=True,
            help="Consume this topic, as TOPIC.",
        ),
        pattern_options("Consume"),
        option(
            SOURCE,
            "--channel",
            type=_channel,
            default=channel,
            metavar="CHANNEL",
            help=f"Consume this channel. {by_log}".rstrip(),
        ),
        *(
            (
                option(
                    SOURCE,
                    "--at-least-once",
                    is_flag=True,
                    brief=True,
                    help="Consume the channel, as of an nsqd, also if the broker's log can be read.",
                ),
            )
            if reads_logs
            else ()
        ),
        option(
            SOURCE,
            "--max-in-flight",
            type=Integer(min=1),
            default=max_in_flight,
            brief=True,
            help="Receive at most N unanswered messages of a channel.",
        ),
        option(
            SOURCE,
            "--consumer-opt",
            "consumer_opts",
            type=consumer_option,
            multiple=True,
            metavar="NAME,VALUE",
            brief=True,
            help="Set an option of the Go client by its name, for channels.",
        ),
        tcp_addresses("Consume from these brokers."),
        lookupd_addresses("Consume from all brokers that these nsqlookupd list."),
        http_addresses(
            "The HTTP addresses of the same brokers, in the same order; by default the port after the TCP port."
        ),
        tcp_connection,
        option(
            "Output",
            "--http-address",
            metavar="ADDRESS",
            brief=True,
            help="Serve /healthz, /metrics (Prometheus) and /stats here: HOST:PORT, :PORT for every interface, or the "
            "path of a unix socket. Clients need no secret.",
        ),
        *(_http_timeouts() if reads_logs else ()),
    )

    def decorate(command: _F) -> _F:
        @functools.wraps(command)
        def run(**values: Any) -> Any:
            names = _NAMES if reads_logs else _NAMES[:-3]
            consuming = {name: values.pop(name) for name in names}
            return command(consuming=Consuming(**{"at_least_once": not reads_logs, **consuming}), **values)

        return options(run)  # type: ignore[return-value]  # click calls it with the parameters of the options

    return decorate
