"""Runs a server: its log, reload and stop on signals, the address file, and messages to the service manager."""

import dataclasses
import gc
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import trio
from click.core import ParameterSource

from ..errors import ExitCode, Failure
from ..signals import at_first_signal, run_trio, watch_signal
from .config_file import ConfigFile, read_config
from .log_format import LIBRARY, log_to_stderr
from .notes import ignored_settings
from .setting import LOG_LEVELS, settings_of
from .used_files import check_used_files

if TYPE_CHECKING:
    from trio_nsq.server.startup_checks import OwnFiles

logger = logging.getLogger("trio_nsq")


def notify_ready(status: str) -> None:
    """Say that the server is ready, and what it is doing, in a line for people.

    Like the other functions here, this does nothing unless the environment has NOTIFY_SOCKET. A failure is logged.
    """
    _notify(f"READY=1\nSTATUS={status}")


def notify_reloading() -> None:
    """Say that files are being read again. `notify_ready` ends that."""
    _notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")


def notify_stopping() -> None:
    """Say that the server is stopping."""
    _notify("STOPPING=1\nSTATUS=stopping")


def notify_alive() -> None:
    """Say that the server works; see `alive_interval_s`."""
    _notify("WATCHDOG=1")


def alive_interval_s() -> float | None:
    """Return how often to call `notify_alive`: twice in the service manager's timeout; None: it has none."""
    try:
        timeout_s = int(os.environ["WATCHDOG_USEC"]) / 1_000_000
        is_this = int(os.environ.get("WATCHDOG_PID", os.getpid())) == os.getpid()
    except (KeyError, ValueError):
        return None
    return timeout_s / 2 if is_this and timeout_s > 0 and os.environ.get("NOTIFY_SOCKET") else None


async def _notify_alive(interval_s: float) -> None:
    while True:
        notify_alive()
        await trio.sleep(interval_s)


