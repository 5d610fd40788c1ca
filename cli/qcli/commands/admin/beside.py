"""The options of the console beside a broker: `qcli serve --admin-config FILE`, a file as of `qcli admin --config`."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ...framework.daemon.config_file import read_config
from ...framework.daemon.setting import LOG_SETTINGS, fields_of
from ...framework.errors import Failure
from .oidc_settings import oidc_options
from .settings import SETTINGS

if TYPE_CHECKING:
    from trio_nsq.console.options import ConsoleOptions

FLAG = "--admin-config"
_OF_THE_BROKER = {
    "address_file",
    "fleets",
    "http_address",
    "https_cert",
    "https_key",
    "lookupd_allowed_hosts",
    "lookupd_http_addresses",
    "nsqd_http_addresses",
    *(f"http_client_tls_{name}" for name in ("root_ca_file", "cert", "key", "insecure_skip_verify")),
    *(setting.name for setting in LOG_SETTINGS),
}
"""The settings that the broker gives its console."""


def read_console_config(path: Path | None) -> ConsoleOptions:
    """Return the options of the console in a file, without those that the broker gives; None: the defaults.

    The environment and contexts do not count: the broker has the same names for its own options.

    Raises Failure: the file cannot be read, or a key or a value is wrong.
    """
    from trio_nsq.console.options import ConsoleOptions

    if path is None:
        return ConsoleOptions()
    ctx = click.Context(click.Command("admin", params=[*SETTINGS]), info_name="admin")
    config = read_config(ctx, path, flag=FLAG)
    if config.unknown:
        raise Failure(f"{FLAG}: {path}: {config.unknown[0]!r} is no option of 'qcli admin'.")
    for setting in SETTINGS:
        if setting.name in config.values and setting.name in _OF_THE_BROKER:
            raise Failure(f"{FLAG}: {path}: {setting.key}: the broker gives this to its console. Remove it.")
    values: dict[str, Any] = {}
    for setting in SETTINGS:
        assert setting.name is not None
        is_given = setting.name in config.values
        ctx.set_parameter_source(
            setting.name, ParameterSource.DEFAULT_MAP if is_given else ParameterSource.DEFAULT
        )
        values[setting.name] = setting.process_value(
            ctx, config.values[setting.name] if is_given else setting.default
        )
    try:
        oidc = oidc_options(ctx, values)
    except click.UsageError as error:
        raise Failure(f"{FLAG}: {path}: {error.format_message()}") from error
    found = fields_of(ConsoleOptions, values)
    default = ConsoleOptions()
    kept = {each.name: getattr(default, each.name) for each in fields(default) if each.name in _OF_THE_BROKER}
    return ConsoleOptions(**found | kept | {"oidc": oidc})
