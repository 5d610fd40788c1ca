"""`qcli admin`: the web console."""

from __future__ import annotations

from typing import Any

import click

from ...broker.connection_options import http_connection
from ...framework.daemon.checking import CHECK_CONFIG, check_config
from ...framework.daemon.config_file import CONFIG
from ...framework.errors import ExitCode, Failure
from ...framework.go_flags import GoFlagsCommand
from ...framework.options import version_option
from .settings import SETTINGS, console_options


@click.command(
    "admin",
    cls=GoFlagsCommand,
    params=[CONFIG, CHECK_CONFIG, *SETTINGS],
    short_help="Run the web console.",
    examples={
        "show the broker on this machine": "qcli admin",
        "show all brokers of a discovery service": "qcli admin --lookupd-http-address 127.0.0.1:4161",
        "show the fleet of a context": "qcli --context prod admin",
        "show the fleets of two contexts, and switch between them": "qcli admin --fleet production --fleet staging",
        "serve the network over HTTPS, with logins": "qcli admin --http-address 0.0.0.0:4171 --https-cert cert.pem "
        "--https-key key.pem --auth-file auth.toml",
        "use nsqadmin's configuration file": "qcli admin --config /etc/nsqadmin.cfg",
        "start a broker with its console": "qcli serve --data-path ./data --admin",
    },
    exits={
        ExitCode.OK: "SIGINT or SIGTERM stopped the console in an orderly way; or --check-config found no problem.",
        ExitCode.FAILURE: "The console could not start (an address is in use, a file cannot be read, a package is "
        "missing), or it failed.",
        ExitCode.USAGE: "The command line or an environment variable is wrong.",
        ExitCode.INTERRUPTED: "A second signal, SIGINT, stopped the console at once.",
        ExitCode.TERMINATED: "A second signal, SIGTERM, stopped the console at once.",
    },
    details={
        "Brokers": "The brokers may be of this project, NSQ's own nsqd, or both. nsqd cannot show messages, move a "
        "channel, list deferred messages or dead letters: pages say so.",
        "Logins": "If a broker requires tokens, viewers log in with a token of the brokers' auth file, and see and do "
        "what its roles allow: the console sends the viewer's token with each action. Its own token, "
        "--auth-secret-file, needs the role read on all topics. For brokers without tokens, --auth-file names "
        "the tokens of the console itself.",
        "Fleets": "With --fleet, one console serves several fleets. Each has its own pages, logins and rights; the "
        "switch shows the same page, such as a topic, of another fleet. A context's --title-color is the colour of its "
        "label. JSON API: /c/CONTEXT/api.",
        "OpenID Connect": "With --oidc-issuer, viewers log in with a provider, beside tokens, and --oidc-role says "
        "what the users in a group may do. The console checks this, and its own token, --auth-secret-file, acts for "
        "them at brokers with authentication, so it needs every role that they use. --check-config asks the provider "
        "for its endpoints and keys.",
        "State": "The console keeps only the charts of the last hour, in memory. Stopping it loses nothing else.",
        "JSON API": "/api and /config have the paths and answers of nsqadmin's API; "
        "docs/reference/differences.md lists the differences.",
        "Environment": "QCLI_ and the option's name in capitals with underscores sets an option. A flag overrides the "
        "environment, and the environment overrides the configuration file.",
        "Reloading": "At SIGHUP the console reads the auth file, the certificate and log_level in the configuration "
        "file again, and opens the audit log again. All other options need a restart.",
        "Configuration file": "TOML with nsqadmin's keys: the option with underscores. Unknown keys are logged and "
        "ignored.",
        "Differences from nsqadmin": "The default address is on the loopback interface; nsqadmin listens on all. "
        "Without an address of a broker or nsqlookupd, the broker at 127.0.0.1:4151 is shown.",
    },
)
@http_connection
@version_option
@click.pass_context
def command(ctx: click.Context, /, **values: Any) -> int:
    """Run a web console until SIGINT or SIGTERM.

    It replaces nsqadmin: it shows topics, channels, consumers, brokers and messages, and changes them. When it is
    ready, it writes a line with its URL to standard error.
    """
    try:
        from trio_nsq.console.server import serve
    except ModuleNotFoundError as error:
        from trio_nsq.platform.extras import install_hint

        raise Failure(f"The console needs the package {error.name}: {install_hint('admin')}") from error

    from ...framework.daemon.run import raise_file_limit, run_server

    if values["check_config"]:
        from trio_nsq.console.startup_check import startup_problems

        return check_config(
            ctx, values["address_file"], lambda: startup_problems(*console_options(ctx, values))
        )
    options, *others = console_options(ctx, values)
    raise_file_limit()

    async def serve_all(first: Any, **more: Any) -> None:
        await serve(first, *others, **more)

    run_server(ctx, serve_all, options, "trio_nsq.console", lambda bound: str(bound.url))
    return ExitCode.OK
