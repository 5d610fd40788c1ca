"""Tests for the engines of the cluster's tests, and for small disks: what they do to those that use them."""

import errno
import os
import random
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import trio

from broker.support import PATIENCE_S
from cluster.disks import disks
from cluster.engines import CLUSTER, Engine, Static, bucket_engine, etcd_engine
from cluster.ledger import Epochs
from cluster.links import Gateway, Link
from coordination.conftest import candidate
from trio_nsq.coordination.interface import Coordinator, CoordinatorError
from trio_nsq.coordination.opening import open_coordinator
from trio_nsq.coordination.static import STATE_FILE, StaticCoordinator
from trio_nsq.storage import access

DISK_BYTES = 32 << 20


@asynccontextmanager
async def member_of(engine: Engine, link: Link, folder: Path) -> AsyncIterator[Coordinator]:
    """What a member has of an engine, which it reaches through a link."""
    async with trio.open_nursery() as nursery:
        gateways = [Gateway(address, lambda port, to: link) for address in engine.addresses]
        for gateway in gateways:
            await nursery.start(gateway.serve)
        addresses = [gateway.address for gateway in gateways]
        with (
            patch.dict(os.environ, engine.environment(addresses)),
            patch.dict(access.known, clear=True),
        ):
            coordinator = open_coordinator(engine.url(addresses, []), CLUSTER, folder)
        with trio.fail_after(PATIENCE_S):
            yield coordinator
        coordinator.close()
        nursery.cancel_scope.cancel()


async def epoch_of(engine: Engine) -> int | None:
    state = (await trio.to_thread.run_sync(engine.observe)).state
    return None if state is None else state.epoch


async def fails(call: Callable[[], object]) -> bool:
    try:
        await trio.to_thread.run_sync(call)
    except CoordinatorError:
        return True
    return False


async def test_etcd(tmp_path: Path) -> None:
    link = Link("from a member to etcd")
    with etcd_engine(tmp_path / "etcd") as engine:
        async with member_of(engine, link, tmp_path) as member:
            assert await epoch_of(engine) is None
            epoch = await trio.to_thread.run_sync(member.campaign, candidate("A"))
            assert epoch is not None
            assert await epoch_of(engine) == epoch

            link.cut()
            assert await fails(member.renew)
            assert await epoch_of(engine) == epoch  # does not use the link
            link.mend()
            await trio.to_thread.run_sync(member.renew)

            await trio.to_thread.run_sync(engine.lose_data)
            assert await epoch_of(engine) is None
            await trio.to_thread.run_sync(engine.restore_data)
            assert await epoch_of(engine) == epoch
            await trio.to_thread.run_sync(engine.revoke_leases)
            assert await fails(member.renew)
            await trio.to_thread.run_sync(engine.remove_keys)
            assert await epoch_of(engine) is None


async def test_members_of_etcd(tmp_path: Path) -> None:
    with etcd_engine(tmp_path / "etcd", 3) as engine:
        async with member_of(engine, Link("from a member to etcd"), tmp_path) as member:
            epoch = await trio.to_thread.run_sync(member.campaign, candidate("A"))
            leader = await trio.to_thread.run_sync(engine.leader)
            await trio.to_thread.run_sync(engine.move_leader)
            assert await trio.to_thread.run_sync(engine.leader) is not leader
            await trio.to_thread.run_sync(leader.kill)  # the other two need no election
            await trio.to_thread.run_sync(member.renew)
            assert await epoch_of(engine) == epoch


async def test_a_bucket(tmp_path: Path) -> None:
    link = Link("from a member to the store")
    with bucket_engine(tmp_path / "store") as engine:
        async with member_of(engine, link, tmp_path) as member:
            epoch = await trio.to_thread.run_sync(member.campaign, candidate("A"))
            assert epoch is not None
            assert await epoch_of(engine) == epoch

            engine.fail()
            assert await fails(member.renew)
            assert await epoch_of(engine) == epoch  # does not use the proxy
            engine.lose_answers(0.5, random.Random(1))
            await trio.to_thread.run_sync(member.renew)
            engine.mend()
            await trio.to_thread.run_sync(member.renew)
            assert link.connections


async def test_who_leads_is_recorded(tmp_path: Path) -> None:
    with etcd_engine(tmp_path / "etcd") as engine:
        async with member_of(engine, Link("from a member to etcd"), tmp_path) as member:
            epochs = Epochs()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine.watch, epochs)
                epoch = await trio.to_thread.run_sync(member.campaign, candidate("A"))
                while not epochs.leaders:
                    await trio.sleep(0.01)  # another process: only its answers show progress
                nursery.cancel_scope.cancel()
    assert epochs.leaders == {epoch: {"A"}}
    assert not epochs.wrong


def test_files(tmp_path: Path) -> None:
    engine = Static(tmp_path)
    assert engine.observe().state is None
    for name in ("m0", "m1"):
        (tmp_path / name).mkdir()
        coordinator = StaticCoordinator(tmp_path / name, CLUSTER)
        epoch = coordinator.campaign(candidate(name), found=True)
        (tmp_path / name / STATE_FILE).rename(tmp_path / name / "cluster-state.json")
        state = engine.observe().state
        assert state is not None
        assert epoch is not None
        assert state.epoch >= epoch


def test_a_disk_is_full_and_hangs(tmp_path: Path) -> None:
    with disks(tmp_path, 1, DISK_BYTES) as (disk,):
        file = disk.path / "file"
        disk.fill()
        with pytest.raises(OSError) as caught:
            file.write_bytes(bytes(1 << 20))
        assert caught.value.errno == errno.ENOSPC
        disk.make_room()
        file.write_bytes(bytes(1 << 20))

        disk.freeze()
        writer = threading.Thread(target=file.write_bytes, args=(b"late",), daemon=True)
        writer.start()
        writer.join(0.2)
        assert writer.is_alive()
        disk.thaw()
        writer.join(PATIENCE_S)
        assert file.read_bytes() == b"late"
