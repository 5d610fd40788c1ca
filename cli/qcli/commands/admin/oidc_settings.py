"""The settings of `qcli admin` for logins with an OpenID Connect provider."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ...framework.daemon import kinds
from ...framework.daemon.setting import PROBLEMS, Setting

if TYPE_CHECKING:
    from trio_nsq.console.oidc.options import OIDCOptions


def issuer(text: str) -> str:
    """Check the URL of a provider; empty: none."""
    from trio_nsq.console.oidc.options import check_issuer

    try:
        return check_issuer(text) if text else ""
    except ValueError as error:
        raise click.BadParameter(f"{error}.") from error


def redirect_url(text: str) -> str:
    """Check the URL to which the provider sends browsers back; empty: none."""
    from trio_nsq.console.oidc.options import CALLBACK

    if text and not issuer(text).endswith(CALLBACK):
        raise click.BadParameter(f"{text!r} does not end with {CALLBACK}.")
    return text


def group_role(text: str) -> str:
    """Check what a group may do."""
    from trio_nsq.console.oidc.options import parse_group_grant

    try:
        parse_group_grant(text)
    except ValueError as error:
        raise click.BadParameter(f"{error}.") from error
    return text


OIDC_SETTINGS = (
    Setting(
        "oidc-issuer",
        kinds.Kind(issuer, "URL"),
        "",
        help="Let viewers log in with this OpenID Connect provider: its issuer.",
    ),
    Setting("oidc-client-id", kinds.TEXT, "", help="The id of the console at the provider.", brief=True),
    Setting(
        "oidc-client-secret-file",
        kinds.FILE,
        help="Send the first line of this file as the secret of the console. Without it, the console is a public "
        "client.",
        brief=True,
    ),
    Setting(
        "oidc-role",
        kinds.Kind(group_role, "GROUP=ROLES[@TOPIC]"),
        field="oidc_roles",
        multiple=True,
        help="Give these roles to the users in a group of the provider: ops=read+publish+manage, or all. @TOPIC "
        "limits them to topics, with * for any characters: billing=read+manage@invoices-*. The group * is every user. "
        "May be repeated. Users without a role cannot log in.",
        brief=True,
    ),
    Setting(
        "oidc-groups-claim",
        kinds.TEXT,
        "groups",
        help="Read the groups of a user from this claim of the ID token or of the userinfo endpoint.",
        brief=True,
    ),
    Setting(
        "oidc-scopes",
        kinds.TEXT,
        "openid profile email",
        help="Ask for these scopes, with blanks between them. Some providers need one more for groups.",
        brief=True,
    ),
    Setting(
        "oidc-name",
        kinds.TEXT,
        "",
        help="Call the provider this on the login page. By default its host name.",
        brief=True,
    ),
    Setting(
        "oidc-redirect-url",
        kinds.Kind(redirect_url, "URL"),
        "",
        help="Have the provider send browsers back to this URL, which ends with /oidc/callback. By default it is made "
        "of the host that the browser asked for.",
        brief=True,
    ),
    Setting(
        "oidc-root-ca-file",
        kinds.FILE,
        help="Trust the CAs in this PEM file for the provider. By default the system's CAs are trusted.",
        brief=True,
    ),
)


def oidc_options(ctx: click.Context, values: dict[str, Any]) -> OIDCOptions | None:
    """Return the options of the provider; None without one. Raises UsageError."""
    from trio_nsq.access.secret import Secret
    from trio_nsq.console.oidc.options import CALLBACK, MAX_GROUPS, OIDCOptions, parse_group_grant

    url, client_id = values["oidc_issuer"], values["oidc_client_id"]
    grants = tuple(map(parse_group_grant, values["oidc_roles"]))
    if not url:
        others = [setting.opts[0] for setting in OIDC_SETTINGS if _is_given(ctx, str(setting.name))]
        if others and not _is_given(ctx, "oidc_issuer"):
            raise click.UsageError(f"{others[0]} needs --oidc-issuer.", ctx)
        return None  # or --check-config has found that the URL is wrong
    if not client_id:
        raise click.UsageError("--oidc-issuer needs --oidc-client-id.", ctx)
    if not grants and ctx.meta.get(PROBLEMS) and _is_given(ctx, "oidc_roles"):
        return None  # --check-config has found that a role is wrong
    if not grants:
        raise click.UsageError(
            "--oidc-issuer needs --oidc-role, such as --oidc-role ops=read+manage: without a role, no user can log in.",
            ctx,
        )
    if len({each.group for each in grants}) > MAX_GROUPS:
        raise click.UsageError(f"--oidc-role: roles for more than {MAX_GROUPS} groups.", ctx)
    scopes = tuple(values["oidc_scopes"].split())
    if "openid" not in scopes:
        raise click.UsageError("--oidc-scopes needs openid.", ctx)
    path = values["base_path"].rstrip("/") + CALLBACK
    if values["oidc_redirect_url"] and not values["oidc_redirect_url"].endswith(path):
        raise click.UsageError(f"--oidc-redirect-url must end with {path}, because of --base-path.", ctx)
    return OIDCOptions(
        url,
        client_id,
        Secret(file=values["oidc_client_secret_file"]),
        values["oidc_name"],
        scopes,
        values["oidc_groups_claim"],
        grants,
        values["oidc_redirect_url"],
        values["oidc_root_ca_file"],
    )


def _is_given(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) is not ParameterSource.DEFAULT
