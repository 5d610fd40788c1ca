"""A console on a real socket, with brokers that a test controls, and what its pages say."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any
from urllib.parse import urlencode

import h11
import httpx
import trio

from console.fleet.fake_brokers import FakeBroker
from trio_nsq.console.options import ConsoleOptions, Fleet
from trio_nsq.console.server import ConsoleAddresses, serve

DEADLINE_S = 30.0


@asynccontextmanager
async def visited(
    *brokers: FakeBroker, poll_interval_ms: int = 10, **settings: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """Run a console with these settings until the block exits, and return a client of it."""
    options = ConsoleOptions(
        http_address="127.0.0.1:0",
        nsqd_http_addresses=tuple(broker.address for broker in brokers),
        poll_interval_ms=poll_interval_ms,
        **settings,
    )
    async with _client(options) as client:
        yield client


@asynccontextmanager
async def visited_fleets(
    fleets: Mapping[str, FakeBroker], base_path: str = "/", **settings: Mapping[str, Any]
) -> AsyncIterator[httpx.AsyncClient]:
    """Run one console of several fleets until the block exits, and return a client of it.

    Args:
        fleets: The broker of each fleet, by its name.
        settings: Further options of a fleet, by its name.
    """
    names = tuple(Fleet(name, str(settings.get(name, {}).get("color", ""))) for name in fleets)
    options = [
        ConsoleOptions(
            **{
                "http_address": "127.0.0.1:0",
                "base_path": base_path,
                "nsqd_http_addresses": (broker.address,),
                "poll_interval_ms": 10,
                "fleet": name,
                "title": name,
                "fleets": names,
                **settings.get(name, {}),
            }
        )
        for name, broker in fleets.items()
    ]
    async with _client(*options) as client:
        yield client


@asynccontextmanager
async def _client(*options: ConsoleOptions) -> AsyncIterator[httpx.AsyncClient]:
    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            bound: ConsoleAddresses = await nursery.start(_serve, options)
            async with httpx.AsyncClient(
                base_url=f"http://{bound.http_address}", timeout=DEADLINE_S
            ) as client:
                yield client
            nursery.cancel_scope.cancel()


async def _serve(options: Sequence[ConsoleOptions], task_status: trio.TaskStatus[ConsoleAddresses]) -> None:
    await serve(*options, task_status=task_status)


class Events:
    """The live events of a page, over a connection of its own. `status` is that of the answer."""

    def __init__(
        self, stream: trio.SocketStream, path: str, base: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        self.status = 0
        self._base = base
        self._stream = stream
        self._path = path
        self._headers = {"Host": "127.0.0.1", **(headers or {})}
        self._http = h11.Connection(h11.CLIENT)
        self._received = b""

    async def start(self) -> None:
        """Send the request, and receive the head of the answer."""
        target = f"{self._base}/live?{urlencode({'path': self._path})}"
        request = h11.Request(method="GET", target=target, headers=list(self._headers.items()))
        await self._stream.send_all(self._http.send(request) + self._http.send(h11.EndOfMessage()))
        head = await self._next()
        assert isinstance(head, h11.Response)
        self.status = head.status_code

    async def next(self) -> tuple[str, str] | None:
        """Return the kind and the text of the next event; None: there are no more."""
        while b"\n\n" not in self._received:
            piece = await self._next()
            if not isinstance(piece, h11.Data):
                return None
            self._received += piece.data
        event, _, self._received = self._received.partition(b"\n\n")
        lines = event.decode().split("\n")
        kind = next(line.removeprefix("event: ") for line in lines if line.startswith("event: "))
        return kind, "\n".join(line.removeprefix("data: ") for line in lines if line.startswith("data: "))

    async def until(self, kind: str, text: str = "") -> str:
        """Read events up to one of this kind with a text in it, and return its text."""
        while (found := await self.next()) is not None:
            if found[0] == kind and text in found[1]:
                return found[1]
        raise AssertionError(f"the events ended before {kind} with {text!r}")

    async def _next(self) -> object:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._stream.receive_some())
        return event


@asynccontextmanager
async def watching(
    client: httpx.AsyncClient, path: str, base: str = "", headers: Mapping[str, str] | None = None
) -> AsyncIterator[Events]:
    """Receive the live events of a page until the block exits."""
    async with await trio.open_tcp_stream("127.0.0.1", client.base_url.port or 0) as stream:
        events = Events(stream, path, base, headers)
        await events.start()
        yield events


@dataclass
class Table:
    """A table of a page: its head, and for each row the text of its cells."""

    head: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)

    def column(self, name: str) -> list[str]:
        """Return the texts of one column."""
        return [row[self.head.index(name)] for row in self.rows]

    def row(self, name: str) -> dict[str, str]:
        """Return the row that begins with a text, by the names of its columns."""
        return next(dict(zip(self.head, row, strict=True)) for row in self.rows if row[0].split()[0] == name)


class Document(HTMLParser):
    """A page: its tables, links, and all of its text.

    Attributes:
        links: The targets by text.
        hidden: The hidden fields of forms.
    """

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tables: list[Table] = []
        self.links: dict[str, str] = {}
        self.hidden: dict[str, str] = {}
        self.text = ""
        self._row: list[str] | None = None
        self._cell: list[str] | None = None
        self._in_head = False
        self._link: tuple[str, list[str]] | None = None
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """See HTMLParser."""
        about = dict(attrs)
        if tag == "input" and about.get("type") == "hidden":
            self.hidden[about.get("name") or ""] = about.get("value") or ""
        if tag == "table":
            self.tables.append(Table())
        elif tag in ("thead", "tbody"):
            self._in_head = tag == "thead"
        elif tag == "tr":
            self._row = []
        elif tag in ("td", "th"):
            self._cell = []
        elif tag == "a":
            self._link = (dict(attrs).get("href") or "", [])

    def handle_endtag(self, tag: str) -> None:
        """See HTMLParser."""
        if tag in ("td", "th") and self._row is not None and self._cell is not None:
            self._row.append(" ".join("".join(self._cell).split()))
            self._cell = None
        elif tag == "tr" and self._row is not None:
            if self._in_head:
                self.tables[-1].head = self._row
            else:
                self.tables[-1].rows.append(self._row)
            self._row = None
        elif tag == "a" and self._link is not None:
            self.links["".join(self._link[1])] = self._link[0]
            self._link = None

    def handle_data(self, data: str) -> None:
        """See HTMLParser."""
        self.text += data
        if self._cell is not None:
            self._cell.append(data)
        if self._link is not None:
            self._link[1].append(data)


async def document(client: httpx.AsyncClient, path: str, **query: str) -> Document:
    """Return a page of a console that exists."""
    answer = await client.get(path, params=query or None)
    assert answer.status_code == 200, answer.text
    return Document(answer.text)
