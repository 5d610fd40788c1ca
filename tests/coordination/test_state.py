"""Tests for the value of a cluster, and its transitions."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from soak import examples
from trio_nsq.coordination.state import (
    MAX_EPOCH,
    MAX_MEMBERS,
    MAX_VALUE_BYTES,
    Candidate,
    ClusterState,
    NotInSync,
    OutdatedState,
    RecordedArchive,
    StateError,
    check_founder,
    decode,
    founded,
)
from trio_nsq.replication.link import MAX_ADDRESSES

A, B, C = (Candidate(name, (f"10.0.0.{number}:4151",)) for number, name in enumerate("ABC", 1))
FIRST = founded("prod", A, "s1", 1)
TWO = FIRST.joined("B", B.addresses).synced("B")
FIELDS = json.loads(TWO.encode())


def test_the_members_one_of_which_led_before() -> None:
    state = TWO.joined("C", C.addresses)  # C is not in sync
    assert state.elected(B, "s2", 2).in_sync_besides("B") == state.in_sync_besides("B") == A.addresses
    assert state.in_sync_besides("C") == A.addresses + B.addresses


def test_value_is_one_json_object() -> None:
    state = replace(TWO.joined("C", C.addresses), successor="B", unknown={"newer": [1, {"x": None}]})
    state = state.archived(RecordedArchive("s3://archive", "1"))
    assert json.loads(state.encode()) == {
        "cluster": "prod",
        "id": "s1",
        "epoch": 1,
        "leader": "A",
        "session": "s1",
        "in_sync": ["A", "B"],
        "members": {"A": ["10.0.0.1:4151"], "B": ["10.0.0.2:4151"], "C": ["10.0.0.3:4151"]},
        "successor": "B",
        "archive": {"place": "s3://archive", "owner": "1"},
        "newer": [1, {"x": None}],
    }
    assert decode(state.encode()) == state
    assert state.addresses == A.addresses


def test_a_member_that_was_replaced_is_forgotten() -> None:
    """A member with an empty folder is a new one, also at the addresses of the one before."""
    state = TWO.joined("C", C.addresses)
    assert state.joined("D", C.addresses).members.keys() == {"A", "B", "D"}
    assert state.joined("D", B.addresses).members.keys() == {"A", "B", "C", "D"}  # B may lead
    assert state.unsynced("B").joined("D", B.addresses).members.keys() == {"A", "C", "D"}
    assert state.joined("D", ()).joined("E", ()).members.keys() == {"A", "B", "C", "D", "E"}  # unknown


def test_members_are_forgotten_if_there_are_too_many() -> None:
    """Otherwise the leader could record nothing any more."""
    state = TWO
    for number in range(MAX_MEMBERS):
        state = state.joined(f"F{number}", (f"10.0.1.{number}:4151",))
        assert f"F{number}" in state.members
    assert len(state.members) == MAX_MEMBERS
    assert {"A", "B"} <= state.members.keys()
    again = state.synced(f"F{number}").elected(B, "s2", 2)
    assert again.members == state.members


def test_fields_of_newer_versions_survive_all_changes() -> None:
    state = decode(json.dumps({**FIELDS, "newer": 7}).encode())
    state = state.joined("C", ()).synced("C").unsynced("C").removed("C").handed_over("B")
    assert json.loads(state.elected(B, "s2", 2).encode())["newer"] == 7


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {**FIELDS, "cluster": "../x"},
        {**FIELDS, "cluster": 1},
        {**FIELDS, "epoch": "1"},
        {**FIELDS, "epoch": True},
        {**FIELDS, "epoch": 1.0},
        {**FIELDS, "epoch": 0},
        {**FIELDS, "epoch": MAX_EPOCH + 1},
        {**FIELDS, "leader": "C"},
        {**FIELDS, "leader": None},
        {**FIELDS, "session": ""},
        {**FIELDS, "in_sync": ["B"]},
        {**FIELDS, "in_sync": ["A", "C"]},
        {**FIELDS, "in_sync": "A"},
        {**FIELDS, "in_sync": ["A", 1]},
        {**FIELDS, "members": {"A": [], "B": "x"}},
        {**FIELDS, "members": {"A": [], "B": [1]}},
        {**FIELDS, "members": {"A": [], "B": ["x" * 256]}},
        {**FIELDS, "members": {"A": [], "B": ["x"] * (MAX_ADDRESSES + 1)}},
        {**FIELDS, "members": {"A": [], "B": [], "a/b": []}},
        {**FIELDS, "members": {"A": [], "B": []} | {f"F{n}": [] for n in range(MAX_MEMBERS)}},
        {**FIELDS, "successor": "A"},
        {**FIELDS, "successor": "C"},
        {**FIELDS, "successor": 1},
        {**FIELDS, "archive": 1},
        [],
        "text",
    ],
)
def test_invalid_values_are_refused(fields: Any) -> None:
    with pytest.raises(StateError, match=r"^[a-z0-9A-Z].* .*[^.]$"):
        decode(json.dumps(fields).encode())


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[" * 9999, b" " * (MAX_VALUE_BYTES + 1)])
def test_other_data_is_refused(data: bytes) -> None:
    with pytest.raises(StateError):
        decode(data)


def test_a_value_that_readers_would_refuse_is_not_written() -> None:
    with pytest.raises(StateError, match="longer than"):
        replace(FIRST, unknown={"newer": "x" * MAX_VALUE_BYTES}).encode()


def test_only_a_member_in_sync_is_elected() -> None:
    with pytest.raises(
        NotInSync, match=r"C is not in sync with the cluster prod, .* in sync: A \(10\.0\.0\.1:4151\) or B \("
    ):
        TWO.joined("C", ()).elected(C, "s2", 2)
    with pytest.raises(StateError, match="C is not a member of the cluster prod"):
        TWO.elected(C, "s2", 2)
    elected = TWO.elected(Candidate("B", ("new:1",)), "s2", 2)
    assert (elected.epoch, elected.leader, elected.in_sync) == (2, "B", frozenset("AB"))
    assert elected.addresses == ("new:1",)


def test_no_member_is_elected_from_a_value_that_is_too_old() -> None:
    with pytest.raises(OutdatedState, match=r"has epoch 1 .* B has seen epoch 3"):
        TWO.elected(B._replace(epoch=3), "s2", 4)
    with pytest.raises(OutdatedState, match=r"has no value of the cluster prod, .* B has seen epoch 3"):
        check_founder("prod", B._replace(epoch=3))
    check_founder("prod", B)


def test_an_older_copy_of_a_folder_is_not_elected() -> None:
    """It does not know the process that was in sync; the process after that does."""
    state = TWO.synced("B", "two")
    with pytest.raises(NotInSync, match=r"B is older than when it was in sync with the cluster prod"):
        state.elected(B._replace(instances=("one",)), "s2", 2)
    elected = state.elected(B._replace(instances=("one", "two", "three")), "s2", 2)
    assert elected.instances == {"B": "three"}
    assert decode(elected.encode()) == elected
    assert state.elected(B._replace(instances=("one",)), "s2", 2, is_confirmed=True).instances == {"B": "one"}
    assert state.unsynced("B").instances == state.removed("B").instances == {}
    assert founded("prod", A._replace(instances=("one",)), "s", 1).instances == {"A": "one"}


def test_an_administrator_lets_a_member_lead_that_may_lack_messages() -> None:
    elected = TWO.joined("C", ()).elected(C._replace(epoch=9), "s2", 10, is_confirmed=True)
    assert (elected.epoch, elected.leader, elected.in_sync) == (10, "C", frozenset("C"))
    assert elected.members.keys() == set("ABC")


def test_epochs_of_elections_grow() -> None:
    with pytest.raises(StateError, match="not above 1"):
        TWO.elected(B, "s2", 1)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda: TWO.unsynced("A"), "A leads"),
        (lambda: TWO.removed("A"), "A leads"),
        (lambda: TWO.handed_over("A"), "A leads"),
        (lambda: TWO.synced("C"), "C is not a member"),
        (lambda: TWO.removed("C"), "C is not a member"),
        (lambda: TWO.joined("C", ()).handed_over("C"), "C is not in sync"),
        (lambda: TWO.joined("a b", ()), "the id of a data folder 'a b' is not valid"),
        (lambda: TWO.joined("C", ["x"] * 99), "C has more than 16 addresses"),
    ],
)
def test_changes_that_are_not_allowed(change: Any, text: str) -> None:
    with pytest.raises(StateError, match=text):
        change()


def test_a_successor_that_is_out_of_sync_is_none() -> None:
    assert TWO.handed_over("B").unsynced("B").successor == ""
    assert TWO.handed_over("B").removed("B").successor == ""
    assert TWO.handed_over("B").elected(B, "s2", 2).successor == ""
    assert TWO.handed_over("B").joined("C", ()).successor == "B"


# ---------------------------------------------------------------------- model

NAMES = st.sampled_from("ABCD")


class Cluster(RuleBasedStateMachine):
    """Members that change the value as a leader may, and candidates; a naive model knows who has all messages."""

    def __init__(self) -> None:
        super().__init__()
        self.state = FIRST
        self.leaders = {1: "A"}
        self.complete = {"A"}
        self.values: list[ClusterState] = [FIRST]

    @rule(name=NAMES)
    def join(self, name: str) -> None:
        self.state = self.state.joined(name, (f"{name}:1",))

    @rule(name=NAMES)
    def sync(self, name: str) -> None:
        try:
            self.state = self.state.synced(name)
        except StateError:
            assert name not in self.state.members
        else:
            self.complete.add(name)

    @rule(name=NAMES, remove=st.booleans())
    def leave(self, name: str, remove: bool) -> None:
        try:
            self.state = self.state.removed(name) if remove else self.state.unsynced(name)
        except StateError:
            assert name == self.state.leader or name not in self.state.members
        else:
            self.complete.discard(name)

    @rule(name=NAMES)
    def hand_over(self, name: str) -> None:
        try:
            self.state = self.state.handed_over(name)
        except StateError:
            assert name == self.state.leader or name not in self.complete

    @rule(name=NAMES, back=st.integers(0, 5), known=st.integers(0, 9))
    def elect(self, name: str, back: int, known: int) -> None:
        """A candidate has read one of the last values; it is written only if that is still the value."""
        seen = self.values[-1 - min(back, len(self.values) - 1)]
        epoch = seen.epoch + 1
        try:
            won = seen.elected(Candidate(name, (), known), f"s{epoch}", epoch)
        except StateError:
            assert name not in seen.in_sync or known > seen.epoch
            return
        if seen == self.state:  # the coordinator's condition
            assert epoch not in self.leaders
            assert name in self.complete
            self.leaders[epoch] = name
            self.state = won

    @invariant()
    def value_is_valid(self) -> None:
        state = self.state
        assert decode(state.encode()) == state
        assert state.leader in state.in_sync
        assert state.in_sync == self.complete
        assert self.leaders[state.epoch] == state.leader
        assert state.epoch == max(self.leaders)
        if self.values[-1] != state:
            self.values.append(state)


TestCluster = Cluster.TestCase
TestCluster.settings = settings(max_examples=examples(100), stateful_step_count=30)


@given(
    st.binary(max_size=200)
    | st.dictionaries(st.sampled_from(sorted(FIELDS)), st.none() | st.text() | st.integers()).map(
        lambda fields: json.dumps({**FIELDS, **fields}).encode()
    )
)
def test_any_data_is_a_value_or_refused(data: bytes) -> None:
    try:
        state = decode(data)
    except StateError:
        return
    assert decode(state.encode()) == state


def test_another_cluster_of_the_same_name() -> None:
    former = B._replace(cluster_id="other")
    with pytest.raises(OutdatedState, match="another cluster with the name prod"):
        TWO.elected(former, "s2", 2)
    assert TWO.elected(former, "s2", 2, is_confirmed=True).id == "other"
    assert TWO.elected(B, "s2", 2).id == TWO.id == "s1"
    assert founded("prod", former, "s3", 9).id == "other"
