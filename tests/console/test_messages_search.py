"""Search in the message browser, and brokers that fail or keep no log."""

from pathlib import Path
from typing import Any

import pytest
import trio

from broker.api import running_api
from broker.support import PATIENCE_S, HeldFiles, connected, running_broker
from console.message_support import ConsoleSite, all_pages, browsing, http_address, listed, running_console
from fleet.support import hung, take_down
from interop.peers import nsqd, qcli_serve


async def found(site: ConsoleSite, **query: Any) -> list[int]:
    """Return the sequences that a search finds."""
    return [sequence for _, sequence in listed(await site.page("/topics/t/messages", **query))]


async def test_search_by_text_pattern_and_condition(tmp_path: Path) -> None:
    async with browsing(tmp_path) as (site, (broker,)):
        bodies = [b'{"user": {"name": "ann"}, "n": %d}' % n for n in range(20)]
        await broker.tcp.publish("t", *bodies, b"ANN \xff", "é ann".encode())
        assert await found(site, q="ANN") == [20]
        assert await found(site, q="ann", ignore_case="1", order="oldest", count=3) == [0, 1, 2]
        assert await found(site, q='"n": 1[0-2]}', kind="regex") == [12, 11, 10]
        assert await found(site, q="^ann", kind="regex", ignore_case="1") == [20]
        assert await found(site, q="é", kind="regex") == [21]
        assert await found(site, q="n>=18", kind="json", order="oldest") == [18, 19]
        assert await found(site, q='user.name="ann"', kind="json", count=2) == [19, 18]
        assert "No match" in (nothing := await site.page("/topics/t/messages", q="zebra")).text
        assert not [link for link in nothing.links if "condition" in link]
        as_text = await site.page("/topics/t/messages", q="n>=18")
        meant = await site.follow(as_text, "Search for the JSON condition n>=18 instead")
        assert [sequence for _, sequence in listed(meant)] == [19, 18]
        for wrong in (
            {"q": "(", "kind": "regex"},
            {"q": "=", "kind": "json"},
            {"q": "n>>1", "kind": "json"},
            {"q": "a", "kind": "sql"},
            {"q": "x" * 2000},
        ):
            await site.page("/topics/t/messages", status=400, **wrong)


async def test_a_pattern_that_backtracks_elsewhere_is_quick(tmp_path: Path) -> None:
    async with browsing(tmp_path) as (site, (broker,)):
        await broker.tcp.publish("t", b"a" * 100_000 + b"!")
        with trio.fail_after(PATIENCE_S):
            assert await found(site, q="(a+)+$", kind="regex") == []


async def test_a_search_has_bounds_says_how_far_it_came_and_continues(tmp_path: Path) -> None:
    # Without a limit of time, which a busy machine would reach first.
    async with browsing(tmp_path, request_timeout_ms=600_000) as (site, (broker,)):
        await broker.tcp.publish("t", b"needle")
        for _ in range(3):
            await broker.tcp.publish("t", *[b"x"] * 100_000)
        await broker.tcp.publish("t", b"needle")
        first = await site.page("/topics/t/messages", q="needle")
        assert [sequence for _, sequence in listed(first)] == [300_001]
        assert "are left" in first.text
        steps, page = [], first
        while "Continue searching" in page.links:
            page = await site.follow(page, "Continue searching")
            steps.append([sequence for _, sequence in listed(page)])
        assert steps[-1] == [0]
        assert 1 <= len(steps) <= 3
        assert "none are left" in page.text
        forwards = await site.page("/topics/t/messages", q="needle", order="oldest")
        assert [sequence for _, sequence in listed(forwards)] == [0]
        forwards = await site.follow(forwards, "Continue searching")
        assert [sequence for _, sequence in listed(forwards)] == [300_001]


async def test_matches_beyond_a_page_are_not_lost(tmp_path: Path) -> None:
    async with browsing(tmp_path, 2) as (site, brokers):
        for broker in brokers:
            await broker.tcp.publish("t", *(b"match" if n % 3 else b"other" for n in range(90)))
        await site.until_shown("/topics/t/messages", *map(http_address, brokers))
        for order in ("newest", "oldest"):
            page = await site.page("/topics/t/messages", q="match", count=10, order=order)
            assert 0 < len(listed(page)) <= 10
            everything = await all_pages(site, page, "Continue searching")
            assert len(everything) == len(set(everything)) == 120


# ---------------------------------------------------------------------- brokers that fail


async def test_a_hung_broker_is_named_and_delays_no_other(tmp_path: Path) -> None:
    files = HeldFiles()
    async with (
        running_api(tmp_path / "good") as good,
        running_broker(tmp_path / "bad", files=files) as bound,
        connected(bound.tcp_address) as client,
        running_console([http_address(good), bad := str(bound.http_address)], request_timeout_ms=500) as site,
    ):
        await good.tcp.publish("t", b"good")
        await client.publish("t", b"bad")
        await site.until_shown("/topics/t/messages", http_address(good), bad)
        files.hold("read")
        try:
            for query in ({}, {"q": "o"}, {"q": "0" * 16, "kind": "id"}):
                page = await site.page("/topics/t/messages", status=400 if "kind" in query else 200, **query)
                assert bad in page.text
                assert "no answer within" in page.text
                if "kind" not in query:
                    assert (http_address(good), 0) in listed(page)
        finally:
            files.release()


async def test_a_killed_and_a_stopped_broker_are_named(tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "b") as doomed:
        doomed.post("/pub", b"doomed", topic="t")
        async with (
            running_api(tmp_path / "a") as alive,
            running_console([http_address(alive), doomed.http_address], request_timeout_ms=500) as site,
        ):
            await alive.tcp.publish("t", b"1", b"2")
            await site.until_shown("/topics/t/messages", http_address(alive), doomed.http_address)
            first = await site.page("/topics/t/messages", count=1)
            with hung(doomed):
                page = await site.page("/topics/t/messages")
                assert listed(page) == [(http_address(alive), 1), (http_address(alive), 0)]
                assert doomed.http_address in page.text
            take_down(doomed)
            for page in (await site.page("/topics/t/messages"), await site.follow(first, "Older")):
                assert (http_address(alive), 0) in listed(page)
                assert doomed.http_address in page.text
            single = await site.page("/topics/t/messages/0", status=502, broker=doomed.http_address)
            assert doomed.http_address in single.text


@pytest.mark.interop
async def test_nsqd_keeps_no_log_and_the_pages_say_so(tmp_path: Path) -> None:
    with nsqd(tmp_path / "nsqd") as stock:
        stock.create("t", "c")
        async with running_console([stock.http_address]) as site:
            for path in ("/topics/t/messages", "/topics/t/c/messages"):
                assert "it keeps no log" in (await site.page(path)).text
            assert (
                "it keeps no log"
                in (await site.page("/topics/t/messages/0", status=404, broker=stock.http_address)).text
            )
            done = await site.submit("/topics/t/publish", body="one\ntwo", format="lines")
            assert "has stored 2 messages" in done.text
            assert stock.channel_stats("t", "c")["depth"] == 2
            refused = await site.submit(
                "/topics/t/publish", status=400, body="a\nb", format="lines", defer="1m"
            )
            assert "nsqd defers single messages only" in refused.text
            await site.submit("/topics/t/publish", body="later", defer="1h")
            assert stock.channel_stats("t", "c")["deferred_count"] == 1
