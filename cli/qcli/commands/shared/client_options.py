"""Options of the Go client by their names, `NAME,VALUE`, as NSQ's programs take them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import click

from trio_nsq.text.numbers import parse_decimal, parse_integer

from ...framework.params import Boolean, duration, parsed


def _seconds(text: str) -> float:
    return duration(text) / 1000


def _boolean(text: str) -> bool:
    return bool(Boolean().convert(text, None, None))


_integer, _number = partial(parsed, parse_integer), partial(parsed, parse_decimal)
_OF_CONNECTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "dial_timeout": ("dial_timeout_s", _seconds),
    "client_id": ("client_id", str),
    "hostname": ("hostname", str),
    "user_agent": ("user_agent", str),
    "topology_region": ("topology_region", str),
    "topology_zone": ("topology_zone", str),
    "heartbeat_interval": ("heartbeat_interval_s", _seconds),
    "tls_v1": ("tls_v1", _boolean),
    "tls_root_ca_file": ("tls_root_ca_file", str),
    "tls_cert": ("tls_cert", str),
    "tls_key": ("tls_key", str),
    "tls_insecure_skip_verify": ("tls_insecure_skip_verify", _boolean),
    "deflate": ("deflate", _boolean),
    "deflate_level": ("deflate_level", _integer),
    "snappy": ("snappy", _boolean),
    "auth_secret": ("auth_secret", str),
    "auth_secret_file": ("auth_secret_file", str),  # not an option of the Go client
}
_OF_CONSUMERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    **_OF_CONNECTIONS,
    "lookupd_poll_interval": ("lookupd_poll_interval_s", _seconds),
    "lookupd_poll_jitter": ("lookupd_poll_jitter", _number),
    "lookupd_poll_timeout": ("lookupd_poll_timeout_s", _seconds),
    "max_requeue_delay": ("max_requeue_delay_s", _seconds),
    "default_requeue_delay": ("default_requeue_delay_s", _seconds),
    "backoff_strategy": ("backoff_strategy", str),
    "max_backoff_duration": ("max_backoff_duration_s", _seconds),
    "backoff_multiplier": ("backoff_multiplier_s", _seconds),
    "max_attempts": ("max_attempts", _integer),
    "low_rdy_idle_timeout": ("low_rdy_idle_timeout_s", _seconds),
    "low_rdy_timeout": ("low_rdy_timeout_s", _seconds),
    "rdy_redistribute_interval": ("rdy_redistribute_interval_s", _seconds),
    "sample_rate": ("sample_rate", _integer),
    "output_buffer_size": ("output_buffer_size", _integer),
    "output_buffer_timeout": ("output_buffer_timeout_s", _seconds),
    "max_in_flight": ("max_in_flight", _integer),
    "msg_timeout": ("msg_timeout_s", _seconds),
}


@dataclass(frozen=True, slots=True)
class ClientOption:
    """An option of our client.

    Attributes:
        given: The name that the user gave.
        name: The name of the keyword argument of `Consumer` or `Producer`, or `max_attempts`.
    """

    given: str
    name: str
    value: Any


def consumer_option(text: str) -> ClientOption:
    return _parsed(text, _OF_CONSUMERS)


def producer_option(text: str) -> ClientOption:
    return _parsed(text, _OF_CONNECTIONS)


def keyword_arguments(options: Iterable[ClientOption]) -> dict[str, Any]:
    """Return the arguments for the client; the last of the same name counts."""
    return {each.name: each.value for each in options}


def check_keyword_arguments(make: Callable[..., object], options: Iterable[ClientOption]) -> None:
    """Raises UsageError if `make`, which is called with each option alone, refuses a value."""
    for each in options:
        try:
            make(**{each.name: each.value})
        except ValueError as error:
            raise click.UsageError(f"{each.given}: {error}.") from None


def _parsed(text: str, known: dict[str, tuple[str, Callable[[str], Any]]]) -> ClientOption:
    name, comma, value = text.partition(",")
    if name not in known:
        raise click.BadParameter(f"{name!r} is not supported. The names are {', '.join(sorted(known))}.")
    ours, convert = known[name]
    try:
        return ClientOption(name, ours, convert(value if comma else "true"))
    except click.BadParameter as error:
        raise click.BadParameter(f"{name}: {error.message}") from None
