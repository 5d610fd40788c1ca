"""A console in front of brokers in the test's trio run, and its pages over HTTP."""

from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import trio

from broker.api import Api, running_api
from broker.support import PATIENCE_S
from trio_nsq.console.options import ConsoleOptions
from trio_nsq.console.server import ConsoleAddresses, serve

VOID = {"meta", "link", "input", "br", "hr", "img", "path", "rect", "circle", "line"}
HOSTILE_ATTRIBUTES = ("on", "srcdoc", "style")


class PageText(HTMLParser):
    """The text and the elements of a page. It fails if elements are not balanced.

    Attributes:
        text: All text, with single spaces.
        tags: The names of the elements.
        links: The addresses of links, by their text; of equal texts the first.
        hrefs: The addresses of all links.
        commands: The command lines to copy.
        fields: The input fields: name and value.
    """

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: dict[str, str] = {}
        self.hrefs: list[str] = []
        self.commands: list[str] = []
        self.fields: dict[str, str] = {}
        self._open: list[str] = []
        self._pieces: list[str] = []
        self._link: tuple[str, int] | None = None
        self._in_command = False
        self.feed(html)
        self.close()
        assert not self._open, f"not closed: {self._open}"
        self.text = " ".join("".join(self._pieces).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element; attributes that run something or style it are not allowed."""
        for name, value in attrs:
            assert not name.startswith(HOSTILE_ATTRIBUTES), f"{tag} has {name}"
            assert not (value or "").lower().startswith("javascript:"), value
        given = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        if tag not in VOID:
            self._open.append(tag)
        if tag == "a":
            self._link = given.get("href", ""), len(self._pieces)
            self.hrefs.append(given.get("href", ""))
        if tag == "code" and given.get("id", "").startswith("command-"):
            self.commands.append("")
            self._in_command = True
        if tag == "input" and "name" in given:
            self.fields[given["name"]] = given.get("value", "")

    def handle_endtag(self, tag: str) -> None:
        """Note the end of an element."""
        if tag in VOID:
            return
        assert self._open, f"</{tag}> closes nothing"
        opened = self._open.pop()
        assert opened == tag, f"<{opened}> is closed by </{tag}>"
        if tag == "code":
            self._in_command = False
        if tag == "a" and self._link is not None:
            href, start = self._link
            self.links.setdefault(" ".join("".join(self._pieces[start:]).split()), href)

    def handle_data(self, data: str) -> None:
        """Collect text."""
        self._pieces.append(data)
        if self._in_command:
            self.commands[-1] += data
        if self._open[-1:] not in (["pre"], ["span"], ["code"], ["a"]):
            self._pieces.append(" ")


class ConsoleSite:
    """Requests pages of a console. `client` makes the requests."""

    def __init__(self, client: httpx.AsyncClient, addresses: ConsoleAddresses) -> None:
        self.client = client
        self.addresses = addresses

    async def get(self, path: str, **query: Any) -> httpx.Response:
        """Send a GET."""
        return await self.client.get(path, params=query or None)

    async def page(self, path: str, *, status: int = 200, **query: Any) -> PageText:
        """Return a page, which must have this status and be well-formed."""
        answer = await self.get(path, **query)
        assert answer.status_code == status, (answer.status_code, answer.text[-2000:])
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert len(answer.content) < 150 * 1024, f"the page has {len(answer.content)} bytes"
        return PageText(answer.text)

    async def until_shown(self, path: str, *texts: str) -> PageText:
        """Request a page until it has these texts: the console polls brokers from time to time."""
        with trio.fail_after(PATIENCE_S):
            while True:
                page = await self.page(path)
                if all(text in page.text for text in texts):
                    return page

    async def follow(self, page: PageText, link: str) -> PageText:
        """Return the page behind a link."""
        return await self.page(page.links[link])

    async def submit(
        self, path: str, files: dict[str, bytes] | None = None, status: int = 200, **fields: str
    ) -> PageText:
        """Fill in the form of a page, and send it as a browser does."""
        form = await self.page(path)
        data = {name: value for name, value in form.fields.items() if name != "file"} | fields
        sent = {name: ("upload.bin", content) for name, content in (files or {}).items()} or {
            "file": ("", b"")
        }
        answer = await self.client.post(
            path, data=data, files=sent, headers={"Origin": str(self.client.base_url).rstrip("/")}
        )
        assert answer.status_code == status, (answer.status_code, answer.text[-2000:])
        return PageText(answer.text)


@asynccontextmanager
async def running_console(brokers: Iterable[str], **options: Any) -> AsyncIterator[ConsoleSite]:
    """Run a console for brokers with these HTTP addresses on a free port."""
    settings = ConsoleOptions(
        http_address="127.0.0.1:0", nsqd_http_addresses=tuple(brokers), poll_interval_ms=20, **options
    )
    async with trio.open_nursery() as nursery:
        bound: ConsoleAddresses = await nursery.start(
            lambda task_status: serve(settings, task_status=task_status)
        )
        async with httpx.AsyncClient(base_url=bound.url, timeout=30) as client:
            yield ConsoleSite(client, bound)
        nursery.cancel_scope.cancel()


def http_address(broker: Api) -> str:
    """Return the HTTP address of a broker."""
    return broker.client.base_url.netloc.decode()


@asynccontextmanager
async def browsing(
    folder: Path, count: int = 1, *, request_timeout_ms: int | None = None, **options: Any
) -> AsyncIterator[tuple[ConsoleSite, list[Api]]]:
    """Run brokers and a console in front of them.

    Args:
        request_timeout_ms: Of the console; None: the default.
        options: Of the brokers.
    """
    async with AsyncExitStack() as stack:
        brokers = [
            await stack.enter_async_context(running_api(folder / str(number), **options))
            for number in range(count)
        ]
        limits = {} if request_timeout_ms is None else {"request_timeout_ms": request_timeout_ms}
        site = await stack.enter_async_context(running_console(map(http_address, brokers), **limits))
        yield site, brokers


def listed(page: PageText) -> list[tuple[str, int]]:
    """Return the broker and the sequence of the messages of a list, in order."""
    found = []
    for href in page.hrefs:
        parts = urlsplit(href)
        if "/messages/" in parts.path:
            pair = parse_qs(parts.query)["broker"][0], int(parts.path.rpartition("/")[2])
            if pair not in found:
                found.append(pair)
    return found


async def all_pages(site: ConsoleSite, page: PageText, link: str) -> list[tuple[str, int]]:
    """Return the messages of a page and of all that follow by a link."""
    found = listed(page)
    while link in page.links:
        page = await site.follow(page, link)
        more = listed(page)
        if not more and link == "Newer":  # the end, where new messages will be
            break
        found += more
    return found
