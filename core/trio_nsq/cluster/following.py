"""A member as a follower: it copies the leader's folder, until it is elected itself."""

import logging
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import trio

from ..broker.errors import StartupError
from ..broker.storage.data_folder import BROKER_FILE, end_following
from ..coordination.interface import CoordinatorError, Observation
from ..coordination.state import NotInSync, StateError
from ..coordination.static import StaticCoordinator
from ..event_loop.retries import Delays
from ..http.upgrade import UpgradeFailed, open_upgraded
from ..protocol.errors import NSQError, leaves_of
from ..replication.follower import follow
from ..replication.replica import Replica, ReplicaError
from ..replication.stream import FormerOperations
from .context import RETRY_S, MemberContext
from .front import FollowerFront, LeaderTarget
from .membership import topics_in
from .other_members import OtherMembers
from .standby import Standby
from .static_peers import StaticPeers

logger: logging.Logger = logging.getLogger("trio_nsq.cluster")

_SILENCE_S: Final = 5.0
"""A leader that sends nothing for this time is not followed any longer."""
_LINK_S: Final = _SILENCE_S + 1.0
"""A link that does not come about ends in this time."""
_ASK_S: Final = 0.5
_ANSWER_S: Final = 20.0
"""A promotion is answered in this time, also if it still restores the folder."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
REPLICATE = "/cluster/replicate"
NOT_ASKED = "the coordinator was not asked yet"
NO_LEADER = "there is no leader"


class _MemberReplica(Replica):
    """A replica that says so before its folder becomes a copy of another leader's."""

    on_copy: Callable[[], None] = staticmethod(lambda: None)

    def catch_up(self, epoch: int) -> None:
        self.on_copy()
        super().catch_up(epoch)

    def go_on(self, epoch: int) -> None:
        self.on_copy()
        super().go_on(epoch)


