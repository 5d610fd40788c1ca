"""Opening what lies in the data folder. A topic that cannot be opened is unavailable; the others are served."""

import json
import logging
from typing import Any

from ..log import LogError
from .dead_letters import settle
from .state.broker import Broker
from .state.topic import StateError, Topic
from .storage.data_folder import STATE_FILE, DataFolder

logger = logging.getLogger("trio_nsq.broker")


def load_topics(broker: Broker, folder: DataFolder) -> None:
    """Let a broker take up the topics of a data folder.

    What is wrong with one topic is reported, and keeps only that one from being used: see `Broker.unavailable`.

    Raises:
        StartupError: The list of the topics cannot be read.
    """
    for name in folder.topic_names():
        try:
            _load(broker, folder, name)
        except (LogError, StateError) as exc:
            _give_up(broker, name, str(exc))
        except OSError as exc:
            _give_up(broker, name, f"cannot write to {folder.topic_folder(name)}: {exc.strerror}")
        except Exception:
            # A mistake of ours: it must not reach other topics.
            logger.exception("%s: internal error", folder.topic_folder(name))
            _give_up(broker, name, "internal error, see the log")
    settle(broker)


def _give_up(broker: Broker, name: str, reason: str) -> None:
    broker.give_up(name, reason)
    what = "TOPIC(%s): unavailable: %s; the other topics are served. Repair it and start again, or delete the topic"
    logger.error(what, name, reason)


def _load(broker: Broker, folder: DataFolder, name: str) -> None:
    """Raises LogError, StateError, OSError."""
    state, is_previous = folder.read_state(name)
    topic = broker.topic(name)
    try:
        ahead = topic.restore(state)
    except StateError as exc:
        raise StateError(f"{folder.topic_folder(name) / STATE_FILE} is damaged: {exc}") from exc
    _report_missing(topic, state, folder, is_previous=is_previous)
    if ahead:
        folder.write_state(name, json.dumps(topic.snapshot()).encode(), keep_previous=False)
    if state is not None:
        broker.never_saved.discard(topic)
        if ahead or (not is_previous and int(state["end"]) == topic.log.next_sequence):
            broker.changed.discard(name)  # else the log has what came after the last checkpoint
    for channel in topic.channels.values():
        broker.watch(channel, channel.next_deadline_ns)


def _report_missing(
    topic: Topic, state: dict[str, Any] | None, folder: DataFolder, *, is_previous: bool
) -> None:
    """Say what a topic had before, and has no longer: its files, or the ends of them, are gone.

    What a previous state needed may have been deleted because the last one did not.
    """
    path = folder.topic_folder(topic.name) / STATE_FILE
    first, end = topic.log.first_sequence, topic.log.next_sequence
    if state is None:
        if end:
            what = "%s is missing: no channel is known, and all messages in the log wait for a first one"
            logger.warning(what, path)
        return
    if not is_previous and (needed := topic.first_needed(state, topic.is_carried)) < first:
        what = "%s: messages %d to %d are missing, the log begins after them"
        logger.error(what, path, needed, first - 1)
    if (known := int(state["end"])) > end:
        what = "%s: messages %d to %d are missing, the log ends before them"
        logger.error(what, path, end, known - 1)
