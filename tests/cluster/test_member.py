"""Members of a cluster: they follow, lead, and take over."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from shutil import copytree

import httpx
import pytest
import trio

from access.support import AuthFile, bearer, everything
from broker.support import PATIENCE_S, RawClient, pub, running_broker
from cluster.running import Members, running_members
from coordination.conftest import cluster, etcd_member  # noqa: F401 - fixtures
from coordination.etcd_server import Member
from interop.peers import free_ports
from replication.leader import tree_of
from trio_nsq.broker import BrokerOptions
from trio_nsq.broker.serve import listen_at
from trio_nsq.cluster.member import addresses_of
from trio_nsq.cluster.membership import Membership
from trio_nsq.log import Files
from trio_nsq.protocol.errors import StartupError
from trio_nsq.server.listening import Listening, port_of


@pytest.fixture
def url(etcd_member: Member) -> str:  # noqa: F811 - the fixture
    """The URL of a coordinator."""
    return f"etcd://127.0.0.1:{etcd_member.port}"


async def test_a_follower_takes_over_when_the_leader_stops(tmp_path: Path, url: str, cluster: str) -> None:  # noqa: F811
    async with running_members(tmp_path, url, cluster) as members:
        one = await members.start("one")
        await one.leads()
        two = await members.start("two")
        await two.in_sync(2)
        sent = [f"message {number}" for number in range(20)]
        for number, body in enumerate(sent):
            member = (one, two)[number % 2]
            assert (await member.publish("t", body.encode())).text == "OK"
        assert await two.bodies("t") == sent
        await one.stop()
        await two.leads()
        assert await two.bodies("t") == sent
        assert (await two.publish("t", b"more")).text == "OK"
        again = await members.start("one")
        await again.in_sync(2)
        assert await again.bodies("t") == [*sent, "more"]


async def test_a_switch_lets_the_other_member_lead(tmp_path: Path, url: str, cluster: str) -> None:  # noqa: F811
    async with running_members(tmp_path, url, cluster) as members:
        audit = tmp_path / "audit"
        one = await members.start("one", audit_log=str(audit))
        about = await one.leads()
        two = await members.start("two")
        await two.in_sync(2)
        assert (await two.publish("t", b"before")).text == "OK"
        second = (await two.about())["id"]
        refused = await two.client.post("/cluster/switch", params={"to": "nosuch"})
        assert (refused.status_code, "not connected and in sync" in refused.text) == (409, True)
        answer = await two.client.post("/cluster/switch")
        assert answer.json() == {"to": second}
        led = await two.leads()
        assert led["epoch"] > about["epoch"]
        assert (await one.publish("t", b"after")).text == "OK"
        about = (await one.client.get("/info")).json()["cluster"]
        assert about == {"name": cluster, "member": second, "epoch": led["epoch"]}
        await one.in_sync(2)
        assert await one.bodies("t") == ["before", "after"]
        assert (await one.client.get("/ping?role=leader")).status_code == 503
        assert (await one.client.get("/ping?role=follower")).headers["x-nsq-role"] == "follower"
        assert (await two.client.get("/ping?role=leader")).text == "OK"
        assert (await one.client.post("/cluster/promote")).status_code == 409
    assert '"POST /cluster/promote"' in audit.read_text(), "a member that has led is a follower like others"


async def test_followers_and_the_former_leader_go_on_from_where_they_are(
    tmp_path: Path,
    url: str,
    cluster: str,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They copy nothing: a member that copies cannot lead, and each change of the leader would have such a time."""
    caplog.set_level("INFO", "trio_nsq.replication")
    async with running_members(tmp_path, url, cluster) as members:
        one = await members.start("one")
        await one.leads()
        two, three = await members.start("two"), await members.start("three")
        await three.in_sync(3)
        first, second, third = [(await each.about())["id"] for each in (one, two, three)]
        bodies = [str(number) for number in range(20)]
        for body in bodies[:10]:
            assert (await three.publish("t", body.encode())).text == "OK"
        caplog.clear()
        assert (await one.client.post(f"/cluster/switch?to={second}")).status_code == 200
        await two.leads()
        for body in bodies[10:]:
            assert (await three.publish("t", body.encode())).text == "OK"
        await two.in_sync(3)
        texts = [record.getMessage() for record in caplog.records]
        for each in (first, third):
            assert any(text.startswith(f"follower {each}: continues after operation") for text in texts)
        assert not any("catches up" in text for text in texts)
        assert (await one.about())["is_copy"], "it has followed since it led"
        with trio.fail_after(PATIENCE_S):
            while not tree_of(one.folder) == tree_of(two.folder) == tree_of(three.folder):
                await trio.sleep(0.1)


