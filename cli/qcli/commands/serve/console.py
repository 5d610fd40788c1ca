"""`qcli serve --admin`: runs the web console of one broker as a child process, which ends with the broker.

It is a process of its own, so that pages never delay the broker's event loop. The broker opens the console's listener
and passes it on: a port in use is an error at the start, and viewers can connect while the console is started again.
The child reads its options, with its token and the key of the session cookies, from a pipe; the end of this pipe is
the end of the broker, also if that was killed.
"""

import json
import logging
import secrets
import subprocess
import sys
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import trio

from trio_nsq.access.patterns import ALL, compile_glob
from trio_nsq.access.policy import ROLES, Grant, Identity, Role, token_digest
from trio_nsq.broker import BoundAddresses, BrokerOptions
from trio_nsq.console.options import ConsoleOptions
from trio_nsq.event_loop.retries import Delays
from trio_nsq.protocol.address import is_unix_path
from trio_nsq.protocol.errors import StartupError
from trio_nsq.server.listening import Listening, is_exposed, listen
from trio_nsq.server.startup_checks import check_different, check_listen_address, problems_of
from trio_nsq.tls.settings import requires_certificate

from ..admin.beside import read_console_config

logger = logging.getLogger("trio_nsq.broker")

FLAG = "--admin"
CHILD = "qcli.commands.serve.console_process"
RELOAD = b"reload\n"
_PACKAGES = ("starlette", "jinja2")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_STEADY_S = 60.0
"""After running for this long, the next end is followed by the shortest pause again."""
_STOP_S = 3.0
_SESSION_KEY_BYTES = 32
_NAME = "(console)"
"""Of its identity at the broker; no name in an auth file has parentheses."""


@dataclass(frozen=True, slots=True)
class BoundWithConsole(BoundAddresses):
    """The addresses of a broker and its console.

    Attributes:
        admin_address: `host:port`.
        admin_url: The first page.
    """

    admin_address: str = ""
    admin_url: str = ""


async def serve_with_console(
    options: BrokerOptions,
    *,
    serve: Callable[..., Awaitable[None]],
    admin: str,
    own: ConsoleOptions,
    config: Path | None,
    log: Mapping[str, str],
    secret_file: Path | None = None,
    reloads: AsyncIterable[object],
    drains: AsyncIterable[object],
    task_status: trio.TaskStatus[BoundWithConsole],
) -> None:
    """Run a broker and its console until cancelled.

    Args:
        options: Of the broker.
        serve: Runs the broker, as `trio_nsq.broker.serve` does.
        admin: Where the console listens.
        own: The options of the console that the broker does not give it.
        config: The file with these options, which the console reads; None: they are the defaults.
        log: The console's log options: `level`, `prefix` and `form`.
        secret_file: Has the token of the console; None: it gets a new one, which only this broker knows. In a cluster,
            another member may answer.
        reloads, drains: As for `serve`; the console also reads its files again.
        task_status: Receives the addresses when the broker is ready. The console is ready soon after.

    Raises:
        StartupError: The broker or the console cannot start.
    """
    check_possible(options)
    if config is not None:
        _check_files(config, own)
    token = secrets.token_urlsafe(32)
    there = await listen(FLAG, admin)
    try:
        secure = is_exposed(there.address) and options.tls_cert is not None
        console = _ConsoleProcess(
            there, token, options, secure=secure, config=config, log=log, secret_file=secret_file
        )
        trusted = {} if secret_file is not None else {token_digest(token.encode()): _identity(token, own)}
        async with trio.open_nursery() as nursery:

            async def run(*, task_status: trio.TaskStatus[BoundAddresses]) -> None:
                both = _reloads_of_both(reloads, console)
                await serve(options, reloads=both, drains=drains, trusted=trusted, task_status=task_status)

            bound = await nursery.start(run)
            nursery.start_soon(console.run, bound)
            url = f"{'https' if secure else 'http'}://{there.address}{own.base_path.rstrip('/')}/"
            task_status.started(BoundWithConsole(**asdict(bound), admin_address=there.address, admin_url=url))
    finally:
        there.close()


def console_problems(options: BrokerOptions, admin: str, config: Path | None) -> list[str]:
    """Return why the console could not start, for `--check-config`. Raises Failure: its file cannot be used."""

    def check() -> None:
        check_possible(options)

    def check_address() -> None:
        check_listen_address(FLAG, admin)
        check_different([("--http-address", options.http_address), (FLAG, admin)])

    found = problems_of([check, check_address])
    if find_spec("starlette") is None:
        return found
    from trio_nsq.console.startup_check import file_problems

    return found + file_problems(read_console_config(config))


def _check_files(config: Path, own: ConsoleOptions) -> None:
    """Raises StartupError: the console, which starts after the broker, could not use a file or an option.

    Its provider is not asked: a broker also starts while that is down.
    """
    from trio_nsq.console.startup_check import file_problems

    for problem in file_problems(own, asks_provider=False):
        raise StartupError(f"--admin-config: {config}: {problem}")


