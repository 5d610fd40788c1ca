"""The policy engine, compared with a naive one that has the rules of the documentation."""

import math

from hypothesis import given
from hypothesis import strategies as st

from access.support import (
    ALL_ROLES,
    AuthFile,
    Given,
    naively_allows,
    naively_allows_everywhere,
)
from trio_nsq.access.auth_file import parse_auth_file
from trio_nsq.access.policy import ROLES, Identity, Policy, Rule, token_digest

NAMES = st.sampled_from(["orders", "orders.eu", "clicks", "o", "ors", "orders#ephemeral", "none"])
PATTERNS = st.lists(
    st.sampled_from(["*", "orders", "orders*", "*s", "clicks", "**", "o*s", "none"]), max_size=3
)
GRANTS = st.lists(
    st.builds(
        Given,
        st.lists(st.sampled_from(ALL_ROLES), min_size=1, max_size=3),
        st.none() | PATTERNS,
        st.none() | PATTERNS,
    ),
    max_size=4,
)
ROLE = st.sampled_from(ROLES)
MAYBE_NAME = st.none() | NAMES


def parsed(*tokens: tuple[str, list[Given], int | None]) -> Policy:
    """A policy with tokens: name, grants, and the hour of the first day of 1970 when it expires."""
    file = AuthFile(None)  # type: ignore[arg-type]  # it is not written
    for name, grants, hour in tokens:
        expires = None if hour is None else f"1970-01-01T{hour:02}:00:00Z"
        file.add_token(name, *grants, expires=expires)
    return parse_auth_file("\n".join(file.entries.values()))


def identity_of(grants: list[Given]) -> Identity:
    """The identity of a token with these grants."""
    found = parsed(("web", grants, None)).find_token(b"web-secret", 0)
    assert found is not None
    return found


def test_the_roles() -> None:
    assert ROLES == ALL_ROLES


@given(GRANTS, ROLE, NAMES, MAYBE_NAME)
def test_what_an_identity_may_do(grants: list[Given], role: str, topic: str, channel: str | None) -> None:
    identity = identity_of(grants)
    assert identity.allows(role, topic, channel) is naively_allows(grants, role, topic, channel)  # type: ignore[arg-type]
    assert identity.allows_everywhere(role) is naively_allows_everywhere(grants, role)  # type: ignore[arg-type]
    assert identity.sees(topic) is any(
        naively_allows([Given(grant.roles, grant.topics)], each, topic) for grant in grants for each in ROLES
    )


@given(GRANTS, ROLE, NAMES, NAMES)
def test_everywhere_includes_every_topic_and_channel(
    grants: list[Given], role: str, topic: str, channel: str
) -> None:
    identity = identity_of(grants)
    if identity.allows_everywhere(role):  # type: ignore[arg-type]
        assert identity.allows(role, topic)  # type: ignore[arg-type]
        assert identity.allows(role, topic, channel)  # type: ignore[arg-type]


@given(GRANTS, ROLE, st.sampled_from(["topic", "channel", "server"]), MAYBE_NAME, MAYBE_NAME)
def test_what_a_rule_allows(
    grants: list[Given], role: str, scope: str, topic: str | None, channel: str | None
) -> None:
    identity = identity_of(grants)
    rule = Rule(role, scope)  # type: ignore[arg-type]
    query = {name: value for name, value in (("topic", topic), ("channel", channel)) if value is not None}
    if scope == "server" or topic is None or (scope == "channel" and channel is None):
        expected = naively_allows_everywhere(grants, role)
    else:
        expected = naively_allows(grants, role, topic, channel if scope == "channel" else None)
    assert rule.allows(identity, query) is expected
    assert Rule().allows(identity, query)
    assert Rule(open=True).allows(identity, query)
    assert Rule(role, "server", open=True).allows(identity, query)  # type: ignore[arg-type]


TOKENS = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c", "d"]), GRANTS, st.none() | st.integers(0, 23)),
    unique_by=lambda token: token[0],
    max_size=4,
)
HOURS = st.integers(0, 24 * 4).map(lambda quarter: quarter * 900.0)


@given(TOKENS, HOURS, st.sampled_from(["a", "b", "c", "d", "e"]))
def test_who_has_a_token(tokens: list[tuple[str, list[Given], int | None]], now_s: float, name: str) -> None:
    policy = parsed(*tokens)
    valid = [each for each in tokens if each[0] == name and (each[2] is None or now_s < each[2] * 3600)]
    found = policy.find_token(f"{name}-secret".encode(), now_s)
    assert (found.name if found else None) == (valid[0][0] if valid else None)
    for wrong in (
        b"",
        name.encode(),
        f"{name}-secret ".encode(),
        token_digest(f"{name}-secret".encode()).encode(),
    ):
        assert policy.find_token(wrong, now_s) is None
    assert policy.find_certificate(f"{name}-secret", now_s) is None


@given(TOKENS, TOKENS, HOURS)
def test_an_identity_is_renewed_by_its_token_and_not_by_its_name(
    before: list[tuple[str, list[Given], int | None]],
    after: list[tuple[str, list[Given], int | None]],
    now_s: float,
) -> None:
    old, new = parsed(*before), parsed(*after)
    for name, _, _ in before:
        identity = old.tokens[token_digest(f"{name}-secret".encode())]
        assert new.renew(identity, now_s) == new.find_token(f"{name}-secret".encode(), now_s)
    same_name = AuthFile(None)  # type: ignore[arg-type]
    for name, grants, _ in before:
        same_name.add_token(name, *grants, secret="another")
        policy = parse_auth_file(same_name.entries.pop(name))
        identity = old.tokens[token_digest(f"{name}-secret".encode())]
        assert policy.renew(identity, now_s) is None


@given(TOKENS, HOURS)
def test_the_next_expiry(tokens: list[tuple[str, list[Given], int | None]], now_s: float) -> None:
    policy = parsed(*tokens)
    later = [hour * 3600 for _, _, hour in tokens if hour is not None and hour * 3600 > now_s]
    assert policy.next_expiry_s(now_s) == min(later, default=math.inf)
    # Between two expiries the same tokens are valid.
    valid = [policy.find_token(f"{name}-secret".encode(), now_s) for name, _, _ in tokens]
    until = min(policy.next_expiry_s(now_s), now_s + 1e9)
    for at_s in (now_s, (now_s + until) / 2, math.nextafter(until, 0)):
        assert [policy.find_token(f"{name}-secret".encode(), at_s) for name, _, _ in tokens] == valid


def test_a_certificate_is_no_token_and_a_token_no_certificate() -> None:
    file = AuthFile(None)  # type: ignore[arg-type]
    digest = token_digest(b"secret")
    file.add_certificate("backup", digest, Given(["read"]))
    policy = parse_auth_file("\n".join(file.entries.values()))
    assert policy.find_token(b"secret", 0) is None
    assert policy.find_certificate("", 0) is None
    found = policy.find_certificate(digest, 0)
    assert found is not None
    assert policy.renew(found, 0) == found
