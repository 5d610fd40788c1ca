"""`--check-config`: collects what is wrong with the options and files of a server, instead of starting it."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ..errors import ExitCode, Failure
from ..options import GroupedOption
from ..output import print_diagnostic, write
from ..params import Word
from .config_file import ConfigFile
from .notes import ineffective_settings, unknown_keys
from .setting import PROBLEMS, Problem, Setting, settings_of
from .used_files import check_used_files

if TYPE_CHECKING:
    from trio_nsq.server.startup_checks import OwnFiles

_ONLY_CHECK, _SHOW = "true", "show"
_NO_LIMIT = {"retention_time": "forever", "retention_bytes": "unlimited"}

CHECK_CONFIG = GroupedOption(
    ["--check-config"],
    type=Word([_ONLY_CHECK, _SHOW]),
    alone=_ONLY_CHECK,
    metavar="[=show]",
    section="Configuration",
    help="Name what is wrong with options and files, and exit. show: list options.",
)
"""Checks instead of running the server; see `check_config`."""


def check_config(
    ctx: click.Context,
    address_file: Path | None,
    startup_problems: Callable[[], list[str]],
    own: "OwnFiles | None" = None,
) -> ExitCode:
    """Print all problems and notes to standard error, and the options if the user wants them.

    Args:
        ctx: The command's context.
        address_file: The file that gets the bound addresses.
        startup_problems: Returns what is wrong with the files and addresses of the options.
        own: The server's data folder; None: it has none.

    Returns:
        `USAGE` if the command line or the environment is wrong, `FAILURE` if something else is.
    """
    from trio_nsq.server.startup_checks import check_written_file, problems_of

    config: ConfigFile | None = ctx.params["config"]
    # A start only warns of unknown keys, as nsqd ignores them.
    problems = [Problem(ExitCode.USAGE, f"{text}{hint}.") for text, hint in unknown_keys(ctx, config)]
    problems += ctx.meta[PROBLEMS]
    for text in ineffective_settings(ctx):
        print_diagnostic(f"Warning: {text}")
    try:
        check_file = partial(check_written_file, "--address-file", address_file)
        separate = partial(check_used_files, ctx, own)
        found = [*problems_of([check_file, separate]), *startup_problems()]
        problems += [Problem(ExitCode.FAILURE, f"{text}.") for text in found]
    except Failure as failure:  # values contradict each other
        problems.append(Problem(failure.exit_code, failure.message))
    except click.UsageError as error:  # or belong together
        problems.append(Problem(ExitCode.USAGE, error.format_message()))
    for problem in dict.fromkeys(problems):
        print_diagnostic(f"Error: {problem.text}")
    if problems:
        return max(problem.code for problem in problems)
    if ctx.params["check_config"] == _SHOW:
        write("".join(_lines(ctx)))
    print_diagnostic("The configuration is valid.")
    return ExitCode.OK


def _lines(ctx: click.Context) -> Iterator[str]:
    """Yield the options in effect as lines of a configuration file, with their origin as a comment."""
    for param in settings_of(ctx):
        if param.name in (None, "config") or param.ignored:
            continue
        assert param.name is not None
        value = ctx.params[param.name]
        if value is None or value == ():
            continue
        if value == -1:
            value = _NO_LIMIT.get(param.key, value)
        yield f"{param.key} = {_toml(value)}  # {_origin(ctx, param)}\n"


def _origin(ctx: click.Context, param: Setting) -> str:
    config: ConfigFile | None = ctx.params["config"]
    is_of_map = ctx.get_parameter_source(param.name or "") is ParameterSource.DEFAULT_MAP
    return str(config.path) if is_of_map and config and param.name in config.values else param.origin(ctx)


def _toml(value: Any) -> str:
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, Path):
        value = str(value)
    return json.dumps(value, ensure_ascii=False)