async def test_a_lost_lease_ends_the_leadership(
    tmp_path: Path,
    url: str,
    cluster: str,  # noqa: F811
    etcd_member: Member,  # noqa: F811
) -> None:
    async with running_members(tmp_path, url, cluster) as members:
        one = await members.start("one")
        epoch = (await one.leads())["epoch"]
        two = await members.start("two")
        await two.in_sync(2)
        assert (await one.publish("t", b"1")).text == "OK"
        etcd_member.revoke_leases()
        with trio.fail_after(PATIENCE_S):
            while (await two.about())["epoch"] == epoch:
                await trio.sleep(0.02)
        assert (await two.publish("t", b"2")).text == "OK"
        await two.in_sync(2)
        assert await one.bodies("t") == ["1", "2"]


async def test_the_member_that_led_last_says_where_it_was(
    tmp_path: Path,
    url: str,
    cluster: str,  # noqa: F811
    etcd_member: Member,  # noqa: F811
) -> None:
    """An administrator compares it with the positions of followers."""
    async with running_members(tmp_path, url, cluster) as members:
        one = await members.start("one")
        await one.leads()
        assert (await one.publish("t", b"1")).text == "OK"
        led = (await one.about())["position"]
        etcd_member.remove(f"/trio-nsq/{cluster}/")
        etcd_member.revoke_leases()
        about = await one.until(lambda about: "has no value" in about["reason"])
        assert (about["position"] >= led > 0, about["is_copy"]) == (True, False)


async def test_a_former_leader_without_the_addresses_of_others_says_why_it_does_not_lead(
    tmp_path: Path,
) -> None:
    async with running_members(tmp_path, "static:") as members:
        one = await members.start("one")
        await one.client.post("/cluster/promote")
        await one.leads()
        two = await members.start("two", coordinator=f"static:{one.bound.http_address}")
        await two.in_sync(2)
        second = (await two.about())["id"]
        assert (await one.client.post("/cluster/switch")).status_code == 200
        await two.leads()
        expected = (
            f"it has handed over to {second}, and no member at the addresses in --coordinator leads: static:"
        )
        await one.until(lambda about: about["reason"] == expected)


async def test_clients_that_were_passed_on_to_a_silent_leader_are_closed(
    tmp_path: Path,
    url: str,
    cluster: str,  # noqa: F811
) -> None:
    """They look for a broker again, and find the new leader."""
    proxy = SilentProxy()
    async with proxy.run(), running_members(tmp_path, url, cluster) as members:
        one = await members.start("one", broadcast_http_port=proxy.port)
        proxy.target = one.bound.http_address
        await one.leads()
        two, three = await members.start("two"), await members.start("three")
        await three.in_sync(3)
        host, _, port = three.bound.tcp_address.rpartition(":")
        async with await trio.open_tcp_stream(host, int(port)) as stream:
            client = RawClient(stream)
            await client.send(b"  V2" + pub("t", b"x"))
            await client.ok()
            proxy.silence()
            second = (await two.about())["id"]
            assert (await one.client.post(f"/cluster/switch?to={second}")).status_code == 200
            await two.leads()
            with trio.fail_after(PATIENCE_S):
                assert await client.frame() is None