class _Promotion:
    """A request to lead, and why it was refused."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.refusal = ""


class Following:
    """One time as a follower.

    Args:
        context: The member.
        front: Passes clients on to the leader.

    Attributes:
        is_connected: A leader is followed.
        reason: Why none is followed, or this member does not lead; empty: nothing is wrong.
        operations: What this member, when it is elected, knows of the operations of the leader before; None: nothing.
        is_admitted: Set when the folder is opened, and the coordinator was asked: nothing is against this member.
    """

    def __init__(self, context: MemberContext, front: FollowerFront) -> None:
        self.is_connected: bool = False
        self.reason: str = NOT_ASKED
        self.operations: FormerOperations | None = None
        self.is_admitted: trio.Event = trio.Event()
        self._context = context
        self._front = front
        self._replica: Replica | None = None
        self._leader: LeaderTarget | None = None
        self._linking = trio.Lock()
        self._is_confirmed = False
        self._lead_after: int | None = None
        self._write_error = ""
        self._promotion: _Promotion | None = None
        self._others = OtherMembers(context, _ASK_S)
        self._gave_way_in = 0  # an epoch
        self._failure = ""  # of the link, as logged
        self._is_refused = False  # the last link ended soon after it had come about
        self._standby = Standby(context) if context.options.restore_from else None
        self._peers: StaticPeers | None = None
        if isinstance(coordinator := context.coordinator, StaticCoordinator) and coordinator.peers:
            self._peers = StaticPeers(context, coordinator.peers)

    @property
    def position(self) -> int:
        """The number of the last operation that the folder has durably; 0 if that is unknown."""
        position = self._replica.position if self._replica is not None else None
        if position is not None:
            return position.number
        return 0 if self._context.membership.is_copy else self._context.led_position

    @property
    def leader(self) -> LeaderTarget | None:
        """The leader; None: there is none."""
        return self._leader

    async def promote(self) -> str:
        """Lead although the coordinator does not elect this member: an administrator has confirmed it.

        Returns:
            Why that is not possible; empty: this member leads, or is still restored from the archive before.
        """
        promotion = self._promotion = self._promotion or _Promotion()
        with trio.move_on_after(_ANSWER_S):
            await promotion.done.wait()
        return promotion.refusal

    async def run(self) -> int:
        """Follow each leader, until this member is elected. Then the folder is ready for a broker.

        Returns:
            The epoch.

        Raises:
            StartupError: The folder cannot be used.
        """
        try:
            self._replica = await trio.to_thread.run_sync(self._open)
        except ReplicaError as exc:
            raise StartupError(f"--data-path: {exc}") from exc
        try:
            while True:
                async with trio.open_nursery() as nursery:
                    epoch = await self._until_elected(nursery)
                    nursery.cancel_scope.cancel()
                if await self._is_prepared(epoch):
                    return epoch
        finally:
            self._replica.close()

    async def _is_prepared(self, epoch: int) -> bool:
        """Make the folder one that a broker opens. If that fails, as on a full disk, another member may lead."""
        context = self._context
        logger.info("this member is elected, epoch %d: it opens %s", epoch, context.path)
        context.keep_lease()
        try:
            await trio.to_thread.run_sync(self._prepare, epoch)
        except (OSError, ReplicaError, NotInSync) as exc:
            logger.error("this member was elected, and cannot use %s: %s", context.path, exc)
            self.reason = str(exc)
        else:
            return True
        context.end_keeping()
        with suppress(CoordinatorError, StateError):
            await context.ask(context.coordinator.resign)
        self._leader = None
        await trio.sleep(RETRY_S)
        return False

    def _usable(self) -> Replica:
        """Return the opened folder; it is opened again, and its journal done again, only after a failure."""
        replica = self._replica
        assert replica is not None
        if not replica.is_intact or replica.position is None:
            replica.close()  # what it has in memory may be half done
            replica = self._replica = self._open()
        return replica

    def _open(self) -> Replica:
        replica = _MemberReplica.open(self._context.files, self._context.path)
        replica.record_bytes = self._context.record_bytes
        replica.on_copy = partial(self._context.save, is_copy=True)
        replica.keep(self._replica.former if self._replica is not None else None)
        return replica

    def _prepare(self, epoch: int) -> None:
        """Make the folder one that a broker opens."""
        context = self._context
        replica = self._usable()
        if replica.position is not None:
            self.operations = replica.former
            replica.end(partial(self._finish, epoch))
        elif replica.is_incomplete or (context.membership.is_copy and not self._is_confirmed):
            # A catch-up has begun after the folder was looked at.
            raise NotInSync("the folder has not caught up with a leader: messages are missing in it")
        else:
            context.save(epoch=epoch, is_copy=False, cluster_id=context.led_id)

    def _finish(self, epoch: int) -> None:
        context = self._context
        end_following(context.files, context.path)
        context.save(epoch=epoch, is_copy=False, cluster_id=context.led_id)

    # ------------------------------------------------------------------ the coordinator

    async def _until_elected(self, nursery: trio.Nursery) -> int:
        context = self._context
        seen: Observation | None = None
        link: trio.CancelScope | None = None
        while True:
            try:
                if self._peers is not None and isinstance(context.coordinator, StaticCoordinator):
                    await self._peers.learn(context.coordinator)
                seen = await context.wait_for_change(seen)
                is_learned = await self._learn(seen)
                self._coordinator_answers()
                if self._standby is not None:
                    self._standby.see(seen)
                self.is_admitted.set()
                if self._new_leader(seen):
                    if link is not None:
                        link.cancel()
                    link = trio.CancelScope()
                    if self._leader is not None:
                        nursery.start_soon(self._follow_leader, self._leader, link)
                if is_learned and (epoch := await self._campaign(seen)) is not None:
                    return epoch
            except (CoordinatorError, StateError) as exc:
                self._report(str(exc))
                self.is_admitted.set()
                await trio.sleep(RETRY_S)
            except OSError as exc:
                self._report(f"cannot write {exc.filename or context.path}: {exc.strerror or exc}")
                await trio.sleep(RETRY_S)

    def _coordinator_answers(self) -> None:
        if self._context.coordinator_error:
            logger.info("the coordinator %s answers", self._context.coordinator.shown)
        self._context.coordinator_error = ""

    def _report(self, reason: str) -> None:
        if reason != self._context.coordinator_error:
            logger.warning("%s", reason)
        self._context.coordinator_error = self.reason = reason

    async def _learn(self, seen: Observation) -> bool:
        """Note what the coordinator says, durably; returns False if that fails, as on a full disk.

        Then clients are passed on to the leader all the same. Raises StartupError: the folder must not take part;
        OutdatedState: the coordinator has another cluster.
        """
        context, state = self._context, seen.state
        if state is not None and self._promotion is None:
            state.check_same(context.membership.cluster_id)
        context.state = state
        if state is None:
            return True
        is_foreign = not (context.is_saved or context.membership.is_copy)
        if is_foreign and (topics := topics_in(context.path)):
            raise StartupError(
                f"--data-path: {context.path} has {len(topics)} topics of a broker that is no member of the cluster "
                f"{state.cluster}, which exists already: its messages would be set aside. Choose an empty folder; or "
                "begin a new cluster with it, under another name"
            )
        try:
            await trio.to_thread.run_sync(context.learn, state)
        except OSError as exc:
            error = f"cannot write {exc.filename or context.path}: {exc.strerror or exc}"
            if error != self._write_error:
                logger.warning("%s", error)
            self._write_error = self.reason = error
            return False
        self._write_error = ""
        return True

    def _new_leader(self, seen: Observation) -> bool:
        """Point the front to the leader; returns whether it is another one than before."""
        leader = self._target_of(seen)
        if leader is None and self.reason == NOT_ASKED:
            self.reason = NO_LEADER
        if leader == self._leader:
            return False
        self._leader = leader
        self._front.lead_to(leader)
        if leader is None:
            self.reason = NO_LEADER
        return True

    def _target_of(self, seen: Observation) -> LeaderTarget | None:
        state = seen.state
        if state is None:
            return None
        if state.leader == self._context.folder:
            if isinstance(self._context.coordinator, StaticCoordinator):
                if state.successor:
                    self.reason = (
                        f"it has handed over to {state.successor}, and no member at the addresses in "
                    )
                    self.reason += f"--coordinator leads: {self._context.coordinator.shown}"
            elif seen.is_held:
                self.reason = "the lease of this member's earlier process is not over yet"
            return None
        # Without the engine, a leader goes on as long as all members in sync follow it: see `Leading`.
        if not (seen.is_held or self.is_connected):
            return None
        url = link_url(self._context, state.addresses)
        if url is None:
            needed = "--http-address" if self._context.tls is None else "--tls-cert and --https-address"
            self._report(f"the leader {state.leader} cannot be reached: give it {needed}")
            return None
        return LeaderTarget(state.leader, state.epoch, url)

    async def _campaign(self, seen: Observation) -> int | None:
        """Lead, if there is no leader and this member may."""
        promotion = self._promotion
        if promotion is None and (self.is_connected or (seen.is_held and not self._is_named(seen))):
            return None
        if self.is_connected:
            epoch, refusal = None, "this member follows a leader, which runs: stop that one first"
        elif promotion is not None and self._standby is not None and seen.is_held:
            # It may be over before the coordinator is asked again, and the archive would not be looked at.
            epoch, refusal = None, "another member leads"
        else:
            # No catch-up may begin while the folder is a candidate.
            with trio.move_on_after(_LINK_S) as waiting:
                await self._linking.acquire()
            if waiting.cancelled_caught:
                return None  # a link has come about meanwhile, or ends: see what the coordinator says then
            self._is_confirmed, self._lead_after = promotion is not None, None
            try:
                if promotion is None and await self._gives_way(seen):
                    return None
                if await self._is_restored(seen, is_promoted=promotion is not None):
                    epoch, refusal = await self._win()
                elif promotion is None:
                    return None
                else:
                    epoch, refusal = None, self.reason
            finally:
                self._linking.release()
        if promotion is not None:
            promotion.refusal, self._promotion = refusal, None
            promotion.done.set()
        return epoch

    def _is_named(self, seen: Observation) -> bool:
        """Whether there are no elections, and this member is the one that leads."""
        is_static, state = isinstance(self._context.coordinator, StaticCoordinator), seen.state
        return is_static and state is not None and self._context.folder in (state.leader, state.successor)

    async def _gives_way(self, seen: Observation) -> bool:
        """Whether another follower of the former leader has more operations, and shall lead; once for each leader.

        Then no follower has what the next leader lacks, so that all go on from where they are: see `FormerOperations`.
        """
        state, context = seen.state, self._context
        position = self._replica.position if self._replica is not None else None
        if state is None or position is None or state.epoch == self._gave_way_in or state.successor:
            return False
        self._gave_way_in = state.epoch
        positions: list[int] = []

        async def ask(member: str, url: str) -> None:
            with suppress(NSQError, OSError):
                about = await self._others.about(url)
                if (about.get("id"), about.get("epoch")) == (member, context.membership.epoch):
                    positions.append(int(about.get("position") or 0))

        async with trio.open_nursery() as nursery:
            for member in state.followers_besides(context.folder):
                if (url := link_url(context, state.members[member])) is not None:
                    nursery.start_soon(ask, member, url)
        return max(positions, default=0) > position.number

    async def _win(self) -> tuple[int | None, str]:
        """Return the epoch if this member is elected, and otherwise why not."""
        try:
            epoch = await self._elected()
        except StateError as exc:
            refusal = str(exc)
            if self._standby is not None and self._standby.why_not:
                refusal = f"{refusal}; {self._standby.why_not}"
            if refusal != self.reason:
                logger.warning("this member cannot lead: %s", refusal)
            self.reason = refusal
            return None, refusal
        return epoch, "" if epoch is not None else "another member leads"

    async def _elected(self) -> int | None:
        """Return the epoch if this member is elected. Raises StateError: it may not lead."""
        context = self._context
        coordinator = context.coordinator
        if not self._is_whole and not (self._is_confirmed and self._is_complete):
            raise NotInSync("the folder has not caught up with a leader: messages are missing in it")
        await trio.to_thread.run_sync(context.save)
        if not self._is_confirmed:
            return await context.ask(coordinator.campaign, context.candidate)
        if isinstance(coordinator, StaticCoordinator):
            return await context.ask(coordinator.promote, context.candidate)
        return await context.ask(coordinator.campaign, context.candidate, found=True, after=self._lead_after)

    async def _is_restored(self, seen: Observation, *, is_promoted: bool) -> bool:
        """Restore the folder from the archive, if that is due; returns False if this member must not try to lead.

        Args:
            is_promoted: An administrator lets it lead: as it is, or from the archive if it has nothing.
        """
        standby = self._standby
        if standby is None or (is_promoted and not self._has_nothing):
            return True
        standby.is_asked = is_promoted
        standby.see(seen)
        if not await standby.is_ready(self._usable):
            self.reason = standby.reason
            return False
        if standby.restored_after is not None:
            self._is_confirmed, self._lead_after = True, standby.restored_after
        return True

    @property
    def _has_nothing(self) -> bool:
        """Whether the folder has no state of a leader, or of a broker that begins the cluster."""
        path = self._context.path
        return not (self._is_complete and ((path / BROKER_FILE).exists() or topics_in(path)))

    @property
    def _is_complete(self) -> bool:
        """Whether the folder is one that a leader had at some time: a catch-up was not cut short."""
        return self._replica is not None and not self._replica.is_incomplete

    @property
    def _is_whole(self) -> bool:
        """Whether the folder has all that it acknowledged, or is no copy."""
        return not self._context.membership.is_copy or (
            self._replica is not None and self._replica.position is not None
        )

    # ------------------------------------------------------------------ the link

    async def _follow_leader(self, leader: LeaderTarget, scope: trio.CancelScope) -> None:
        """Follow a leader, and connect again after each failure; runs until cancelled."""
        delays = Delays(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, random.random)
        self._failure, self._is_refused = "", False
        with scope:
            while True:
                began_s = trio.current_time()
                try:
                    async with self._linking:  # the one before may still end
                        await self._follow_once(leader)
                except* (NSQError, OSError, trio.BrokenResourceError) as group:
                    leaves = list(leaves_of(group))
                    reason = "; ".join(str(exc) or "the connection is broken" for exc in leaves)
                    reason = f"leader {leader.member} at {leader.url}: {reason}"
                    if reason != self._failure:
                        logger.warning("%s", reason)
                    self._failure = self.reason = reason
                    if any(isinstance(exc, UpgradeFailed) and not exc.status for exc in leaves):
                        # Clients that were passed on wait in vain, too; elsewhere, they may find the leader.
                        self._front.end_forwarded()
                except* Exception:
                    # A bug: the folder is opened again, as after a crash.
                    logger.exception("following the leader %s failed", leader.member)
                delays.connection_lasted(trio.current_time() - began_s)
                await trio.sleep(delays.next_s())

    async def _follow_once(self, leader: LeaderTarget) -> None:
        context = self._context
        replica = await trio.to_thread.run_sync(self._usable)
        await trio.to_thread.run_sync(context.save)
        if context.state is not None:
            await trio.to_thread.run_sync(context.learn, context.state)
        stream = await open_upgraded(
            leader.url, REPLICATE, secret=context.secret, tls=context.tls, timeout_s=_SILENCE_S
        )
        async with stream:
            connected_s = trio.current_time()
            try:
                self.is_connected = True
                self.reason = ""
                logger.log(
                    # A leader that refuses is asked again and again.
                    logging.DEBUG if self._is_refused else logging.INFO,
                    "connected to the leader %s at %s: epoch %d",
                    *(leader.member, leader.url, leader.epoch),
                )
                # If the former leader is gone without a word, its clients would wait for it.
                self._front.end_forwarded(leader)
                await follow(
                    stream,
                    replica,
                    cluster=context.membership.cluster,
                    member=context.folder,
                    addresses=context.addresses,
                    least_epoch=context.membership.epoch,
                    timeout_s=_SILENCE_S,
                    free_bytes=lambda: context.free_bytes,
                )
            finally:
                self.is_connected = False
                self._is_refused = trio.current_time() - connected_s < _LONGEST_PAUSE_S
                if not self._is_refused:
                    self._failure = ""


def link_url(context: MemberContext, addresses: Sequence[str]) -> str | None:
    """Return where a member is reached by others, of its addresses; None: it does not have what the link needs."""
    scheme = "http" if context.tls is None else "https"
    return next((each for each in addresses if each.startswith(f"{scheme}://")), None)
