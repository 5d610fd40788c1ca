"""Whose archive it is: a data folder and its archive have the same random id.

The id is archived and restored, and the members of a cluster share it. So a broker that was given the archive of
another one by mistake does not write there, and no member is restored from it.
"""

import json
import secrets
from pathlib import Path
from typing import Final

from ..log.files import Files
from ..storage import Storage
from . import OWNER_FILE
from .manifest import ArchiveDamaged, ArchiveError, read_manifest

_MOST_BYTES: Final = 4096


def take_ownership(files: Files, root: Path, storage: Storage) -> str:
    """Return the id of a data folder, after checking that its archive is free, or has this id.

    Raises:
        ArchiveError: It is the archive of another data folder.
        ArchiveDamaged: Its manifest, or the file in the folder, cannot be understood.
        StorageError, OSError: The archive or the folder cannot be read or written.
    """
    path = root / OWNER_FILE
    mine, theirs = _read(files, path), read_manifest(storage).manifest.owner
    if theirs not in ("", mine):
        raise ArchiveError(
            f"{storage.shown} is the archive of another broker or cluster: give --archive another place. If this "
            "broker has lost its data folder, restore it from there first: see 'qcli archive restore'"
        )
    if not mine:
        mine = secrets.token_hex(8)
        files.replace(path, json.dumps({"id": mine}).encode() + b"\n")
    return mine


def check_owner(storage: Storage, owner: str) -> None:
    """Check that an archive is that of a data folder. Raises ArchiveError, ArchiveDamaged, StorageError, OSError."""
    if read_manifest(storage).manifest.owner not in ("", owner):
        raise ArchiveError(f"{storage.shown} is the archive of another broker or cluster")


def _read(files: Files, path: Path) -> str:
    """Return the id in a data folder; empty if there is none."""
    try:
        return str(json.loads(files.content(path, _MOST_BYTES))["id"])
    except FileNotFoundError:
        return ""
    except (ValueError, KeyError, TypeError) as exc:
        raise ArchiveDamaged(f"{path} is damaged: remove it, and give --archive another place") from exc
