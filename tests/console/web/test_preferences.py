"""Favourite and hidden topics, which a viewer's browser keeps."""

import re
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.fleet.fake_brokers import FakeBroker, fake_brokers, topic
from console.web.support import Document, document, visited, visited_fleets, watching
from trio_nsq.console.web.preferences import MAX_CHARACTERS, Preferences, hides

NAMES = ["clicks", "orders", "payments", "scratch#ephemeral", "test-1", "test-2"]


def broker() -> FakeBroker:
    return FakeBroker(topics=[topic(name) for name in NAMES])


async def prefer(client: httpx.AsyncClient, path: str = "/", root: str = "", **fields: str) -> httpx.Response:
    """Send the form of a page."""
    hidden = (await document(client, f"{root}{path}")).hidden
    return await client.post(f"{root}/preferences", data=hidden | fields)


async def shown(client: httpx.AsyncClient, path: str = "/") -> list[str]:
    """Return the names in the list of topics."""
    page = await document(client, path)
    return [name.split()[0] for name in page.tables[0].column("Topic")] if page.tables else []


async def test_favourites_come_first_whatever_the_order() -> None:
    one = broker()
    async with fake_brokers(one), visited(one) as client:
        answer = await prefer(client, "/?q=e", star="orders")
        assert (answer.status_code, answer.headers["location"]) == (303, "/?q=e")
        await prefer(client, star="test-1")
        assert await shown(client) == [
            "orders",
            "test-1",
            "clicks",
            "payments",
            "scratch#ephemeral",
            "test-2",
        ]
        assert (await shown(client, "/?sort=name&order=desc"))[:3] == ["test-1", "orders", "test-2"]
        pressed = re.findall(
            r'value="([^"]+)" aria-label="[^"]+" aria-pressed="true"', (await client.get("/")).text
        )
        assert pressed == ["orders", "test-1"]
        assert 'name="star" value="clicks"' in (await client.get("/topics/clicks")).text
        assert 'name="unstar" value="orders"' in (await client.get("/topics/orders")).text
        answer = await prefer(client, "/topics/orders", unstar="orders")
        assert answer.headers["location"] == "/topics/orders"
        assert (await shown(client))[:2] == ["test-1", "clicks"]


async def test_hidden_topics_are_counted_and_can_be_shown() -> None:
    one = broker()
    async with fake_brokers(one), visited(one, hide_topics=("*#ephemeral",)) as client:
        await prefer(client, "/topics/clicks", hide="clicks")
        await prefer(client, "/preferences", save="yes", favourites="test-2", hidden="clicks\ntest-*")
        assert await shown(client) == ["test-2", "orders", "payments"]
        page = await document(client, "/")
        assert "3 topics hidden: show" in page.text
        assert page.links["show"] == "/?hidden=show"
        assert sorted(await shown(client, page.links["show"])) == NAMES
        assert "1 topic hidden" in (await document(client, "/?q=test")).text
        filtered = await document(client, "/?hidden=show&q=t&sort=depth")
        assert filtered.links["leave out"] == "/?q=t&sort=depth"
        assert filtered.hidden["hidden"] == "show"  # of the form that filters
        await prefer(client, "/topics/clicks", show="clicks")
        assert await shown(client) == ["test-2", "clicks", "orders", "payments"]


async def test_everything_hidden_is_not_nothing() -> None:
    one = broker()
    async with fake_brokers(one), visited(one, hide_topics=("*",)) as client:
        page = await document(client, "/")
        assert "6 topics hidden" in page.text
        assert "No topics yet" not in page.text


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"favourites": "a b!c"}, "b!c is not the name of a topic"),
        ({"hidden": "a/*"}, "a/* is not a name or a pattern"),
        ({"favourites": "\n".join(f"{n:064}" for n in range(40))}, "a browser keeps 1,900"),
    ],
)
async def test_what_cannot_be_kept_is_shown_again(fields: dict[str, str], said: str) -> None:
    one = broker()
    async with fake_brokers(one), visited(one) as client:
        await prefer(client, star="orders")
        answer = await prefer(client, "/preferences", save="yes", **fields)
        assert (answer.status_code, said in answer.text) == (400, True)
        assert next(iter(fields.values())).split()[-1] in answer.text
        assert (await shown(client))[0] == "orders"


