"""`cluster.json`: the member that a data folder is."""

import json
import logging
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from ..broker.storage.data_folder import MEMBER_FILE, SUFFIX, TOPICS_FOLDER, decode_checked, encode_checked
from ..coordination.state import MAX_EPOCH, StateError, check_name
from ..log import Files
from ..protocol.errors import StartupError

logger: logging.Logger = logging.getLogger("trio_nsq.cluster")

_MOST_BYTES: Final = 64 * 1024
_ID_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Membership:
    """The member that a data folder is.

    Attributes:
        cluster: The name of the cluster.
        cluster_id: See `ClusterState`; empty: unknown.
        folder: The id of the folder.
        epoch: The highest epoch that it has seen; 0: none.
        is_copy: The folder is a copy of a leader's, and only a `Replica` knows whether it is complete. Otherwise it was
            opened by a broker last, or is new.
        inode: Of the data folder: a copy of it has another one. 0: unknown.
        instances: Names of processes that have had the folder; one of them is recorded at the coordinator, if the
            folder is in sync.
    """

    cluster: str
    folder: str
    epoch: int = 0
    is_copy: bool = False
    inode: int = 0
    instances: tuple[str, ...] = ()
    cluster_id: str = ""

    def save(self, files: Files, path: Path) -> None:
        """Write it into a data folder, durably. Raises OSError."""
        files.replace(path / MEMBER_FILE, encode_checked(json.dumps(asdict(self)).encode()) + b"\n")


def membership_of(files: Files, path: Path, cluster: str) -> tuple[Membership, bool]:
    """Return the membership of a locked data folder, and whether it is saved there.

    A folder without one, and a copy of a member's folder, are new members: of two members with one identity, the one
    that lacks messages could lead. A copy must catch up.

    Raises:
        StartupError: The folder cannot be used, or belongs to another cluster.
    """
    inode = path.stat().st_ino
    saved = read_membership(files, path)
    check_cluster(saved, cluster, path)
    if saved is None:
        return Membership(cluster, secrets.token_hex(_ID_BYTES), inode=inode), False
    if saved.inode in (0, inode):
        return replace(saved, inode=inode), True
    copy = replace(saved, folder=secrets.token_hex(_ID_BYTES), is_copy=True, inode=inode)
    logger.warning(
        "%s was copied from the data folder of the member %s: it is a new member, %s, and must catch up",
        *(path, saved.folder, copy.folder),
    )
    return copy, False


def read_membership(files: Files, path: Path) -> Membership | None:
    """Return the membership of a data folder; None: it has none. Raises StartupError: it cannot be used."""
    file = path / MEMBER_FILE
    try:
        fields = decode_checked(files.content(file, _MOST_BYTES))
        match {"inode": 0, "instances": [], "cluster_id": "", **fields}:
            case {
                "cluster": str(cluster),
                "folder": str(folder),
                "epoch": int(epoch),
                "is_copy": bool(is_copy),
                "inode": int(inode),
                "instances": [*instances],
                "cluster_id": str(cluster_id),
            } if all(isinstance(each, str) for each in instances):
                check_name("the name of the cluster", cluster)
                check_name("the id of the folder", folder)
                if 0 <= epoch <= MAX_EPOCH:
                    return Membership(cluster, folder, epoch, is_copy, inode, tuple(instances), cluster_id)
        raise ValueError("it has other fields than those of a member of a cluster")
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise StartupError(f"--data-path: cannot read {file}: {exc.strerror}") from exc
    except (ValueError, StateError) as exc:
        raise StartupError(
            f"--data-path: {file} is damaged: {exc}. If other members have all messages, move the content of the "
            "folder away: it is a new member then, and copies them from the leader"
        ) from exc


def check_cluster(membership: Membership | None, cluster: str, path: Path) -> None:
    """Raise StartupError if a data folder belongs to another cluster."""
    if membership is not None and membership.cluster != cluster:
        raise StartupError(
            f"--cluster: the data folder {path} belongs to the cluster {membership.cluster}, not to {cluster}"
        )


def topics_in(path: Path) -> Sequence[str]:
    """Return the names of the topics in a data folder."""
    try:
        names = sorted(each.name for each in (path / TOPICS_FOLDER).iterdir())
    except OSError:
        return []
    return [name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX)]
