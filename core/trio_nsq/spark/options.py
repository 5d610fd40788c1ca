"""Parse the options of the data source `nsq` that reading and writing have in common.

Spark imports this to look up any data source, so it does not import pyarrow.
"""

from collections.abc import Mapping

from ..client.connection.reconnect import PATIENCE_S
from ..protocol.errors import NSQError
from .broker_log import broker_label

MS_PER_S = 1000
_DEFAULT_ADDRESS = "127.0.0.1:4151"


class OptionError(NSQError):
    """An option of the data source is wrong; the text says which and why."""


def parse_brokers(options: Mapping[str, str]) -> dict[str, str]:
    """The addresses of `nsqdHttpAddress`, by broker label. Raises OptionError: one has no port."""
    addresses = options.get("nsqdHttpAddress") or _DEFAULT_ADDRESS
    found = {}
    for address in (each.strip().removeprefix("http://") for each in addresses.split(",")):
        if "/" not in address.removeprefix("https://") and not address.rpartition(":")[2].isdecimal():
            raise OptionError(
                f"the option nsqdHttpAddress wants host:port, several with commas: {addresses!r}"
            )
        found[broker_label(address)] = address
    return found


def parse_patience(options: Mapping[str, str]) -> float:
    """How long to wait for a broker that is unreachable, in seconds. Raises OptionError."""
    patience_ms = parse_number(options, "patienceMs", minimum=0)
    return PATIENCE_S if patience_ms is None else patience_ms / MS_PER_S


def parse_number(options: Mapping[str, str], name: str, minimum: int) -> int | None:
    """An option that is a whole number; None: it is not given. Raises OptionError."""
    text = options.get(name)
    if text is None:
        return None
    if not text.strip().isdecimal() or int(text) < minimum:
        raise OptionError(f"the option {name} wants a whole number, {minimum} or more: {text!r}")
    return int(text)


def parse_choice(options: Mapping[str, str], name: str, *choices: str) -> str:
    """An option that is one of some words; the first is the default. Raises OptionError."""
    text = (options.get(name) or choices[0]).strip().lower()
    if text not in choices:
        raise OptionError(f"the option {name} wants {' or '.join(choices)}: {text!r}")
    return text