async def test_too_many_favourites_are_refused_one_by_one() -> None:
    one = broker()
    async with fake_brokers(one), visited(one) as client:
        many = [f"{number:064}" for number in range(MAX_CHARACTERS // 65)]
        await prefer(client, "/preferences", save="yes", favourites=" ".join(many))
        answer = await prefer(client, star="x" * 64)
        assert (answer.status_code, "remove some" in answer.text) == (400, True)
        assert (await prefer(client, unstar=many[0])).status_code == 303


async def test_cookies_that_are_not_valid_are_ignored() -> None:
    one = broker()
    async with fake_brokers(one), visited(one) as client:
        port = client.base_url.port
        for bad in ("a/b:../x", ":::", "*" * 3000, "clicks/:[", "%00"):
            cookie = f"trio_nsq_favourites_{port}={bad}; trio_nsq_hidden_{port}={bad.replace('*', '?')}"
            answer = await client.get("/", headers={"Cookie": cookie})
            assert answer.status_code == 200
            names = [name.split()[0] for name in Document(answer.text).tables[0].column("Topic")]
            assert names == NAMES


async def test_live_updates_are_of_the_viewers_preferences() -> None:
    one = broker()
    async with fake_brokers(one), visited(one) as client:
        await prefer(client, star="test-2")
        async with (
            watching(client, "/") as without,
            watching(client, "/", headers={"Cookie": cookie_header(client)}) as own,
        ):
            for events, first in ((own, "test-2"), (without, "clicks")):
                rows = Document(await events.until("update")).tables[0].column("Topic")
                assert rows[0].split()[0] == first


def cookie_header(client: httpx.AsyncClient) -> str:
    """Return the cookies of a browser."""
    return "; ".join(f"{each.name}={each.value}" for each in client.cookies.jar)


async def test_preferences_are_of_one_fleet() -> None:
    one, two = broker(), broker()
    async with fake_brokers(one, two), visited_fleets({"one": one, "two": two}) as client:
        answer = await prefer(client, "/", "/c/two", star="orders")
        assert answer.headers["location"] == "/c/two/"
        assert all("Path=/c/two;" in each for each in answer.headers.get_list("set-cookie"))
        assert (await shown(client, "/c/two/"))[0] == "orders"
        assert (await shown(client, "/c/one/"))[0] == "clicks"


@pytest.mark.parametrize("next_page", ["//other.example", "https://other.example/", "/\\other.example"])
async def test_the_form_leads_to_no_other_site(next_page: str) -> None:
    one = broker()
    async with fake_brokers(one), visited(one) as client:
        assert (await prefer(client, star="orders", next=next_page)).headers["location"] == "/"


async def test_a_form_of_another_site_changes_nothing() -> None:
    one = broker()
    async with fake_brokers(one), visited(one) as client:
        fields: dict[str, Any] = {"star": "orders"}
        assert (await client.post("/preferences", data=fields)).status_code == 403
        headers = {"Origin": "http://other.example"}
        hidden = (await document(client, "/")).hidden
        assert (await client.post("/preferences", data=hidden | fields, headers=headers)).status_code == 403
        assert (await shown(client))[0] == "clicks"


@given(
    st.lists(st.sampled_from([*NAMES, "*", "test-*", "*#ephemeral", "x"]), max_size=4),
    st.sets(st.sampled_from(NAMES)),
)
def test_a_favourite_is_never_hidden(patterns: list[str], favourites: set[str]) -> None:
    is_hidden = hides(patterns[:2], Preferences(tuple(favourites), tuple(patterns[2:])))
    for name in NAMES:
        covered = any(
            name.startswith(each.partition("*")[0]) and name.endswith(each.rpartition("*")[2])
            if "*" in each
            else name == each
            for each in patterns
        )
        assert is_hidden(name) == (covered and name not in favourites)
