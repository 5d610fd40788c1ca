"""Which settings of a server have no effect."""

from collections.abc import Iterator

import click
from click.core import ParameterSource

from ..command import alike
from ..go_flags import REPEATED
from .config_file import ConfigFile
from .setting import settings_of


def ignored_settings(ctx: click.Context, config: ConfigFile | None) -> Iterator[str]:
    """Yield which options have no effect or were repeated, and which keys of the configuration file are unknown."""
    yield from ineffective_settings(ctx)
    for text in unknown_keys(ctx, config):
        yield f"{text[0]} is ignored{text[1]}"


def ineffective_settings(ctx: click.Context) -> Iterator[str]:
    """Yield which options have no effect or were repeated."""
    for text in ctx.meta.get(REPEATED, ()):
        yield f"{text}: the last value is used"
    for setting in settings_of(ctx):
        if setting.ignored is None or ctx.params[setting.name or ""] is False:
            continue  # what is switched off may well have no effect
        if ctx.get_parameter_source(setting.name or "") is not ParameterSource.DEFAULT:
            yield f"{setting.opts[0]} has no effect here: {setting.ignored}"


def unknown_keys(ctx: click.Context, config: ConfigFile | None) -> Iterator[tuple[str, str]]:
    """Yield which keys of the configuration file are unknown, each with a hint, which may be empty."""
    keys = {name: setting.key for setting in settings_of(ctx) for name in (setting.key, setting.name or "")}
    for key in config.unknown if config else ():
        near = alike(key.replace("-", "_"), list(keys))
        hint = f" (did you mean {keys[near]}?)" if near else ""
        yield f"configuration: unknown key {key}", hint
