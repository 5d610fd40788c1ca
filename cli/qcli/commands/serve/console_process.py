"""The process of the console beside a broker: `python -m qcli.commands.serve.console_process`, started by the broker.

Its first line on standard input has its options; each further line makes it read its files again. The end of standard
input is the end of the broker. The broker alone ends the process and has it read its files again: signals also reach it
if they are sent to all processes of a service or a container, and are then for the broker.
"""

import signal

if __name__ == "__main__":  # before the other imports, during which signals may arrive
    for _number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(_number, signal.SIG_IGN)

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import trio

from trio_nsq.access.secret import Secret
from trio_nsq.client.connection.tls import TLSFiles
from trio_nsq.console.options import ConsoleOptions
from trio_nsq.console.server import serve
from trio_nsq.protocol.errors import StartupError
from trio_nsq.server.listening import Listening

from ...framework.daemon.log_format import log_to_stderr
from ...framework.daemon.run import raise_file_limit
from ...framework.daemon.setting import LOG_LEVELS
from ...framework.errors import ExitCode, Failure, leaf_exceptions
from ...framework.output import print_diagnostic
from ..admin.beside import read_console_config

_STOP_S = 2.0
"""Time for an orderly end; then the process ends at once."""


def main() -> int:
    """Run the console until standard input ends."""
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return ExitCode.OK  # the broker has ended
    setup = json.loads(line)
    log = setup["log"]
    log_to_stderr(LOG_LEVELS[log["level"]], log["prefix"], log["form"])
    raise_file_limit()
    try:
        trio.run(_run, setup)
    except* (StartupError, Failure) as group:
        print_diagnostic(f"Error: the console cannot start: {leaf_exceptions(group)[0]}")
        sys.exit(ExitCode.FAILURE)
    return ExitCode.OK


async def _run(setup: dict[str, Any]) -> None:
    listening = Listening([_listener(fd) for fd in setup["fds"]])
    send, receive = trio.open_memory_channel[None](1)
    soon = trio.lowlevel.current_trio_token().run_sync_soon

    def reload() -> None:
        with suppress(trio.WouldBlock):  # it is about to read them
            send.send_nowait(None)

    with trio.CancelScope() as scope:
        threading.Thread(
            target=_watch_broker, args=(partial(soon, reload), partial(soon, scope.cancel)), daemon=True
        ).start()
        await serve(_options(setup), listening=listening, reloads=receive)


def _listener(fd: int) -> trio.SocketListener:
    return trio.SocketListener(trio.socket.from_stdlib_socket(socket.socket(fileno=fd)))


def _watch_broker(reload: Callable[[], None], end: Callable[[], None]) -> None:
    """Wait until the broker closes the pipe, and end the process, also if its event loop hangs."""
    with suppress(trio.RunFinishedError):
        while sys.stdin.buffer.readline():
            reload()
        end()
    time.sleep(_STOP_S)
    os._exit(ExitCode.FAILURE)


def _options(setup: dict[str, Any]) -> ConsoleOptions:
    broker, cert, key = setup["broker"], setup["https_cert"], setup["https_key"]
    own = read_console_config(Path(setup["config"]) if setup["config"] else None)
    return replace(
        own,
        http_address=setup["http_address"],
        nsqd_http_addresses=(broker,),
        # The broker's own address: no other machine answers there, and its certificate has other names.
        tls=TLSFiles(skip_verify=broker.startswith("https://")),
        secret=Secret(setup["token"], setup["secret_file"]),
        session_key=b"" if own.session_key_file else bytes.fromhex(setup["session_key"]),
        http_allowed_hosts=(*own.http_allowed_hosts, *setup["http_allowed_hosts"]),
        https_cert=Path(cert) if cert else None,
        https_key=Path(key) if key else None,
    )


if __name__ == "__main__":
    sys.exit(main())
