"""The configuration file of a server: TOML with the keys of NSQ's.

Its values are made into the text that a flag would have, so that both are checked and converted by the same code; click
then puts flags before the environment, and that before the file.
"""

import json
import tomllib
from pathlib import Path
from typing import NamedTuple

import click

from ..errors import Failure
from . import kinds
from .setting import Setting


class ConfigFile(NamedTuple):
    """What stands in a configuration file."""

    values: dict[str, str | list[str]]
    """Texts by the name of the parameter, in the form in which click takes them as defaults."""
    unknown: list[str]
    """Keys that mean nothing."""
    path: Path
    """Where it is."""


def read_config(ctx: click.Context, path: Path) -> ConfigFile:
    """Read a file. Raises Failure: it cannot be read, is not TOML, or a value is none of its key's."""
    try:
        with open(path, "rb") as file:
            data = tomllib.load(file)
    except OSError as error:
        raise Failure(f"--config: cannot read {path}: {error.strerror}.") from error
    except ValueError as error:  # TOMLDecodeError or UnicodeDecodeError
        raise Failure(f"--config: {path} is not valid TOML: {error}.") from error
    settings = {
        param.key: param for param in ctx.command.params if isinstance(param, Setting) and param is not CONFIG
    }
    config = ConfigFile({}, [key for key in data if key not in settings], path)
    for key, value in data.items():
        if key in settings:
            setting = settings[key]
            try:
                text = _as_text(setting, value)
                setting.type_cast_value(ctx, text)
            except click.BadParameter as error:
                raise Failure(f"--config: {path}: {key}: {error.message}") from error
            assert setting.name
            config.values[setting.name] = text
    return config


def _as_text(setting: Setting, value: object) -> str | list[str]:
    if not setting.multiple:
        return _one_as_text(setting, value)
    if isinstance(value, str):
        # nsqd takes one string with commas too.
        return value.split(",") if value else []
    if not isinstance(value, list):
        raise click.BadParameter(f"{_shown(value)} is not a list, each value {setting.kind.wanted}.")
    return [_one_as_text(setting, each) for each in value]


def _one_as_text(setting: Setting, value: object) -> str:
    # Not isinstance, for which a bool is an integer.
    if type(value) not in setting.kind.toml:
        raise click.BadParameter(f"{_shown(value)} is not {setting.kind.wanted}.")
    return value if isinstance(value, str) else f"{value}{setting.kind.unit}"


def _shown(value: object) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)


def _use(ctx: click.Context, _param: click.Parameter, path: Path | None) -> ConfigFile | None:
    if path is None:
        return None
    config = read_config(ctx, path)
    ctx.default_map = config.values
    return config


CONFIG = Setting(
    "config",
    kinds.FILE,
    section="Configuration",
    is_eager=True,
    callback=_use,
    help="A TOML file with values for all other options; that of NSQ's own server will do. See below.",
)
"""Makes what the file says the defaults of the other options, before those are looked at."""
