"""Runs a server: its log, in nsqd's format, what SIGHUP reloads, the file of its addresses, and its end by signals."""

import dataclasses
import gc
import json
import logging
import os
from collections.abc import Awaitable, Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import trio
from click.core import ParameterSource

from trio_nsq.wording import printable

from ..command import alike
from ..errors import Failure
from ..go_flags import REPEATED
from ..output import print_diagnostic
from ..signals import watch_hangups, watch_signals
from .config_file import ConfigFile, read_config
from .setting import LOG_LEVELS, Setting

_LIBRARY = "trio_nsq"


def run_server(
    ctx: click.Context,
    serve: Callable[..., Awaitable[None]],
    options: Any,
    logger: str,
    describe: Callable[[Any], str],
    reload: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Run a server until SIGINT or SIGTERM.

    Args:
        ctx: Of the command, with values for `log_level`, `log_prefix`, `address_file` and `config`.
        serve: Runs it until cancelled; called with the options and `task_status`, which is told the bound addresses,
            a dataclass.
        options: See `serve`.
        logger: The name of the server's logger.
        describe: Makes the rest of the line that says that it is ready, from the addresses.
        reload: Called for each SIGHUP, after the log level was reloaded.

    Raises:
        Failure: The file of addresses cannot be written.
    """
    _log_to_stderr(LOG_LEVELS[ctx.params["log_level"]], ctx.params["log_prefix"])
    config: ConfigFile | None = ctx.params["config"]
    log = logging.getLogger(logger)
    _log_ignored_settings(ctx, config, log)

    async def reload_all() -> None:
        _reload_log_level(ctx, config, log)
        if reload is not None:
            await reload()

    trio.run(_run, serve, options, ctx.params["address_file"], describe, reload_all)


async def _run(
    serve: Callable[..., Awaitable[None]],
    options: Any,
    address_file: Path | None,
    describe: Callable[[Any], str],
    reload: Callable[[], Awaitable[None]],
) -> None:
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
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.write_text(json.dumps(dataclasses.asdict(bound)) + "\n")
        temporary.replace(path)
    except OSError as error:
        raise Failure(f"--address-file: cannot write {path}: {os.strerror(error.errno or 0)}.") from error


def _log_ignored_settings(ctx: click.Context, config: ConfigFile | None, logger: logging.Logger) -> None:
    """Log which options have no effect or were repeated, and which keys of the configuration file mean nothing."""
    for text in ctx.meta.get(REPEATED, ()):
        logger.warning("%s: the last value counts", text)
    settings = [param for param in ctx.command.params if isinstance(param, Setting)]
    for setting in settings:
        if setting.ignored and ctx.get_parameter_source(setting.name) is not ParameterSource.DEFAULT:
            logger.warning("%s has no effect here: %s", setting.opts[0], setting.ignored)
    keys = {name: setting.key for setting in settings for name in (setting.key, setting.name or "")}
    for key in config.unknown if config else ():
        near = alike(key.replace("-", "_"), list(keys))
        hint = f" (did you mean {keys[near]}?)" if near else ""
        logger.warning("configuration: the key %s is not known%s", key, hint)


def _reload_log_level(ctx: click.Context, config: ConfigFile | None, logger: logging.Logger) -> None:
    """Read the configuration file again and use its log level, unless a flag or the environment says another.

    Logs what it did, why it could not, and which other values have changed: these hold after a restart.
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
        logging.getLogger(_LIBRARY).setLevel(LOG_LEVELS[word])
        logger.info("reload: the log level is %s", word)
    for name in sorted(config.values.keys() | new.values.keys()):
        if name != "log_level" and config.values.get(name) != new.values.get(name):
            key = settings[name].key
            logger.warning("reload: %s has changed in %s: restart to use it", key, config.path)


class NsqdFormatter(logging.Formatter):
    """`{prefix}YYYY/MM/DD hh:mm:ss.uuuuuu LEVEL: text`, in local time.

    Attributes:
        prefix: What every line begins with; the broker tells it to those who ask over HTTP.
    """

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix

    def formatMessage(self, record: logging.LogRecord) -> str:
        """One line, whatever strangers sent; a traceback, if there is one, is put below by the caller."""
        time = datetime.fromtimestamp(record.created).strftime("%Y/%m/%d %H:%M:%S.%f")
        level = "FATAL" if record.levelno >= logging.CRITICAL else record.levelname
        return f"{self.prefix}{time} {level}: {printable(record.message)}"

    def formatException(self, ei: Any) -> str:
        """The traceback, whose last line may repeat what a stranger sent."""
        return printable(super().formatException(ei), keep="\n")


class _StderrHandler(logging.Handler):
    """Standard error may be a pipe whose reader is gone; the broker does not stop for that."""

    def emit(self, record: logging.LogRecord) -> None:
        print_diagnostic(self.format(record))


def _log_to_stderr(level: int, prefix: str) -> None:
    """Send what the library logs at this level and above to standard error."""
    handler = _StderrHandler()
    handler.setFormatter(NsqdFormatter(prefix))
    logger = logging.getLogger(_LIBRARY)
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
