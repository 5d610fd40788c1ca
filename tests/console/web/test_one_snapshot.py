"""Each page is made from one snapshot, although the fleet changes while its handler waits for brokers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from starlette.requests import Request

from broker.api import DONE, OK
from console.message_support import ConsoleSite, browsing, http_address
from console.web.support import watching
from trio_nsq.console.console import console_of
from trio_nsq.console.web import app
from trio_nsq.console.web.page import View
from trio_nsq.console.web.rendering import render
from trio_nsq.fleet.snapshot import Snapshot

GET = sorted({page.path for page in app.PAGES if "GET" in page.methods})
LIVE = sorted({page.path for page in app.PAGES if page.live})


def render_without_fleet(request: Request, view: View, block: str = "", *, live: bool = False) -> str:
    """Render a view when all brokers have left the newest snapshot."""
    watcher = console_of(request).watcher
    known = watcher.snapshot
    watcher.snapshot = Snapshot(known.version + 1, taken_at_s=1.0)
    try:
        return render(request, view, block, live=live)
    finally:
        watcher.snapshot = known


@asynccontextmanager
async def site(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[ConsoleSite, str]]:
    """Run a console, and a broker with dead letters; return the broker's address, too."""
    monkeypatch.setattr(app, "render", render_without_fleet)
    async with browsing(folder) as (found, [broker]):
        assert await broker.post("/pub", b"hello", topic="dead") == OK
        assert await broker.post("/channel/create", topic="dead", channel="dead-letters") == DONE
        await found.until_shown("/dead-letters", http_address(broker))
        yield found, http_address(broker)


def filled(path: str, broker: str) -> str:
    """Return the path of a page of the broker, with a topic, a channel and a message that it has."""
    names = {"topic": "dead", "channel": "dead-letters", "cluster": "none", "member": "none"}
    return path.format(node=broker, sequence=0, **names)


async def test_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = 0
    async with site(tmp_path, monkeypatch) as (found, broker):
        for path in GET:
            answer = await found.get(filled(path, broker))
            assert answer.status_code < 500, (path, answer.status_code, answer.text[-500:])
            if answer.status_code == 200:
                shown += 'id="as-of"' in answer.text
                assert "1970-01-01" not in answer.text, path
    assert shown == len(LIVE)


async def test_live_updates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with site(tmp_path, monkeypatch) as (found, broker):
        for path in LIVE:
            async with watching(found.client, filled(path, broker)) as events:
                first = await events.next()
                assert first is not None
                assert first[0] == "update", (path, first)
                assert "No broker" not in first[1], path
