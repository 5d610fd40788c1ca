"""The settings of TLS and authentication that all servers have. Each call returns new settings: they get a heading."""

import click

from .. import params
from . import kinds
from .setting import Setting


def certificate_settings() -> list[Setting]:
    return [
        Setting("tls-cert", kinds.FILE, help="Offer TLS with the certificate and chain in this PEM file."),
        Setting("tls-key", kinds.FILE, help="Read its key from this PEM file."),
    ]


def tls_client_settings(also_for: str = "") -> list[Setting]:
    """Return the settings of clients' certificates and of TLS versions.

    Args:
        also_for: What the CAs are also for, such as `, and for authorization services`.
    """
    return [
        Setting(
            "tls-client-auth-policy",
            kinds.Kind(params.Word(["require", "require-verify", "verify-if-given"], empty=""), None),
            "",
            help="require: clients need a certificate from any CA. require-verify: from a CA in "
            "--tls-root-ca-file. Either one implies --tls-required. verify-if-given: a certificate is optional, but "
            "must be from such a CA.",
            brief=True,
        ),
        Setting(
            "tls-root-ca-file",
            kinds.FILE,
            help=f"Trust the CAs in this PEM file, for clients' certificates{also_for}. By default the system's CAs "
            "are trusted.",
            brief=True,
        ),
        Setting(
            "tls-min-version",
            kinds.Kind(params.Word(["tls1.0", "tls1.1", "tls1.2", "tls1.3"], empty="tls1.2"), None),
            "tls1.2",
            help="Refuse older versions of TLS. nsqd's default is the obsolete tls1.0.",
            brief=True,
        ),
    ]


def auth_file_setting() -> Setting:
    return Setting(
        "auth-file",
        kinds.FILE,
        help="Require a token; this file has its roles. See 'qcli token'.",
    )


def http_access_settings(changes: str = "") -> list[Setting]:
    """Return the settings of the HTTP API.

    Args:
        changes: Which requests count as changes, such as `, also publishes`.
    """
    return [
        Setting(
            "http-read-only",
            kinds.BOOLEAN,
            "false",
            help=f"Refuse HTTP requests that change something{changes}.",
            brief=True,
        ),
        Setting(
            "http-allowed-host",
            kinds.HOST_PATTERN,
            field="http_allowed_hosts",
            multiple=True,
            help="Accept HTTP requests of browsers for this host name too, such as an alias of this machine; "
            "'*.example.com' for all below it. Always accepted: IP addresses, this machine's name, "
            "--broadcast-address, and names in no public top-level domain. '*' accepts all names, and with them "
            "DNS rebinding by web pages.",
            brief=True,
        ),
    ]


def audit_log_setting() -> Setting:
    return Setting(
        "audit-log",
        kinds.Kind(click.Path(dir_okay=False, allow_dash=True), "FILE|-", writes=True),
        "",
        help="Append a line of JSON to this file for each administrative action, failed login and refusal; - is "
        "standard output. Opened again at SIGHUP.",
        brief=True,
    )
