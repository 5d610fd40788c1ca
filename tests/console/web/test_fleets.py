"""One console of several fleets: each has its own pages, logins and rights, and every page leads to the others."""

import json
from pathlib import Path

import pytest

from access.support import ALL_ROLES, AuthFile, everything
from console.fleet.fake_brokers import FakeBroker, channel, fake_brokers, topic
from console.web.support import Document, document, visited_fleets, watching


def brokers() -> tuple[FakeBroker, FakeBroker]:
    """A broker with a topic, and one with another topic besides."""
    clicks = topic("clicks", channel("archive"), channel("messages"))
    return FakeBroker(topics=[clicks]), FakeBroker(topics=[clicks, topic("orders"), topic("..")])


@pytest.mark.parametrize("base", ["", "/nsq"])
async def test_each_fleet_has_its_pages(base: str) -> None:
    one, two = brokers()
    async with (
        fake_brokers(one, two),
        visited_fleets({"one": one, "two": two}, base_path=base or "/") as client,
    ):
        for entrance in {f"{base}/", base or "/", f"{base}/c/one"}:
            assert (await client.get(entrance)).headers["location"] == f"{base}/c/one/"
        assert (await document(client, f"{base}/c/one/")).tables[0].column("Topic") == ["clicks"]
        page = await document(client, f"{base}/c/two/")
        assert page.tables[0].column("Topic") == ["..", "clicks", "orders"]
        assert (await document(client, page.links["orders"])).text
        assert (await client.get(f"{base}/c/one/topics/orders")).status_code == 404
        assert (await client.get(f"{base}/c/two/api/topics")).json()["topics"] == ["..", "clicks", "orders"]
        assert (await client.get(f"{base}/c/two/ping")).text == "OK"
        async with watching(client, "/topics/orders", f"{base}/c/two") as found:
            assert "orders" in await found.until("update")
        for outside in (f"{base}/topics/clicks", f"{base}/c/three/", f"{base}/c/"):
            answer = await client.get(outside)
            assert (answer.status_code, "--fleet" in answer.text) == (404, True)


@pytest.mark.parametrize(
    ("path", "there"),
    [
        ("/", "/"),
        ("/?q=clicks", "/"),
        ("/nodes", "/nodes"),
        ("/nodes/{one}", "/nodes"),
        ("/nodes/{one}/drain", "/nodes"),
        ("/counter", "/counter"),
        ("/create", "/create"),
        ("/topics/clicks", "/topics/clicks"),
        ("/topics/clicks/settings", "/topics/clicks/settings"),
        ("/topics/clicks/delete", "/topics/clicks"),
        ("/topics/clicks/archive", "/topics/clicks/archive"),
        ("/topics/clicks/%256Dessages", "/topics/clicks/%256Dessages"),
        ("/topics/clicks/archive/empty", "/topics/clicks/archive"),
        ("/topics/missing", "/topics/missing"),
        ("/nothing", "/"),
    ],
)
async def test_the_switch_shows_the_same_page(path: str, there: str) -> None:
    one, two = brokers()
    async with fake_brokers(one, two), visited_fleets({"one": one, "two": two}) as client:
        page = Document((await client.get(f"/c/one{path.replace('{one}', one.address)}")).text)
        assert page.links["two"] == f"/c/two{there}"
        assert page.links["one"].startswith("/c/one/")


async def test_the_label_and_the_colours_of_all_fleets_are_on_each_page() -> None:
    one, two = brokers()
    async with (
        fake_brokers(one, two),
        visited_fleets({"one": one, "two": two}, one={"color": "red"}, two={"color": "green"}) as client,
    ):
        for path in ("/c/two/", "/c/two/nodes", "/c/two/topics/missing"):
            html = (await client.get(path)).text
            assert "· two</title>" in html
            assert '<html lang="en" data-base="/c/two/" data-color="green">' in html
            assert f'<a href="/c/one{path.removeprefix("/c/two")}" data-color="red">' in html


async def test_a_login_is_for_one_fleet(tmp_path: Path) -> None:
    """Neither its cookie nor the rights of another fleet count; the audit log names the fleet."""
    file, audit = AuthFile(tmp_path / "auth.toml"), tmp_path / "audit.log"
    file.add_token("admin", everything(*ALL_ROLES))
    file.write()
    guarded = {"auth_file": tmp_path / "auth.toml", "audit_log": str(audit)}
    one, two = brokers()
    async with (
        fake_brokers(one, two),
        visited_fleets({"one": one, "two": two, "three": two}, one=guarded, two=guarded) as client,
    ):
        assert (await client.get("/c/one/")).headers["location"] == "/c/one/login"
        csrf = (await document(client, "/c/one/login")).hidden["csrf"]
        answer = await client.post("/c/one/login", data={"token": "admin-secret", "csrf": csrf})
        assert answer.headers["location"] == "/c/one/"
        assert "Path=/c/one;" in answer.headers["set-cookie"]
        assert (await client.get("/c/one/")).status_code == 200
        assert (await client.get("/c/two/")).headers["location"] == "/c/two/login"
        stolen = "; ".join(
            f"{each.name}={each.value}" for each in client.cookies.jar if each.path == "/c/one"
        )
        assert (await client.get("/c/two/", headers={"Cookie": stolen})).status_code == 303
        assert (await client.get("/c/three/")).status_code == 200
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [(line["event"], line["fleet"]) for line in lines] == [("login", "one")]