class SilentProxy:
    """A proxy that can stop to pass on connections of clients, without closing them.

    Attributes:
        port: Where it listens.
        target: Where it passes connections on to.
    """

    def __init__(self) -> None:
        self.port = 0
        self.target: str | None = None
        self._passing: list[trio.CancelScope] = []

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.port = listeners[0].socket.getsockname()[1]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, self._serve, listeners)
            yield
            nursery.cancel_scope.cancel()

    def silence(self) -> None:
        """Pass on nothing any longer of the connections with a client."""
        for scope in self._passing:
            scope.cancel()

    async def _serve(self, near: trio.SocketStream) -> None:
        assert self.target is not None
        host, _, port = self.target.rpartition(":")
        async with near, await trio.open_tcp_stream(host, int(port)) as far:
            first = await near.receive_some()
            await far.send_all(first)
            with trio.CancelScope() as scope:
                if b"/cluster/forward" in first:
                    self._passing.append(scope)
                with suppress(trio.BrokenResourceError):
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._pass_on, near, far)
                        await self._pass_on(far, near)
                        nursery.cancel_scope.cancel()
            if scope.cancelled_caught:
                await trio.sleep_forever()

    async def _pass_on(self, source: trio.SocketStream, target: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError):
            async for data in source:
                await target.send_all(data)


async def test_all_members_stop_and_start_again(tmp_path: Path, url: str, cluster: str) -> None:  # noqa: F811
    async with running_members(tmp_path, url, cluster) as members:
        one = await members.start("one")
        await one.leads()
        two = await members.start("two")
        await two.in_sync(2)
        assert (await two.publish("t", b"1")).text == "OK"
    async with running_members(tmp_path, url, cluster) as members:
        one, two = await members.start("one"), await members.start("two")
        await one.in_sync(2)
        assert await two.bodies("t") == ["1"]


async def test_an_administrator_promotes_a_member_of_a_cluster_without_an_engine(tmp_path: Path) -> None:
    async with running_members(tmp_path, "static:") as members:
        one = await members.start("one")
        assert (await one.about())["role"] == "follower"
        assert (await one.client.post("/cluster/promote")).status_code == 200
        await one.leads()
        assert (await one.publish("t", b"1")).text == "OK"
        other = one.bound.http_address
        two = await members.start("two", coordinator=f"static:{other}")
        await two.in_sync(2)
        refused = await two.client.post("/cluster/promote")
        assert (refused.status_code, "stop that one first" in refused.text) == (409, True)
        await one.stop()
        await two.until(lambda about: not about["is_following"])
        assert (await two.client.post("/cluster/promote")).status_code == 200
        await two.leads()
        assert await two.bodies("t") == ["1"]
        again = await members.start("one", coordinator=f"static:{two.bound.http_address}")
        print(await again.about())
        await again.in_sync(2)


async def test_a_member_announces_where_discovery_services_list_it(tmp_path: Path) -> None:
    """By this, the next leader recognizes its registrations."""
    for host in (None, "Broker.example"):
        options = BrokerOptions(tmp_path, "127.0.0.1:0", "127.0.0.1:0", broadcast_address=host)
        opened: dict[str, Listening] = {}
        listeners = await listen_at(options, opened)
        name = host or "127.0.0.1"  # not the host name: it listens on loopback only
        expected = [f"{kind.lower()}://{name}:{port_of(each.address)}" for kind, each in opened.items()]
        assert list(addresses_of(options, listeners)) == expected
        for each in opened.values():
            each.close()


