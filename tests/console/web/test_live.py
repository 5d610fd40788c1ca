"""Live updates over real sockets: each page's block as events, for a bounded number of viewers."""

from contextlib import AsyncExitStack, aclosing

import pytest
import trio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Scope

from console.fleet.fake_brokers import FakeBroker, channel, fake_brokers, topic
from console.support import console_of
from console.web.support import DEADLINE_S, Document, document, visited, watching
from trio_nsq.console.access.viewer import Viewer
from trio_nsq.console.web.live import MAX_VIEWERS, Live
from trio_nsq.console.web.page import Page, View
from trio_nsq.console.web.streamed import Streamed


async def test_an_event_has_the_block_of_the_page() -> None:
    broker = FakeBroker(topics=[topic("clicks", depth=7)])
    async with fake_brokers(broker), visited(broker) as client, watching(client, "/") as found:
        block = await found.until("update")
        assert block.strip() in (await client.get("/")).text
        assert Document(block).tables[0].row("clicks")["Depth"] == "7"
        assert "<!doctype" not in block


async def test_events_follow_the_brokers() -> None:
    broker = FakeBroker(topics=[topic("clicks", depth=7)])
    async with fake_brokers(broker), visited(broker) as client, watching(client, "/") as found:
        await found.until("update", ">7<")
        broker.topics = [topic("clicks", depth=8), topic("new")]
        assert Document(await found.until("update", ">8<")).tables[0].column("Topic") == [
            "clicks no channel",
            "new",
        ]


async def test_an_unchanged_page_is_not_sent_again() -> None:
    broker = FakeBroker(topics=[topic("clicks")])
    async with fake_brokers(broker), visited(broker) as client, watching(client, "/?q=c") as found:
        kinds = [event[0] for _ in range(6) if (event := await found.next())]
        assert kinds[0] == "update"
        assert kinds[-3:] == ["beat"] * 3  # the first rates are known at the second poll


async def test_filter_and_page_of_the_path_are_kept() -> None:
    broker = FakeBroker(topics=[topic("clicks"), topic("orders")])
    async with fake_brokers(broker), visited(broker) as client, watching(client, "/?q=ord") as found:
        assert Document(await found.until("update")).tables[0].column("Topic") == ["orders"]


async def test_names_are_escaped_in_the_path() -> None:
    broker = FakeBroker(topics=[topic("a#ephemeral", channel("messages")), topic("..")])
    async with fake_brokers(broker), visited(broker, base_path="/console") as client:
        for name in ("a#ephemeral", ".."):
            link = (await document(client, "/console/")).links[name]
            assert (await document(client, link)).text
            async with watching(client, link, "/console") as found:
                assert name in await found.until("update")


async def test_events_end_when_the_page_is_gone() -> None:
    broker = FakeBroker(topics=[topic("clicks", channel("archive"))])
    async with fake_brokers(broker), visited(broker) as client:
        async with watching(client, "/topics/clicks/archive") as found:
            await found.until("update")
            broker.topics = []
            assert "no topic clicks" in await found.until("end")
            assert await found.next() is None


@pytest.mark.parametrize(
    "path", ["", "x", "/nothing", "/topics/missing", "/live?path=/", "/lookup", "http://other/", "/" * 5000]
)
async def test_pages_without_live_updates(path: str) -> None:
    broker = FakeBroker()
    async with fake_brokers(broker), visited(broker) as client:
        assert (await client.get("/live", params={"path": path})).status_code == 404
        assert (await client.head("/live", params={"path": path})).status_code == 404


async def test_head_tells_whether_there_are_events() -> None:
    broker = FakeBroker()
    async with fake_brokers(broker), visited(broker) as client:
        answer = await client.head("/live", params={"path": "/"})
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream")


async def test_viewers_share_what_is_rendered_and_asked() -> None:
    broker = FakeBroker(topics=[topic("clicks", channel("archive"))])
    async with (
        fake_brokers(broker),
        visited(broker, poll_interval_ms=10) as client,
        AsyncExitStack() as stack,
    ):
        path = "/topics/clicks/archive"
        found = [await stack.enter_async_context(watching(client, path)) for _ in range(20)]
        for each in found:
            await each.until("update")
        polls, stats = broker.asked.count("/info"), broker.asked.count("/stats")
        # Each poll asks once for the numbers, and at most once for the clients that 20 viewers see.
        assert stats <= 2 * polls + 1


