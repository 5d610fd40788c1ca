"""A member that is restored from the archive, and leads, if no member is left that has all messages.

That loses what the lost leader had acknowledged and not archived. So the leader records at the coordinator whether its
archive has all but the last seconds, and acknowledges nothing without its lease then: when a member is restored, no
other one acknowledges anything. If the lost leader comes back, it finds a higher epoch, and follows.
"""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import trio

from ..archive.owner import check_owner
from ..archive.restore import RestorePlan, shown_time
from ..broker.restoring import is_begun, write_folder
from ..broker.storage.data_folder import BROKER_FILE
from ..coordination.interface import CoordinatorError, Observation
from ..coordination.state import ClusterState
from ..protocol.errors import NSQError
from ..replication.replica import Replica
from ..storage import canonical_place, storage_at
from .context import RETRY_S, MemberContext

logger: logging.Logger = logging.getLogger("trio_nsq.cluster")

_PAUSE_S: Final = 10.0
"""After a restore that failed."""
_EMPTY: Final = ". To let it lead without any message, start it without --restore-from, and promote it again"


class _Superseded(Exception):
    """Another member leads, so that the folder need not be restored."""


class Standby:
    """Whether a member may be restored, and the restore. For one time as a follower.

    Args:
        context: The member; its options have an archive.

    Attributes:
        restored_after: The folder was restored, and may lead after this epoch; 0: after none. None: it was not, or
            there was a leader since then.
        reason: Why it waits, or what it does; empty: nothing.
        why_not: Why this member is not restored although it may not lead either; empty: there is no such reason.
        is_asked: An administrator lets this member lead, and its folder has nothing. So it is restored first, at once,
            also if others were in sync. Set it before `see`.
    """

    def __init__(self, context: MemberContext) -> None:
        self.restored_after: int | None = None
        self.reason: str = ""
        self.why_not: str = ""
        self.is_asked = False
        self._failure = ""
        self._said = ""
        self._is_recorded = False  # the lost leader has recorded this archive
        self._context = context
        self._url = context.options.restore_from
        self._archive = canonical_place(self._url)
        self._owner = ""  # the id of the archive, if the lost leader has recorded it
        self._after: int | None = None
        self._due_s = 0.0

    def see(self, seen: Observation) -> None:
        """Note what the coordinator says; call it with each observation."""
        recorded = None if seen.state is None else seen.state.archive
        self._is_recorded = recorded is not None and recorded.place == self._archive
        self._owner = recorded.owner if recorded is not None and self._is_recorded else ""
        after = self._replaceable(seen)
        if after != self._after:
            patience_s = self._context.options.restore_after_ms / 1000
            self._after, self._due_s, self.restored_after = after, trio.current_time() + patience_s, None
        if seen.is_held:
            self._failure = ""
        self.why_not = "" if after is not None or seen.is_held else self._failure or self._why_not(seen.state)

    def _replaceable(self, seen: Observation) -> int | None:
        """Return the last epoch, 0 if there was none, if no member may lead but one that is restored; else None."""
        state, context = seen.state, self._context
        if seen.is_held:
            return None
        if self.is_asked:
            return 0 if state is None else state.epoch
        if state is None:
            about = context.membership
            is_new = about.epoch == 0 and (about.is_copy or not (context.path / BROKER_FILE).exists())
            return 0 if is_new else None
        is_lost = state.in_sync == {state.leader} and state.leader != context.folder
        return state.epoch if is_lost and self._is_recorded else None

    def _why_not(self, state: ClusterState | None) -> str:
        if state is None or self._context.folder in state.in_sync:
            return ""
        if state.in_sync != {state.leader}:
            return (
                f"it is not restored from {self._archive}, because these have everything. If all of them are lost for "
                "good, 'qcli cluster promote' restores a member with an empty folder"
            )
        return (
            f"it is not restored from {self._archive}, because the lost leader {state.leader} did not record that this "
            "archive is current: it ran without --restore-from, with another --archive, or was behind"
        )

    async def is_ready(self, replica: Callable[[], Replica]) -> bool:
        """Restore the folder if that is due; return whether this member may try to lead: restored, or as it is.

        Args:
            replica: Returns the folder; nothing else uses it.
        """
        after = self._after
        if after is None or after == self.restored_after:
            return True
        try:
            if not (self._is_recorded or await trio.to_thread.run_sync(is_begun, self._url)):
                return True  # the archive begins with this member
            if not self.is_asked and (wait_s := self._due_s - trio.current_time()) > 0:
                waiting = f"no other member may lead: waiting before restoring {self._archive}"
                self._say(
                    self._failure or waiting,
                    f"; {'next try' if self._failure else 'it begins'} in {wait_s:.0f} s",
                )
                return False
            await self._restore(replica, after)
        except _Superseded:
            self._say("there was a leader while the archive was restored")
        except (NSQError, OSError) as exc:
            self._failure = f"cannot restore {self._archive}: {exc}"
            self._say(self._failure, _EMPTY if self.is_asked else f"; next try in {_PAUSE_S:.0f} s")
            self._due_s = trio.current_time() + _PAUSE_S
        return self.restored_after is not None

    def _say(self, reason: str, when: str = "") -> None:
        """Set the reason, and log it unless it is the one that was logged last; `when` is not logged."""
        if reason != self._said:
            logger.warning("%s", reason)
        self._said, self.reason = reason, reason + when

    async def _restore(self, replica: Callable[[], Replica], after: int) -> None:
        """Raises _Superseded, NSQError, OSError."""
        if self._failure:
            self._say(self._failure, "; it is tried again now")
        else:
            self._say(f"no other member may lead: restoring {self._archive}")
        await trio.to_thread.run_sync(self._restore_now, replica, after)
        self.restored_after, self._failure = after, ""

    def _restore_now(self, replica: Callable[[], Replica], after: int) -> None:
        storage = storage_at(self._url)
        plan = RestorePlan(storage)  # first: where there is no archive, there is none of others
        if self._owner:
            check_owner(storage, self._owner)
        look_s = 0.0

        def on_read(size: int) -> None:
            nonlocal look_s
            if (now_s := time.monotonic()) >= look_s:
                trio.from_thread.run(self._check, after)
                look_s = now_s + RETRY_S

        def write() -> None:
            files, path = self._context.files, self._context.path
            point, damage = write_folder(files, path, storage, plan, lambda: None, on_read=on_read)
            for what in damage:
                logger.error("%s", what)
            logger.warning("restored the state of %s from %s", shown_time(point.time_ms), self._archive)

        replica().take_copy(after + 1, write)

    async def _check(self, after: int) -> None:
        """Raise _Superseded if there is a leader, or was one."""
        with suppress(CoordinatorError):  # it is asked again before this member leads
            self.see(await self._context.ask(self._context.coordinator.read))
            if self._after != after:
                raise _Superseded
