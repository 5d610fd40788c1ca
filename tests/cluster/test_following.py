"""A follower that is elected."""

from pathlib import Path

import pytest
import trio

from broker.support import PATIENCE_S
from trio_nsq.access.secret import NO_SECRET
from trio_nsq.cluster.context import MemberContext
from trio_nsq.cluster.following import Following
from trio_nsq.cluster.front import FollowerFront
from trio_nsq.cluster.membership import membership_of
from trio_nsq.cluster.options import ClusterOptions
from trio_nsq.coordination.state import Candidate
from trio_nsq.coordination.static import StaticCoordinator
from trio_nsq.http.routing import Router
from trio_nsq.log import Files
from trio_nsq.replication.replica import Replica


class RacedCoordinator(StaticCoordinator):
    """One that elects a member whose folder begins to catch up meanwhile."""

    elections = 0

    def campaign(self, candidate: Candidate, *, found: bool = False, after: int | None = None) -> int | None:
        epoch = super().campaign(candidate, found=found, after=after)
        if epoch is not None:
            type(self).elections += 1
            if self.elections == 1:
                replica = Replica.open(Files(), self.raced)
                replica.catch_up(epoch)
                replica.close()
        return epoch

    raced: Path


async def test_a_member_whose_folder_is_incomplete_does_not_lead(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator = RacedCoordinator(tmp_path, "prod")
    coordinator.raced = tmp_path
    membership, is_saved = membership_of(Files(), tmp_path, "prod")
    context = MemberContext(
        *(ClusterOptions("prod", "static:"), coordinator, Files(), tmp_path, membership),
        is_saved=is_saved,
        addresses=(),
        record_bytes=1,
        secret=NO_SECRET,
        tls=None,
    )
    following = Following(context, FollowerFront(Router([]), secret=NO_SECRET))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(following.run)
        with trio.fail_after(PATIENCE_S):
            await following.promote()
            while "this member was elected, and cannot use" not in caplog.text:
                await trio.sleep(0.02)
            assert "messages are missing in it" in following.reason
            while coordinator.led is not None:  # it resigns in a thread
                await trio.sleep(0.02)
        nursery.cancel_scope.cancel()