async def test_folders_that_must_not_take_part(tmp_path: Path, url: str, cluster: str) -> None:  # noqa: F811
    alone = tmp_path / "alone"
    async with running_broker(alone) as bound, httpx.AsyncClient() as client:
        await client.post(f"http://{bound.http_address}/pub?topic=t", content=b"1")
    before = contents(alone)
    async with running_members(tmp_path, url, cluster) as members:
        one = await members.start("one")
        await one.leads()
        is_ready = trio.Event()
        with pytest.raises(ExceptionGroup) as refused:
            await started_alone(tmp_path, url, cluster, is_ready)
        assert not is_ready.is_set(), "it does not say so before it knows"
        assert refused.group_contains(StartupError, match="has 1 topics of a broker that is no member")
        assert contents(alone) == before
        await one.stop()
    with pytest.raises(ExceptionGroup) as refused:
        async with running_members(tmp_path, url, "other") as members:
            await members.start("one")
    assert refused.group_contains(StartupError, match=f"belongs to the cluster {cluster}, not to other")
    with pytest.raises(ExceptionGroup) as refused:
        async with running_broker(tmp_path / "one"):
            pass
    assert refused.group_contains(StartupError, match="is the data folder of a member of a cluster")


async def test_a_copy_of_a_members_folder_is_a_new_member(tmp_path: Path, url: str, cluster: str) -> None:  # noqa: F811
    async with running_members(tmp_path, url, cluster) as members:
        one = await members.start("one")
        first = (await one.leads())["id"]
        assert (await one.publish("t", b"1")).text == "OK"
    copytree(tmp_path / "one", tmp_path / "copy")
    async with running_members(tmp_path, url, cluster) as members:
        copy = await members.start("copy")
        about = await copy.until(lambda about: "has not caught up" in about["reason"])
        assert about["id"] != first
        one = await members.start("one")
        await one.leads()
        assert (await one.publish("t", b"2")).text == "OK"
        await copy.in_sync(2)
        assert await copy.bodies("t") == ["1", "2"]


async def test_an_administrator_promotes_a_copy_if_all_members_are_lost(
    tmp_path: Path,
    url: str,
    cluster: str,  # noqa: F811
) -> None:
    async with running_members(tmp_path, url, cluster) as members:
        one = await members.start("one")
        epoch = (await one.leads())["epoch"]
        assert (await one.publish("t", b"1")).text == "OK"
    copytree(tmp_path / "one", tmp_path / "copy")
    async with running_members(tmp_path, url, cluster) as members:
        copy = await members.start("copy")
        await copy.until(lambda about: "has not caught up" in about["reason"])
        assert (await copy.client.post("/cluster/promote")).status_code == 200
        assert (await copy.leads())["epoch"] > epoch
        assert await copy.bodies("t") == ["1"]


async def test_members_that_require_tokens_have_one_for_each_other(
    tmp_path: Path,
    url: str,
    cluster: str,  # noqa: F811
) -> None:
    file = AuthFile(tmp_path / "auth.toml")
    file.add_token("member", everything("replicate"))
    file.add_token("client", everything("publish", "read"))
    secret = tmp_path / "token"
    with pytest.raises(ExceptionGroup) as refused:
        async with running_members(tmp_path, url, cluster) as members:
            await members.start("one", auth_file=file.write(), member={"cluster_auth_secret_file": None})
    assert refused.group_contains(
        StartupError, match="--cluster-auth-secret-file: the members require tokens"
    )
    secret.write_text("client-secret")
    async with running_members(tmp_path, url, cluster) as members:
        about = {"cluster_auth_secret_file": secret}
        one = await members.start("one", auth_file=file.path, member=about)
        one.client.headers["Authorization"] = bearer("client")
        await one.leads()  # before the other one starts, which would lead as well
        two = await members.start("two", auth_file=file.path, member=about)
        two.client.headers["Authorization"] = bearer("client")
        await two.until(lambda about: "403" in about["reason"])
        secret.write_text("member-secret")
        await two.in_sync(2)
        assert (await two.publish("t", b"1")).text == "OK"


async def started_alone(root: Path, url: str, cluster: str, is_ready: trio.Event) -> None:  # noqa: F811
    """Start one member, and run it until it fails."""
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            await Members(nursery, root, url, cluster).start("alone")
            is_ready.set()
            await trio.sleep_forever()


