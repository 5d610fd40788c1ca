"""The data folders of processes that a node did not have before: the topics and channels of the others, no messages."""

import logging
from pathlib import Path
from typing import Any, Final

from ...log import Files, LogError
from ...protocol.errors import StartupError
from ..state.checkpoint import without_messages
from ..storage.data_folder import DataFolder
from ..storage.process_folders import FOLDER, folder_of, folders_in

logger: logging.Logger = logging.getLogger("trio_nsq.broker")

_BEGUN: Final = f".new-{FOLDER}"
"""A folder gets its name when it is complete: this process may be killed before."""


def make_new_folders(data_path: Path, count: int) -> None:
    """Make the folders that a node of `count` processes lacks, if it has one. None of its processes may run.

    A channel does not get what a process stores before it has the channel, and no consumer need be there to create it.

    Raises:
        StartupError: A folder cannot be used.
    """
    found = folders_in(data_path)
    new = [index for index in range(count) if index not in found]
    if not found or not new:
        return
    states = _states_in([folder_of(data_path, index) for index in found])
    for index in new if states else ():
        try:
            _make(data_path, index, states)
        except OSError as exc:
            reason = f"cannot write to {folder_of(data_path, index)}: {exc.strerror}"
            raise StartupError(f"--data-path: {reason}") from exc
        logger.info(
            "process %d begins with the topics and channels of the others: %d topics", index, len(states)
        )


def _states_in(folders: list[Path]) -> dict[str, bytes]:
    """Return the state of a new topic for each topic that one of these folders has. Raises StartupError."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in folders:
        folder = DataFolder(path)
        try:
            for name in folder.topic_names():
                try:
                    state, _ = folder.read_state(name)
                    if state is not None:
                        without_messages([state])
                        found.setdefault(name, []).append(state)
                except (LogError, OSError, KeyError, TypeError, ValueError):
                    pass  # the process whose topic it is says why it cannot be used
        finally:
            folder.close()
    return {name: without_messages(states) for name, states in found.items()}


def _make(data_path: Path, index: int, states: dict[str, bytes]) -> None:
    """Make the folder of a process. Raises OSError, StartupError."""
    begun, files = data_path / f"{_BEGUN}{index}", Files()
    files.remove_folder(begun)
    folder = DataFolder(begun)
    try:
        folder.reserve_ids(folder.first_id())
        for name, state in states.items():
            folder.write_state(name, state, keep_previous=False)
    finally:
        folder.close()
    files.rename(begun, folder_of(data_path, index))
    files.sync_folder(data_path)
