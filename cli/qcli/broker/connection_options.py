"""Options of all commands that connect to a broker: TLS, the secret, and compression.

Their values are kept in click's context, not given to each command: `ConnectOptions.of_command` returns them.
"""

from __future__ import annotations

import os
import shlex
import stat
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trio_nsq._version import __version__
from trio_nsq.protocol.address import is_unix_path

from ..contexts.choice import chosen_context, context_option
from ..contexts.context import Context
from ..framework.errors import ExitCode, Failure, reason_of
from ..framework.options import CONNECTION_OPTIONS, Decorator, all_of, option
from ..framework.output import print_diagnostic, show_security_warnings
from ..framework.params import is_https

if TYPE_CHECKING:
    import ssl

    from trio_nsq.access.secret import Secret
    from trio_nsq.client.connection.options import ConnectionOptions
    from trio_nsq.client.connection.tls import TLSFiles

USER_AGENT = f"qcli/{__version__}"
"""The client name that commands send to a broker."""

PREFIX = "QCLI_CLIENT_"
"""Not `QCLI_`: `QCLI_TLS_CERT` is the broker's certificate, for `qcli serve`."""

_IN_CONTEXT = "qcli.broker.connection_options"
_SECRET = "qcli.broker.secret"
_TYPED = click.core.ParameterSource.COMMANDLINE
_FILE = click.Path(exists=True, dir_okay=False)


