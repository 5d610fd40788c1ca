"""The command line of `qcli tail`: all values as one object, and checks."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

import click

from ...broker.address_options import check_tcp_address
from ...broker.brokers import Brokers, brokers_with_logs, chosen
from ...framework.options import delimiter_of, given
from ...framework.params import Source
from ...framework.positions import check_range
from ..shared.body_options import DecodedBodies, decoded_bodies
from ..shared.format_string import FormatString, refuse_other_formats

TAKE_BACKLOG = "--take-backlog"


@dataclass(frozen=True, slots=True, kw_only=True)
class TailOptions:
    sources: tuple[Source, ...]
    nsqd_tcp_addresses: tuple[str, ...]
    lookupd_addresses: tuple[str, ...]
    lookupd_allowed_hosts: tuple[str, ...]
    nsqd_http_addresses: tuple[str, ...]
    form: str
    format_string: FormatString | None
    separator: bytes
    null: bool
    print_topic: bool
    body_format: str | None
    schema: Path | None
    message: str
    registry: str
    bodies_file: Path | None
    count: int | None
    idle_timeout_ms: int | None
    max_in_flight: int
    take_backlog: bool
    first: str | None
    end: str | None

    @property
    def reads_log(self) -> bool:
        """Whether to read the topics' logs instead of consuming channels."""
        return self.first is not None or self.end is not None

    @property
    def delimiter(self) -> bytes:
        return delimiter_of(self.separator, self.null)

    @property
    def idle_timeout_s(self) -> float:
        """End after this time without a message; infinite: no timeout."""
        return self.idle_timeout_ms / 1000 if self.idle_timeout_ms else math.inf

    def decoded_bodies(self) -> DecodedBodies | None:
        """Return what decodes bodies; None: they stay as they are. Raises UsageError, Failure."""
        return decoded_bodies(self.body_format, self.schema, self.message, self.registry, self.bodies_file)

    def log_brokers(self) -> Brokers:
        """Return the brokers whose logs to read. Raises UsageError as `brokers_with_logs`."""
        return brokers_with_logs(self.lookupd_allowed_hosts, self.first, self.end)

    def resolve(self) -> "TailOptions":
        """Check the options, and return them with the brokers and the discovery services to use.

        Raises UsageError: the options contradict each other.
        """
        if self.format_string is not None:
            refuse_other_formats("form", "separator", "null", "print_topic")
        if self.delimiter != b"\n" and self.form == "json":
            raise click.UsageError(
                "--null and --delimiter are for --format raw; JSON is one object per line."
            )
        if self.reads_log:
            self._check_log()
            return self
        brokers, lookupds = chosen(click.get_current_context(), "nsqd_tcp_addresses")
        for address in brokers:
            check_tcp_address(address)
        return dataclasses.replace(self, nsqd_tcp_addresses=brokers, lookupd_addresses=lookupds)

    def _check_log(self) -> None:
        """Raises UsageError for options that contradict reading a log."""
        check_range(self.first, self.end)
        for source in self.sources:
            if source.channel is not None:
                raise click.UsageError(
                    f"--from and --to read a topic's log: leave '/{source.channel}' out, or see 'qcli channel seek'."
                )
        if given("max_in_flight"):
            raise click.UsageError(
                "--max-in-flight is for channels: nothing is in flight with --from and --to."
            )
