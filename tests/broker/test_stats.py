"""Tests for `/stats` as JSON: filters, the process's memory, and connections."""

import gc
import os
import re
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.api import Api, running_api
from broker.auth_server import answer, authenticated, authorization, running_auth_server
from broker.auth_server import options as auth_options
from broker.certificates import Certificates
from broker.support import connected, identify, settle
from broker.upgrading import compress, negotiate, upgrade
from soak import examples
from trio_nsq.broker.monitoring.process import ProcessFigures
from trio_nsq.http.messages import compact_json

MEMORY = [
    "heap_objects", "heap_idle_bytes", "heap_in_use_bytes", "heap_released_bytes",
    "gc_pause_usec_100", "gc_pause_usec_99", "gc_pause_usec_95", "next_gc_bytes", "gc_total_runs",
]  # fmt: skip


# ---------------------------------------------------------------------- parameters


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (None, True),
        ("true", True),
        ("1", True),
        ("", True),
        ("F", True),
        ("no", True),
        ("false", False),
        ("0", False),
    ],
)
async def test_include_mem_and_include_clients_are_true_unless_false_or_0(
    tmp_path: Path, given: str | None, shown: bool
) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.tcp.subscribe("t", "c")
        await api.tcp.publish("t", b"x")
        stats = await api.stats(**({} if given is None else {"include_mem": given, "include_clients": given}))
        assert ("memory" in stats) is shown
        assert (stats["producers"] is not None) is shown
        assert (stats["topics"][0]["channels"][0]["clients"] is not None) is shown
        assert stats["topics"][0]["channels"][0]["client_count"] == 1


def names(stats: dict[str, Any]) -> list[tuple[str, list[str]]] | None:
    """Return topics and their channels."""
    if stats["topics"] is None:
        return None
    return [(t["topic_name"], [c["channel_name"] for c in t["channels"]]) for t in stats["topics"]]


