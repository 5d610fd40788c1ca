"""The pages of a fleet: their numbers, order, filters and links."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import click
import httpx
import pytest

from console.fleet.fake_brokers import FakeBroker, channel, fake_brokers, topic
from console.web.support import document, visited, watching
from qcli.commands.admin.settings import SETTINGS
from trio_nsq.console.options import COLORS
from trio_nsq.console.web.static_files import static_files


@asynccontextmanager
async def fleet(*topics: dict[str, Any], **second: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Run a console for a broker with some topics, and another one."""
    one, other = FakeBroker(topics=[*topics]), FakeBroker(**second)
    async with fake_brokers(one, other), visited(one, other) as client:
        yield client


async def test_topics_have_the_sums_of_all_brokers() -> None:
    here = topic(
        "clicks", channel("archive", depth=5, in_flight_count=2, client_count=1), depth=1, message_count=10
    )
    there = topic(
        "clicks",
        channel("archive", depth=6, deferred_count=4, oldest_message_age_ms=90_000),
        message_count=20,
    )
    async with fleet(here, topics=[there], is_nsqd=True) as client:
        row = (await document(client, "/")).tables[0].row("clicks")
    assert row["Depth"] == "12"
    assert (row["In flight"], row["Deferred"], row["Oldest"]) == ("2", "4", "90 s")
    assert (row["Messages"], row["Channels"], row["Brokers"]) == ("30", "1", "2")


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ({}, ["a", "B", "c"]),
        ({"order": "desc"}, ["c", "a", "B"]),
        ({"sort": "depth"}, ["c", "B", "a"]),
        ({"sort": "depth", "order": "asc"}, ["a", "B", "c"]),
        ({"sort": "nothing", "order": "sideways", "page": "-1"}, ["a", "B", "c"]),
        ({"sort": "messages"}, ["a", "B", "c"]),
        ({"q": "b"}, ["B"]),
        ({"page": "9" * 30}, ["a", "B", "c"]),
        ({"page": "7"}, ["a", "B", "c"]),
    ],
)
async def test_topics_are_sorted_and_filtered(query: dict[str, str], names: list[str]) -> None:
    async with fleet(topic("a", depth=1), topic("c", depth=3), topic("B", depth=2)) as client:
        cells = (await document(client, "/", **query)).tables[0].column("Topic")
    shown = [cell.removesuffix(" no channel") for cell in cells]
    assert sorted(shown) == sorted(names)
    if query.get("sort") == "depth":
        assert shown == names


async def test_a_page_has_a_hundred_rows() -> None:
    async with fleet(*(topic(f"t{number:03}") for number in range(250))) as client:
        first = await document(client, "/")
        assert first.tables[0].column("Topic") == [f"t{number:03}" for number in range(100)]
        assert "1–100 of 250" in first.text  # noqa: RUF001 - the page has an en dash
        second = await document(client, first.links["Next"])
        last = await document(client, second.links["Next"])
        assert last.tables[0].column("Topic") == [f"t{number:03}" for number in range(200, 250)]
        assert "Next" not in last.links
        descending = await document(client, first.links["Topic"])
        assert descending.tables[0].column("Topic")[0] == "t249"


async def test_a_filter_without_a_match_says_so() -> None:
    async with fleet(topic("clicks")) as client:
        found = await document(client, "/", q="<b>")
    assert "No topic matches “<b>”" in found.text
    assert not found.tables


async def test_an_empty_fleet_says_what_to_do() -> None:
    async with fleet() as client:
        assert "qcli pub TOPIC" in (await document(client, "/")).text


async def test_a_topic_shows_channels_and_brokers() -> None:
    percentiles = {"count": 3, "percentiles": [{"quantile": 0.99, "value": 2_000_000_000}]}
    here = topic(
        "clicks",
        channel("archive", depth=5, message_count=8, client_count=1),
        channel("mail", depth=3, paused=True),
        message_count=8,
        e2e_processing_latency=percentiles,
    )
    async with fleet(here, topics=[topic("clicks", message_count=4)], is_nsqd=True) as client:
        found = await document(client, "/topics/clicks")
    channels, brokers, latencies = found.tables
    assert channels.column("Depth") == ["5", "3"]
    assert channels.column("Channel") == ["archive", "mail paused no consumer"]
    (ours, theirs), whole = sorted(brokers.rows[:2], key=lambda row: row[0].endswith("nsqd")), brokers.rows[2]
    numbers = [dict(zip(brokers.head, row, strict=True)) for row in (ours, theirs, whole)]
    assert [row["Messages"] for row in numbers] == ["8", "4", "12"]
    assert [row["Depth"] for row in numbers] == ["8", "0", "8"]
    assert sorted(brokers.column("Broker")[:2]) == brokers.column("Broker")[:2]
    assert latencies.column("p99") == ["2.0 s"]


