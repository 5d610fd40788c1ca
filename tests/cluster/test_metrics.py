"""`/metrics` of a leader and of a follower."""

from pathlib import Path
from typing import cast

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from access.support import ALL_ROLES, AuthFile, bearer, everything
from broker.metrics import OPENMETRICS, Scrape, described, documented
from broker.support import PATIENCE_S
from cluster.running import RunningMember, running_members
from trio_nsq.api.answers import Cluster
from trio_nsq.fleet.cluster import problems_of

OF_BOTH = {"nsq_build_info", "nsq_disk_free_bytes", "nsq_disk_size_bytes"}


async def scrape(member: RunningMember, **headers: str) -> Scrape:
    answer = await member.client.get("/metrics", headers=headers)
    assert answer.status_code == 200, answer.text
    return Scrape(text_string_to_metric_families(answer.text))


async def until(member: RunningMember, **samples: float) -> Scrape:
    """Wait until a member has these samples, and return all."""
    with trio.fail_after(PATIENCE_S):
        while True:
            found = await scrape(member)
            if all(
                found.samples.get((f"nsq_cluster_{name}", ())) == value for name, value in samples.items()
            ):
                return found
            await trio.sleep(0.02)


async def until_its_room_is_known(leader: RunningMember) -> Scrape:
    """Wait until the only follower has told its free space, which it does each second."""
    with trio.fail_after(PATIENCE_S):
        while not (found := await scrape(leader)).families["nsq_cluster_follower_free_bytes"].samples:
            await trio.sleep(0.02)
    return found


async def test_metrics_of_members_are_those_that_are_documented(tmp_path: Path) -> None:
    async with running_members(tmp_path, "static:") as members:
        one = await members.start("one")
        await one.client.post("/cluster/promote")
        await one.leads()
        two = await members.start("two", coordinator=f"static:{one.bound.http_address}")
        await two.in_sync(2)
        await until_its_room_is_known(one)
        leader = described((await one.client.get("/metrics", headers=OPENMETRICS)).text)
        follower = described((await two.client.get("/metrics", headers=OPENMETRICS)).text)
    alone = documented()
    alone.pop("nsq_channel_e2e_processing_latency_seconds")  # needs an option
    assert leader.keys() == (alone | documented("all", "leader")).keys()
    assert {name: leader[name] for name in documented("all", "leader")} == documented("all", "leader")
    assert follower == {name: alone[name] for name in OF_BOTH} | documented("all", "follower")


async def test_values(tmp_path: Path) -> None:
    async with running_members(tmp_path, "static:") as members:
        one = await members.start("one")
        found = await scrape(one)
        member = (await one.about())["id"]
        assert found("cluster_info", cluster="prod", member=member, role="follower") == 1
        assert (found("cluster_leader"), found("cluster_following"), found("cluster_times_led_total")) == (
            0,
            0,
            0,
        )
        await one.client.post("/cluster/promote")
        epoch = (await one.leads())["epoch"]
        found = await until(
            one, members=1, members_in_sync=1, min_in_sync=1, refuses_publishes=0, leader=1, times_led_total=1
        )
        assert (found("cluster_epoch"), found("cluster_coordinator_up")) == (epoch, 1)
        assert found("cluster_info", cluster="prod", member=member, role="leader") == 1
        two = await members.start("two", coordinator=f"static:{one.bound.http_address}")
        await two.in_sync(2)
        other = (await two.about())["id"]
        found = await until(one, members=2, members_in_sync=2, catch_ups_total=1, followers_left_total=0)
        assert found("cluster_follower_connected", member=other) == 1
        for lag in ("operations", "bytes", "seconds"):
            assert found(f"cluster_follower_lag_{lag}", member=other) >= 0
        assert found("cluster_follower_ok_wait_seconds", member=other) >= 0
        found = await until_its_room_is_known(one)
        assert found("cluster_follower_free_bytes", member=other) > 0
        forwarded = (await scrape(two))("cluster_forwards_total")
        assert (await two.publish("t", b"x")).text == "OK"
        found = await until(two, following=1, in_sync=1, forwards_total=forwarded + 1, epoch=epoch)
        assert found("cluster_position") > 0
        assert (found("cluster_waiting_connections"), found("disk_free_bytes") > 0) == (0, True)
        await two.stop()
        found = await until(one, members=2, members_in_sync=1, followers_left_total=1)
        assert found("cluster_follower_connected", member=other) == 0
        assert found.families["nsq_cluster_follower_lag_operations"].samples == []


async def test_the_progress_of_a_catch_up(tmp_path: Path) -> None:
    async with running_members(tmp_path, "static:") as members:
        one = await members.start("one", member={"catch_up_rate": 1 << 20})
        await one.client.post("/cluster/promote")
        await one.leads()
        for _ in range(6):
            assert (await one.publish("t", b"x" * 900_000)).text == "OK"
        two = await members.start("two", coordinator=f"static:{one.bound.http_address}")
        other = (await two.about())["id"]
        with trio.fail_after(PATIENCE_S):
            while True:
                found_members = (await one.status())["members"]
                if any(each["copied_bytes"] for each in found_members):
                    break
                await trio.sleep(0.02)
        (member,) = [each for each in found_members if each["id"] == other]
        assert member["state"] == "catching up"
        assert 0 < member["copied_bytes"] < member["copy_bytes"], "the option paces it"
        assert member["copy_bytes"] > 5_400_000
        found = await scrape(one)
        assert found("cluster_follower_copy_bytes", member=other) >= member["copy_bytes"]
        assert found("cluster_follower_copied_bytes", member=other) >= member["copied_bytes"]
        (problem,) = problems_of(cast("Cluster", await one.status()))
        assert problem.endswith(" % of the leader's files"), problem
        await two.in_sync(2)
        (member,) = [each for each in (await one.status())["members"] if each["id"] == other]
        assert (member["copied_bytes"], member["copy_bytes"]) == (0, 0)


@pytest.mark.parametrize("is_open", [False, True])
async def test_a_follower_with_tokens_tells_its_metrics_to_readers_only_unless_they_are_open(
    tmp_path: Path, is_open: bool
) -> None:
    file = AuthFile(tmp_path / "auth.toml")
    file.add_token("admin", everything(*ALL_ROLES))
    file.add_token("publisher", everything("publish"))
    file.write()
    async with running_members(tmp_path, "static:") as members:
        one = await members.start("one", auth_file=file.path, http_open_metrics=is_open)
        tokens = [{}, *({"Authorization": bearer(name)} for name in ("publisher", "admin"))]
        statuses = [(await one.client.get("/metrics", headers=each)).status_code for each in tokens]
    assert statuses == ([200, 200, 200] if is_open else [401, 403, 200])