def _keep(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    ctx.meta.setdefault(_IN_CONTEXT, {})[param.name] = value


def values_of_command(ctx: click.Context) -> dict[str, Any]:
    return dict(ctx.meta.get(_IN_CONTEXT, {}))


VARIABLES: list[str] = []
"""The environment variables of these options."""


def _option(name: str, variable: str, **attributes: Any) -> Decorator:
    VARIABLES.append(PREFIX + variable)
    return option(
        CONNECTION_OPTIONS,
        name,
        envvar=PREFIX + variable,
        show_envvar=True,
        expose_value=False,
        callback=_keep,
        **attributes,
    )


_TLS_OVER_HTTP = option(
    CONNECTION_OPTIONS,
    "--tls",
    is_flag=True,
    default=None,
    hidden=True,
    expose_value=False,
    callback=_keep,
    help="Encrypt TCP connections. Over HTTP, write the address as https://HOST:PORT.",
)

_HTTPS_OPTIONS = (
    _option(
        "--tls-root-ca-file",
        "TLS_ROOT_CA_FILE",
        type=_FILE,
        metavar="FILE",
        help="Trust the CAs in this PEM file instead of the system's.",
    ),
    _option(
        "--tls-cert",
        "TLS_CERT",
        type=_FILE,
        metavar="FILE",
        help="Send the client certificate in this PEM file, for a broker that requires one.",
    ),
    _option(
        "--tls-key",
        "TLS_KEY",
        type=_FILE,
        metavar="FILE",
        help="Read the certificate's key from this PEM file, if it is not in the same file.",
    ),
    _option(
        "--tls-insecure-skip-verify",
        "TLS_INSECURE_SKIP_VERIFY",
        is_flag=True,
        help="Skip certificate verification.",
    ),
)
_SECRET_OPTIONS = (
    _option(
        "--auth-secret-file",
        "AUTH_SECRET_FILE",
        metavar="FILE",
        help="Authenticate with the token or secret in the first line of this file; -: standard input.",
    ),
    _option(
        "--auth-secret",
        "AUTH_SECRET",
        default="",
        metavar="TEXT",
        help="Authenticate with this secret. Other users can see a command line: use the file or the variable.",
    ),
)
_TCP_OPTIONS = (
    _option(
        "--tls/--no-tls",
        "TLS",
        default=None,
        help="Encrypt TCP connections, or do not. By default they are encrypted if another TLS option is given.",
    ),
    *_HTTPS_OPTIONS,
    *_SECRET_OPTIONS,
    _option(
        "--snappy",
        "SNAPPY",
        is_flag=True,
        help="Compress TCP connections with snappy, if the broker allows it.",
    ),
    _option(
        "--deflate",
        "DEFLATE",
        is_flag=True,
        help="Compress TCP connections with deflate: slower and smaller.",
    ),
)


tcp_connection = all_of(context_option, *_TCP_OPTIONS)
"""The options of a command that uses the TCP protocol, with or without HTTP."""

http_connection = all_of(context_option, *_HTTPS_OPTIONS, *_SECRET_OPTIONS, _TLS_OVER_HTTP)
"""The options of a command that uses HTTP only."""


@dataclass(frozen=True, slots=True)
class ConnectOptions:
    """The values of the connection options, by their names. Raises UsageError: the options contradict each other.

    Attributes:
        auth_secret: The secret, also of `--auth-secret-file`.
    """

    tls: bool | None = None
    tls_root_ca_file: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_insecure_skip_verify: bool = False
    auth_secret: str = field(default="", repr=False)
    snappy: bool = False
    deflate: bool = False

    def __post_init__(self) -> None:
        if self.tls_key and not self.tls_cert:
            raise click.UsageError("--tls-key needs a certificate: give --tls-cert, too.")
        if self.snappy and self.deflate:
            raise click.UsageError("--snappy and --deflate exclude each other.")

    @property
    def has_tls(self) -> bool:
        return bool(self.tls or self.tls_root_ca_file or self.tls_cert or self.tls_insecure_skip_verify)

    @classmethod
    def of_command(cls, ctx: click.Context | None = None) -> ConnectOptions:
        """Return the values of the current command, or of this context's; the defaults outside of a command.

        Raises Failure: the file of the secret cannot be used.
        """
        ctx = ctx or click.get_current_context(silent=True)
        if ctx is None:
            return cls()
        values = values_of_command(ctx)
        file = values.pop("auth_secret_file", None)
        return cls(**values | {"auth_secret": _secret(ctx, values.get("auth_secret", ""), file)})

    @property
    def encrypts_tcp(self) -> bool:
        if self.tls is not None:
            return self.tls
        return self._has_tls_files

    @property
    def _has_tls_files(self) -> bool:
        return bool(self.tls_root_ca_file or self.tls_cert or self.tls_insecure_skip_verify)

    @property
    def secret(self) -> Secret:
        from trio_nsq.access.secret import Secret

        return Secret(self.auth_secret)

    def lookupd_context(self) -> ssl.SSLContext | None:
        """Return the TLS context for discovery services; None: the system's CAs. Raises as `options`."""
        return self._context() if self._has_tls_files else None

    def options(self) -> ConnectionOptions:
        """Return the arguments for a `Producer` or a `Consumer`. Raises Failure: a file cannot be used."""
        return {
            "user_agent": USER_AGENT,
            "tls_v1": self.encrypts_tcp,
            "tls_context": self._context() if self.encrypts_tcp or self._has_tls_files else None,
            "auth_secret": self.auth_secret,
            "snappy": self.snappy,
            "deflate": self.deflate,
        }

    def https_context(self, address: str) -> ssl.SSLContext | None:
        """Return the TLS context for an HTTP address; None: plain HTTP. Raises as `options`."""
        return self._context() if is_https(address) else None

    def tls_files(self) -> TLSFiles:
        """Return the TLS files, for a Spark task or another thread."""
        from trio_nsq.client.connection.tls import TLSFiles

        return TLSFiles(self.tls_root_ca_file, self.tls_cert, self.tls_key, self.tls_insecure_skip_verify)

    def _context(self) -> ssl.SSLContext:
        try:
            return self.tls_files().context()
        except ValueError as error:
            text = str(error)
            for name in ("tls_root_ca_file", "tls_cert", "tls_key"):
                text = text.replace(f"{name} ", f"--{name.replace('_', '-')} ")
            text = text.replace(
                ", --tls-key None:", ", which must hold the key too, as --tls-key is not given:"
            )
            raise Failure(f"{text}.") from error


def _secret(ctx: click.Context, text: str, file: str | None) -> str:
    """Return the secret of the options. Raises UsageError if both are given; Failure if the file cannot be used.

    A value of the command line overrides the environment.
    """
    if text and file:
        typed = [ctx.get_parameter_source(name) is _TYPED for name in ("auth_secret", "auth_secret_file")]
        if typed[0] == typed[1]:
            raise click.UsageError("--auth-secret and --auth-secret-file exclude each other.", ctx)
        text, file = ("", file) if typed[1] else (text, None)
    if file:
        # Read once: it may be a pipe.
        if _SECRET not in ctx.meta:
            ctx.meta[_SECRET] = read_secret(file, completing=ctx.resilient_parsing)
        text = ctx.meta[_SECRET]
    elif not text:
        if _SECRET not in ctx.meta:
            ctx.meta[_SECRET] = _secret_of_context(ctx)
        text = ctx.meta[_SECRET]
    if text and not ctx.resilient_parsing:
        show_security_warnings()
    return text


def _secret_of_context(ctx: click.Context) -> str:
    """Return the secret that the command's context refers to, "" without one. Raises Failure: it cannot be read."""
    chosen = chosen_context(ctx)
    return "" if chosen is None else secret_of_context(chosen.context, completing=ctx.resilient_parsing)


def secret_of_context(context: Context, *, completing: bool = False) -> str:
    """Return the secret that a context refers to, "" without one. Raises Failure: it cannot be read.

    Args:
        completing: The shell completes a word: read regular files only, and run nothing.
    """
    if context.secret is None:
        return ""
    key, value = context.secret
    try:
        if key == "auth_secret_file":
            return read_secret(value, completing=completing)
        if completing:
            return ""  # the command, or the keyring, may ask for a password
        from ..contexts.secret import secret_of_command, secret_of_keyring

        return secret_of_command(value) if key == "auth_secret_command" else secret_of_keyring(value)
    except Failure as error:
        raise Failure(f"The context {context.name}: {error.message}", ExitCode.FAILURE) from error


def read_secret(file: str, *, completing: bool = False) -> str:
    """Return the secret in the first line of a file, or of standard input (`-`).

    Args:
        completing: The shell completes a word: read regular files only, and warn of nothing.

    Raises Failure: the file cannot be used.
    """
    from trio_nsq.access.secret import SecretFileError, decode_secret, read_secret_file

    if file == "-":
        secret = b"" if completing else _first_line(sys.stdin.fileno())
        if not secret and not completing:
            raise Failure(
                "--auth-secret-file -: standard input has no secret in its first line.", ExitCode.USAGE
            )
        return decode_secret(secret)
    try:
        mode = Path(file).stat().st_mode
        if completing and not stat.S_ISREG(mode):
            return ""
        secret_text = read_secret_file(file)
    except (SecretFileError, OSError) as error:
        reason = reason_of(error).removeprefix(f"auth_secret_file {file}: ")
        raise Failure(f"--auth-secret-file {file}: {reason}.", ExitCode.USAGE) from error
    if stat.S_ISREG(mode) and mode & stat.S_IROTH and not completing:
        print_diagnostic(
            f"Warning: --auth-secret-file {file}: other users can read the secret: chmod 600 {shlex.quote(file)}"
        )
    return secret_text


def _first_line(fd: int) -> bytes:
    """Read a line and nothing behind it: the rest of standard input may be messages."""
    line = b""
    while (character := os.read(fd, 1)) not in (b"", b"\n"):
        line += character
    return line.rstrip(b"\r")


def refuse_plain_http(address: str) -> None:
    """Raises UsageError if the command line asks for TLS, and this HTTP address is not https.

    The environment is ignored here: it is for other commands and brokers, too.
    """
    ctx = click.get_current_context(silent=True)
    if ctx is None or is_https(address) or is_unix_path(address):
        return
    for each in fields(ConnectOptions):
        asked = ctx.get_parameter_source(each.name) is _TYPED
        if asked and each.name.startswith("tls") and getattr(ConnectOptions.of_command(), each.name):
            flag = "--" + each.name.replace("_", "-")
            raise click.UsageError(
                f"{flag}: this command sends HTTP requests to {address}: for TLS write "
                "--nsqd-http-address https://HOST:PORT."
            )
