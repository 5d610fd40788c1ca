"""Tests for `/debug`: tasks, profile and memory."""

import gc
import pstats
from pathlib import Path

import pytest
import trio
import trio.testing

from broker.api import Api, running_api
from broker.support import PATIENCE_S, connected, running_broker, settle
from trio_nsq.broker.api.debug import task_tree


async def test_index_lists_the_pages(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        index = await api.get("/debug")
        assert index.status_code == 200
        assert "x-nsq-content-type" not in index.headers
        for line in index.text.splitlines():
            method, target = line.split()[:2]
            path = target.partition("?")[0]
            response = await api.get(path, seconds=0)
            assert response.status_code == (405 if method == "POST" else 400 if "profile" in path else 200), (
                line
            )
        assert (await api.get("/debug/")).headers["location"] == "/debug"


@pytest.mark.uncompiled
async def test_tasks_shows_the_stack_of_each_task(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await settle()
        lines = (await api.get("/debug/tasks")).text.splitlines()
        living = trio.lowlevel.current_statistics().tasks_living
        assert lines[0] == f"{living} tasks"
        (mover,) = [i for i, line in enumerate(lines) if line.endswith("DeadLetterMover.run")]
        assert lines[mover + 1].strip().startswith("_keep_running (trio_nsq.broker.serve:")
        assert lines[mover + 2].strip().startswith("DeadLetterMover.run (trio_nsq.broker.dead_letters:")
        assert lines[mover + 3].strip().startswith("Event.wait (trio._sync:")


async def test_equal_tasks_are_shown_once() -> None:
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(trio.sleep_forever, name="sleeper")
        nursery.start_soon(trio.sleep, 1000, name="sleeper")
        await settle()
        told = [line.strip() for line in task_tree().splitlines() if line.endswith("sleeper")]
        assert sorted(told) == ["3 x sleeper", "sleeper"]
        nursery.cancel_scope.cancel()


@pytest.mark.uncompiled
async def test_profile_shows_where_time_is_spent(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with running_api(tmp_path / "d", sync="interval") as api, trio.open_nursery() as nursery:

        async def publish() -> None:
            await trio.sleep(1)
            await api.tcp.publish("t", b"x")

        nursery.start_soon(publish)
        began = trio.current_time()
        response = await api.get("/debug/profile", seconds=7)
        assert trio.current_time() - began == pytest.approx(7, abs=1)
        assert response.headers["content-type"].startswith("text/plain")
        assert "over 7 s" in response.text
        assert "write_path.py" in response.text
        assert "internal time" in response.text


async def test_profile_for_pstats(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    async with running_api(tmp_path / "d") as api:
        response = await api.get("/debug/profile", seconds=5, format="pstats")
        assert response.headers["content-type"] == "application/octet-stream"
        (tmp_path / "profile").write_bytes(response.content)
        functions = pstats.Stats(str(tmp_path / "profile")).get_stats_profile().func_profiles
        assert functions["unrolled_run"].ncalls


async def test_one_profile_at_a_time(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    async with running_broker(tmp_path / "d") as bound:
        host, _, port = bound.http_address.rpartition(":") if bound.http_address else ("", "", "")
        request = b"GET /debug/profile?seconds=300 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        answers: list[bytes] = []

        async def ask() -> None:
            async with await trio.open_tcp_stream(host, int(port)) as stream:
                await stream.send_all(request)
                answers.append(b"".join([bytes(data) async for data in stream]).partition(b"\r\n")[0])

        for _ in range(2):  # a refused request does not block the next
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                nursery.start_soon(ask)
        assert answers == [b"HTTP/1.1 409 Conflict", b"HTTP/1.1 200 OK"] * 2


async def test_profile_does_not_delay_a_stop(tmp_path: Path) -> None:
    """By the real clock: a stop writes files, during which a mock clock would jump."""
    async with running_broker(tmp_path / "d") as bound:
        assert bound.http_address is not None
        async with connected(bound.http_address, greeting=b"") as client:
            await client.send(b"GET /debug/profile?seconds=300 HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await settle()
            began = trio.current_time()
    assert trio.current_time() - began < PATIENCE_S


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ({"seconds": "0"}, "INVALID_SECONDS"),
        ({"seconds": "301"}, "INVALID_SECONDS"),
        ({"seconds": "-1"}, "INVALID_SECONDS"),
        ({"seconds": "1e2"}, "INVALID_SECONDS"),
        ({"seconds": ""}, "INVALID_SECONDS"),
        ({"seconds": "9" * 5000}, "INVALID_SECONDS"),
        ({"seconds": "1", "format": "pprof"}, "INVALID_FORMAT"),
    ],
)
async def test_invalid_profile(tmp_path: Path, query: dict[str, str], code: str) -> None:
    async with running_api(tmp_path / "d") as api:
        response = await api.get("/debug/profile", **query)
        assert (response.status_code, response.json()["message"]) == (400, code)


async def test_memory_shows_the_process_and_the_cache(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d", cache_bytes=1_000_000) as api:
        await api.tcp.publish("big", b"x" * 100_000)
        await api.tcp.publish("small", b"x")
        await api.tcp.publish("small", b"x" * 100_000)
        memory = (await api.get("/debug/memory")).json()
        assert 1_000_000 < memory["rss_bytes"] <= memory["peak_rss_bytes"]
        assert memory["gc"]["objects"] > 1000
        assert (memory["connections"], memory["topics"], memory["channels"]) == (1, 2, 0)
        cache = memory["cache"]
        assert cache["max_bytes"] == 1_000_000
        assert cache["batches"] == 3
        assert cache["topics"]["big"]["bytes"] > 100_000
        assert cache["topics"]["small"]["batches"] == 2
        assert sum(topic["bytes"] for topic in cache["topics"].values()) == cache["bytes"]


async def test_free_memory_collects_garbage(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        gc.disable()
        try:
            for _ in range(1000):
                ring: list[object] = []
                ring.append(ring)
            freed = await post(api, "/debug/freememory")
        finally:
            gc.enable()
        assert freed["collected_objects"] >= 999
        assert freed["rss_bytes"] > 1_000_000


async def post(api: Api, path: str) -> dict[str, int]:
    """Return the JSON answer of a successful POST."""
    response = await api.send("POST", path)
    assert response.status_code == 200
    answer: dict[str, int] = response.json()
    return answer


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("Origin", "http://evil.example"),
        ("Origin", "null"),
        ("Referer", "http://evil.example/"),
        ("Sec-Fetch-Site", "cross-site"),
        ("Sec-Fetch-Site", "same-site"),
    ],
)
@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/debug/freememory"), ("GET", "/debug/profile"), ("GET", "/config/log_level")],
)
async def test_requests_of_web_pages_are_refused(
    tmp_path: Path, method: str, path: str, name: str, value: str
) -> None:
    async with running_api(tmp_path / "d") as api:
        response = await api.send(method, path, {name: value})
        assert response.status_code == 403
        assert response.json()["message"].startswith("NOT_FOR_WEB_PAGES")


@pytest.mark.parametrize(
    "headers",
    [
        {"Accept-Language": "en"},  # an image by plain HTTP, with referrerpolicy=no-referrer
        {"User-Agent": "Mozilla/5.0"},
        {"Upgrade-Insecure-Requests": "1"},
        {"Cookie": "a=b"},
        {"Sec-GPC": "1"},
    ],
)
async def test_requests_of_browsers_that_do_not_tell_the_page_are_refused(
    tmp_path: Path, headers: dict[str, str]
) -> None:
    async with running_api(tmp_path / "d") as api:
        for path in ("/debug", "/debug/profile?seconds=1", "/config/log_level"):
            for _ in range(2):  # the second has a known Host
                response = await api.send("GET", path, {"Host": "broker.lan:4151", **headers})
                assert (response.status_code, response.json()["message"][:17]) == (403, "NOT_FOR_WEB_PAGES")
        assert (await api.send("GET", "/ping", {"Host": "broker.lan:4151", **headers})).status_code == 200
        own = {"Referer": "http://broker.lan:4151/debug", "Host": "broker.lan:4151", **headers}
        assert (await api.send("GET", "/debug", own)).status_code == 200


async def test_address_typed_into_a_browser_is_answered(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        response = await api.send(
            "GET", "/debug/tasks", {"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate"}
        )
        assert response.status_code == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/debug/pprof"),
        ("GET", "/debug/pprof/heap"),
        ("GET", "/debug/pprof/profile?seconds=1"),
        ("POST", "/debug/pprof/symbol"),
        ("PUT", "/debug/setblockrate?rate=1"),
    ],
)
async def test_paths_of_nsqd_point_to_ours(tmp_path: Path, method: str, path: str) -> None:
    async with running_api(tmp_path / "d") as api:
        response = await api.send(method, path)
        assert response.status_code == 404
        assert "/debug lists" in response.json()["message"]