async def test_the_number_of_viewers_is_bounded() -> None:
    broker = FakeBroker()
    async with (
        fake_brokers(broker),
        visited(broker, poll_interval_ms=60_000) as client,
        AsyncExitStack() as stack,
    ):
        for _ in range(MAX_VIEWERS):
            found = await stack.enter_async_context(watching(client, "/"))
            await found.until("update")
        async with watching(client, "/") as refused:
            assert refused.status == 503
        assert "Too many pages" in (await client.get("/live", params={"path": "/"})).text
        assert (await client.get("/")).status_code == 200
        await stack.aclose()
        while (await client.head("/live", params={"path": "/"})).status_code == 503:
            pass  # the console sees that they have gone


async def test_a_viewer_that_does_not_read_delays_no_other() -> None:
    topics = [topic(f"topic-{number:03}", depth=1) for number in range(100)]
    broker = FakeBroker(topics=topics)
    async with fake_brokers(broker), visited(broker) as client:
        lazy = await trio.open_tcp_stream("127.0.0.1", client.base_url.port or 0)
        async with lazy, watching(client, "/") as found:
            await lazy.send_all(b"GET /live?path=/ HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            for depth in range(2, 60):
                for each in topics:
                    each["depth"] = depth
                await found.until("update", f">{depth}<")


async def test_the_console_stops_while_viewers_look() -> None:
    broker = FakeBroker()
    async with fake_brokers(broker):
        with trio.fail_after(20):
            async with visited(broker) as client, AsyncExitStack() as stack:
                found = await stack.enter_async_context(watching(client, "/"))
                await found.until("update")


def request_for_events(app: Starlette) -> Request:
    """Return a request for the events of `/page`."""
    scope: Scope = {
        "type": "http",
        "method": "GET",
        "path": "/live",
        "query_string": b"path=/page",
        "headers": [],
        "app": app,
        "state": {"viewer": Viewer()},
    }
    return Request(scope)


async def any_view(request: Request) -> View:
    return View("any.html")


PAGE = Page("/page", "page", any_view, live=True)
ROUTES = [Route("/page", any_view, name="page")]


async def test_the_bound_counts_viewers_that_arrive_together() -> None:
    broker, app = FakeBroker(), Starlette()
    live = Live(lambda _request, _view: "block", [PAGE], ROUTES, max_viewers=3)
    async with fake_brokers(broker), console_of([broker.address]) as console, AsyncExitStack() as stack:
        app.state.console = console
        with trio.fail_after(DEADLINE_S):
            answers = [await live.answer(request_for_events(app)) for _ in range(5)]
            kinds = []
            for answer in answers:
                assert isinstance(answer, Streamed)
                pieces = await stack.enter_async_context(aclosing(answer.pieces))
                kinds.append((await anext(pieces)).partition(b"\n")[0])
            assert kinds == [b"event: update"] * 3 + [b"event: end"] * 2
            with pytest.raises(HTTPException, match="Too many pages"):
                await live.answer(request_for_events(app))


async def test_a_block_is_rendered_once_for_all_viewers() -> None:
    rendered: list[int] = []
    viewers = 20
    broker = FakeBroker()

    def render(request: Request, view: View) -> str:
        rendered.append(console.watcher.snapshot.version)
        return f"version {rendered[-1]}"

    app = Starlette()
    live = Live(render, [PAGE], ROUTES)

    async def view(nursery: trio.Nursery) -> None:
        nonlocal viewers
        answer = await live.answer(request_for_events(app))
        assert isinstance(answer, Streamed)
        received = 0
        async with aclosing(answer.pieces) as pieces:
            async for _ in pieces:
                received += 1
                if received == 2:
                    viewers -= 1
                    if not viewers:
                        nursery.cancel_scope.cancel()

    async with fake_brokers(broker), console_of([broker.address]) as console:
        app.state.console = console
        with trio.fail_after(DEADLINE_S):
            async with trio.open_nursery() as nursery:
                for _ in range(viewers):
                    nursery.start_soon(view, nursery)
    assert len(rendered) == len(set(rendered)) >= 2
