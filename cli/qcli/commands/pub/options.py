"""The command line of `qcli pub` as one object, and its checks."""

import errno
import os
import re
import shlex
import stat
import sys
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import click
from click.core import ParameterSource

from trio_nsq.protocol.address import next_port
from trio_nsq.protocol.headers import Headers, encode_headers
from trio_nsq.text.wording import count_of

from ...broker.address_options import (
    HTTP_OPTION,
    HTTP_VARIABLE,
    TCP_OPTION,
    TCP_VARIABLE,
    check_tcp_address,
)
from ...broker.at_once import in_context
from ...broker.brokers import Brokers, chosen
from ...broker.connection_options import ConnectOptions
from ...framework.errors import ExitCode, Failure
from ...framework.options import delimiter_of, given
from ...framework.output import is_live_terminal, is_terminal, print_diagnostic
from ...framework.params import topic_name

ALL, ROUND_ROBIN, HASH = "all", "round-robin", "hash"
SPREADING = (ROUND_ROBIN, HASH)
"""The strategies in which each message goes to one broker."""


def topic_before_files(text: str) -> str:
    """Parse the name of a topic, which a user may have left out before a file."""
    try:
        return topic_name(text)
    except click.BadParameter as error:
        if not Path(text).exists():
            raise
        raise click.BadParameter(
            f"{error.message} It is a file: write TOPIC before it, or, with --format json, - for the topics of the "
            "records."
        ) from None


def pattern(text: str) -> re.Pattern[bytes]:
    try:
        return re.compile(os.fsencode(text))
    except re.error as error:
        raise click.BadParameter(f"{text!r} is not a regular expression: {error}.") from None


def header(text: str) -> tuple[str, str]:
    """Parse a header, `name:value`; blanks around the value are removed."""
    name, colon, value = text.partition(":")
    value = value.strip(" \t")
    if not colon:
        raise click.BadParameter(f"{text!r} is not a header such as tenant:7.")
    try:
        encode_headers({name: value})
    except ValueError as error:
        raise click.BadParameter(f"{error}.") from None
    return name, value