def check_possible(options: BrokerOptions) -> None:
    """Raises StartupError: a package is missing, or the console could not use the broker's HTTP API."""
    missing = next((name for name in _PACKAGES if find_spec(name) is None), None)
    if missing is not None:
        from trio_nsq.platform.extras import install_hint

        raise StartupError(f"{FLAG} needs the package {missing}: {install_hint('admin')}")
    if options.required_tls != "true":
        if not options.http_address:
            raise StartupError(f"{FLAG} uses the broker's HTTP API, which is off: give --http-address")
        return
    if not options.https_address:
        raise StartupError(f"{FLAG} uses the broker's HTTP API, which is off: give --https-address")
    if requires_certificate(options.tls_client_auth_policy):
        raise StartupError(
            f"{FLAG} has no client certificate, which --tls-client-auth-policy requires. Run the console "
            "on its own: qcli admin --tls-cert FILE --tls-key FILE"
        )


def _identity(token: str, console: ConsoleOptions) -> Identity:
    """Return the console's identity.

    It may read everything. Changes are sent with the tokens of viewers; those of viewers that the console itself knows,
    and whose rights it checks, are sent with its own token, which then may do everything.
    """
    every = (compile_glob(ALL),)
    roles = frozenset(ROLES) if console.knows_viewers else frozenset[Role]({"read"})
    grant = Grant(roles, every, every, everywhere=True, every_channel=True)
    return Identity(_NAME, "token", (grant,), key=token_digest(token.encode()))


async def _reloads_of_both(
    reloads: AsyncIterable[object], console: "_ConsoleProcess"
) -> AsyncIterator[object]:
    async for each in reloads:
        await console.reload()
        yield each


class _ConsoleProcess:
    """The console's process, started again when it ends.

    Args:
        there: Its listeners.
        token: Its token.
        options: Of the broker.
        secure: Serve HTTPS, with the broker's certificate.
        config: The file with its options; None: none.
        log: Its log options.
        secret_file: Has its token, instead of `token`; None: no file.
    """

    def __init__(
        self,
        there: Listening,
        token: str,
        options: BrokerOptions,
        *,
        secure: bool,
        config: Path | None,
        log: Mapping[str, str],
        secret_file: Path | None,
    ) -> None:
        needs_token = options.auth_file is not None or bool(options.auth_http_addresses)
        self._fds = [listener.socket.fileno() for listener in there.listeners]
        self._options = options
        self._setup: dict[str, Any] = {
            "fds": self._fds,
            "http_address": there.address,
            # Of all processes of the console, so that viewers stay logged in when it is started again.
            "session_key": secrets.token_hex(_SESSION_KEY_BYTES),
            "token": token if needs_token and secret_file is None else "",
            "secret_file": str(secret_file) if needs_token and secret_file is not None else None,
            "https_cert": str(options.tls_cert) if secure else None,
            "https_key": str(options.tls_key) if secure else None,
            "http_allowed_hosts": list(options.http_allowed_hosts),
            "config": str(config) if config is not None else None,
            "log": dict(log),
        }
        self._pipe: trio.abc.SendStream | None = None  # of a process that has its options

    async def reload(self) -> None:
        if self._pipe is not None:
            with trio.move_on_after(_STOP_S), suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await self._pipe.send_all(RELOAD)

    async def run(self, bound: BoundAddresses) -> None:
        setup = json.dumps(self._setup | {"broker": _address_for(self._options, bound)}).encode() + b"\n"
        pauses = Delays(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while True:
            began_s = trio.current_time()
            try:
                ending = f"exit status {await self._run_once(setup)}"
            except OSError as exc:
                ending = str(exc)
            if trio.current_time() - began_s > _STEADY_S:
                pauses.reset()
            # Before the message: a stop of both, as by systemd, is no reason for one.
            await trio.sleep(pauses.next_s())
            logger.warning("ADMIN: the console has ended (%s); starting it again", ending)

    async def _run_once(self, setup: bytes) -> int:
        # -P: modules in the current folder must not replace those of the program. Its own process group: signals of
        # the terminal are for the broker, which ends the console.
        process = await trio.lowlevel.open_process(
            [sys.executable, "-P", "-m", CHILD],
            stdin=subprocess.PIPE,
            pass_fds=self._fds,
            process_group=0,
        )
        assert process.stdin is not None
        try:
            with suppress(trio.BrokenResourceError):  # it has ended already
                await process.stdin.send_all(setup)
                self._pipe = process.stdin
            return await process.wait()
        finally:
            self._pipe = None
            with trio.CancelScope(shield=True):
                await process.stdin.aclose()
                with trio.move_on_after(_STOP_S):
                    await process.wait()
                if process.returncode is None:
                    process.kill()
                    await process.wait()


def _address_for(options: BrokerOptions, bound: BoundAddresses) -> str:
    """Return the address by which the console reaches the broker's HTTP API."""
    if options.required_tls == "true":
        assert bound.https_address is not None  # checked before the start
        return "https://" + _reachable(bound.https_address)
    assert bound.http_address is not None
    return bound.http_address if is_unix_path(bound.http_address) else _reachable(bound.http_address)


def _reachable(address: str) -> str:
    """Return a bound address, with loopback instead of every interface."""
    host, _, port = address.rpartition(":")
    return f"{ {'0.0.0.0': '127.0.0.1', '[::]': '[::1]'}.get(host, host) }:{port}"
