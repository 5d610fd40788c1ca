"""Tests for the registry of a discovery service."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_nsq.lookup.protocol import PeerInfo
from trio_nsq.lookup.service.registry import Producer, Registry, TooMany

INACTIVE_S = 300
LIFETIME_S = 45


def registry(**changes: Any) -> Registry:
    settings = {
        "inactive_timeout_s": INACTIVE_S,
        "tombstone_lifetime_s": LIFETIME_S,
        "max_registrations": 100,
    }
    return Registry(**(settings | changes))


def join(there: Registry, name: str = "a", now: float = 0) -> Producer:
    return there.identify(f"{name}:1", PeerInfo(name, name, 4151, 4150, "1"), now)


def told(there: Registry, topic: str = "t", now: float = 0) -> list[str] | None:
    producers = there.lookup(topic, now)
    return None if producers is None else [producer.info.hostname for producer in producers]


# ------------------------------------------------------------------------------------------------ time


def test_silent_producer_is_hidden_until_its_next_ping() -> None:
    there = registry()
    producer = join(there)
    there.register(producer, "t")
    assert told(there, now=INACTIVE_S) == ["a"]
    assert told(there, now=INACTIVE_S + 1) == []
    assert [*there.nodes(INACTIVE_S + 1)] == []
    there.ping(producer, INACTIVE_S + 1)
    assert told(there, now=2 * INACTIVE_S) == ["a"]
    assert [*there.nodes(2 * INACTIVE_S)] == [(producer, {"t": False})]


def test_tombstone_hides_a_producer_of_its_topic_for_its_lifetime() -> None:
    there = registry()
    producer = join(there)
    there.register(producer, "t", "c")
    there.register(producer, "u")
    assert there.tombstone("t", "a:4151", 10)
    assert (told(there, "t", 10), told(there, "u", 10)) == ([], ["a"])
    assert [*there.nodes(10 + LIFETIME_S - 1)] == [(producer, {"t": True, "u": False})]
    assert (told(there, "t", 10 + LIFETIME_S - 1), told(there, "t", 10 + LIFETIME_S)) == ([], ["a"])
    assert ("topic:t:", producer, 10) in there.registrations()


def test_tombstone_ends_with_its_own_registration() -> None:
    there = registry()
    producer = join(there)
    there.register(producer, "t")
    there.tombstone("t", "a:4151", 0)
    assert not there.register(producer, "t")
    assert told(there) == []
    there.unregister(producer, "t")
    there.register(producer, "t")
    assert told(there) == ["a"]


@pytest.mark.parametrize("node", ["::1:4151", "[::1]:4151"])
def test_a_tombstone_for_an_ipv6_address(node: str) -> None:
    there = registry()
    producer = there.identify("p:1", PeerInfo("::1", "h", 4151, 4150, "1"), 0)
    there.register(producer, "t")
    assert there.tombstone("t", node, 0)
    assert told(there) == []


def test_tombstone_without_a_producer() -> None:
    there = registry()
    there.register(join(there), "t")
    assert not there.tombstone("t", "a:4150", 0)
    assert not there.tombstone("u", "a:4151", 0)
    assert told(there) == ["a"]


# ------------------------------------------------------------------------------------------------ permanent names


@pytest.mark.parametrize("unregisters", [True, False])
def test_names_stay_listed_after_their_last_producer(unregisters: bool) -> None:
    there = registry()
    producer = join(there)
    there.register(producer, "t", "c")
    there.register(producer, "t", "d#ephemeral")
    if unregisters:
        there.unregister(producer, "t")
    else:
        there.disconnect(producer)
    assert (told(there), there.channels("t"), there.topics()) == ([], ["c"], ["t"])


@pytest.mark.parametrize("unregisters", [True, False])
def test_ephemeral_topic_is_removed_with_its_last_producer(unregisters: bool) -> None:
    there = registry()

    def leave(producer: Producer) -> None:
        if unregisters:
            there.unregister(producer, "t#ephemeral")
        else:
            there.disconnect(producer)

    first, last = join(there, "a"), join(there, "b")
    for producer in (first, last):
        there.register(producer, "t#ephemeral", "c")
    leave(first)
    assert told(there, "t#ephemeral") == ["b"]
    leave(last)
    assert (told(there, "t#ephemeral"), there.channels("t#ephemeral")) == (None, [])


def test_deleted_names_can_be_registered_again() -> None:
    there = registry()
    producer = join(there)
    there.register(producer, "t", "c")
    assert there.delete_channel("t", "c")
    assert not there.delete_channel("t", "c")
    assert there.register(producer, "t", "c")
    assert there.delete_topic("t")
    assert not there.delete_topic("t")
    assert (told(there), there.channels("t"), producer.registrations) == (None, [], 0)
    assert not there.unregister(producer, "t", "c")
    assert there.register(producer, "t")
    assert (told(there), there.channels("t")) == (["a"], [])
    there.disconnect(producer)


def test_registrations_per_producer_are_limited() -> None:
    there = registry(max_registrations=3)
    producer = join(there)
    there.register(producer, "t", "c")
    with pytest.raises(TooMany, match="limit of 3"):
        there.register(producer, "u", "c")  # this would be two registrations
    there.register(producer, "u")
    with pytest.raises(TooMany):
        there.register(producer, "t", "d")
    assert not there.register(producer, "t", "c")  # it is registered already
    there.unregister(producer, "u")
    there.register(producer, "t", "d")
    there.register(join(there, "b"), "v")


# ------------------------------------------------------------------------------------------------ saved state


def test_names_to_save() -> None:
    there = registry()
    changes: list[dict[str, list[str]]] = []
    there.on_names_changed = lambda: changes.append(there.durable_names())
    producer = join(there)
    there.register(producer, "t", "c")
    there.register(producer, "t", "c#ephemeral")
    there.register(producer, "u#ephemeral", "c")
    there.create("v", "d")
    assert changes == [{"t": []}, {"t": ["c"]}, {"t": ["c"], "v": []}, {"t": ["c"], "v": ["d"]}]
    del changes[:]
    there.disconnect(producer)
    there.create("v", "d")
    assert changes == []
    there.delete_channel("t", "c")
    there.delete_topic("v")
    assert changes == [{"t": [], "v": ["d"]}, {"t": []}]
    again = registry()
    again.load({"t": ["c"], "v": []})
    assert (again.topics(), again.channels("t"), told(again)) == (["t", "v"], ["c"], [])


# ------------------------------------------------------------------------------------------------ properties

TOPICS = st.sampled_from(["t", "u", "t#ephemeral"])
CHANNELS = st.sampled_from([None, "c", "d", "c#ephemeral"])
WHO = st.integers(0, 2)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["register", "register", "register", "unregister", "leave", "delete"]),
        WHO,
        TOPICS,
        CHANNELS,
    ),
    max_size=40,
)


@given(STEPS)
def test_registry_equals_a_simple_list(steps: list[tuple[str, int, str, str | None]]) -> None:
    """Compare with a list of registrations that is searched for every answer."""
    there = registry()
    producers = [join(there, str(who)) for who in range(3)]
    registered: set[tuple[str, str, str | None]] = set()
    for what, who, topic, channel in steps:
        me = str(who)
        match what:
            case "register":
                there.register(producers[who], topic, channel)
                registered |= {(me, topic, channel), (me, topic, None)}
            case "unregister":
                there.unregister(producers[who], topic, channel)
                registered = {
                    each for each in registered if each[:2] != (me, topic) or channel not in (None, each[2])
                }
            case "leave":
                there.disconnect(producers[who])
                producers[who] = join(there, me)
                registered = {each for each in registered if each[0] != me}
            case "delete":
                if channel is None:
                    there.delete_topic(topic)
                else:
                    there.delete_channel(topic, channel)
                registered = {
                    each for each in registered if each[1] != topic or channel not in (None, each[2])
                }
        for name in ("t", "u", "t#ephemeral"):
            assert set(told(there, name) or []) == {me for me, of, _ in registered if of == name}
        for producer in producers:
            own = {each for each in registered if each[0] == producer.info.hostname}
            assert producer.registrations == len(own)
        listed = {
            (p.info.hostname, key) for key, p, _ in there.registrations() if not key.startswith("client")
        }
        assert listed == {
            (me, f"topic:{of}:" if name is None else f"channel:{of}:{name}") for me, of, name in registered
        }
        # Ephemeral names are listed while they have a producer.
        assert ("t#ephemeral" in there.topics()) == any(of == "t#ephemeral" for _, of, _ in registered)
        assert ("c#ephemeral" in there.channels("t")) == any(
            each[1:] == ("t", "c#ephemeral") for each in registered
        )