def contents(folder: Path) -> dict[Path, bytes]:
    """Return all files of a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


async def test_a_switch_without_an_engine(tmp_path: Path) -> None:
    port_one, port_two = free_ports(2)
    async with running_members(tmp_path, f"static:127.0.0.1:{port_one},127.0.0.1:{port_two}") as members:
        one = await members.start("one", http_address=f"127.0.0.1:{port_one}")
        await one.until(lambda about: about["reason"] == "there is no leader")
        assert (await one.client.post("/cluster/promote")).status_code == 200
        await one.leads()
        two = await members.start("two", http_address=f"127.0.0.1:{port_two}")
        await two.in_sync(2)
        assert (await two.publish("t", b"1")).text == "OK"
        for member in (two, one):
            assert (await one.client.post("/cluster/switch")).status_code == 200
            await member.leads()
            await member.in_sync(2)
            assert await member.bodies("t") == ["1"]
        folder = two.folder
    async with running_members(tmp_path, f"static:127.0.0.1:{port_one},127.0.0.1:{port_two}") as members:
        again = await members.start(folder.name, http_address=f"127.0.0.1:{port_two}")
        assert (await again.about())["role"] == "follower"
        one = await members.start("one", http_address=f"127.0.0.1:{port_one}")
        await one.leads()
        await one.in_sync(2)


async def test_a_member_that_was_replaced_is_forgotten(
    tmp_path: Path,
    url: str,
    cluster: str,  # noqa: F811
) -> None:
    """Also if it is recorded as in sync when another one takes its place, because nothing was published meanwhile."""
    async with running_members(tmp_path, url, cluster) as members:
        one = await members.start("one")
        await one.leads()
        tcp, web = (f"127.0.0.1:{port}" for port in free_ports(2))
        two = await members.start("two", tcp_address=tcp, http_address=web, https_address="")
        await two.in_sync(2)
        await two.stop()
        await one.in_sync(1)
        three = await members.start("three", tcp_address=tcp, http_address=web, https_address="")
        await three.in_sync(2)
        assert {each["id"] for each in (await one.status())["members"]} == {
            (await each.about())["id"] for each in (one, three)
        }


async def test_a_leader_that_is_refused_again_and_again_is_named_once(
    tmp_path: Path,
    url: str,
    cluster: str,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    async with running_members(tmp_path, url, cluster) as members:
        one = await members.start("one")
        epoch = (await one.leads())["epoch"]
        folder = tmp_path / "two"
        folder.mkdir()
        Membership(cluster, "two", epoch + 1, is_copy=True).save(Files(), folder)
        await members.start("two")
        with trio.fail_after(PATIENCE_S):
            while caplog.text.count("follower two: catches up") < 4:
                await trio.sleep(0.02)
    assert caplog.text.count("another one has replaced that leader") == 1
    assert caplog.text.count("connected to the leader") == 1


async def test_a_cluster_that_began_anew_takes_no_member_of_the_former_one(
    tmp_path: Path,
    url: str,
    cluster: str,  # noqa: F811
    etcd_member: Member,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The coordinator lost its data, and an empty member was started first. An administrator can turn that back."""
    async with running_members(tmp_path, url, cluster) as members:
        one = await members.start("one")
        await one.leads()
        two = await members.start("two")
        await two.in_sync(2)
        assert (await one.publish("t", b"before")).text == "OK"
        await one.stop()
        await two.leads()
        etcd_member.remove(f"/trio-nsq/{cluster}/")
        etcd_member.revoke_leases()
        await two.until(lambda about: about["role"] == "follower")
        empty = await members.start("empty")
        await empty.leads()
        await two.until(lambda about: "another cluster with the name" in about["reason"])
        another = await members.start("another")
        await another.in_sync(2)  # the value changes, and is seen again
        await another.stop()
        await empty.in_sync(1)
        assert caplog.text.count("has another cluster with the name") == 1
        await empty.stop()
        assert (await two.client.post("/cluster/promote")).status_code == 200
        await two.leads()
        assert await two.bodies("t") == ["before"]
        again = await members.start("one")
        print(await again.about())
        await again.in_sync(2)
        assert await again.bodies("t") == ["before"]
