"""Which settings of a server have no effect."""

from collections.abc import Iterator

import click
from click.core import ParameterSource

from ..command import alike
from ..go_flags import REPEATED
from .config_file import ConfigFile
from .setting import Setting


def ignored_settings(ctx: click.Context, config: ConfigFile | None) -> Iterator[str]:
    """Yield which options have no effect or were repeated, and which keys of the configuration file are unknown."""
    for text in ctx.meta.get(REPEATED, ()):
        yield f"{text}: the last value is used"
    settings = [param for param in ctx.command.params if isinstance(param, Setting)]
    for setting in settings:
        if setting.ignored and ctx.get_parameter_source(setting.name) is not ParameterSource.DEFAULT:
            yield f"{setting.opts[0]} has no effect here: {setting.ignored}"
    keys = {name: setting.key for setting in settings for name in (setting.key, setting.name or "")}
    for key in config.unknown if config else ():
        near = alike(key.replace("-", "_"), list(keys))
        hint = f" (did you mean {keys[near]}?)" if near else ""
        yield f"configuration: unknown key {key} is ignored{hint}"
