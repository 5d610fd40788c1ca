"""The scheduler: one task does the broker's work, in rounds, and this is their order.

1. **Read.** Call what threads have reported, then read each readable client once and execute its commands. Publishes
   are only collected. A client that needs more than its turn comes again.
2. **Write.** The collected publishes become one write for each topic.
3. **Sync.** Writes of several rounds share a sync: it begins at the first idle moment, or after `Pacing.coalesce_s`.
4. **Commit, answer.** A thread reports the sync, in step 1 of a later round: `WritePath._complete_synced` commits the
   writes that have reached all barriers, and answers OK. With `--sync=interval`, this is part of step 2.
5. **Deliver.** Committed messages go to consumers at once, unless they may wait for more: at the end of the round for
   channels with much to deliver; when no client sends for output buffers; before the sleep for consumers that have
   most of their RDY in flight.
6. **Idle**, when no client sends: begin syncs, or do the only one; then deliveries that may wait.
7. **Sleep.** First busy-wait for clients that answer at once, then nap for a thread or a follower that syncs; then
   sleep in trio.

After `Pacing.turn_s` of this, the other tasks of trio run: connections, timers, checkpoints.
"""

import trio

from ..event_loop.pacing import Pacing
from ..event_loop.reactor import Poller
from .delivery import Deliverer
from .ingest.write_path import WritePath


class _ScheduledTasks(trio.abc.Instrument):
    """Notes whether trio has scheduled tasks. Asking trio each time takes longer than a read from a socket.

    Attributes:
        some_runnable: A task was scheduled since `ask`, or was runnable then.
    """

    def __init__(self) -> None:
        self.some_runnable = False

    def task_scheduled(self, task: trio.lowlevel.Task) -> None:
        self.some_runnable = True

    def ask(self) -> None:
        """Ask trio."""
        self.some_runnable = trio.lowlevel.current_statistics().tasks_runnable > 0


class Scheduler:
    """Runs the rounds of a broker. One per broker.

    Args:
        syncs_first: With `--sync=always`, clients wait for syncs, so they come before deliveries that may wait.
    """

    def __init__(
        self, poller: Poller, write_path: WritePath, delivery: Deliverer, pacing: Pacing, *, syncs_first: bool
    ) -> None:
        self._poller = poller
        self._write_path = write_path
        self._local = write_path.local
        self._delivery = delivery
        self._pacing = pacing
        self._syncs_first = syncs_first
        self._tasks = _ScheduledTasks()

    async def run(self) -> None:
        """Serve clients, and do the work that they cause; runs until cancelled."""
        poller = self._poller
        poller.open()
        trio.lowlevel.add_instrument(self._tasks)
        try:
            while True:
                fell_asleep_s = poller.clock_s()
                await poller.sleep()
                await self._work(fell_asleep_s)
        finally:
            trio.lowlevel.remove_instrument(self._tasks)
            poller.close()

    async def _work(self, fell_asleep_s: float) -> None:
        """Run rounds, and do what could wait, until there is nothing to do."""
        poller, pacing, tasks, clock_s = self._poller, self._pacing, self._tasks, self._poller.clock_s
        woke_s = clock_s()
        spins = woke_s - fell_asleep_s < 2 * pacing.spin_s  # clients have sent again at once
        spins_until_s = woke_s + pacing.spin_at_most_s
        turn_over_s = woke_s + pacing.turn_s
        tasks.ask()
        while True:
            if poller.poll():
                self._round()
            elif self._idle():
                pass
            elif spins and self._may_spin(spins_until_s) and poller.spin():
                self._round()
            elif self._delivery.before_sleep():
                pass
            elif self._write_path.is_call_near and not tasks.some_runnable and poller.nap():
                self._round()
            else:
                return
            if clock_s() > turn_over_s:
                await trio.lowlevel.checkpoint()
                tasks.ask()
                turn_over_s = clock_s() + pacing.turn_s

    def _round(self) -> None:
        """Read, write, answer and deliver."""
        poller = self._poller
        poller.in_round = True
        try:
            poller.serve()
        finally:
            try:
                poller.call_due()  # what the members of a cluster have
                self._write_path.write_gathered()
                poller.call_due()  # before the local sync, so that members sync at the same time
                if self._local.is_late:
                    self._local.begin()
                self._delivery.end_round()
                poller.call_due()
            finally:
                poller.in_round = False

    def _idle(self) -> bool:
        """Do the requested sync, or begin them, and one delivery that could wait. Returns True if there may be more."""
        if self._write_path.due:
            self._write_path.write_gathered()
        # With --sync=interval, no client waits for syncs, which store more.
        if self._syncs_first and not self._delivery.has_work and self._local.sync_in_loop():
            return True
        self._local.begin()
        return self._delivery.idle()

    def _may_spin(self, until_s: float) -> bool:
        """Whether nothing else needs the event loop or the processor: no sync here or in a follower, no task."""
        return not (self._poller.clock_s() > until_s or self._write_path.is_busy or self._tasks.some_runnable)
