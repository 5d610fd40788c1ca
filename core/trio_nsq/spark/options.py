"""Parse the common options of reading and writing with the data source `nsq`.

Spark imports this to look up any data source, so it does not import pyarrow.
"""

from collections.abc import Mapping

from ..client.connection.reconnect import PATIENCE_S
from ..protocol.errors import NSQError
from .broker_log import broker_label

MS_PER_S = 1000
_DEFAULT_ADDRESS = "127.0.0.1:4151"


class OptionError(NSQError):
    """An option of the data source is invalid; the text has its name and the reason."""


def parse_brokers(options: Mapping[str, str]) -> dict[str, str]:
    """Parse `nsqdHttpAddress`; return the addresses by broker label. Raises OptionError if one has no port."""
    addresses = options.get("nsqdHttpAddress") or _DEFAULT_ADDRESS
    found = {}
    for address in (each.strip().removeprefix("http://") for each in addresses.split(",")):
        if "/" not in address.removeprefix("https://") and not address.rpartition(":")[2].isdecimal():
            raise OptionError(
                f"the option nsqdHttpAddress must be host:port, or several separated by commas: {addresses!r}"
            )
        found[broker_label(address)] = address
    return found


def parse_patience(options: Mapping[str, str]) -> float:
    """Parse how long to wait for an unreachable broker, in seconds. Raises OptionError."""
    patience_ms = parse_number(options, "patienceMs", minimum=0)
    return PATIENCE_S if patience_ms is None else patience_ms / MS_PER_S


def parse_number(options: Mapping[str, str], name: str, minimum: int) -> int | None:
    """Parse an integer option; None if it is not set. Raises OptionError."""
    text = options.get(name)
    if text is None:
        return None
    if not text.strip().isdecimal() or int(text) < minimum:
        raise OptionError(f"the option {name} must be a whole number, {minimum} or more: {text!r}")
    return int(text)


def parse_choice(options: Mapping[str, str], name: str, *choices: str) -> str:
    """Parse an option with a fixed set of values; the first is the default. Raises OptionError."""
    text = (options.get(name) or choices[0]).strip().lower()
    if text not in choices:
        raise OptionError(f"the option {name} must be {' or '.join(choices)}: {text!r}")
    return text
