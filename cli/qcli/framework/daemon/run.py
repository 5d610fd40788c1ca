"""Runs a server: logs ignored settings, reloads on SIGHUP, stops on signals, writes the file of addresses."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ..command import alike
from ..errors import Failure
from ..go_flags import REPEATED
from ..output import print_diagnostic
from .config_file import ConfigFile, read_config
from .setting import LOG_LEVELS, Setting

if TYPE_CHECKING:
    import logging


def log_ignored_settings(ctx: click.Context, config: ConfigFile | None, logger: logging.Logger) -> None:
    """Log which options have no effect or were repeated, and which keys of the configuration file mean nothing.

    Args:
        ctx: Of the command.
        config: The file, if there is one.
        logger: The server's, so that its level holds.
    """
    for text in ctx.meta.get(REPEATED, ()):
        logger.warning("%s: the last value counts", text)
    for setting in ctx.command.params:
        if (
            isinstance(setting, Setting)
            and setting.ignored
            and ctx.get_parameter_source(setting.name) is not ParameterSource.DEFAULT
        ):
            logger.warning("%s has no effect here: %s", setting.opts[0], setting.ignored)
    settings = [param for param in ctx.command.params if isinstance(param, Setting)]
    keys = {name: setting.key for setting in settings for name in (setting.key, setting.name or "")}
    for key in config.unknown if config else ():
        near = alike(key.replace("-", "_"), list(keys))
        hint = f" (did you mean {keys[near]}?)" if near else ""
        logger.warning("configuration: the key %s is not known%s", key, hint)


def reload_log_level(ctx: click.Context, config: ConfigFile | None, logger: logging.Logger) -> None:
    """Read the configuration file again and use its log level, unless a flag or the environment says another.

    Logs what it did, why it could not, and which other values have changed: these hold after a restart.

    Args:
        ctx: Of the command.
        config: The file as it was read at the start; None: there is none, and nothing is done.
        logger: The server's.
    """
    logger.info("SIGHUP: reading files again")
    if config is None:
        return
    try:
        new = read_config(ctx, config.path)
    except Failure as error:
        logger.error("reload: %s What was read before stays in use.", error.message)
        return
    settings = {param.name or "": param for param in ctx.command.params if isinstance(param, Setting)}
    if ctx.get_parameter_source("log_level") not in (
        ParameterSource.COMMANDLINE,
        ParameterSource.ENVIRONMENT,
    ):
        setting = settings["log_level"]
        word = setting.type_cast_value(ctx, new.values.get("log_level", setting.default))
        import logging  # not needed to show help

        logging.getLogger("trio_nsq").setLevel(LOG_LEVELS[word])
        logger.info("reload: the log level is %s", word)
    for name in sorted(config.values.keys() | new.values.keys()):
        if name != "log_level" and config.values.get(name) != new.values.get(name):
            key = settings[name].key
            logger.warning("reload: %s has changed in %s: restart to use it", key, config.path)


async def run_server(
    serve: Callable[..., Awaitable[None]],
    options: Any,
    address_file: Path | None,
    describe: Callable[[Any], str],
    reload: Callable[[], Awaitable[None]],
) -> None:
    """Run a server until SIGINT or SIGTERM.

    Args:
        serve: Runs it until cancelled; called with the options and `task_status`, which is told the bound addresses,
            a dataclass.
        options: See `serve`.
        address_file: Where the addresses are written once it is ready; removed at the end. None: nowhere.
        describe: Makes the rest of the line that says that it is ready, from the addresses.
        reload: Called for each SIGHUP.

    Raises:
        Failure: The file cannot be written.
    """
    import gc

    import trio

    from ..signals import watch_hangups, watch_signals

    if address_file is not None:
        # Whoever waits for the file must not find that of an earlier server.
        address_file.unlink(missing_ok=True)
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(watch_signals, lambda _code: nursery.cancel_scope.cancel())
            await nursery.start(watch_hangups, reload)
            bound = await nursery.start(serve, options)
            # What the server has loaded stays: the garbage collector need not look through it again and again, which
            # with ten thousand channels takes so long that their messages would be late.
            gc.collect()
            gc.freeze()
            if address_file is not None:
                _write_addresses(address_file, bound)
            print_diagnostic(f"ready: {describe(bound)}")
    finally:
        if address_file is not None:
            address_file.unlink(missing_ok=True)


def _write_addresses(path: Path, bound: Any) -> None:
    import json

    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.write_text(json.dumps(dataclasses.asdict(bound)) + "\n")
        temporary.replace(path)
    except OSError as error:
        raise Failure(f"--address-file: cannot write {path}: {os.strerror(error.errno or 0)}.") from error