async def test_filters(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        assert names(await api.stats()) == []
        for topic, channels in {"b": ["d", "c"], "a": ["c"], "empty": []}.items():
            await api.post("/topic/create", topic=topic)
            for channel in channels:
                await api.post("/channel/create", topic=topic, channel=channel)
        assert names(await api.stats()) == [("a", ["c"]), ("b", ["c", "d"]), ("empty", [])]
        assert names(await api.stats(topic="b")) == [("b", ["c", "d"])]
        assert names(await api.stats(channel="c")) == [("a", ["c"]), ("b", ["c"])]
        assert names(await api.stats(topic="b", channel="d")) == [("b", ["d"])]
        assert names(await api.stats(topic="b", channel="unknown")) == []
        assert names(await api.stats(channel="unknown")) == []
        assert names(await api.stats(topic="unknown")) is None
        assert names(await api.stats(topic="unknown", channel="c")) is None


async def test_topic_filter_keeps_producers_without_their_counts_of_other_topics(
    tmp_path: Path,
) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.tcp.subscribe("t", "c")
        for topic in "t", "u":
            await api.tcp.publish(topic, b"x", b"y")
        everything = (await api.stats())["producers"]
        assert [each["pub_counts"] for each in everything] == [
            [{"topic": "t", "count": 2}, {"topic": "u", "count": 2}]
        ]
        of_t = await api.stats(topic="t")
        (client,) = of_t["topics"][0]["channels"][0]["clients"]
        assert client["pub_counts"] == of_t["producers"][0]["pub_counts"] == [{"topic": "t", "count": 2}]
        await api.post("/topic/create", topic="v")
        (producer,) = (await api.stats(topic="v"))["producers"]
        assert "pub_counts" not in producer
        assert (await api.stats(topic="t", channel="unknown"))["producers"] is not None
        assert (await api.stats(topic="unknown"))["producers"] is None  # as in nsqd


# ---------------------------------------------------------------------- memory


async def test_memory(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        gc.collect()
        memory = (await api.stats())["memory"]
    assert list(memory) == MEMORY
    assert all(isinstance(value, int) for value in memory.values())
    assert memory["heap_objects"] > 10_000
    assert 1e6 < memory["heap_in_use_bytes"] < 1e10
    assert memory["gc_total_runs"] >= 1
    assert memory["gc_pause_usec_100"] >= memory["gc_pause_usec_99"] >= memory["gc_pause_usec_95"] > 0
    assert memory["heap_idle_bytes"] == memory["heap_released_bytes"] == memory["next_gc_bytes"] == 0


async def test_stopped_broker_no_longer_observes_the_garbage_collector(tmp_path: Path) -> None:
    before = list(gc.callbacks)
    async with running_api(tmp_path / "d"):
        assert len(gc.callbacks) == len(before) + 1
    assert gc.callbacks == before


@pytest.fixture
def figures() -> Iterator[ProcessFigures]:
    found = ProcessFigures()
    yield found
    found.close()


def test_heap_follows_allocations(figures: ProcessFigures) -> None:
    for _ in range(10):  # threads of other tests may free as much meanwhile
        gc.collect()  # else garbage of other tests may be freed in between
        before = figures.memory()
        objects = [object() for _ in range(100_000)]
        large = b"x" * 100_000_000  # too large for free memory of other objects
        during = figures.memory()
        grown = {name: during[name] - before[name] for name in ("heap_in_use_bytes", "heap_objects")}
        is_seen = grown["heap_in_use_bytes"] > 0.9 * len(large) and grown["heap_objects"] >= len(objects)
        del objects, large
        if is_seen:
            return
    raise AssertionError(grown)


def test_collections_of_the_youngest_generation_are_not_counted(figures: ProcessFigures) -> None:
    gc.collect(0)
    assert figures.memory()["gc_total_runs"] == 0
    gc.collect(1)
    gc.collect(2)
    assert figures.memory()["gc_total_runs"] == 2
    assert figures.memory()["gc_pause_usec_95"] == figures.memory()["gc_pause_usec_100"] > 0
    figures.close()
    gc.collect()
    assert figures.memory()["gc_total_runs"] == 2


# ---------------------------------------------------------------------- end-to-end latency


async def latency(api: Api, topic: str) -> tuple[Any, list[Any]]:
    """Return the latency of the topic, and of its channels."""
    (found,) = (await api.stats(topic=topic))["topics"]
    key = "e2e_processing_latency"
    return found[key], [channel[key] for channel in found["channels"]]


async def test_percentiles_of_channels_and_their_topic(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d", e2e_processing_latency_percentiles=(1.0, 0.99)) as api:
        await api.post("/channel/create", topic="t", channel="idle")
        await api.tcp.subscribe("t", "c", ready_count=10)
        await api.post("/channel/create", topic="t", channel="idle")
        nothing = {"count": 0, "percentiles": [{"quantile": 1, "value": 0}, {"quantile": 0.99, "value": 0}]}
        assert await latency(api, "t") == (nothing, [nothing, nothing])
        await api.tcp.publish("t", b"1", b"2", b"3")
        for _ in range(2):
            await api.tcp.send(b"FIN %s\n" % (await api.tcp.message()).id)
        await api.tcp.publish("without", b"marks that the FINs are done")
        topic, (busy, idle) = await latency(api, "t")
        assert topic == busy
        assert idle == nothing
        assert busy["count"] == 2
        assert [each["quantile"] for each in busy["percentiles"]] == [1, 0.99]
        assert all(1000 < each["value"] < 60e9 for each in busy["percentiles"])
        assert await latency(api, "without") == ({"count": 0, "percentiles": None}, [])
        assert '"quantile":1,' in (await api.get("/stats", format="json")).text


async def test_percentiles_only_on_request(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.tcp.subscribe("t", "c")
        off = {"count": 0, "percentiles": None}
        assert await latency(api, "t") == (off, [off])


# ---------------------------------------------------------------------- connections


async def producer(api: Api, topic: str = "t") -> dict[str, Any]:
    (found,) = (await api.stats(topic=topic))["producers"]
    described: dict[str, Any] = found
    return described


PLAIN = {
    "sample_rate": 0,
    "deflate": False,
    "snappy": False,
    "tls": False,
    "tls_cipher_suite": "",
    "tls_version": "",
    "tls_negotiated_protocol": "",
    "tls_negotiated_protocol_is_mutual": False,
}


async def test_plain_connection(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.tcp.publish("t", b"x")
        found = await producer(api)
        assert found | PLAIN == found
        assert not found.keys() & {"authed", "auth_identity", "auth_identity_url"}


@pytest.mark.parametrize("kind", ["deflate", "snappy"])
async def test_compressed_connection(tmp_path: Path, kind: str) -> None:
    async with running_api(tmp_path / "d") as api:
        await upgrade(api.tcp, None, kind)
        await api.tcp.publish("t", b"x")
        expected = PLAIN | {kind: True}
        found = await producer(api)
        assert found | expected == found


async def test_sampled_connection(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await negotiate(api.tcp, sample_rate=37)
        await api.tcp.publish("t", b"x")
        assert (await producer(api))["sample_rate"] == 37


async def test_encrypted_connection(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path / "certificates")
    async with running_api(tmp_path / "d", **certificates.options) as api:
        await upgrade(api.tcp, certificates.client_context(), None)
        await api.tcp.publish("t", b"x")
        found = await producer(api)
        assert (found["tls"], found["tls_version"]) == (True, "TLS1.3")
        assert found["tls_cipher_suite"].startswith("TLS_")
        assert found["tls_negotiated_protocol"] == ""
        assert found["tls_negotiated_protocol_is_mutual"] is True


@pytest.mark.parametrize("about", [{}, {"identity": "it", "identity_url": "http://it/"}])
async def test_authorized_connection(tmp_path: Path, about: dict[str, Any]) -> None:
    everything = [authorization(), authorization(".*", ".*", "read")]
    async with running_auth_server(answer(*everything, **about)) as server:
        async with running_api(tmp_path / "d", **auth_options(server)) as api:
            api.client.headers["Authorization"] = "Bearer secret"
            await negotiate(api.tcp)
            await authenticated(api.tcp)
            await api.tcp.publish("t", b"x")
            found = await producer(api)
    assert {key: value for key, value in found.items() if key.startswith("auth")} == {
        "authed": True,
        **{f"auth_{key}": value for key, value in about.items()},
    }
    assert list(found)[14 : 16 + len(about)] == ["user_agent", "authed", *(f"auth_{key}" for key in about)]


async def test_identify_and_auth_after_an_answer_are_in_the_next_one(tmp_path: Path) -> None:
    everything = [authorization(), authorization(".*", ".*", "read")]
    certificates = Certificates(tmp_path / "certificates")
    async with running_auth_server(answer(*everything, identity="it")) as server:
        async with running_api(tmp_path / "d", **auth_options(server), **certificates.options) as api:
            api.client.headers["Authorization"] = "Bearer secret"
            async with connected(api.tcp_address) as other:
                await authenticated(other)
                await other.publish("t", b"x")
                first = await producer(api)
                assert (first["client_id"], first["user_agent"]) == ("127.0.0.1", "")
                await upgrade(other, certificates.client_context(), "deflate")
                second = await producer(api)
                assert (second["tls"], second["deflate"]) == (True, True)
                await negotiate(other, client_id="me", hostname="here", user_agent="a/1")
                third = await producer(api)
                changed = {"client_id": "me", "hostname": "here", "user_agent": "a/1"}
                assert third == second | changed
                assert await producer(api) == third
                assert re.search(r"\[V2 here:[0-9]+ a/1 *\] msgs: 1 ", await api.check_text())


async def test_identity_that_has_changed_after_an_answer_is_in_the_next_one(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    everything = [authorization(), authorization(".*", ".*", "read")]
    async with running_auth_server(answer(*everything, ttl=60, identity="before")) as server:
        async with running_api(tmp_path / "d", **auth_options(server)) as api:
            api.client.headers["Authorization"] = "Bearer secret"
            await negotiate(api.tcp, heartbeat_interval=-1)
            await authenticated(api.tcp)
            await api.tcp.publish("t", b"x")
            assert (await producer(api))["auth_identity"] == "before"
            server.response = answer(*everything, identity="after")
            await trio.sleep(61)
            await api.tcp.publish("t", b"x")
            assert (await producer(api))["auth_identity"] == "after"


async def test_connections_that_do_not_publish_are_not_producers(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.tcp.subscribe("t", "c")
        async with connected(f"127.0.0.1:{(await api.get('/info')).json()['tcp_port']}"):
            assert (await api.stats())["producers"] is None


# ---------------------------------------------------------------------- other clients


@pytest.mark.parametrize("path", [b"/stats?format=json", b"/stats", b"/metrics"])
async def test_ping_does_not_wait_for_all_earlier_answers(tmp_path: Path, path: bytes) -> None:
    answered: list[int] = []

    async def read(number: int, stream: trio.SocketStream) -> None:
        async with stream:
            assert (await stream.receive_some()).startswith(b"HTTP/1.1 200")
            async for _ in stream:
                pass
        answered.append(number)

    async with running_api(tmp_path / "d") as api:
        for number in range(120):
            await api.tcp.publish(f"t{number}#ephemeral", b"x")
        url = api.client.base_url
        streams = [await trio.open_tcp_stream(url.host, url.port or 0) for _ in range(20)]
        await trio.testing.wait_all_tasks_blocked(0.05)
        for stream in streams:  # without a switch to the broker, so that it gets all requests at once
            wanted = path if stream is not streams[-1] else b"/ping"
            os.write(stream.socket.fileno(), b"GET %b HTTP/1.0\r\n\r\n" % wanted)
        async with trio.open_nursery() as nursery:
            for number, stream in enumerate(streams):
                nursery.start_soon(read, number, stream)
    assert answered.index(19) < 10


# ---------------------------------------------------------------------- any clients

TEXTS = st.text(max_size=8) | st.sampled_from(
    ["", "%s %d %%", 'a "b"\\', "\x00\x1f\x7f", "é", "\u2028", "🎉"]
)


@st.composite
def connections(draw: st.DrawFn) -> dict[str, Any]:
    """Draw what a client sends: the fields of IDENTIFY, how many messages to which topics, and SUB or not."""
    fields = {name: draw(TEXTS) for name in ("client_id", "hostname", "user_agent")}
    # Often the same, so that clients differ in one field alone.
    fields |= {name: draw(st.sampled_from(["", "", "é"])) for name in ("topology_region", "topology_zone")}
    return {
        "fields": fields | {"sample_rate": draw(st.sampled_from([0, 0, 0, 99]))},
        "kind": draw(st.sampled_from([None, None, None, "deflate", "snappy"])),
        "published": draw(
            st.dictionaries(st.sampled_from(["a", "b", "c#ephemeral"]), st.integers(1, 3), max_size=2)
        ),
        "consumes": draw(st.booleans()),
        "ready_count": draw(st.integers(0, 2500)),
    }


def described(sent: dict[str, Any], port: int, topic: str) -> dict[str, Any]:
    """Return what `/stats` has to tell of a client, without its time."""
    fields, published = sent["fields"], {n: c for n, c in sent["published"].items() if topic in ("", n)}
    places = {name: fields[name] for name in ("topology_region", "topology_zone")}
    counts = [{"topic": name, "count": count} for name, count in sorted(published.items())]
    return {
        **{name: fields[name] for name in ("client_id", "hostname")},
        "version": "V2",
        "remote_address": f"127.0.0.1:{port}",
        "state": 3 if sent["consumes"] else 0,
        "ready_count": sent["ready_count"] if sent["consumes"] else 0,
        **dict.fromkeys(("in_flight_count", "message_count", "finish_count", "requeue_count"), 0),
        "sample_rate": fields["sample_rate"],
        "deflate": sent["kind"] == "deflate",
        "snappy": sent["kind"] == "snappy",
        "user_agent": fields["user_agent"],
        **(places if any(places.values()) else {}),
        **({"pub_counts": counts} if counts else {}),
        **{name: value for name, value in PLAIN.items() if name.startswith("tls")},
    }


@given(st.lists(connections(), min_size=2, max_size=6), st.sampled_from(["", "", "a", "idle"]))
@settings(max_examples=examples(60), deadline=None)
def test_any_clients(drawn: list[dict[str, Any]], topic: str) -> None:
    async def run() -> None:
        with TemporaryDirectory() as folder:
            async with running_api(Path(folder) / "d") as api, AsyncExitStack() as stack:
                for name in ("a", "idle"):
                    await api.post("/topic/create", topic=name)
                ports = []
                for sent in drawn:
                    client = await stack.enter_async_context(connected(api.tcp_address))
                    ports.append(client.stream.socket.getsockname()[1])
                    await client.send(
                        identify(feature_negotiation=True, **sent["fields"], **{str(sent["kind"]): True})
                    )
                    assert await client.frame() is not None
                    if sent["kind"]:
                        compress(client, sent["kind"])
                        await client.ok()
                    for name, count in sent["published"].items():
                        await client.publish(name, *[b"x"] * count)
                    if sent["consumes"]:
                        await client.subscribe("idle", "c", ready_count=sent["ready_count"])
                await settle()
                here = [(sent, described(sent, port, topic)) for sent, port in zip(drawn, ports, strict=True)]
                for _ in range(2):  # the second time, from what the broker remembers
                    answer = await api.get("/stats", format="json", topic=topic)
                    stats = answer.json()
                    assert answer.text == compact_json(stats)  # the escapes are those of any other JSON
                    check(stats["producers"], [each for sent, each in here if sent["published"]])
                    await api.check_text(topic=topic)
                    idle = [found for found in stats["topics"] if found["topic_name"] == "idle"]
                    for channel in idle[0]["channels"] if idle else ():
                        check(channel["clients"], [each for sent, each in here if sent["consumes"]])

    def check(clients: list[dict[str, Any]] | None, expected: list[dict[str, Any]]) -> None:
        for each in clients or ():
            assert each.pop("connect_ts") > 0
        assert (clients or []) == expected
        assert list(map(list, clients or [])) == list(map(list, expected))  # the order of the fields

    trio.run(run)