def field_path(text: str) -> tuple[str, ...]:
    """Parse the name of a field, or several that lead to a nested one, such as `user.id`; an empty text is none."""
    path = tuple(text.removeprefix(".").split(".")) if text else ()
    if not all(path):
        raise click.BadParameter(f"{text!r} is not a field such as user or user.id.")
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class PubOptions:
    topic: str | None
    files: tuple[str, ...]
    nsqd_tcp_addresses: tuple[str, ...]
    nsqd_http_addresses: tuple[str, ...]
    lookupd_addresses: tuple[str, ...]
    lookupd_allowed_hosts: tuple[str, ...]
    strategy: str | None
    key: re.Pattern[bytes] | None
    key_field: tuple[str, ...]
    separator: bytes
    null: bool
    framing: str
    form: str
    headers: tuple[tuple[str, str], ...]
    skip_bad: bool
    strip_cr: bool
    max_msg_size: int
    batch_size: int | None
    rate: float | None
    defer_ms: int
    no_retry: bool
    quiet: bool

    @property
    def inputs(self) -> tuple[str, ...]:
        """The files to read; `-` is standard input."""
        return self.files or ("-",)

    @property
    def delimiter(self) -> bytes:
        return delimiter_of(self.separator, self.null)

    @property
    def shows_progress(self) -> bool:
        """Whether to show a status line; not if the user types messages on the terminal."""
        return not self.quiet and is_live_terminal(sys.stderr) and not self._reads_terminal

    @property
    def welcome(self) -> str | None:
        """The line for a user who types messages on the terminal, once the brokers are connected; None: none."""
        if self.quiet or not self._reads_terminal or not is_terminal(sys.stderr):
            return None
        by_line = "" if self.framing == "length" or self.delimiter != b"\n" else ", one per line"
        return f"Reading messages from the terminal{by_line}; Ctrl-D ends."

    @property
    def _reads_terminal(self) -> bool:
        return "-" in self.inputs and is_terminal(sys.stdin)

    @property
    def reads_json(self) -> bool:
        """Whether each line is a JSON object with a message."""
        return self.form == "json"

    @property
    def common_topic(self) -> str | None:
        """The topic of all messages; None: each record has its own."""
        return None if self.reads_json and self.topic == "-" else self.topic

    @property
    def common_defer_ms(self) -> int | None:
        """The delay of all messages; None: each record has its own."""
        return None if self.reads_json and not given("defer_ms") else self.defer_ms

    @property
    def common_headers(self) -> Headers:
        """The headers of each message; a record may have others."""
        return dict(self.headers)

    def check(self) -> None:
        """Raises UsageError if options exclude each other, Failure if a file cannot be read."""
        for name, value in (("--key", self.key), ("--key-field", self.key_field)):
            if value and self.strategy != HASH:
                raise click.UsageError(f"{name} is for --strategy hash.")
        if len(self.common_headers) < len(self.headers):
            raise click.UsageError("--header has a name twice.")
        try:
            encode_headers(self.common_headers)
        except ValueError as error:
            raise click.UsageError(f"--header: {error}.") from None
        if self.key and self.key_field:
            raise click.UsageError("--key and --key-field exclude each other.")
        if self.reads_json:
            self._check_json()
        else:
            self._check_raw()
        for path in self.files:
            _check_readable(path)

    def _check_json(self) -> None:
        if self.delimiter != b"\n" or self.framing != "delimiter":
            raise click.UsageError(
                "--null, --delimiter and --framing are for --format raw; JSON is one object per line."
            )
        if self.topic and not self.files and Path(self.topic).is_file():
            self._note_file("records", "--format json -")

    def _check_raw(self) -> None:
        if self.topic is None:
            ctx = click.get_current_context()
            raise click.MissingParameter(ctx=ctx, param=ctx.command.params[0])
        if self.skip_bad:
            raise click.UsageError("--skip-bad is for --format json.")
        if self.framing == "length" and (self.strip_cr or given("separator", "null")):
            raise click.UsageError(
                "--framing length has no lines: leave out --delimiter, --null and --strip-cr."
            )
        if self.delimiter != b"\n" and self.strip_cr:
            raise click.UsageError("--strip-cr is for lines: leave out --delimiter and --null.")
        if not self.files and self._reads_terminal and Path(self.topic).is_file():
            self._note_file("messages", "TOPIC")

    def _note_file(self, messages: str, before: str) -> None:
        assert self.topic is not None
        print_diagnostic(
            f"Note: all {messages} go to the topic {self.topic}. To read the file {self.topic}: "
            f"qcli pub {before} {shlex.quote(self.topic)}"
        )

    @property
    def is_spread(self) -> bool:
        """Whether each message goes to one of the brokers."""
        return self.strategy in SPREADING

    def resolve(self) -> "PubOptions":
        """Return the options with a `strategy`: brokers of discovery services each get a part of the messages."""
        listed = chosen(click.get_current_context(), "nsqd_tcp_addresses")[1]
        return replace(self, strategy=self.strategy or (ROUND_ROBIN if listed else ALL))

    def brokers(self) -> dict[str, str]:
        """Return the HTTP address of each broker, for its numbered batches, by its TCP address.

        The HTTP address is empty if it is unknown. Discovery services are asked for their brokers.

        Raises:
            UsageError: The numbers of addresses differ, or a TCP address is wrong.
            Failure: No discovery service answers, or none lists a broker that accepts the messages.
        """
        tcp, lookupds = chosen(click.get_current_context(), "nsqd_tcp_addresses")
        found = self._given_brokers(tcp) if tcp else {}
        if lookupds:
            found = self._listed_brokers(lookupds) | found
        from trio_nsq.fleet.identity import first_addresses

        first = first_addresses(found, in_context(lambda address: _identity(address, found[address])))
        return {address: found[address] for address in dict.fromkeys(first.values())}

    def _listed_brokers(self, lookupds: tuple[str, ...]) -> dict[str, str]:
        """Return the brokers that discovery services list, without those that take no messages of the topic."""
        brokers = Brokers((), lookupds, self.lookupd_allowed_hosts)
        found: dict[str, str] = {}
        left_out: dict[str, str] = {}
        for node in brokers.nodes():
            found[node.tcp_address] = node.http_address or ""
            if node.draining:
                left_out[node.tcp_address] = f"the broker at {node.tcp_address} drains; left out."
            elif self.common_topic in node.tombstones:
                text = f"{self.common_topic} has a tombstone for the broker at {node.tcp_address}; left out."
                left_out.setdefault(node.tcp_address, text)
        # A broker is listed by each service, and one of them is enough: NSQ's own does not tell that a broker drains.
        for address, note in sorted(left_out.items()):
            print_diagnostic(f"Note: {note}")
            del found[address]
        if not found:
            raise brokers.none_listed(TCP_OPTION)
        return dict(sorted(found.items()))

    def _given_brokers(self, tcp: tuple[str, ...]) -> dict[str, str]:
        http = self.nsqd_http_addresses or ("",)
        ctx = click.get_current_context()
        for address in tcp:
            check_tcp_address(address)
        sources = [ctx.get_parameter_source(name) for name in ("nsqd_tcp_addresses", "nsqd_http_addresses")]
        if http == ("",) or (len(http) == 1 and sources[1] not in (sources[0], ParameterSource.COMMANDLINE)):
            # A default: `BrokerSender` uses it only for the broker that has this address.
            http *= len(tcp)
        if len(tcp) != len(http):
            names = [
                variable if source is ParameterSource.ENVIRONMENT else option
                for source, option, variable in zip(
                    sources, (TCP_OPTION, HTTP_OPTION), (TCP_VARIABLE, HTTP_VARIABLE), strict=True
                )
            ]
            raise click.UsageError(
                f"{names[0]} names {count_of(len(tcp), 'broker')} and {names[1]} {len(http)}. Give an HTTP address for "
                "each broker, in the same order, or none."
            )
        return dict(zip(tcp, http, strict=True))


def _identity(tcp_address: str, http_address: str) -> Hashable | None:
    """Return what tells the broker at an address from others; None: unknown."""
    from trio_nsq.fleet.identity import BrokerIdentity, resolved

    from ...broker.admin_client import client_of

    candidates = filter(None, [http_address, next_port(tcp_address)])
    with suppress(Failure):
        if (client := client_of(tcp_address, candidates, ConnectOptions.of_command())) is not None:
            return BrokerIdentity.of(client.info())
    return resolved(tcp_address)


def _check_readable(path: str) -> None:
    """Raises Failure, as for a wrong command line, if a file cannot be read."""
    if path == "-":
        return
    problem = 0
    try:
        if stat.S_ISDIR(Path(path).stat().st_mode):
            problem = errno.EISDIR
        elif not os.access(path, os.R_OK):
            problem = errno.EACCES
    except OSError as error:
        problem = error.errno or errno.ENOENT
    if problem:
        hint = ""
        if problem == errno.ENOENT and not set(path) & {"/", "."}:
            hint = f" To publish the text itself: echo {shlex.quote(path)} | qcli pub TOPIC."
        raise Failure(
            f"Cannot read {path}: {os.strerror(problem)}. Nothing was published.{hint}", ExitCode.USAGE
        )
