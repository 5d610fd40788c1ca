"""The settings of `qcli admin`: names, defaults and keys are nsqadmin's where it has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ...broker.connection_options import ConnectOptions, secret_of_context
from ...contexts.choice import chosen_context, complete_context
from ...contexts.context import COLORS, Context
from ...contexts.store import Contexts, read_contexts
from ...framework import params
from ...framework.daemon import kinds
from ...framework.daemon.security_settings import audit_log_setting, auth_file_setting
from ...framework.daemon.setting import LOG_SETTINGS, Setting, fields_of, under_headings, verbose_setting
from ...framework.options import CONNECTION_OPTIONS
from .oidc_settings import OIDC_SETTINGS, oidc_options

if TYPE_CHECKING:
    from trio_nsq.console.options import ConsoleOptions

_BROKERS, _LOOKUPDS = "nsqd_http_addresses", "lookupd_http_addresses"
_OF_CONTEXTS = {
    "--context",
    "--nsqd-http-address",
    "--lookupd-http-address",
    "--lookupd-allowed-host",
    "--title",
    "--title-color",
    *(f"--http-client-tls-{name}" for name in ("root-ca-file", "cert", "key", "insecure-skip-verify")),
}
"""The options that `--fleet` excludes, besides those of connections."""
LISTEN = kinds.Kind(params.tcp_listen_address, "HOST:PORT")
_TLS_NAMES = ("root_ca_file", "cert", "key", "insecure_skip_verify")


def base_path(text: str) -> str:
    """Parse the path of the first page: it begins with a slash, and ends without one."""
    if not text.startswith("/") or "//" in text or any(not c.isprintable() or c in "?#%\\ " for c in text):
        raise click.BadParameter(f"{text!r} is not a path such as /nsq.")
    return text.rstrip("/") or "/"


def title(text: str) -> str:
    if len(text) > 60 or not text.isprintable():
        raise click.BadParameter("The title has up to 60 printable characters.")
    return text


def topic_pattern(text: str) -> str:
    """Check a pattern for names of topics."""
    from trio_nsq.access.patterns import compile_glob

    params.parsed(compile_glob, text)
    return text


def cidr(text: str) -> str:
    """Check a network such as `10.0.0.0/8`; an address is a network, too; empty: none."""
    import ipaddress

    if text:
        try:
            ipaddress.ip_network(text, strict=False)
        except ValueError as error:
            raise click.BadParameter(f"{text!r} is not a network such as 10.0.0.0/8.") from error
    return text


def web_url(text: str) -> str:
    """Check the URL of a web service; empty: none."""
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(text)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if text and (not is_valid or any(not char.isprintable() or char in " ;," for char in text)):
        raise click.BadParameter(f"{text!r} is not a URL such as http://127.0.0.1:8080.")
    return text


_URL = kinds.Kind(web_url, "URL")

SETTINGS = under_headings(
    "Which broker",
    Setting(
        "nsqd-http-address",
        kinds.Kind(params.http_address, "[https://]HOST:PORT|PATH"),
        ("127.0.0.1:4151",),
        field=_BROKERS,
        multiple=True,
        commas=True,
        help="Show the brokers at these HTTP addresses. Several: with commas, or repeat the option.",
    ),
    Setting(
        "lookupd-http-address",
        kinds.Kind(params.lookupd_address, "[https://]HOST:PORT"),
        field=_LOOKUPDS,
        key="nsqlookupd_http_addresses",
        multiple=True,
        commas=True,
        help="Show all brokers that these nsqlookupd list. Several: with commas, or repeat the option.",
    ),
    Setting(
        "lookupd-allowed-host",
        kinds.HOST_PATTERN,
        field="lookupd_allowed_hosts",
        multiple=True,
        commas=True,
        brief=True,
        help="Use only brokers with these host names or addresses, if nsqlookupd returns others: *.example.com.",
    ),
    Setting(
        "http-client-connect-timeout",
        kinds.POSITIVE_DURATION,
        "2s",
        field="connect_timeout_ms",
        key="http_client_connect_timeout",
        brief=True,
        help="Wait so long for a connection to a broker or nsqlookupd.",
    ),
    Setting(
        "http-client-request-timeout",
        kinds.POSITIVE_DURATION,
        "5s",
        field="request_timeout_ms",
        key="http_client_request_timeout",
        brief=True,
        help="Wait so long for the answer of a broker or nsqlookupd. A server that hangs delays no other.",
    ),
    Setting(
        "poll-interval",
        kinds.POSITIVE_DURATION,
        "2s",
        field="poll_interval_ms",
        key="poll_interval",
        help="Ask each broker once in this time, for all viewers together, while a page is open.",
        brief=True,
    ),
    *(
        Setting(
            f"http-client-tls-{name.replace('_', '-')}",
            kinds.BOOLEAN if name == "insecure_skip_verify" else kinds.FILE,
            "false" if name == "insecure_skip_verify" else None,
            brief=True,
            help=f"nsqadmin's name of --tls-{name.replace('_', '-')}.",
        )
        for name in _TLS_NAMES
    ),
    Setting(
        "fleet",
        kinds.Kind(click.STRING, "CONTEXT"),
        field="fleets",
        multiple=True,
        commas=True,
        shell_complete=complete_context,
        help="Serve the fleets of these contexts, each below /c/CONTEXT/, with a switch on every page. Several: with "
        "commas, or repeat the option.",
    ),
    "Listener",
    Setting(
        "http-address",
        LISTEN,
        "127.0.0.1:4171",
        help="Serve the pages here. Port 0 picks a free port; :4171 is every interface.",
    ),
    Setting(
        "title",
        kinds.Kind(title, "TEXT"),
        "",
        help="Show this name of the fleet on every page, such as production; by default that of the context.",
        brief=True,
    ),
    Setting(
        "title-color",
        kinds.Kind(params.Word(list(COLORS), empty=""), None),
        "",
        field="color",
        key="title_color",
        help="Show the title and the icon in this colour, so that pages of two fleets look different.",
        brief=True,
    ),
    Setting(
        "hide-topic",
        kinds.Kind(topic_pattern, "PATTERN"),
        field="hide_topics",
        multiple=True,
        commas=True,
        brief=True,
        help="Leave these topics out of the list of topics, which says how many are hidden: 'test-*'. May be repeated.",
    ),
    Setting(
        "base-path",
        kinds.Kind(base_path, "PATH"),
        "/",
        help="Serve the pages below this path, for a reverse proxy that passes it on.",
        brief=True,
    ),
    Setting("https-cert", kinds.FILE, help="Serve HTTPS, with the certificate and chain in this PEM file."),
    Setting("https-key", kinds.FILE, help="Read the certificate's key from this PEM file."),
    Setting(
        "address-file",
        kinds.WRITTEN_FILE,
        help="Write the bound address to this file when the console is ready: JSON with the keys http_address and "
        "url. The file is replaced atomically, and removed when the console stops.",
        brief=True,
    ),
    "Viewers",
    Setting(
        "anonymous",
        kinds.Kind(params.Word(["none", "read", "manage"], empty=""), None),
        "",
        help="What viewers without a login may do. By default: none, if a broker requires tokens or there is an "
        "--auth-file or --oidc-issuer; read, with --admin-user or an address that is not loopback; else manage.",
    ),
    auth_file_setting(),
    Setting(
        "acl-http-header",
        kinds.TEXT,
        "X-Forwarded-User",
        help="Take the viewer's name from this header of a trusted proxy. It counts only with --admin-user.",
        brief=True,
    ),
    Setting(
        "admin-user",
        kinds.TEXT,
        field="admin_users",
        multiple=True,
        help="Let this user, named by a trusted proxy, change everything; other users only read. May be repeated.",
    ),
    Setting(
        "trusted-proxy",
        kinds.Kind(cidr, "CIDR"),
        ("127.0.0.0/8", "::1/128"),
        field="trusted_proxies",
        multiple=True,
        commas=True,
        brief=True,
        help="Believe the header only from these addresses. Several: with commas, or repeat the option.",
    ),
    Setting(
        "session-lifetime",
        kinds.POSITIVE_DURATION,
        "8h",
        help="End a login after this time.",
        brief=True,
    ),
    Setting(
        "session-key-file",
        kinds.WRITTEN_FILE,
        help="Keep the key of the session cookies in this file, so that logins survive a restart. It is created "
        "if it is missing.",
        brief=True,
    ),
    Setting(
        "http-allowed-host",
        kinds.HOST_PATTERN,
        field="http_allowed_hosts",
        multiple=True,
        commas=True,
        help="Accept requests for this host name too, such as that of a reverse proxy; '*.example.com' for all "
        "below it. '*' accepts all names, and with them DNS rebinding by web pages.",
        brief=True,
    ),
    Setting(
        "max-connections",
        kinds.COUNT,
        0,
        help="Limit the connections of viewers. 0: as many as half of the limit of open files allows (ulimit -Hn). A "
        "further one ends the connection that waits longest for a request.",
        brief=True,
    ),
    Setting(
        "allow-config-from-cidr",
        kinds.Kind(cidr, "CIDR"),
        "127.0.0.1/8",
        help="Accept requests to /config from this network only; '': from none.",
        brief=True,
    ),
    "OpenID Connect",
    *OIDC_SETTINGS,
    "Messages",
    Setting(
        "bodies-file",
        kinds.FILE,
        help="Decode and mask message bodies as this TOML file says: formats, schemas and masked fields of topics.",
    ),
    "Graphite and notifications",
    Setting("graphite-url", _URL, "", help="Show the charts of this Graphite, too.", brief=True),
    Setting(
        "proxy-graphite",
        kinds.BOOLEAN,
        "false",
        help="Fetch Graphite's charts through the console.",
        brief=True,
    ),
    Setting(
        "statsd-prefix",
        kinds.METRIC_PREFIX,
        "nsq.%s",
        help="The brokers' --statsd-prefix; %s is the broker.",
        brief=True,
    ),
    Setting(
        "statsd-counter-format",
        kinds.TEXT,
        "stats.counters.%s.count",
        help="How statsd names counters in Graphite.",
        brief=True,
    ),
    Setting(
        "statsd-gauge-format",
        kinds.TEXT,
        "stats.gauges.%s",
        help="How statsd names gauges in Graphite.",
        brief=True,
    ),
    Setting(
        "statsd-interval",
        kinds.POSITIVE_DURATION,
        "60s",
        help="The interval of the brokers' statsd.",
        brief=True,
    ),
    Setting(
        "notification-http-endpoint",
        _URL,
        "",
        help="POST a JSON object to this URL after each action.",
        brief=True,
    ),
    "Logging",
    *LOG_SETTINGS,
    audit_log_setting(),
    Setting("dev-static-dir", kinds.FOLDER, ignored="the pages are part of the package", help="No effect."),
    verbose_setting(),
)


def console_options(ctx: click.Context, values: dict[str, Any]) -> list[ConsoleOptions]:
    """Return the options of each fleet from values by field; other values are ignored. Raises UsageError, Failure."""
    from trio_nsq.console.options import ConsoleOptions

    from ...broker.brokers import chosen

    if (values["https_cert"] is None) != (values["https_key"] is None):
        raise click.UsageError("--https-cert and --https-key are needed together.", ctx)
    if values["fleets"]:
        return _fleets(ctx, values)
    brokers, lookupds = chosen(ctx, _BROKERS, _LOOKUPDS)
    connection = ConnectOptions.of_command(ctx)
    fields = fields_of(ConsoleOptions, values)
    fields |= {_BROKERS: brokers, _LOOKUPDS: lookupds}
    if (used := chosen_context(ctx)) and not fields["title"]:
        fields["title"] = used.context.name
    fields["oidc"] = oidc_options(ctx, values)
    fields |= {"tls": _tls_files(connection, values), "secret": connection.secret}
    return [ConsoleOptions(**fields | {"fleets": ()})]


def _fleets(ctx: click.Context, values: dict[str, Any]) -> list[ConsoleOptions]:
    """Return the options of the fleets of `--fleet`. Raises UsageError, Failure."""
    from trio_nsq.access.secret import Secret
    from trio_nsq.client.connection.tls import TLSFiles
    from trio_nsq.console.options import ConsoleOptions, Fleet, fleet_root

    _refuse_other_addresses(ctx)
    contexts = read_contexts()
    found = [_context_of_fleet(ctx, contexts, name) for name in dict.fromkeys(values["fleets"])]
    shared = fields_of(ConsoleOptions, values)
    oidc, base_path = oidc_options(ctx, values), values["base_path"]
    shared["fleets"] = tuple(Fleet(each.name, each.values.get("title_color", "")) for each in found)
    return [
        ConsoleOptions(
            **shared
            | {
                "fleet": each.name,
                "title": each.name,
                "oidc": oidc and oidc.at(base_path, fleet_root(base_path, each.name)),
                "color": each.values.get("title_color", ""),
                _BROKERS: each.values.get("nsqd_http_address", ()),
                _LOOKUPDS: each.values.get("lookupd_http_address", ()),
                "lookupd_allowed_hosts": each.values.get("lookupd_allowed_host", ()),
                "tls": TLSFiles(
                    each.values.get("tls_root_ca_file"),
                    each.values.get("tls_cert"),
                    each.values.get("tls_key"),
                    each.values.get("tls_insecure_skip_verify", False),
                ),
                "secret": Secret(secret_of_context(each, completing=ctx.resilient_parsing)),
            }
        )
        for each in found
    ]


def _refuse_other_addresses(ctx: click.Context) -> None:
    """Raises UsageError: an option is typed that contexts of fleets have themselves."""
    for param in ctx.command.params:
        of_context = param.opts[0] in _OF_CONTEXTS or getattr(param, "section", "") == CONNECTION_OPTIONS
        if of_context and ctx.get_parameter_source(param.name or "") is ParameterSource.COMMANDLINE:
            raise click.UsageError(
                f"{param.opts[0]} and --fleet exclude each other: a fleet has the addresses, TLS options, secret and "
                "label of its context. Change it with 'qcli context save NAME'.",
                ctx,
            )


def _context_of_fleet(ctx: click.Context, contexts: Contexts, name: str) -> Context:
    """Return a context with an address of HTTP. Raises UsageError, Failure."""
    context = contexts.get(name)
    if context is None:
        raise click.UsageError(f"--fleet: {contexts.unknown(name).message}", ctx)
    if not (context.values.get("nsqd_http_address") or context.values.get("lookupd_http_address")):
        raise click.UsageError(
            f"--fleet: the context {name} has no address of HTTP. Add one: qcli context save {name} "
            "--nsqd-http-address HOST:PORT",
            ctx,
        )
    return context


def _tls_files(connection: ConnectOptions, values: dict[str, Any]) -> Any:
    from trio_nsq.client.connection.tls import TLSFiles

    given = connection.tls_files()
    of_nsqadmin = [values[f"http_client_tls_{name}"] for name in _TLS_NAMES]
    return TLSFiles(
        given.root_ca_file or of_nsqadmin[0],
        given.cert or of_nsqadmin[1],
        given.key or of_nsqadmin[2],
        given.skip_verify or of_nsqadmin[3] is True or of_nsqadmin[3] == "true",
    )
