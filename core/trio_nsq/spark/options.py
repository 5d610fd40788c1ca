"""Parse the common options of reading and writing with the data source `nsq`.

Spark imports this to look up any data source, so it does not import pyarrow.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..access.secret import NO_SECRET, Secret
from ..client.connection.tls import TLSFiles
from ..client.http.idempotent_producer import IdempotentProducer
from ..client.reading.broker_log import broker_label
from ..event_loop.retries import PATIENCE_S
from ..protocol.address import is_unix_path, parse_address
from ..protocol.errors import NSQError
from ..text.numbers import parse_integer

MS_PER_S = 1000
ACCESS_OPTIONS = (
    "tlsRootCaFile",
    "tlsCert",
    "tlsKey",
    "tlsInsecureSkipVerify",
    "authSecret",
    "authSecretFile",
)
"""The options of `parse_access`. Spark's own patterns of names hide the values of those with `secret` in their name."""
_DEFAULT_ADDRESS = "127.0.0.1:4151"


class OptionError(NSQError):
    """An option of the data source is invalid; the text has its name and the reason."""


def parse_brokers(options: Mapping[str, str]) -> dict[str, str]:
    """Parse `nsqdHttpAddress`; return the addresses by broker label. Raises OptionError."""
    return parse_addresses("nsqdHttpAddress", options.get("nsqdHttpAddress") or _DEFAULT_ADDRESS)


def parse_addresses(name: str, text: str) -> dict[str, str]:
    """Parse an option with HTTP addresses; return them by label, in order.

    Raises:
        OptionError: An address has no port, or has a user or password, which is not repeated: Spark's plans, rows and
            checkpoints would show it.
    """
    found = {}
    for address in (each.strip().removeprefix("http://").rstrip("/") for each in text.split(",")):
        place = address.removeprefix("https://")
        if "@" in place and not place.startswith("/"):
            raise OptionError(
                f"the option {name} must not have a user or password, because Spark shows it: give the secret with "
                "authSecretFile"
            )
        try:
            if not is_unix_path(place):
                parse_address(place)
        except ValueError:
            raise OptionError(
                f"the option {name} must be host:port, or several separated by commas: {text!r}"
            ) from None
        found[broker_label(address)] = address
    return found


@dataclass(frozen=True, slots=True)
class BrokerAccess:
    """How tasks and the driver connect to brokers. Can be pickled; the repr does not show the secret."""

    tls: TLSFiles = field(default_factory=TLSFiles)
    secret: Secret = NO_SECRET

    def producer(
        self, address: str, topic: str, name: str, patience_s: float, max_resends: int = 0
    ) -> IdempotentProducer:
        """Make a producer. Arguments and errors as for `IdempotentProducer`."""
        return IdempotentProducer(
            *(address, topic, name, self.tls, patience_s),
            max_resends=max_resends,
            auth_secret=self.secret.text,
            auth_secret_file=self.secret.file,
        )


def parse_access(options: Mapping[str, str]) -> BrokerAccess:
    """Parse `ACCESS_OPTIONS`. Files are read where they are used: on the driver and in tasks. Raises OptionError."""
    tls = parse_tls(options, "tls")
    return BrokerAccess(tls, parse_secret(options, "authSecret"))


def parse_tls(options: Mapping[str, str], prefix: str) -> TLSFiles:
    """Parse the options of TLS whose names begin with a prefix, such as `tls`. Raises OptionError."""
    tls = TLSFiles(
        options.get(f"{prefix}RootCaFile"),
        options.get(f"{prefix}Cert"),
        options.get(f"{prefix}Key"),
        parse_choice(options, f"{prefix}InsecureSkipVerify", "false", "true") == "true",
    )
    if tls.key and not tls.cert:
        raise OptionError(f"the option {prefix}Key needs {prefix}Cert")
    return tls


def parse_secret(options: Mapping[str, str], name: str) -> Secret:
    """Parse the option of a secret, and the one with its file, which ends with `File`. Raises OptionError."""
    secret, file = options.get(name), options.get(f"{name}File")
    if secret and file:
        raise OptionError(f"the options {name} and {name}File exclude each other")
    return Secret(secret or "", file or None)


def parse_patience(options: Mapping[str, str]) -> float:
    """Parse how long to wait for an unreachable broker, in seconds. Raises OptionError."""
    patience_ms = parse_number(options, "patienceMs", minimum=0)
    return PATIENCE_S if patience_ms is None else patience_ms / MS_PER_S


def parse_number(options: Mapping[str, str], name: str, minimum: int) -> int | None:
    """Parse an integer option; None if it is not set. Raises OptionError."""
    text = options.get(name)
    if text is None:
        return None
    try:
        number = parse_integer(text.strip())
    except ValueError:
        number = minimum - 1
    if number < minimum:
        raise OptionError(f"the option {name} must be a whole number, {minimum} or more: {text!r}")
    return number


def parse_choice(options: Mapping[str, str], name: str, *choices: str) -> str:
    """Parse an option with a fixed set of values; the first is the default. Raises OptionError."""
    text = (options.get(name) or choices[0]).strip().lower()
    if text not in choices:
        raise OptionError(f"the option {name} must be {' or '.join(choices)}: {text!r}")
    return text
