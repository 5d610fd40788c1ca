"""`/metrics` of a leader and of a follower."""

from pathlib import Path

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from access.support import ALL_ROLES, AuthFile, bearer, everything
from broker.metrics import OPENMETRICS, Scrape, described, documented
from broker.support import PATIENCE_S
from cluster.running import RunningMember, running_members

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


async def test_metrics_of_members_are_those_that_are_documented(tmp_path: Path) -> None:
    async with running_members(tmp_path, "static:") as members:
        one = await members.start("one")
        await one.client.post("/cluster/promote")
        await one.leads()
        two = await members.start("two", coordinator=f"static:{one.bound.http_address}")
        await two.in_sync(2)
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
        found = await until(one, members=1, members_in_sync=1, min_in_sync=1, leader=1, times_led_total=1)
        assert (found("cluster_epoch"), found("cluster_coordinator_up")) == (epoch, 1)
        assert found("cluster_info", cluster="prod", member=member, role="leader") == 1
        two = await members.start("two", coordinator=f"static:{one.bound.http_address}")
        await two.in_sync(2)
        other = (await two.about())["id"]
        found = await until(one, members=2, members_in_sync=2, catch_ups_total=1, followers_left_total=0)
        assert found("cluster_follower_connected", member=other) == 1
        for lag in ("operations", "bytes", "seconds"):
            assert found(f"cluster_follower_lag_{lag}", member=other) >= 0
        forwarded = (await scrape(two))("cluster_forwards_total")
        assert (await two.publish("t", b"x")).text == "OK"
        found = await until(two, following=1, in_sync=1, forwards_total=forwarded + 1, epoch=epoch)
        assert found("cluster_position") > 0
        assert (found("cluster_waiting_connections"), found("disk_free_bytes") > 0) == (0, True)
        two.scope.cancel()
        found = await until(one, members=2, members_in_sync=1, followers_left_total=1)
        assert found("cluster_follower_connected", member=other) == 0
        assert found.families["nsq_cluster_follower_lag_operations"].samples == []


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
