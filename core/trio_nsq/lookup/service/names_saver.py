"""Saves the registry's names when they change."""

import logging

import trio

from .names_file import NamesFile
from .registry import Registry

logger: logging.Logger = logging.getLogger("trio_nsq.lookup")

SAVE_INTERVAL_S = 0.2
"""The shortest time between two writes of the names: many may be registered at once."""
SAVE_RETRY_S = 10.0
"""The delay before a failed write is repeated."""


class NamesSaver:
    """Writes the registry's names to the file, if there is one, when they change."""

    def __init__(self, registry: Registry, names_file: NamesFile | None) -> None:
        self._registry = registry
        self._file = names_file
        self._changed = trio.Event()
        if names_file is not None:
            registry.on_names_changed = self._mark_changed

    def _mark_changed(self) -> None:
        self._changed.set()

    async def run(self) -> None:
        """Write the names whenever they change."""
        while True:
            await self._changed.wait()
            await trio.sleep(SAVE_INTERVAL_S if await self._save() else SAVE_RETRY_S)

    async def save_last_changes(self) -> None:
        """Write pending changes at shutdown; a failure is logged."""
        if self._changed.is_set():
            await self._save()

    async def _save(self) -> bool:
        assert self._file is not None  # without a file, nothing is marked as changed
        self._changed = trio.Event()
        names = self._registry.durable_names()
        try:
            with trio.CancelScope(shield=True):  # a cancelled write would count as done
                await trio.to_thread.run_sync(self._file.save, names)
        except OSError as exc:
            logger.error("DB: cannot write %s: %s", self._file.path, exc.strerror)
            self._changed.set()
            return False
        return True
