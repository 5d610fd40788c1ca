"""Tests for the registry of a discovery service."""

from itertools import groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_nsq.lookup.protocol import Leadership, PeerInfo
from trio_nsq.lookup.service.registry import Producer, Registry, TooMany

INACTIVE_S = 300
LIFETIME_S = 45


def registry(**changes: Any) -> Registry:
    settings = {
        "inactive_timeout_s": INACTIVE_S,
        "tombstone_lifetime_s": LIFETIME_S,
        "max_registrations": 100,
        "max_topics": 1000,
        "max_channels": 1000,
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


@given(STEPS)
def test_names_are_limited(steps: list[tuple[str, int, str, str | None]]) -> None:
    """New names replace those without a producer, and no others."""
    there = registry(max_topics=2, max_channels=2)
    producers = [join(there, str(who)) for who in range(3)]
    for what, who, topic, channel in steps:
        before = names(there)
        used = {key for producer in producers for key in held(producer)}
        match what:
            case "register":
                new = {(topic, None), (topic, channel)} - before
                try:
                    there.register(producers[who], topic, channel)
                except TooMany:
                    topics = {each for each in used | new if each[1] is None}
                    assert len(topics) > 2 or len(used | new) - len(topics) > 2
            case "unregister":
                there.unregister(producers[who], topic, channel)
            case "leave":
                there.disconnect(producers[who])
                producers[who] = join(there, str(who))
            case "delete":
                there.delete_topic(topic) if channel is None else there.delete_channel(topic, channel)
        after = names(there)
        assert sum(name is None for _, name in after) <= 2
        assert sum(name is not None for _, name in after) <= 2
        assert {key for producer in producers for key in held(producer)} <= after


def names(there: Registry) -> set[tuple[str, str | None]]:
    """Return all topics and channels."""
    return {(topic, name) for topic in there.topics() for name in (None, *there.channels(topic))}


def held(producer: Producer) -> set[tuple[str, str | None]]:
    """Return a producer's topics and channels."""
    return {(topic, name) for topic, channels in producer.channels.items() for name in (None, *channels)}


def test_oldest_unused_names_are_replaced_first() -> None:
    there = registry(max_topics=3, max_channels=3)
    there.load({"saved": ["s"]})
    producer = join(there)
    there.register(producer, "kept", "c")
    for n in range(10):
        other = join(there, f"b{n}")
        there.register(other, f"t{n}", "c")
        there.disconnect(other)
    assert names(there) == {(topic, name) for topic in ("kept", "t8", "t9") for name in (None, "c")}
    for topic in ("u", "v"):
        there.register(producer, topic)
    assert there.topics() == ["kept", "u", "v"]
    with pytest.raises(TooMany, match="--max-topics"):
        there.create("w")


def test_registry_may_change_during_a_query() -> None:
    there = registry()
    leaving, staying = join(there, "a"), join(there, "b")
    for topic in ("t", "u", "v"):
        for producer in (leaving, staying):
            there.register(producer, topic, "c")
    registrations, nodes = there.registrations(), there.nodes(0)
    first = [next(registrations) for _ in range(3)]  # up to the first topic
    assert next(nodes)[0] is leaving
    there.delete_topic("u")
    there.disconnect(leaving)
    there.register(join(there, "c"), "w")
    rest = [*registrations]
    assert ("channel:v:c", staying, None) in rest
    assert not any(":u:" in key or (producer is leaving and ":v:" in key) for key, producer, _ in rest)
    assert [key for key, _, _ in first] == ["client::", "client::", "topic:t:"]
    assert [node for node, _ in nodes] == [staying]


def test_registrations_of_a_topic_follow_each_other() -> None:
    there = registry()
    for name in ("a", "b"):
        for topic in ("t", "u"):
            there.register(join(there, name + topic), topic, "c")
    keys = [key for key, _, _ in there.registrations()]
    assert [key for key, _ in groupby(keys)] == [*dict.fromkeys(keys)]


# ------------------------------------------------------------------------------------------------ leaders of clusters


def lead(
    there: Registry, name: str, epoch: int, now: float = 0, *, cluster: str = "prod", owner: str | None = None
) -> Producer:
    """Connect the leader of a cluster, which has the topic t."""
    info = PeerInfo(name, name, 4151, 4150, "1", cluster=Leadership(cluster, name, epoch))
    producer = there.identify(f"{name}:1", info, now, owner)
    there.register(producer, "t")
    return producer


def listed(there: Registry, now: float = 0) -> list[str]:
    return [producer.info.hostname for producer, _ in there.nodes(now)]


def test_a_later_leader_hides_the_earlier_ones_of_its_cluster() -> None:
    there = registry()
    alone = join(there, "alone")
    there.register(alone, "t")
    first = lead(there, "a", 1)
    lead(there, "x", 1, cluster="test")
    second = lead(there, "b", 2, 1)
    third = lead(there, "c", 3, 2)
    lead(there, "a", 3, 3)  # its second connection: members are compared by their epochs only
    assert told(there, now=3) == listed(there, 3) == ["alone", "x", "c", "a"]
    assert there.outdated_by(third) == [first, second]
    assert [there.is_outdated(each, 3) for each in (first, second, third)] == [True, True, False]


def test_an_earlier_leader_is_ignored_until_the_later_one_was_gone_for_long() -> None:
    there = registry()
    later = lead(there, "b", 2)
    there.ping(later, 10)
    there.disconnect(later)
    earlier = lead(there, "a", 1, 20)
    there.ping(earlier, 10 + INACTIVE_S)
    assert (told(there, now=10 + INACTIVE_S), listed(there, 10 + INACTIVE_S)) == ([], [])
    assert told(there, now=11 + INACTIVE_S) == listed(there, 11 + INACTIVE_S) == ["a"]
    again = lead(there, "b", 2, 12 + INACTIVE_S)
    assert told(there, now=12 + INACTIVE_S) == ["b"]
    there.disconnect(again)
    there.ping(earlier, 12 + 2 * INACTIVE_S)
    assert told(there, now=13 + 2 * INACTIVE_S) == ["a"]


def test_another_identity_hides_no_leader() -> None:
    there = registry()
    lead(there, "a", 1, owner="mine")
    lead(there, "b", 2, owner="theirs")
    lead(there, "c", 3, owner=None)
    assert told(there) == ["a", "b", "c"]


def test_clusters_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was not seen for the longest time is forgotten; its leaders are no longer compared."""
    monkeypatch.setattr("trio_nsq.lookup.service.registry.MAX_CLUSTERS", 2)
    there = registry()
    for cluster in ("one", "two"):
        lead(there, cluster, 1, 0, cluster=cluster)
    ones = lead(there, "one2", 2, 1, cluster="one")
    lead(there, "two2", 2, 2, cluster="two")
    there.ping(ones, 3)
    lead(there, "three", 1, 4, cluster="three")
    assert told(there, now=4) == ["two", "one2", "two2", "three"]


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["lead", "lead", "ping", "leave"]),
        st.integers(0, 3),  # who
        st.integers(1, 4),  # epoch
        st.sampled_from([("prod", None), ("prod", "other"), ("test", None)]),
        st.sampled_from([0, 1, INACTIVE_S - 1, INACTIVE_S, INACTIVE_S + 1]),  # how much later
    ),
    max_size=30,
)


@given(EVENTS)
def test_leaders_equal_a_history(
    events: list[tuple[str, int, int, tuple[str, str | None], int]],
) -> None:
    """Compare with all that was ever heard of leaders."""
    there = registry()
    now = 0
    connected: dict[int, Producer] = {}
    heard: list[tuple[tuple[str | None, str], int, int]] = []  # cluster, epoch, time
    for what, who, epoch, (cluster, owner), later in events:
        now += later
        if what == "lead" and who not in connected:
            connected[who] = lead(there, f"{who}", epoch, now, cluster=cluster, owner=owner)
        elif who not in connected:
            continue
        elif what == "leave":
            there.disconnect(connected.pop(who))
            continue
        else:
            there.ping(connected[who], now)
        heard.append((connected[who].cluster, connected[who].epoch, now))
        shown = set(told(there, now=now) or ())
        assert shown == set(listed(there, now))
        for number, producer in connected.items():
            recent = {of for name, of, then in heard if name == producer.cluster and now - then <= INACTIVE_S}
            highest = max(of for name, of, _ in heard if name == producer.cluster)
            if now - producer.last_seen > INACTIVE_S or (producer.epoch < highest and highest in recent):
                assert str(number) not in shown
            elif producer.epoch >= max(recent):
                assert str(number) in shown
