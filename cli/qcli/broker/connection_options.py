"""Options of all commands that connect to a broker: TLS, AUTH and compression.

Their values are kept in click's context, not given to each command: `ConnectOptions.of_command` returns them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import click

from trio_nsq._version import __version__

from ..framework.errors import Failure
from ..framework.options import CONNECTION_OPTIONS, Decorator, all_of, option
from ..framework.params import is_https, is_unix_path

if TYPE_CHECKING:
    import ssl

    from trio_nsq.client.connection.options import ConnectionOptions
    from trio_nsq.client.connection.tls import TLSFiles

USER_AGENT = f"qcli/{__version__}"
"""The client name that commands send to a broker."""

PREFIX = "QCLI_CLIENT_"
"""Not `QCLI_`: `QCLI_TLS_CERT` is the broker's certificate, for `qcli serve`."""

_IN_CONTEXT = "qcli.broker.connection_options"
_FILE = click.Path(exists=True, dir_okay=False)


def _keep(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    ctx.meta.setdefault(_IN_CONTEXT, {})[param.name] = value


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
_TCP_OPTIONS = (
    _option(
        "--tls/--no-tls",
        "TLS",
        default=None,
        help="Encrypt TCP connections, or do not. By default they are encrypted if another TLS option is given.",
    ),
    *_HTTPS_OPTIONS,
    _option(
        "--auth-secret",
        "AUTH_SECRET",
        default="",
        metavar="TEXT",
        help="Send this secret to a broker that requires AUTH. Other users of this machine can see a command line: "
        "use the environment variable instead.",
    ),
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


tcp_connection = all_of(*_TCP_OPTIONS)
"""The options of a command that uses the TCP protocol, with or without HTTP."""

http_connection = all_of(*_HTTPS_OPTIONS, _TLS_OVER_HTTP)
"""The options of a command that uses HTTP only."""


@dataclass(frozen=True, slots=True)
class ConnectOptions:
    """The values of the connection options, by their names. Raises UsageError: the options contradict each other."""

    tls: bool | None = None
    tls_root_ca_file: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_insecure_skip_verify: bool = False
    auth_secret: str = ""
    snappy: bool = False
    deflate: bool = False

    def __post_init__(self) -> None:
        if self.tls_key and not self.tls_cert:
            raise click.UsageError("--tls-key needs a certificate: give --tls-cert, too.")
        if self.snappy and self.deflate:
            raise click.UsageError("--snappy and --deflate exclude each other.")

    @classmethod
    def of_command(cls, ctx: click.Context | None = None) -> ConnectOptions:
        """Return the values of the current command, or of this context's; the defaults outside of a command."""
        ctx = ctx or click.get_current_context(silent=True)
        return cls() if ctx is None else cls(**ctx.meta.get(_IN_CONTEXT, {}))

    @property
    def encrypts_tcp(self) -> bool:
        """Whether TCP connections use TLS."""
        if self.tls is not None:
            return self.tls
        return bool(self.tls_root_ca_file or self.tls_cert or self.tls_insecure_skip_verify)

    def options(self) -> ConnectionOptions:
        """Return the arguments for a `Producer` or a `Consumer`. Raises Failure: a file cannot be used."""
        return {
            "user_agent": USER_AGENT,
            "tls_v1": self.encrypts_tcp,
            "tls_context": self._context() if self.encrypts_tcp else None,
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


def refuse_plain_http(address: str) -> None:
    """Raises UsageError if the command line asks for TLS, and this HTTP address is not https.

    The environment is ignored here: it is for other commands and brokers, too.
    """
    ctx = click.get_current_context(silent=True)
    if ctx is None or is_https(address) or is_unix_path(address):
        return
    for field in fields(ConnectOptions):
        asked = ctx.get_parameter_source(field.name) is click.core.ParameterSource.COMMANDLINE
        if asked and field.name.startswith("tls") and getattr(ConnectOptions.of_command(), field.name):
            flag = "--" + field.name.replace("_", "-")
            raise click.UsageError(
                f"{flag}: this command sends HTTP requests to {address}: for TLS write "
                "--nsqd-http-address https://HOST:PORT."
            )
