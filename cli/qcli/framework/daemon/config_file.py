"""The configuration file of a server: TOML with the keys of NSQ's.

Values are converted to the text of a flag, so that the same code checks and converts both. click then prefers flags to
the environment, and the environment to the file.
"""

import json
import tomllib
from pathlib import Path
from typing import NamedTuple

import click

from ..errors import Failure
from . import kinds
from .setting import PROBLEMS, Problem, Setting, settings_of


class ConfigFile(NamedTuple):
    """The contents of a configuration file."""

    values: dict[str, str | list[str]]
    """Values as text, by the parameter's name, as click takes them as defaults."""
    unknown: list[str]
    """Keys that no setting has."""
    path: Path
    """The file's path."""


def read_config(
    ctx: click.Context, path: Path, problems: list[Problem] | None = None, *, flag: str = "--config"
) -> ConfigFile:
    """Read a file.

    Args:
        ctx: The context of the command that has the settings.
        path: The file.
        problems: Gets the values that are not valid for their keys; these are left out. None: they raise Failure.
        flag: The option that names the file, for errors.

    Raises Failure: it cannot be read, is not TOML, or a value is not valid for its key.
    """
    try:
        with open(path, "rb") as file:
            data = tomllib.load(file)
    except OSError as error:
        raise Failure(f"{flag}: cannot read {path}: {error.strerror}.") from error
    except ValueError as error:  # TOMLDecodeError or UnicodeDecodeError
        raise Failure(f"{flag}: {path} is not valid TOML: {error}.") from error
    settings = {param.key: param for param in settings_of(ctx) if param is not CONFIG}
    config = ConfigFile({}, [key for key in data if key not in settings], path)
    for key, value in data.items():
        if key in settings:
            setting = settings[key]
            try:
                text = _as_text(setting, value)
                setting.type_cast_value(ctx, text)
            except click.BadParameter as error:
                failure = Failure(f"{flag}: {path}: {key}: {error.message}")
                if problems is None:
                    raise failure from error
                problems.append(Problem(failure.exit_code, failure.message))
                continue
            assert setting.name
            config.values[setting.name] = text
    return config


def _as_text(setting: Setting, value: object) -> str | list[str]:
    if not setting.multiple:
        return _one_as_text(setting, value)
    if isinstance(value, str):
        # nsqd also accepts one string with commas.
        return value.split(",") if value else []
    if not isinstance(value, list):
        raise click.BadParameter(f"{_shown(value)} is not a list, each value {setting.kind.wanted}.")
    return [_one_as_text(setting, each) for each in value]


def _one_as_text(setting: Setting, value: object) -> str:
    # isinstance would accept a bool as an integer.
    if type(value) not in setting.kind.toml:
        raise click.BadParameter(f"{_shown(value)} is not {setting.kind.wanted}.")
    return value if isinstance(value, str) else f"{value}{setting.kind.unit}"


def _shown(value: object) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)


def _use(ctx: click.Context, _param: click.Parameter, path: Path | None) -> ConfigFile | None:
    if path is None:
        return None
    config = read_config(ctx, path, ctx.meta.get(PROBLEMS))
    # Values of a context, which is processed before or after, are the defaults of both.
    ctx.default_map = {**(ctx.default_map or {}), **config.values}
    return config


CONFIG = Setting(
    "config",
    kinds.FILE,
    section="Configuration",
    is_eager=True,
    callback=_use,
    help="Read options from this TOML file, such as that of NSQ's own server.",
)
"""Makes the values of the file the defaults of the other options, before click processes those."""
