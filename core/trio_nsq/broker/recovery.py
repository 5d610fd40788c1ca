"""Opens the topics of the data folder. A topic that cannot be opened is unavailable; the other topics are served."""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import trio

from ..event_loop.retries import Delays
from ..log import ALL_STABLE, Log, LogError, is_disk_full
from ..log.write_ahead.replay import Replay
from .clock import BrokerClock
from .delivery import Deliverer
from .state.broker import Broker
from .state.checkpoint import ADDITIONS, first_needed, known_end, stable_end
from .state.moved_letters import MovedLetters
from .state.topic import StateError, Topic
from .storage.data_folder import STATE_FILE, DataFolder
from .storage.retention import RetentionManager

logger: logging.Logger = logging.getLogger("trio_nsq.broker")


_RETRY_S = 10.0
"""Pause before the first new attempt to open a topic; each further pause is twice as long."""
_RETRY_MAX_S = 600.0


@dataclass(eq=False, slots=True)
class TopicLoader:
    """Opens the topics of a data folder. An error in one topic makes only that topic unavailable.

    Attributes:
        make_log: Opens the log of a topic, by name and `DiskLog`'s `stable_end`; thread-safe. May raise LogError.
        replay: The write-ahead log that a crash left. Its files stay until all topics are open.
    """

    broker: Broker
    folder: DataFolder
    make_log: Callable[[str, int], Log]
    delivery: Deliverer
    moved_letters: MovedLetters
    retention: RetentionManager
    clock: BrokerClock
    replay: Replay
    # Held to open or delete an unavailable topic.
    _opening: trio.Lock = field(default_factory=trio.Lock, init=False)

    def load_all(self) -> None:
        """Open all topics. Raises StartupError: the data folder cannot be listed."""
        for name in self.folder.topic_names():
            try:
                self._add(*self._restore(name))
            except Exception as exc:
                self._mark_unavailable(name, exc)
        self._end_replay()
        self._end_write_ahead()
        self.moved_letters.finish_after_restart()
        for topic in self.broker.topics.values():
            self._loaded(topic)

    def _end_replay(self) -> None:
        """Delete the write-ahead log of a crash, if all topics have what is in it."""
        if any(self.folder.topic_folder(name).exists() for name in self.replay.topics):
            return
        try:
            self.replay.remove_files()
        except LogError as exc:
            logger.warning("%s; the next start removes it", exc)

    def _end_write_ahead(self) -> None:
        try:
            self.folder.end_write_ahead()
        except OSError as exc:
            logger.warning(
                "cannot save in %s that there is no write-ahead log: %s", self.folder.path, exc.strerror
            )

    def _loaded(self, topic: Topic) -> None:
        self.retention.schedule_loaded(topic)
        if (move := topic.moving.current) is not None:
            logger.warning(
                "TOPIC(%s): is being moved to %s: its channels deliver nothing until 'qcli drain --move-to' continues "
                "that, or 'qcli drain --stop' ends it",
                topic.name,
                move.to,
            )
        for channel in topic.channels.values():
            self.delivery.collect_dead_letters(channel)

    async def open_again_on_schedule(self) -> None:
        """Retry opening the unavailable topics, with growing pauses, until all are open.

        A disk that fails while the machine boots may work later.
        """
        delays = Delays(_RETRY_S, _RETRY_MAX_S)
        while self.broker.unavailable:
            await trio.sleep(delays.next_s())
            for name in list(self.broker.unavailable):
                async with self._opening:
                    await self._open_again(name)

    async def _open_again(self, name: str) -> None:
        if name not in self.broker.unavailable:
            return  # it was deleted meanwhile
        try:
            topic, is_saved = await trio.to_thread.run_sync(self._restore, name)
            if self.broker.stopping:
                topic.log.close()
                return
            self._add(topic, is_saved)
            self.moved_letters.finish_after_restart(name)
            self._end_replay()
        except Exception as exc:
            self._mark_unavailable(name, exc)
            return
        del self.broker.unavailable[name]
        logger.warning("TOPIC(%s): available again", name)
        for channel in topic.channels:
            self.broker.on_names_changed(name, channel)
        self._loaded(topic)

    async def delete(self, name: str) -> bool:
        """Delete the files of an unavailable topic. Returns False if the topic is available by now.

        Raises OSError: no file was deleted.
        """
        async with self._opening:
            if name not in self.broker.unavailable:
                return False
            retired = await trio.to_thread.run_sync(self.folder.retire_topic, name)
            del self.broker.unavailable[name]
            self.moved_letters.confirm_from(name)
            self.replay.forget(name)
            self._end_replay()
        if retired is not None:
            await trio.to_thread.run_sync(self.folder.files.remove_folder, retired)
        return True

    def _mark_unavailable(self, name: str, error: Exception) -> None:
        """Make a topic unavailable, and log the reason unless it is the same as before."""
        folder = self.folder.topic_folder(name)
        if isinstance(error, (LogError, StateError)):
            reason = str(error)
        elif isinstance(error, OSError):
            reason = f"cannot write to {folder}: {error.strerror}"
        else:  # a bug in the broker: it must not affect other topics
            reason = f"internal error: {error!r}"
        is_known = self.broker.unavailable.get(name) == reason
        self.broker.mark_unavailable(name, reason)
        if not is_known:
            internal = error if not isinstance(error, (LogError, StateError, OSError)) else None
            what = "TOPIC(%s): unavailable: %s; the other topics are served. Repair it, or delete the topic"
            logger.error(what, name, reason, exc_info=internal)

    def _restore(self, name: str) -> tuple[Topic, bool | None]:
        """Build a topic from its log and saved state; thread-safe. Raises LogError, StateError, OSError.

        Returns the topic, and whether its state on disk is current (None: no state was ever saved).
        """
        if written := self.replay.apply(name, self.folder.topic_folder(name)):
            what = (
                "TOPIC(%s): wrote %d bytes to its log that only the write-ahead log had, as after a power cut"
            )
            logger.warning(what, name, written)
        state, is_previous = self.folder.read_state(name)
        log = self.make_log(name, ALL_STABLE if self.replay.lacks_entries else stable_end(state))
        try:
            return self._restore_from(log, name, state, is_previous=is_previous)
        except BaseException:
            log.close()
            raise

    def _restore_from(
        self, log: Log, name: str, state: dict[str, Any] | None, *, is_previous: bool
    ) -> tuple[Topic, bool | None]:
        folder, ahead_ns = self.folder, self.clock.ahead_ns()
        topic = self.broker.make_topic(name, log)
        try:
            ahead = topic.restore(state, ahead_ns)
        except StateError as exc:
            raise StateError(f"{folder.topic_folder(name) / STATE_FILE} is damaged: {exc}") from exc
        _report_missing(topic, state, folder, is_previous=is_previous)
        if ahead:
            try:
                snapshot = topic.snapshot(ahead_ns)
                folder.write_state(name, json.dumps(snapshot).encode(), keep_previous=False)
            except OSError as exc:
                if not is_disk_full(exc):
                    raise
                ahead = False
                topic.refuse_publishes(f"cannot save the state of topic {name}: {exc.strerror}")
        if state is None:
            return topic, None
        # If the end differs, the log has messages published after the last checkpoint. Channels may follow it.
        is_whole = int(state["end"]) == log.next_sequence and ADDITIONS not in state
        return topic, ahead or (not is_previous and is_whole)

    def _add(self, topic: Topic, is_saved: bool | None) -> None:
        """Add a topic to the broker; arguments as `_restore` returns them."""
        broker = self.broker
        broker.add_topic(topic)
        if is_saved is not None:
            broker.never_saved.discard(topic)
        if is_saved:
            broker.changed.discard(topic.name)


def _report_missing(
    topic: Topic, state: dict[str, Any] | None, folder: DataFolder, *, is_previous: bool
) -> None:
    """Log which messages or channels of a topic are lost because files are missing or truncated.

    A previous state is not compared with the log's beginning: retention used a newer state, and may have deleted
    messages that the previous state still needs.
    """
    path = folder.topic_folder(topic.name) / STATE_FILE
    first, end = topic.log.first_sequence, topic.log.next_sequence
    if state is None:
        if end:
            what = (
                "%s is missing: the topic has no channels, and its first channel gets all messages in the log"
            )
            logger.warning(what, path)
        return
    if not is_previous and (needed := first_needed(state, topic.store.is_carried)) < first:
        what = "%s: messages %d to %d are missing: the log begins after them"
        logger.error(what, path, needed, first - 1)
    if (known := known_end(state)) > end:
        what = "%s: messages %d to %d are missing: the log ends before them"
        logger.error(what, path, end, known - 1)
