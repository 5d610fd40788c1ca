"""A console in this process, brokers with auth files, and browsers."""

import json
import re
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import trio

from access.support import ALL_ROLES, AuthFile, Given, everything
from broker.support import PATIENCE_S, running_broker, until
from trio_nsq.access.secret import Secret
from trio_nsq.broker import BoundAddresses
from trio_nsq.console.options import ConsoleOptions
from trio_nsq.console.server import serve

_CSRF = re.compile(r'name="csrf" value="([^"]*)"')


def auth_file(folder: Path, name: str = "auth.toml") -> AuthFile:
    """Tokens: `console` for the console, `admin` with all roles, `web` that reads and manages `clicks` only."""
    file = AuthFile(folder / name)
    file.add_token("console", everything("read"))
    file.add_token("admin", everything(*ALL_ROLES))
    file.add_token("reader", everything("read"))
    file.add_token("web", Given(["read", "publish", "manage"], ["clicks"]))
    file.add_token("expired", everything(*ALL_ROLES), expires="2020-01-01T00:00:00Z")
    file.write()
    return file


@dataclass
class Site:
    """A running console. `root` is its first page, without a slash at the end."""

    root: str
    audit: Path

    @asynccontextmanager
    async def browser(self, **more: Any) -> AsyncIterator["Browser"]:
        """A browser with cookies of its own."""
        async with httpx.AsyncClient(base_url=self.root, timeout=PATIENCE_S, **more) as client:
            yield Browser(client, self.root)

    def audited(self) -> list[dict[str, Any]]:
        """The lines of the audit log."""
        return [json.loads(line) for line in self.audit.read_text().splitlines()]

    async def await_audited(self, event: str) -> dict[str, Any]:
        """Wait for a line about an event, and return it."""
        found: list[dict[str, Any]] = []

        def is_there() -> bool:
            found[:] = [line for line in self.audited() if line["event"] == event]
            return bool(found)

        await until(is_there)
        return found[-1]


class Browser:
    """Sends what a browser sends from pages of the console."""

    def __init__(self, client: httpx.AsyncClient, root: str) -> None:
        self.client = client
        self._origin = root.partition("://")[0] + "://" + root.partition("://")[2].partition("/")[0]

    async def get(self, path: str, headers: Mapping[str, str] | None = None) -> httpx.Response:
        """Open a page."""
        return await self.client.get(path, headers=dict(headers or {}))

    async def csrf(self) -> str:
        """The token of the forms of this browser."""
        found = _CSRF.search((await self.get("/login")).text)
        return found[1] if found else ""

    async def post(
        self,
        path: str,
        fields: Mapping[str, str] | None = None,
        *,
        csrf: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        """Send a form."""
        token = await self.csrf() if csrf is None else csrf
        return await self.client.post(
            path, data={"csrf": token, **(fields or {})}, headers={"Origin": self._origin, **(headers or {})}
        )

    async def log_in(self, name: str, **fields: str) -> httpx.Response:
        """Log in with a token of the auth file."""
        return await self.post("/login", {"token": f"{name}-secret", **fields})


@asynccontextmanager
async def running_console(
    folder: Path,
    *brokers: BoundAddresses,
    reloads: AsyncIterable[object] | None = None,
    **options: Any,
) -> AsyncIterator[Site]:
    """Run a console of these brokers; its own token is `console`."""
    audit = folder / "audit.log"
    settings: dict[str, Any] = {
        "http_address": "127.0.0.1:0",
        "nsqd_http_addresses": tuple(str(broker.http_address) for broker in brokers),
        "secret": Secret("console-secret"),
        "audit_log": str(audit),
        **options,
    }
    async with trio.open_nursery() as nursery:
        bound = await nursery.start(partial(serve, ConsoleOptions(**settings), reloads=reloads))
        yield Site(bound.url.rstrip("/"), audit)
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def guarded_broker(folder: Path, name: str = "d", **options: Any) -> AsyncIterator[BoundAddresses]:
    """A broker with the auth file of `auth_file`, and two topics."""
    file = options.pop("auth_file", None) or auth_file(folder).path
    async with running_broker(folder / name, auth_file=file, **options) as bound:
        async with httpx.AsyncClient(headers={"Authorization": "Bearer admin-secret"}) as client:
            for topic in ("clicks", "orders"):
                answer = await client.post(f"http://{bound.http_address}/topic/create?topic={topic}")
                assert answer.status_code == 200
        yield bound


@asynccontextmanager
async def guarded(folder: Path, **options: Any) -> AsyncIterator[Site]:
    """A console of a broker with tokens."""
    async with guarded_broker(folder) as broker, running_console(folder, broker, **options) as site:
        yield site


@asynccontextmanager
async def open_site(folder: Path, **options: Any) -> AsyncIterator[Site]:
    """A console of a broker without authentication."""
    async with running_broker(folder / "d") as broker:
        async with running_console(folder, broker, **options) as site:
            yield site