async def test_a_channel_shows_its_clients() -> None:
    client_of_channel = {
        "client_id": "worker-1",
        "hostname": "host<script>",
        "remote_address": "10.0.0.9:1234",
        "user_agent": "go-nsq/1.1.0",
        "version": "V2",
        "tls": True,
        "tls_version": "TLS1.3",
        "snappy": True,
        "sample_rate": 50,
        "auth_identity": "billing",
        "in_flight_count": 1,
        "ready_count": 2,
        "finish_count": 3,
        "requeue_count": 4,
        "message_count": 5,
        "connect_ts": 1,
    }
    here = topic(
        "clicks", channel("archive", depth=7, client_count=1, clients=[client_of_channel, "wrong", {}])
    )
    async with fleet(here, topics=[topic("clicks", channel("archive", clients=None))]) as client:
        found = await document(client, "/topics/clicks/archive")
    brokers, clients = found.tables
    assert sorted(brokers.column("Depth")[:2]) == ["0", "7"]
    assert brokers.column("Depth")[2] == "7"
    row = clients.row("host<script>10.0.0.9:1234")
    assert "go-nsq/1.1.0billing" in row["Agent"]
    assert row["Connection"] == "V2 TLS1.3 snappy sample 50 %"
    numbers = [row[name] for name in ("In flight", "Ready", "Finished", "Requeued", "Messages")]
    assert numbers == ["1", "2", "3", "4", "5"]
    assert len(clients.rows) == 2  # the empty object is a client, too


@pytest.mark.parametrize(
    "path", ["/topics/x", "/topics/clicks/x", "/nodes/x:1", "/static/0/x.css", "/nothing"]
)
async def test_what_does_not_exist_is_404(path: str) -> None:
    async with fleet(topic("clicks", channel("archive"))) as client:
        answer = await client.get(path)
    assert answer.status_code == 404
    assert "There is no" in answer.text


@pytest.mark.parametrize("name", ["delete", "messages", ".", "..", "x#ephemeral"])
async def test_channels_with_difficult_names_have_a_page(name: str) -> None:
    async with fleet(topic("clicks", channel(name, depth=3))) as client:
        link = (await document(client, "/topics/clicks")).links[name]
        found = await document(client, link)
    assert found.tables[0].column("Depth") == ["3"]


