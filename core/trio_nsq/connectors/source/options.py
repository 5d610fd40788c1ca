"""What to read, and how to connect."""

from collections.abc import Callable
from dataclasses import dataclass, field

from ...client.consuming.options import ConsumerOptions

MAX_IN_FLIGHT = 200
"""The default of NSQ's programs."""
TOPIC_REFRESH_S = 60.0


@dataclass(frozen=True, slots=True)
class BrokerAddresses:
    """A broker that the user names.

    Attributes:
        tcp: `host:port` of the TCP protocol; empty: as the broker's `/info` tells.
        http: Addresses of which one may be its HTTP API: `host:port`, `https://host:port`, or the path of a unix
            socket. The broker is asked whether it listens at `tcp`.
        paired_http: The one of `http` that the user gives for `tcp`; empty: none. It is also used if the broker there
            names another TCP address: behind mapped ports (docker -p, NAT) it does not know its own.
    """

    tcp: str
    http: tuple[str, ...]
    paired_http: str = ""


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Which topics to read, from which brokers.

    Attributes:
        channel: The channel to consume; for a log, the channel that moves to the stored position.
        topics: Names of topics.
        topic_pattern: Read all topics whose name has a match of this regular expression (RE2); None: only `topics`.
        left_out: Whether the pattern does not select a topic.
        channel_may_lead: A channel ahead of the stored position is nothing to warn of: the connector also moves it over
            messages that it does not store.
        refuses_gaps: If the channel is ahead of the stored position, and passed messages that can be read: raise
            `ChannelAhead` instead of reading on.
        looks_again: Look for topics and brokers again and again; False: only at the start.
        topic_refresh_s: How often to look for new topics and brokers, more than 0.
        brokers: Brokers to read from.
        lookupd_http_addresses: Discovery services; the brokers that they list are read, too.
        max_in_flight: The largest number of unanswered messages of a channel, at least 1, over all its brokers.
        at_least_once: Consume channels of all brokers, also of those whose log can be read.
        consumer: Options of consumers. Those for discovery, TLS and the secret also apply to HTTP.
        https_address: Returns the address to use for an HTTP address: the same, the broker's https address, or "" if it
            has none and must not be used. It may block.
        http_connect_timeout_s, http_request_timeout_s: Timeouts of HTTP requests to brokers.
    """

    channel: str
    topics: tuple[str, ...] = ()
    topic_pattern: str | None = None
    left_out: Callable[[str], bool] = lambda topic: False
    channel_may_lead: bool = False
    refuses_gaps: bool = False
    looks_again: bool = True
    topic_refresh_s: float = TOPIC_REFRESH_S
    brokers: tuple[BrokerAddresses, ...] = ()
    lookupd_http_addresses: tuple[str, ...] = ()
    max_in_flight: int = MAX_IN_FLIGHT
    at_least_once: bool = False
    consumer: ConsumerOptions = field(default_factory=ConsumerOptions)
    https_address: Callable[[str], str] = str
    http_connect_timeout_s: float = 2.0
    http_request_timeout_s: float = 5.0
