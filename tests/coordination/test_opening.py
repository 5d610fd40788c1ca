"""Tests for the URLs of coordinators."""

import ssl
from pathlib import Path

import pytest

from coordination.conftest import candidate
from coordination.etcd_server import Member
from storage.stores import Store
from trio_nsq.coordination.bucket import BucketCoordinator
from trio_nsq.coordination.etcd import EtcdCoordinator
from trio_nsq.coordination.interface import CoordinatorError
from trio_nsq.coordination.opening import open_coordinator
from trio_nsq.coordination.state import StateError
from trio_nsq.coordination.static import StaticCoordinator

NOWHERE = Path("/nowhere")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("etcd://a:2379", "etcd://a:2379"),
        ("ETCD://a:1,b:2,[::1]:3/", "etcd://a:1,b:2,[::1]:3"),
        ("etcd://root@a:2379", "etcd://a:2379"),
    ],
)
def test_etcd(url: str, shown: str) -> None:
    found = open_coordinator(url, "prod", NOWHERE)
    assert isinstance(found, EtcdCoordinator)
    assert (found.shown, found.ttl_s, found.renew_every_s) == (shown, 10.0, 3.0)
    found.close()


def test_etcd_with_tls() -> None:
    for tls in (None, ssl.create_default_context()):
        found = open_coordinator("etcds://a:2379", "prod", NOWHERE, tls=tls)
        assert found.shown == "etcds://a:2379"
        found.close()


def test_buckets(s3: Store) -> None:
    with s3.here():
        place = s3.new_place()
        found = open_coordinator(place, "prod", NOWHERE)
        assert isinstance(found, BucketCoordinator)
        assert (found.shown, found.ttl_s, found.renew_every_s) == (place, 13.0, 3.0)
        # Otherwise a cluster that begins anew would take members of the former one for its own.
        epochs = {open_coordinator(place, name, NOWHERE).campaign(candidate("A")) for name in "abc"}
        assert len(epochs) == 3


def test_static(tmp_path: Path) -> None:
    with_peers = open_coordinator("static:a:4151,[::1]:4152", "prod", tmp_path)
    assert isinstance(with_peers, StaticCoordinator)
    assert with_peers.peers == (("a", 4151), ("::1", 4152))
    assert with_peers.shown == "static:a:4151,[::1]:4152"
    found = open_coordinator("static:", "prod", tmp_path)
    assert isinstance(found, StaticCoordinator)
    assert found.read().state is None


def test_one_that_is_used(etcd_member: Member, cluster: str) -> None:
    found = open_coordinator(f"etcd://127.0.0.1:{etcd_member.port}", cluster, NOWHERE)
    found.read()
    found.close()


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("etcd://a", "the URL etcd://a is not valid: address 'a' has no port"),
        ("etcd://a:1,,b:2", "is not valid: address ''"),
        ("etcd://a:1/path", "is not valid: "),
        ("etcd://root:geheim@a:1", "the URL etcd://root@a:1 has a password: give a file that has it instead"),
        ("etcd:a:1", "the URL etcd:a:1 is not one of a coordinator: use etcd://HOST:PORT"),
        ("http://u:geheim@a:1", "the URL http://u@a:1 is not one of a coordinator: use etcd://HOST:PORT"),
        ("hdfs://a/b", "is not one of a coordinator"),
        ("file:///tmp/x", "is not one of a coordinator"),
        ("/tmp/x", "is not one of a coordinator"),
        ("static:x", "is not valid"),
        ("", "is not one of a coordinator"),
        ("s3:///x", "has no bucket"),
        ("s3://b/x?geheim=1", "has an unknown option"),
    ],
)
def test_other_urls_are_refused(url: str, text: str) -> None:
    with pytest.raises(CoordinatorError) as refused:
        open_coordinator(url, "prod", NOWHERE)
    assert text in str(refused.value)
    assert "geheim" not in str(refused.value)


@pytest.mark.parametrize("cluster", ["", "a/b", "../x", "a b", "x" * 65])
@pytest.mark.parametrize("url", ["etcd://a:1", "static:"])
def test_names_of_clusters(url: str, cluster: str) -> None:
    with pytest.raises(StateError, match=r"the name of the cluster .* is not valid"):
        open_coordinator(url, cluster, NOWHERE)