async def test_nodes_show_versions_and_who_does_not_answer() -> None:
    one, hung = (
        FakeBroker(topics=[topic("clicks", depth=4)]),
        FakeBroker(raw=b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n"),
    )
    async with fake_brokers(one, hung), visited(one, hung) as client:
        brokers = (await document(client, "/nodes")).tables[0]
        assert brokers.row(one.address)["Status"] == "OK"
        assert brokers.row(one.address)["Depth"] == "4"
        assert brokers.row(hung.address)["Status"].startswith("unresponsive")
        front = await document(client, "/")
        assert f"{hung.address} does not answer" in " ".join(front.text.split())
        assert "does not answer" in (await document(client, f"/nodes/{hung.address}")).text


async def test_archives_of_brokers() -> None:
    def archived(**more: Any) -> FakeBroker:
        return FakeBroker(
            more={"archive": {"url": "s3://a/<b>", "state": "archiving", "error": "", "lag_s": 0.4} | more}
        )

    brokers = archived(), archived(lag_s=7.0), archived(lag_s=90.0, error="No route."), FakeBroker()
    async with fake_brokers(*brokers), visited(*brokers) as client:
        rows = (await document(client, "/nodes")).tables[0]
        shown = [rows.row(each.address)["Status"].removeprefix("OK") for each in brokers]
        assert shown == [
            "archive: written",
            "archive: written, 7.0 s behind",
            "archive: not written, 90 s behind",
            "",
        ]
        page = await document(client, f"/nodes/{brokers[2].address}")
        for text in ("s3://a/<b>", "not written", "90 s behind: No route."):
            assert text in page.text
        assert "Archive" not in (await document(client, f"/nodes/{brokers[3].address}")).text


async def test_a_broker_that_fell_silent_keeps_its_last_numbers() -> None:
    one, other = FakeBroker(topics=[topic("clicks", depth=4)]), FakeBroker()
    async with fake_brokers(one, other), visited(one, other) as client:
        await document(client, "/topics/clicks")
        one.raw = b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n"
        while (await client.get("/topics/clicks")).status_code == 200:
            pass
        node = await document(client, f"/nodes/{one.address}")
        assert node.tables[0].row("clicks")["Depth"] == "4"
        assert "its last answer" in node.text


async def test_what_only_a_silent_broker_has_is_not_called_deleted() -> None:
    one, other = FakeBroker(topics=[topic("clicks", channel("archive"))]), FakeBroker(topics=[topic("views")])
    async with fake_brokers(one, other), visited(one, other) as client:
        await document(client, "/topics/clicks")
        one.raw = b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n"
        for path in ("/topics/clicks", "/topics/clicks/archive"):
            while (answer := await client.get(path)).status_code == 200:
                pass
            assert answer.status_code == 503
            assert one.address in answer.text
            assert "deleted" not in answer.text
        for path in ("/topics/others", "/topics/views/other"):
            answer = await client.get(path)
            assert (answer.status_code, "It may have been deleted" in answer.text) == (404, True)


async def test_charts_keep_the_depth_of_a_silent_broker() -> None:
    one = FakeBroker(topics=[topic("clicks", channel("archive", depth=40), depth=2)])
    other = FakeBroker(topics=[topic("clicks", channel("archive", depth=60), depth=3)])
    async with fake_brokers(one, other), visited(one, other) as client:
        await document(client, "/topics/clicks")
        one.raw = b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n"
        while one.address not in (await client.get("/topics/clicks")).text:
            pass
        for path, depth in (("/topics/clicks", 105), ("/topics/clicks/archive", 100)):
            while "does not answer" not in (text := (await document(client, path)).text):
                pass
            assert f"Now {depth}" in " ".join(text.split())


async def test_topics_without_a_channel_are_marked_if_messages_wait() -> None:
    async with fleet(
        topic("waiting", depth=3), topic("empty"), topic("read", channel("c"), depth=1)
    ) as client:
        shown = (await document(client, "/")).tables[0].column("Topic")
    assert shown == ["empty", "read", "waiting no channel"]


async def test_title_and_colour_tell_two_consoles_apart() -> None:
    async with fake_brokers(FakeBroker()), visited(title="<production>", color="red") as client:
        html = (await client.get("/")).text
        assert "<title>Topics \u00b7 &lt;production&gt;</title>" in html
        assert 'data-color="red"' in html
        icon = re.search(r'href="(/static/[^"]+icon[^"]*)"', html)
        assert icon
        red = (await client.get(icon[1])).text
    async with visited() as client:
        html = (await client.get("/")).text
        icon = re.search(r'href="(/static/[^"]+icon[^"]*)"', html)
        assert icon
        assert (await client.get(icon[1])).text != red
        assert "data-color" not in html


def test_every_colour_is_in_the_style_sheet_and_an_option() -> None:
    css = static_files()["console.css"].body.decode()
    assert dict(re.findall(r'(?m)^\[data-color="(\w+)"\] { --fleet: (#\w+); }', css)) == COLORS
    (option,) = [each for each in SETTINGS if each.name == "color"]
    for name in COLORS:
        assert option.type_cast_value(click.Context(click.Command("admin")), name) == name


async def test_a_proxy_that_removes_the_base_path_is_told_so() -> None:
    async with visited(base_path="/nsq") as client:
        assert (await client.get("/nsq/")).status_code == 200
        for method, path in (
            ("GET", "/"),
            ("GET", "/topics/t"),
            ("POST", "/topics/t/delete"),
            ("GET", "//evil"),
        ):
            answer = await client.request(method, path)
            assert answer.status_code == 404
            assert "--base-path /nsq" in answer.text


async def test_lookup_without_a_discovery_service_says_so() -> None:
    async with fleet() as client:
        assert "--lookupd-http-address" in (await document(client, "/lookup")).text


async def test_a_fleet_that_is_computed_in_a_thread_has_the_same_numbers() -> None:
    many = [channel(f"channel-{number:05}", depth=1, message_count=number) for number in range(3_000)]
    async with fleet(
        topic("clicks", *many), topics=[topic("clicks", channel("channel-00000", depth=5))]
    ) as client:
        assert (await document(client, "/")).tables[0].row("clicks")["Depth"] == "3,005"
        assert (await document(client, "/topics/clicks")).tables[0].row("channel-00000")["Depth"] == "6"


async def test_counter_adds_up_channels() -> None:
    here = topic("clicks", channel("archive", message_count=1200), channel("mail", message_count=34))
    async with fleet(here, topics=[topic("clicks", channel("mail", message_count=1))]) as client:
        found = await document(client, "/counter")
    assert "1,235" in found.text
    assert found.tables[0].column("Channel") == ["clicks/archive", "clicks/mail"]
    assert found.tables[0].column("Messages") == ["1,200", "35"]


async def test_static_files_are_kept_by_browsers() -> None:
    async with fleet() as client:
        html = (await client.get("/")).text
        paths = re.findall(r'(?:href|src)="(/static/[^"]+)"', html)
        assert len(paths) == 3
        for path in paths:
            answer = await client.get(path)
            assert answer.status_code == 200
            assert "immutable" in answer.headers["cache-control"]
            older = re.sub(r"/static/\w+/", "/static/0123/", path)
            assert (await client.get(older)).headers["cache-control"] == "no-cache"


async def test_first_page_is_light_with_a_hundred_topics() -> None:
    topics = [
        topic(
            f"{'a-name-of-usual-length'}-{number:04}",
            channel("archive", depth=number * 977, message_count=number * 10_007),
        )
        for number in range(120)
    ]
    async with fleet(*topics) as client:
        html = (await client.get("/")).text
        static = [await client.get(path) for path in re.findall(r'(?:href|src)="(/static/[^"]+)"', html)]
    # Sparklines of a busy hour add at most 300 bytes for each row.
    assert len(html.encode()) + sum(len(each.content) for each in static) + 100 * 300 < 150 * 1024


async def test_theme_of_the_cookie() -> None:
    async with fleet() as client:
        assert 'data-theme="dark"' in (await client.get("/", headers={"Cookie": "theme=dark"})).text
        hostile = {"Cookie": 'theme="><script>'}
        assert "data-theme" not in (await client.get("/", headers=hostile)).text.split("<head>")[0]


async def test_topic_that_was_created_since_the_last_poll_has_a_page() -> None:
    broker = FakeBroker()
    async with fake_brokers(broker), visited(broker, poll_interval_ms=3_600_000) as client:
        broker.topics = [topic("new", channel("c"))]
        while (await client.get("/topics/new/c")).status_code == 404:
            pass  # unknown names cause a poll at most once a second
        asked = broker.asked.count("/stats")
        assert (await client.get("/topics/new")).status_code == 200
        assert broker.asked.count("/stats") == asked


@pytest.mark.parametrize(
    "path", ["/", "/topics/clicks", "/topics/clicks/archive", "/counter", "/nodes", "/api/counter"]
)
async def test_halves_of_surrogate_pairs_in_answers_of_brokers_are_shown_as_replaced(path: str) -> None:
    bad = "\ud800"
    clicks = topic("clicks", channel("archive", clients=[{"client_id": bad}]), channel(bad), unavailable=bad)
    async with fleet(clicks, topic(bad, channel(bad, message_count=1))) as client:
        answer = await client.get(path)
    assert answer.status_code == 200
    shown = "\ufffd" in answer.text or r"\ud800" in answer.text
    assert shown or path in ("/nodes", "/topics/clicks/archive")


async def test_charts_agree_with_the_numbers_beside_them() -> None:
    broker = FakeBroker(topics=[topic("clicks", channel("archive", depth=5, oldest_message_age_ms=7000))])
    async with fake_brokers(broker), visited(broker) as client:
        for path in ("/topics/clicks", "/topics/clicks/archive"):
            await document(client, path)  # the history has a first value
        broker.topics = [topic("clicks", channel("archive", depth=999, oldest_message_age_ms=90_000))]
        for path in ("/topics/clicks", "/topics/clicks/archive"):
            async with watching(client, path) as events:
                block = await events.until("update", "999")
            legends = re.findall(r'<span class="key [^>]*>(?:Now) <b>([^<]*)</b>', block)
            assert legends == ["999", "90 s"]