def _notify(text: str) -> None:
    """Send one datagram. See sd_notify(3)."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):  # a socket without a file
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)  # a service manager that does not read must not stop the server
            sender.sendto(text.encode(), address)
    except OSError as error:
        logger.warning("NOTIFY_SOCKET %s: %s", os.environ["NOTIFY_SOCKET"], error.strerror)


_NEW_OBJECTS = 10_000
"""How many objects are created between two garbage collections; Python's default is 700. A round of publishers creates
thousands, and nearly all of them end without a collection."""


def run_server(
    ctx: click.Context,
    serve: Callable[..., Awaitable[None]],
    options: Any,
    logger: str,
    describe: Callable[[Any], str],
    *,
    own: "OwnFiles | None" = None,
    can_drain: bool = False,
) -> None:
    """Run a server until SIGINT or SIGTERM. At SIGHUP, read the log level again, then the server's files.

    Args:
        ctx: The command's context, with values of `LOG_SETTINGS`, `address_file` and `config`.
        serve: Runs the server until cancelled. It is called with the options, `reloads` (it reads its files again at
            each item) and `task_status`, which it starts with the bound addresses, a dataclass.
        options: The options for `serve`.
        logger: The name of the server's logger.
        describe: Returns the end of the "ready" line, from the bound addresses; empty: there is none, because another
            process tells it.
        own: Its data folder; None: it has none.
        can_drain: `serve` is also called with `drains`: it begins to drain at each item, which is sent at SIGUSR1.

    Raises:
        Failure: The address file cannot be written, or a file that the server writes has another use, too.
    """
    from trio_nsq.event_loop.monotonic_clock import MonotonicClock
    from trio_nsq.server.startup_checks import problems_of

    for problem in problems_of([partial(check_used_files, ctx, own)]):
        raise Failure(f"{problem}.")
    values = ctx.params
    log_line = log_to_stderr(LOG_LEVELS[values["log_level"]], values["log_prefix"], values["log_format"])
    config: ConfigFile | None = values["config"]
    log = logging.getLogger(logger)
    for text in ignored_settings(ctx, config):
        log.warning("%s", text)

    send, receive = trio.open_memory_channel[None](1)
    send_drain, drains = trio.open_memory_channel[None](1)

    async def reload() -> None:
        _reload_log_level(ctx, config, log)
        await send.send(None)

    async def drain() -> None:
        log.info("SIGUSR1: draining")
        await send_drain.send(None)

    with send, receive, send_drain, drains:
        serving = partial(serve, reloads=receive, **({"drains": drains} if can_drain else {}))
        actions = {signal.SIGUSR1: drain} if can_drain else {}
        args = serving, options, values["address_file"], describe, reload, actions, log_line
        run_trio(_run, *args, clock=MonotonicClock())


def raise_file_limit() -> None:
    """Raise the limit of open files as far as it goes: each client needs one."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # the limit stays lower, and with it the maximum of clients
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _run(
    serve: Callable[..., Awaitable[None]],
    options: Any,
    address_file: Path | None,
    describe: Callable[[Any], str],
    reload: Callable[[], Awaitable[None]],
    actions: Mapping[signal.Signals, Callable[[], Awaitable[None]]],
    log_line: Callable[[str], None],
) -> None:
    status = ""

    def stop(_code: ExitCode) -> None:
        notify_stopping()
        nursery.cancel_scope.cancel()

    async def reload_and_notify() -> None:
        is_ready = bool(status)  # a SIGHUP may also arrive during the start
        if is_ready:
            notify_reloading()
        await reload()
        if is_ready:
            notify_ready(status)

    if address_file is not None:
        # A program that waits for the file must not read that of an earlier server.
        address_file.unlink(missing_ok=True)
    try:
        async with trio.open_nursery() as nursery:
            at_first_signal(stop)
            for which, act in {signal.SIGHUP: reload_and_notify, **actions}.items():
                await nursery.start(watch_signal, which, act)
            bound = await nursery.start(serve, options)
            # Exclude the loaded state from garbage collection: with ten thousand channels, scanning it takes so long
            # that deliveries would be late.
            gc.collect()
            gc.freeze()
            gc.set_threshold(_NEW_OBJECTS)
            if address_file is not None:
                write_addresses(address_file, bound)
            status = describe(bound)
            if status:
                log_line(f"ready: {status}")
                notify_ready(status)
            if (interval_s := alive_interval_s()) is not None:
                nursery.start_soon(_notify_alive, interval_s)
    finally:
        if address_file is not None:
            address_file.unlink(missing_ok=True)


def write_addresses(path: Path, bound: Any) -> None:
    """Write a dataclass with addresses to a file, as JSON. Raises Failure."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.write_text(json.dumps(dataclasses.asdict(bound)) + "\n")
        temporary.replace(path)
    except OSError as error:
        raise Failure(f"--address-file: cannot write {path}: {os.strerror(error.errno or 0)}.") from error


def _reload_log_level(ctx: click.Context, config: ConfigFile | None, logger: logging.Logger) -> None:
    """Read the configuration file again and use its log level, unless a flag or the environment sets it.

    Logs the outcome, and which other values have changed: these take effect at a restart.
    """
    logger.info("SIGHUP: reading files again")
    if config is None:
        return
    try:
        new = read_config(ctx, config.path)
    except Failure as error:
        logger.error("reload: %s The earlier values stay in use.", error.message)
        return
    settings = {param.name or "": param for param in settings_of(ctx)}
    if ctx.get_parameter_source("log_level") not in (
        ParameterSource.COMMANDLINE,
        ParameterSource.ENVIRONMENT,
    ):
        setting = settings["log_level"]
        word = setting.type_cast_value(ctx, new.values.get("log_level", setting.default))
        logging.getLogger(LIBRARY).setLevel(LOG_LEVELS[word])
        logger.info("reload: the log level is %s", word)
    for name in sorted(config.values.keys() | new.values.keys()):
        if name != "log_level" and config.values.get(name) != new.values.get(name):
            key = settings[name].key
            logger.warning("reload: %s has changed in %s: restart to use it", key, config.path)
