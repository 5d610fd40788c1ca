"""The command line of `qcli pub` as one object, and its checks."""

import errno
import os
import shlex
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

import click
from click.core import ParameterSource

from trio_nsq.wording import count_of

from ...broker.address_options import HTTP_OPTION, HTTP_VARIABLE, TCP_OPTION, TCP_VARIABLE, check_tcp_address
from ...contexts.choice import require_address
from ...framework.errors import ExitCode, Failure
from ...framework.options import delimiter_of, given
from ...framework.output import is_live_terminal, is_terminal, print_diagnostic


@dataclass(frozen=True, slots=True, kw_only=True)
class PubOptions:
    """The parameters of the command."""

    topic: str | None
    files: tuple[str, ...]
    nsqd_tcp_addresses: tuple[str, ...]
    nsqd_http_addresses: tuple[str, ...]
    separator: bytes
    null: bool
    form: str
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
        typing = "-" in self.inputs and is_terminal(sys.stdin)
        return not self.quiet and is_live_terminal(sys.stderr) and not typing

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

    def check(self) -> None:
        """Raises UsageError if options exclude each other, Failure if a file cannot be read."""
        if self.reads_json:
            self._check_json()
        else:
            self._check_raw()
        for path in self.files:
            _check_readable(path)

    def _check_json(self) -> None:
        if self.delimiter != b"\n":
            raise click.UsageError(
                "--null and --delimiter are for --format raw; JSON is one object per line."
            )
        if self.topic and not self.files and Path(self.topic).is_file():
            print_diagnostic(
                f"Note: all records go to the topic {self.topic}. To read the file {self.topic}: "
                f"qcli pub --format json - {shlex.quote(self.topic)}"
            )

    def _check_raw(self) -> None:
        if self.topic is None:
            ctx = click.get_current_context()
            raise click.MissingParameter(ctx=ctx, param=ctx.command.params[0])
        if self.skip_bad:
            raise click.UsageError("--skip-bad is for --format json.")
        if self.delimiter != b"\n" and self.strip_cr:
            raise click.UsageError("--strip-cr is for lines: leave out --delimiter and --null.")

    def brokers(self) -> dict[str, str]:
        """Return the HTTP address of each broker, for its numbered batches, by its TCP address.

        The HTTP address is empty if a context has none.

        Raises UsageError: the numbers of addresses differ, or a TCP address is wrong.
        """
        tcp, http = self.nsqd_tcp_addresses, self.nsqd_http_addresses or ("",)
        require_address(tcp, TCP_OPTION)
        ctx = click.get_current_context()
        for address in tcp:
            check_tcp_address(address)
        sources = [ctx.get_parameter_source(name) for name in ("nsqd_tcp_addresses", "nsqd_http_addresses")]
        if http == ("",) or (len(http) == 1 and sources[1] not in (sources[0], ParameterSource.COMMANDLINE)):
            # A default: `numbered_sender` uses it only for the broker that has this address.
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
