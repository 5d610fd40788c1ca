"""Clients without credentials: the requests of KEDA's scaler for NSQ, and nothing else."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from access.support import (
    ALL_ROLES,
    Answer,
    AuthFile,
    attempt,
    bearer,
    everything,
    http_connected,
    name_matches,
    request,
)
from access.table import ENDPOINTS
from broker.support import connected, pub, running_broker
from lookup.support import ours
from trio_nsq.access.auth_file import parse_auth_file
from trio_nsq.access.auth_file_editor import GrantText, add_token, remove_entries

LOOKUP = (
    "GET /lookup?topic={topic} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: Go-http-client/1.1\r\n"
    "Accept: application/json; charset=utf-8\r\nAccept-Encoding: gzip\r\n\r\n"
)
STATS = (
    "GET /stats?format=json&include_clients=false&include_mem=false&topic={topic} HTTP/1.1\r\nHost: {host}\r\n"
    "User-Agent: Go-http-client/1.1\r\nAccept-Encoding: gzip\r\n\r\n"
)
"""The requests of KEDA 2.16 and newer, as Go sends them."""


class Places(NamedTuple):
    """The HTTP addresses of a discovery service and of a broker that registers with it."""

    lookupd: str
    broker: str
    tcp: str


def write_auth_file(folder: Path, topics: Sequence[str]) -> Path:
    """Write a token with all roles, and which topics clients without one see."""
    file = AuthFile(folder / "auth.toml")
    file.add_token("all", everything(*ALL_ROLES))
    if topics:
        file.entries["anonymous"] = f"[anonymous]\ntopics = {json.dumps(list(topics))}\n"
    return file.write()


@asynccontextmanager
async def guarded(folder: Path, *topics: str) -> AsyncIterator[Places]:
    """Run both with authentication, and the topics `clicks`, with three messages for the channel `a`, and `secret`."""
    auth_file = write_auth_file(folder, topics)
    (folder / "token").write_text("all-secret")
    async with ours(auth_file=auth_file) as lookupd:
        to_lookupd: dict[str, Any] = {
            "nsqlookupd_tcp_addresses": (lookupd.tcp_address,),
            "lookupd_auth_secret_file": folder / "token",
            "broadcast_address": "127.0.0.1",
        }
        async with running_broker(folder / "d", auth_file=auth_file, **to_lookupd) as bound:
            assert bound.http_address is not None
            places = Places(lookupd.http_address, bound.http_address, bound.tcp_address)
            for target in (
                "/topic/create?topic=clicks",
                "/channel/create?topic=clicks&channel=a",
                "/topic/create?topic=secret",
                *["/pub?topic=clicks"] * 3,
            ):
                assert (await ask(places.broker, request("POST", target, TOKEN, b"x"))).status == 200
            for topic in ("clicks", "secret"):
                lookup = request("GET", f"/lookup?topic={topic}", TOKEN)
                while b"tcp_port" not in (await ask(places.lookupd, lookup)).body:
                    await trio.sleep(0.01)
            yield places


TOKEN = {"Authorization": bearer("all")}


async def ask(address: str, data: bytes) -> Answer:
    """Send a request over a connection of its own."""
    async with http_connected(address) as connection:
        await connection.send(data)
        return await connection.answer()


def of_keda(text: str, address: str, topic: str = "clicks") -> bytes:
    return text.format(topic=topic, host=address).encode()


async def test_keda_gets_the_depth_without_a_token(tmp_path: Path) -> None:
    async with guarded(tmp_path, "cl*") as places:
        found = await ask(places.lookupd, of_keda(LOOKUP, places.lookupd))
        assert found.status == 200
        (producer,) = json.loads(found.body)["producers"]
        broker = f"{producer['broadcast_address']}:{producer['http_port']}"
        assert broker == places.broker
        answer = await ask(broker, of_keda(STATS, broker))
        assert answer.status == 200
        stats = json.loads(answer.body)
        (topic,) = stats["topics"]
        assert (topic["topic_name"], topic["depth"]) == ("clicks", 0)
        assert [(each["channel_name"], each["depth"], each["paused"]) for each in topic["channels"]] == [
            ("a", 3, False)
        ]


async def test_other_topics_do_not_exist_for_anonymous_clients(tmp_path: Path) -> None:
    async with guarded(tmp_path, "clicks") as places:
        assert (await ask(places.lookupd, of_keda(LOOKUP, places.lookupd, "secret"))).status == 404
        answer = await ask(places.broker, of_keda(STATS, places.broker, "secret"))
        assert not json.loads(answer.body)["topics"]
        everything_seen = await ask(places.broker, request("GET", "/stats?format=json&include_disk=true"))
        stats = json.loads(everything_seen.body)
        assert [topic["topic_name"] for topic in stats["topics"]] == ["clicks"]
        assert "disk" not in stats
        assert not stats["producers"]


async def test_anonymous_clients_see_numbers_and_no_settings(tmp_path: Path) -> None:
    async with guarded(tmp_path, "clicks") as places:
        for path, body in (
            ("/topic/settings?topic=clicks", {"ttl_ms": 5_000_000, "table": "delta:s3://bucket/private"}),
            (
                "/channel/settings?topic=clicks&channel=a",
                {"max_attempts": 3, "dead_letter_topic": "secret", "rate_limit_per_s": 7},
            ),
        ):
            changed = await ask(places.broker, request("PUT", path, TOKEN, json.dumps(body).encode()))
            assert changed.status == 200, changed.body
        for form in "json", "text":
            answer = await ask(places.broker, request("GET", f"/stats?format={form}&include_mem=true"))
            assert answer.status == 200
            for text in (b"secret", b"private", b"ttl_ms", b"max_attempts", b"rate_limit", b"memory"):
                assert text not in answer.body
        stats = json.loads((await ask(places.broker, request("GET", "/stats?format=json"))).body)
        assert stats["topics"][0]["channels"][0]["depth"] == 3


async def test_without_the_table_and_with_a_wrong_token_nothing_is_open(tmp_path: Path) -> None:
    async with guarded(tmp_path) as places:
        assert (await ask(places.lookupd, of_keda(LOOKUP, places.lookupd))).message == "AUTH_REQUIRED"
        assert (await ask(places.broker, of_keda(STATS, places.broker))).message == "AUTH_REQUIRED"


async def test_nothing_else_is_open(tmp_path: Path) -> None:
    async with guarded(tmp_path, "*") as places:
        for method, path in ENDPOINTS:
            target = f"{path.replace('{', '').replace('}', '')}?topic=clicks&channel=a"
            answer = await ask(places.broker, request(method, target))
            assert (answer.status == 401) == (path not in ("/ping", "/stats")), (method, path)
        for path in ("/topics", "/channels?topic=clicks", "/nodes", "/info", "/access", "/debug"):
            assert (await ask(places.lookupd, request("GET", path))).status == 401, path
        wrong = request("GET", "/stats", {"Authorization": "Bearer wrong"})
        assert (await ask(places.broker, wrong)).message == "INVALID_TOKEN"
        async with connected(places.tcp) as client:
            assert (await attempt(client, pub("clicks", b"x"))).startswith("E_AUTH_FIRST")


async def test_pages_of_other_names_are_refused(tmp_path: Path) -> None:
    """A page that gave its own name the address of the broker would read the answer."""
    page = {"Host": "attacker.example.com", "Accept-Language": "en"}
    async with guarded(tmp_path, "*") as places:
        answer = await ask(places.broker, request("GET", "/stats", page))
        assert answer.status == 403
        assert answer.message.startswith("HOST_NOT_ALLOWED")


async def test_a_reload_closes_it_again(tmp_path: Path) -> None:
    async with guarded(tmp_path, "*") as places, http_connected(places.broker) as kept:
        await kept.send(of_keda(STATS, places.broker))
        assert (await kept.answer()).status == 200
        path = str(write_auth_file(tmp_path, ())).encode()
        assert (await ask(places.broker, request("PUT", "/config/auth_file", TOKEN, path))).status == 200
        await kept.send(of_keda(STATS, places.broker))
        assert (await kept.answer()).message == "AUTH_REQUIRED"


# ---------------------------------------------------------------------- the file


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("anonymous = 1", "anonymous is not a table"),
        ("[[anonymous]]\ntopics = ['t']", "anonymous is not a table"),
        ("[anonymous]", 'anonymous needs topics, such as ["clicks", "orders-*"]'),
        ("[anonymous]\ntopics = []", "anonymous needs topics"),
        ("[anonymous]\ntopics = 't'", "topics is not a list of strings"),
        ("[anonymous]\ntopics = ['a b']", "anonymous: ' ' in 'a b'"),
        ("[anonymous]\ntopics = ['t']\nroles = ['read']", "anonymous has the unknown key roles"),
    ],
)
def test_errors_of_the_table(text: str, reason: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_auth_file(text)
    assert reason in str(caught.value)


@given(st.lists(st.text("ab*", min_size=1, max_size=4), min_size=1, max_size=3), st.text("abc", min_size=1))
def test_it_sees_the_topics_that_match_and_has_no_role(patterns: list[str], topic: str) -> None:
    policy = parse_auth_file(f"[anonymous]\ntopics = {json.dumps(patterns)}\n")
    assert policy.anonymous is not None
    assert policy.anonymous.sees(topic) == any(name_matches(pattern, topic) for pattern in patterns)
    assert not any(policy.anonymous.allows(role, topic) for role in ALL_ROLES)  # type: ignore[arg-type]  # of strings
    assert policy.find_token(b"", 0) is None


@pytest.mark.parametrize("header", ["[anonymous]", " [ 'anonymous' ] # open"])
def test_changes_of_tokens_keep_the_table(header: str) -> None:
    first = add_token("", "first", "secret", GrantText(("read",)))
    text = f'{first}\n{header}\ntopics = ["t"]\n'
    for changed in (
        add_token(text, "second", "other", GrantText(("read",))),
        remove_entries(text, ["first"]),
        remove_entries(add_token(text, "second", "other", GrantText(("read",))), ["second", "first"]),
    ):
        anonymous = parse_auth_file(changed).anonymous
        assert anonymous is not None
        assert [pattern.pattern for pattern in anonymous.grants[0].topics] == ["t"]
