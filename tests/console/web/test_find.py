"""Finding topics, channels, nodes, pages and actions: which ones a viewer gets, and in which order."""

import re
import time
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from access.support import ALL_ROLES, AuthFile, Given, everything
from console.fleet.fake_brokers import FakeBroker, channel, fake_brokers, topic
from console.web.support import visited, visited_fleets
from trio_nsq.console.web.matching import best_matches

_RESULT = re.compile(r'<li><a href="([^"]*)">([^<]*)</a><span class="muted">(\w+)</span>')


async def found(
    client: httpx.AsyncClient, typed: str, root: str = "", **headers: str
) -> list[tuple[str, str, str]]:
    """Return text, kind and path of the results."""
    answer = await client.get(f"{root}/find", params={"q": typed}, headers=headers)
    assert answer.status_code == 200
    return [(text, kind, path) for path, text, kind in _RESULT.findall(answer.text)]


def broker() -> FakeBroker:
    return FakeBroker(
        topics=[
            topic("orders", channel("billing"), channel("archive", paused=True)),
            topic("orders.dead"),
            topic("reorders"),
            topic("clicks", channel("messages")),
        ]
    )


async def test_the_best_name_comes_first() -> None:
    one = broker()
    async with fake_brokers(one), visited(one) as client:
        assert [text for text, _, _ in await found(client, "ORDERS")] == [
            "orders",
            "orders.dead",
            "orders/archive",
            "orders/billing",
            "reorders",
        ]
        assert (await found(client, "orbi"))[0] == ("orders/billing", "channel", "/topics/orders/billing")
        assert "/topics/clicks/%256Dessages" in [path for _, _, path in await found(client, "lick mess")]
        assert (await found(client, "nod"))[0] == ("Nodes", "page", "/nodes")
        assert (await found(client, one.address))[0] == (
            one.address,
            "node",
            f"/nodes/127.0.0.1%3A{one.port}",
        )
        assert await found(client, "nothing of this kind") == []
        assert ("Topics", "page", "/") in await found(client, "")


async def test_a_verb_finds_the_actions_of_a_place() -> None:
    one = broker()
    async with fake_brokers(one), visited(one) as client:
        for typed in ("pause orders", "orders pau"):
            assert (await found(client, typed))[0] == ("Pause orders", "topic", "/topics/orders/pause")
        assert (await found(client, "unpause orders/archive"))[0][2] == "/topics/orders/archive/unpause"
        assert (await found(client, "seek billing"))[0][2] == "/topics/orders/billing/seek"
        assert (await found(client, "publish clicks"))[0][2] == "/topics/clicks/publish"
        assert await found(client, "pause " * 30 + "orders") == []
        for _, _, path in await found(client, "orders de"):
            assert (await client.get(path)).status_code == 200, path


async def test_a_viewer_finds_what_it_sees_and_may_do(tmp_path: Path) -> None:
    one, file = broker(), AuthFile(tmp_path / "auth.toml")
    file.add_token("admin", everything(*ALL_ROLES))
    file.add_token("reader", everything("read"))
    file.add_token("owner", Given(["read", "publish", "manage"], ["clicks"]))
    file.write()

    async with fake_brokers(one), visited(one, auth_file=tmp_path / "auth.toml") as client:

        async def names(token: str, typed: str) -> list[str]:
            results = await found(client, typed, Authorization=f"Bearer {token}-secret")
            return [text for text, _, _ in results]

        assert "Pause orders" in await names("admin", "pause orders")
        assert "Create topic or channel" in await names("admin", "create")
        assert not [each for each in await names("reader", "pause orders") if each.startswith("Pause")]
        assert "Messages orders" in await names("reader", "messages orders")
        assert "Create topic or channel" not in await names("reader", "create")
        assert await names("owner", "orders") == []
        assert (await names("owner", "pause clicks"))[0] == "Pause clicks"
        assert (await client.get("/find?q=orders")).status_code == 303


async def test_fleets_and_favourites_are_found() -> None:
    one, two = broker(), broker()
    async with fake_brokers(one, two), visited_fleets({"one": one, "staging": two}) as client:
        assert (await found(client, "stag", "/c/one"))[0] == ("staging", "fleet", "/c/staging/")
        assert "one" not in [text for text, kind, _ in await found(client, "", "/c/one") if kind == "fleet"]
        cookie = f"trio_nsq_favourites_{client.base_url.port}=reorders:gone"
        results = await found(client, "", "/c/one", Cookie=cookie)
        assert results[0] == ("reorders", "topic", "/c/one/topics/reorders")
        assert [text for text, _, _ in results].count("reorders") == 1


async def test_names_are_plain_text() -> None:
    one = broker()
    async with fake_brokers(one), visited(one) as client:
        text = (await client.get("/find", params={"q": "<script>\u202e"})).text
        assert "<script>" not in text.replace("<script type=", "")
        assert (await client.get("/find", params={"q": "x" * 5000})).status_code == 200


@given(
    st.text("ab/.-", max_size=4),
    st.lists(st.text("ab/.-", min_size=1, max_size=8), max_size=12),
    st.integers(1, 5),
)
def test_matches_have_the_characters_in_order(typed: str, names: list[str], most: int) -> None:
    def is_match(name: str) -> bool:
        rest = iter(name)
        return all(character in rest for character in typed)

    got = best_matches(typed, names, str, most)
    assert len(got) == min(most, sum(map(is_match, names)))
    assert all(map(is_match, got))
    if typed in names:
        assert got[0] == typed
    elif begins := [name for name in names if name.startswith(typed)]:
        assert got[0] in begins


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("a" * 6 + "b", "a" * 64),
        ("ordersordersx", "production.orders.orders-dead.orders/orders-archive-orders"),
    ],
)
def test_repeated_characters_take_no_time(typed: str, name: str) -> None:
    """All ways to find them were tried, one after the other: a viewer could stop the console."""
    began_s = time.process_time()
    assert best_matches(typed, [name], str, 20) == []
    assert time.process_time() - began_s < 1.0


@pytest.mark.parametrize("typed", ["topic-9999", "t9999ch", "zzz"])
def test_ten_thousand_topics_are_searched_quickly(typed: str) -> None:
    names = [f"topic-{n}{end}" for n in range(10_000) for end in ("", "/channel-a", "/channel-b")]
    began_s = time.process_time()
    best_matches(typed, names, str, 20)
    assert time.process_time() - began_s < 1.0  # 0.02 s here; far above it on a busy machine
