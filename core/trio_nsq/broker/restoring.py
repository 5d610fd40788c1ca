"""Restores a data folder from its archive."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from ..archive.content import Progress
from ..archive.manifest import ArchiveDamaged, read_manifest
from ..archive.restore import OperationsDamaged, RestorePlan, RestorePoint, Restorer
from ..log import Files
from ..protocol.errors import NSQError, StartupError
from ..storage import Storage, StorageError, canonical_place, naming_file, storage_at
from .options import BrokerOptions
from .storage.data_folder import (
    BROKER_FILE,
    ID_RESERVE,
    RESTORING_FILE,
    FolderLock,
    end_following,
    is_own_name,
)

_KEPT: Final = ("lost+found",)


def has_data(path: Path) -> bool:
    """Whether a folder is a broker's, so that nothing may be restored into it; False after an unfinished restore."""
    return (path / BROKER_FILE).exists() and not (path / RESTORING_FILE).exists()


def same_place(url: str, other: str) -> bool:
    """Whether two URLs or paths are the same place. Raises StartupError: one cannot be used."""
    try:
        return canonical_place(url) == canonical_place(other)
    except StorageError as exc:
        raise StartupError(f"--restore-from or --archive: {exc}") from exc


def is_begun(url: str) -> bool:
    """Whether there is an archive at a URL. Raises ArchiveDamaged, StorageError, OSError."""
    return bool(read_manifest(storage_at(url)).manifest.checkpoints)


def begins_archive(options: BrokerOptions) -> bool:
    """Whether there is nothing to restore yet, because this broker begins the archive that it is restored from.

    Raises:
        StartupError: A URL cannot be used. ArchiveDamaged, StorageError, OSError: The archive cannot be read.
    """
    is_own = bool(options.archive) and same_place(options.restore_from, options.archive)
    return is_own and not is_begun(options.archive)


def check_restore(options: BrokerOptions) -> None:
    """Check that a start can begin to restore the data folder, if it has to. Raises StartupError: it cannot."""
    try:
        if not has_data(options.data_path) and not begins_archive(options):
            RestorePlan(storage_at(options.restore_from))
    except StartupError:
        raise
    except (NSQError, OSError) as exc:
        raise StartupError(f"--restore-from: {exc}") from exc


def restore_folder(
    url: str,
    path: Path,
    *,
    until_ms: int | None = None,
    is_wanted: Callable[[str], bool] | None = None,
    before_damage: bool = False,
    on_begin: Progress = lambda size: None,
    on_read: Progress = lambda size: None,
) -> tuple[RestorePoint, list[str]]:
    """Restore a data folder from its archive, durably. Blocking.

    Archived segments that are missing or damaged cost their messages only. If the newest checkpoint is damaged, an
    earlier one of the same run and all operations since give the same state.

    Its ids are higher than those of all messages that the archived broker can have given out. Its sequences go on
    where the archive ends: if the broker had written more, others get these sequences.

    Args:
        url: The archive.
        path: Missing, empty, or left by a restore that did not end. Its parent exists.
        until_ms, before_damage: See `RestorePlan`.
        is_wanted: Whether the topic of this name is restored; None: all are.
        on_begin: Called with about how many bytes will be read.
        on_read: See `Progress`.

    Returns:
        The state, and sentences about what is missing or damaged.

    Raises:
        StartupError: The folder cannot be used, or is not empty.
        ArchiveError: The archive has no such state; ArchiveDamaged: an object is missing or damaged. A folder that was
            begun stays, and no broker opens it.
        StorageError, OSError: The archive cannot be read, or the folder cannot be written.
    """
    storage = storage_at(url)
    plan = RestorePlan(storage, until_ms, before_damage=before_damage)
    on_begin(plan.point.size_bytes)
    files = Files()
    lock = FolderLock(path, files, restores=True)
    try:
        with naming_file(str(path)):
            _empty(files, path)
            files.replace(path / RESTORING_FILE, b"{}\n")
            point, damage = write_folder(
                files, path, storage, plan, partial(_empty, files, path), is_wanted=is_wanted, on_read=on_read
            )
            files.unlink(path / RESTORING_FILE)
            files.sync_folder(path)
    finally:
        lock.close()
    return point, damage


def write_folder(
    files: Files,
    path: Path,
    storage: Storage,
    plan: RestorePlan,
    empty: Callable[[], None],
    *,
    is_wanted: Callable[[str], bool] | None = None,
    on_read: Progress = lambda size: None,
) -> tuple[RestorePoint, list[str]]:
    """Write a state of an archive into a locked folder without one, durably: see `restore_folder`. Blocking.

    Args:
        empty: Called to begin anew.
    """
    while True:
        restorer = Restorer(storage, path, is_wanted=is_wanted, on_read=on_read)
        try:
            point = restorer.restore(plan.point, before_damage=plan.before_damage)
            break
        except OperationsDamaged:
            raise
        except ArchiveDamaged as exc:
            plan.use_earlier(exc)
            empty()
    try:
        end_following(files, path, ID_RESERVE)
    except ValueError as exc:
        raise ArchiveDamaged(f"the archive {storage.shown}: {exc}") from exc
    return point, plan.damage + restorer.damage


def _empty(files: Files, path: Path) -> None:
    """Remove what an unfinished restore has left. Raises StartupError: there is something else."""
    is_unfinished = (path / RESTORING_FILE).exists()
    names = [name for name in files.names(path) if name not in _KEPT]
    foreign = [name for name in names if not (is_unfinished and is_own_name(name))]
    if foreign:
        found = BROKER_FILE if BROKER_FILE in foreign else foreign[0]
        raise StartupError(f"--data-path: {path} is not empty, it has {found}: give a new folder")
    for name in names:
        if name == RESTORING_FILE:
            continue
        if (path / name).is_dir():
            files.remove_folder(path / name)
        else:
            files.unlink(path / name)
