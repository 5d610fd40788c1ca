"""Fixtures for the tests of coordinators: engines, each with coordinators of one new cluster."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from coordination.etcd_server import Member, etcd
from soak import in_soak
from storage.stores import Store
from trio_nsq.coordination.bucket import BucketCoordinator
from trio_nsq.coordination.etcd import EtcdCoordinator
from trio_nsq.coordination.interface import Coordinator
from trio_nsq.coordination.state import Candidate, ClusterState
from trio_nsq.storage import Patience, storage_at

LONG_S = 300.0
"""The time of a lease that does not end during a test."""
PATIENCE = Patience(attempt_s=30.0, deadline_s=60.0)
"""Long, because the machine of the tests may be slow; not the time of the lease."""
_numbers = itertools.count()


@pytest.fixture(scope="session")
def etcd_member(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Member]:
    """An etcd with one member, for tests that do not harm it. Leases may last for a second."""
    flags = ("--heartbeat-interval=50", "--election-timeout=500")
    with etcd(tmp_path_factory.mktemp("etcd"), 1, *flags) as (member,):
        yield member


@pytest.fixture
def cluster() -> str:
    """A new name for a cluster."""
    return f"cluster{next(_numbers)}"


@pytest.fixture(params=["etcd", "s3", *in_soak("moto_s3", "azure", "gcs")])
def opened(request: pytest.FixtureRequest, cluster: str) -> Iterator[Callable[..., Coordinator]]:
    """Opens coordinators of one cluster in an engine; leases are long unless `ttl_s` is given."""
    with ExitStack() as stack:
        if request.param == "etcd":
            member: Member = request.getfixturevalue("etcd_member")
        else:
            store: Store = request.getfixturevalue(request.param)
            stack.enter_context(store.here())
            place = store.new_place()

        def open_one(ttl_s: float = LONG_S) -> Coordinator:
            one: Coordinator
            if request.param == "etcd":
                one = EtcdCoordinator([member.address], cluster, ttl_s=ttl_s, patience=PATIENCE)
            else:
                one = BucketCoordinator(
                    storage_at(place, patience=PATIENCE), cluster, ttl_s=ttl_s, poll_s=0.05
                )
            stack.callback(one.close)
            return one

        yield open_one


def led_by(coordinator: Coordinator) -> ClusterState:
    """Return the value of the leadership of a process."""
    led = coordinator.led
    assert led is not None
    return led


def candidate(name: str, epoch: int = 0) -> Candidate:
    """Return a member with one address."""
    return Candidate(name, (f"{name}:4151",), epoch)
