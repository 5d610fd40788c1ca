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
7. **Sleep.** First busy-wait for clients that answer at once, then nap for a thread or a follower that syncs, for
   clients that send all the time, or for FINs that are read later; then sleep in trio, until the next timer at most.

Due timers (deferred messages, timeouts) run in step 5, before the deliveries.

After `Pacing.turn_s` of this, the other tasks of trio run: connections, timers, checkpoints.
"""

import math
from typing import Final

import trio

from ..event_loop.pacing import Pacing
from ..event_loop.reactor import Poller
from .delivery import Deliverer
from .ingest.write_path import WritePath

_SOON: Final = 10
"""After a sleep of less than so many naps, a nap is probably not in vain, and costs little if it is."""


class _OtherTasks(trio.abc.Instrument):
    """Notes which other tasks than this one can run. Asking trio takes longer, and leaves out those of this batch.

    Attributes:
        runnable: Tasks that trio has scheduled, and that have not run yet.
    """

    def __init__(self) -> None:
        self.runnable: set[trio.lowlevel.Task] = set()
        self._own = trio.lowlevel.current_task()

    def task_scheduled(self, task: trio.lowlevel.Task) -> None:
        if task is not self._own:
            self.runnable.add(task)

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.runnable.discard(task)


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

    async def run(self) -> None:
        """Serve clients, and do the work that they cause; runs until cancelled."""
        poller, lateness = self._poller, self._delivery.lateness
        tasks = _OtherTasks()
        poller.open()
        trio.lowlevel.add_instrument(tasks)
        trio.lowlevel.add_instrument(lateness)
        try:
            while True:
                fell_asleep_s = poller.clock_s()
                await self._sleep()
                await self._work(fell_asleep_s, tasks)
        finally:
            trio.lowlevel.remove_instrument(lateness)
            trio.lowlevel.remove_instrument(tasks)
            poller.close()

    async def _sleep(self) -> None:
        """Wait until there is something to serve, or a timer is due."""
        wait_s = self._delivery.next_timer_s
        if wait_s == math.inf:
            await self._poller.sleep()
        else:
            with trio.move_on_after(max(0.0, wait_s)):
                await self._poller.sleep()
        self._delivery.extend_if_late()

    async def _work(self, fell_asleep_s: float, tasks: _OtherTasks) -> None:
        """Run rounds, and do what could wait, until there is nothing to do."""
        poller, pacing, clock_s = self._poller, self._pacing, self._poller.clock_s
        woke_s = clock_s()
        spins = woke_s - fell_asleep_s < 2 * pacing.spin_s  # clients have sent again at once
        naps = woke_s - fell_asleep_s < _SOON * pacing.nap_s  # they send all the time
        turn_over_s = woke_s + pacing.turn_s
        while True:
            has_input = poller.poll()
            if has_input or self._delivery.next_timer_s <= 0:
                self._round(all_served=not has_input)
            elif self._idle():
                pass
            elif spins and self._may_linger(tasks) and poller.spin():
                self._round()
            elif self._delivery.before_sleep():
                pass
            elif self._write_path.is_call_near and not tasks.runnable and poller.nap_for_call():
                self._round()
            elif naps and self._may_linger(tasks):
                fell_asleep_s = clock_s()
                naps = poller.nap()
                spins = naps and clock_s() - fell_asleep_s < pacing.spin_s
            elif poller.reads_later:
                # Not in trio's sleep, whose clock need not be the poller's.
                if tasks.runnable:
                    turn_over_s = -math.inf  # they run now
                else:
                    poller.nap()
            else:
                return
            if clock_s() > turn_over_s:
                await trio.lowlevel.checkpoint()
                self._delivery.extend_if_late()
                turn_over_s = clock_s() + pacing.turn_s

    def _round(self, *, all_served: bool = False) -> None:
        """Read, write, answer, run timers and deliver."""
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
                self._delivery.run_timers(all_served=all_served)
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

    def _may_linger(self, tasks: _OtherTasks) -> bool:
        """Whether nothing else needs the event loop or the processor: no sync here or in a follower, no task."""
        return not (self._write_path.is_busy or tasks.runnable)
