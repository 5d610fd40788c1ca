"""`GET /access`: a client learns who it is, and rebuilds an identity that decides as the server does."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from access.support import (
    ALL_ROLES,
    Answer,
    AuthFile,
    Given,
    bearer,
    http_connected,
    naively_allows,
    naively_allows_everywhere,
)
from broker.auth_server import answer, authorization, options, running_auth_server
from broker.support import running_broker
from lookup.support import ours
from trio_nsq.access.auth_file import parse_auth_file
from trio_nsq.access.description import MAX_PATTERNS, describe, parse_description
from trio_nsq.access.policy import Identity
from trio_nsq.broker import BoundAddresses

NAMES = st.sampled_from(["a", "b", "ab", "a.b", "orders-1", "orders#ephemeral"])
PATTERNS = st.lists(st.sampled_from(["*", "a", "a*", "*b", "orders-*", "a.b"]), min_size=1, max_size=3)
GRANTS = st.lists(
    st.builds(
        Given,
        st.lists(st.sampled_from(ALL_ROLES), min_size=1, max_size=3),
        st.none() | PATTERNS,
        st.none() | PATTERNS,
    ),
    max_size=4,
)


def identity_with(grants: list[Given], expires: str | None = None) -> Identity:
    """The identity of a token with these grants."""
    file = AuthFile(Path("unused"))
    file.add_token("web", *grants, expires=expires)
    return next(iter(parse_auth_file(file.entries["web"]).tokens.values()))


def sent(value: dict[str, Any]) -> Any:
    """A value as its reader gets it."""
    return json.loads(json.dumps(value))


@given(GRANTS, NAMES, st.none() | NAMES, st.sampled_from(ALL_ROLES))
def test_the_reader_decides_as_the_server(
    grants: list[Given], topic: str, channel: str | None, role: Any
) -> None:
    identity = parse_description(sent(describe(identity_with(grants), read_only=False))).identity
    assert identity is not None
    assert identity.allows(role, topic, channel) == naively_allows(grants, role, topic, channel)
    assert identity.allows_everywhere(role) == naively_allows_everywhere(grants, role)
    assert identity.sees(topic) == any(
        naively_allows([each], *where) for each in grants for where in seen(topic)
    )


def seen(topic: str) -> list[tuple[str, str, str]]:
    """Every role on some channel of a topic."""
    return [
        (role, topic, channel) for role in ALL_ROLES for channel in ("a", "b", "orders-1", "a.b", "orders-")
    ]


def test_name_source_expiry_and_read_only_are_kept() -> None:
    identity = identity_with([], expires="2030-01-01T00:00:00Z")
    about = parse_description(sent(describe(identity, read_only=True)))
    assert about.read_only
    assert about.identity is not None
    assert (about.identity.name, about.identity.source) == ("web", "token")
    assert about.identity.expires_at_s == identity.expires_at_s
    for_ever = parse_description(sent(describe(identity_with([]), read_only=False))).identity
    assert for_ever is not None
    assert for_ever.expires_at_s > 1e18


def test_without_authentication_there_is_no_identity() -> None:
    about = sent(describe(None, read_only=False))
    assert parse_description(about) == (None, False)
    assert about["grants"][0]["roles"] == list(ALL_ROLES)


def regexes(*topics: str) -> dict[str, Any]:
    """A description of a client that an auth server identified, with `read`."""
    grants = [{"roles": ["read", "fly"], "topics": list(topics), "channels": [".*"]}]
    about = describe(identity_with([]), read_only=False)
    return {**about, "source": "auth server", "pattern_type": "regex", "grants": grants}


def test_regular_expressions() -> None:
    identity = parse_description(regexes("orders-[0-9]+", "a_b")).identity
    assert identity is not None
    assert identity.allows("read", "orders-12", "c")
    assert identity.allows("read", "a_b")
    assert not identity.allows("read", "xorders-12")
    assert not identity.allows_everywhere("read")
    everywhere = parse_description(regexes(".*")).identity
    assert everywhere is not None
    assert everywhere.allows_everywhere("read")


def test_without_re2_only_plain_names_and_everything_match(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "re2", None)  # as if it were not installed
    identity = parse_description(regexes("orders-[0-9]+", "a_b", "x.y")).identity
    assert identity is not None
    assert not identity.allows("read", "orders-12")
    assert not identity.allows("read", "x.y")  # a regular expression, too
    assert identity.allows("read", "a_b", "c")
    everywhere = parse_description(regexes(".*")).identity
    assert everywhere is not None
    assert everywhere.allows_everywhere("read")


@pytest.mark.parametrize(
    "changes",
    [
        {"authentication": 1},
        {"authentication": None},
        {"name": 7},
        {"source": "stars"},
        {"expires_at": "soon"},
        {"expires_at": True},
        {"expires_at": 10**400},
        {"expires_at": float("nan")},
        {"pattern_type": "sql"},
        {"grants": None},
        {"grants": [[]]},
        {"grants": [{"roles": ["read"], "topics": "*", "channels": ["*"]}]},
        {"grants": [{"roles": ["read"], "topics": [["*"]], "channels": ["*"]}]},
        {"grants": [{"roles": ["read"], "topics": ["a b"], "channels": ["*"]}]},
        {"grants": [{"roles": ["read"], "topics": ["*"] * MAX_PATTERNS, "channels": ["*"]}]},
        {"grants": [{"roles": ["read"], "topics": ["["], "channels": ["*"]}], "pattern_type": "regex"},
    ],
)
def test_a_malformed_description_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_description({**describe(identity_with([]), read_only=False), **changes})


@pytest.mark.parametrize("value", [None, [], "x", 1])
def test_an_answer_that_is_no_object_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="not an object"):
        parse_description(value)


# ---------------------------------------------------------------------- servers


async def ask(address: str | None, token: str | None = None) -> Answer:
    """Ask a server over a connection of its own."""
    assert address is not None
    async with http_connected(address) as connection:
        return await connection.request("GET", "/access", {"Authorization": token} if token else {})


async def described(bound: BoundAddresses, token: str) -> Any:
    """What a broker says about a token."""
    return json.loads((await ask(bound.http_address, token)).body)


async def test_a_broker_tells_a_token_its_grants_until_it_is_revoked(tmp_path: Path) -> None:
    file = AuthFile(tmp_path / "auth.toml")
    file.add_token("admin", Given(["admin"]))
    file.add_token(
        "web", Given(["publish", "read"], ["clicks", "orders-*"], ["b*"]), expires="2099-01-01T00:00:00Z"
    )
    async with running_broker(tmp_path / "d", auth_file=file.write(), http_read_only=True) as bound:
        assert await described(bound, bearer("web")) == {
            "authentication": True,
            "name": "web",
            "source": "token",
            "expires_at": 4070908800.0,
            "read_only": True,
            "pattern_type": "glob",
            "grants": [
                {"roles": ["publish", "read"], "topics": ["clicks", "orders-*"], "channels": ["b*"]},
            ],
        }
        for token in (None, bearer("stranger")):
            assert (await ask(bound.http_address, token)).status == 401


async def test_a_broker_tells_the_patterns_of_an_auth_server(tmp_path: Path) -> None:
    async with running_auth_server() as server:
        server.response = answer(authorization("orders-[0-9]+", ".*", "publish"), identity="shop")
        async with running_broker(tmp_path / "d", **options(server)) as bound:
            about = await described(bound, "Bearer x")
    assert (about["name"], about["source"], about["pattern_type"]) == ("shop", "auth server", "regex")
    assert about["grants"] == [{"roles": ["publish"], "topics": ["orders-[0-9]+"], "channels": [".*"]}]
    assert about["expires_at"] is None


async def test_without_authentication_a_broker_says_so(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d") as bound:
        assert (await described(bound, "Bearer x"))["authentication"] is False


async def test_a_discovery_service_answers_too(tmp_path: Path) -> None:
    file = AuthFile(tmp_path / "auth.toml")
    file.add_token("web", Given(["register"]))
    async with ours(auth_file=file.write()) as lookupd:
        about = json.loads((await ask(lookupd.http_address, bearer("web"))).body)
        assert about["name"] == "web"
        assert (await ask(lookupd.http_address)).status == 401
    async with ours() as lookupd:
        assert json.loads((await ask(lookupd.http_address)).body)["authentication"] is False
