"""What a member's data folder says about it."""

import json
from pathlib import Path

import pytest

from trio_nsq.access.secret import NO_SECRET
from trio_nsq.broker.storage.data_folder import MEMBER_FILE
from trio_nsq.cluster import context as contexts
from trio_nsq.cluster.context import MemberContext
from trio_nsq.cluster.membership import membership_of
from trio_nsq.cluster.options import ClusterOptions
from trio_nsq.coordination.state import Candidate, ClusterState, founded
from trio_nsq.coordination.static import StaticCoordinator
from trio_nsq.log import Files


def started(folder: Path, monkeypatch: pytest.MonkeyPatch, instance: str) -> MemberContext:
    """Return the member of a folder, in a process of this name."""
    monkeypatch.setattr(contexts, "INSTANCE", instance)
    membership, is_saved = membership_of(Files(), folder, "prod")
    return MemberContext(
        *(ClusterOptions("prod", "static:"), StaticCoordinator(folder, "prod"), Files(), folder, membership),
        is_saved=is_saved,
        addresses=(),
        record_bytes=1,
        secret=NO_SECRET,
        tls=None,
    )


def recorded(member: MemberContext, instance: str) -> ClusterState:
    """Return a value in which the member is in sync, with a process."""
    state = founded("prod", Candidate("L", ()), "s", 1)
    return state.joined(member.folder, ()).synced(member.folder, instance)


def test_a_folder_knows_the_process_that_is_recorded_whenever_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = started(tmp_path, monkeypatch, "one")
    one.save()
    assert one.candidate.instances == ("one",)
    one.learn(recorded(one, "one"))
    two = started(tmp_path, monkeypatch, "two")
    two.save()
    assert two.candidate.instances == ("one", "two")  # until "two" is recorded
    three = started(tmp_path, monkeypatch, "three")
    three.learn(recorded(three, "two"))
    assert three.candidate.instances == ("two", "three")
    assert json.loads((tmp_path / MEMBER_FILE).read_bytes())["instances"] == ["two", "three"]
    three.learn(recorded(three, "three"))
    assert list(three.candidate.instances) == ["three"]


def test_an_older_folder_learns_nothing_from_a_process_that_it_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = started(tmp_path, monkeypatch, "one")
    one.save()
    old = started(tmp_path, monkeypatch, "two")
    old.learn(recorded(old, "later"))
    assert "later" not in old.candidate.instances
