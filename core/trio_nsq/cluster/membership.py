"""`cluster.json`: the member that a data folder is."""

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ..broker.storage.data_folder import MEMBER_FILE, SUFFIX, TOPICS_FOLDER, decode_checked, encode_checked
from ..coordination import StateError
from ..coordination.state import MAX_EPOCH, check_name
from ..log import Files
from ..protocol.errors import StartupError

_MOST_BYTES: Final = 64 * 1024
_ID_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Membership:
    """The member that a data folder is.

    Attributes:
        cluster: The name of the cluster.
        folder: The id of the folder.
        epoch: The highest epoch that it has seen; 0: none.
        is_copy: The folder is a copy of a leader's, and only a `Replica` knows whether it is complete. Otherwise it was
            opened by a broker last, or is new.
    """

    cluster: str
    folder: str
    epoch: int = 0
    is_copy: bool = False

    def save(self, files: Files, path: Path) -> None:
        """Write it into a data folder, durably. Raises OSError."""
        fields = {
            "cluster": self.cluster,
            "folder": self.folder,
            "epoch": self.epoch,
            "is_copy": self.is_copy,
        }
        files.replace(path / MEMBER_FILE, encode_checked(json.dumps(fields).encode()) + b"\n")

    def seen(self, epoch: int) -> "Membership":
        """Return it after it has seen an epoch."""
        return replace(self, epoch=max(self.epoch, epoch))


def new_membership(cluster: str) -> Membership:
    """Return the membership of a data folder that has none. Raises StateError: the name is not valid."""
    return Membership(check_name("the name of the cluster", cluster), secrets.token_hex(_ID_BYTES))


def read_membership(files: Files, path: Path) -> Membership | None:
    """Return the membership of a data folder; None: it has none. Raises StartupError: it cannot be used."""
    file = path / MEMBER_FILE
    try:
        fields = decode_checked(files.content(file, _MOST_BYTES))
        match fields:
            case {
                "cluster": str(cluster),
                "folder": str(folder),
                "epoch": int(epoch),
                "is_copy": bool(is_copy),
            }:
                check_name("the name of the cluster", cluster)
                check_name("the id of the folder", folder)
                if 0 <= epoch <= MAX_EPOCH:
                    return Membership(cluster, folder, epoch, is_copy)
        raise ValueError("it has other fields than those of a member of a cluster")
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise StartupError(f"--data-path: cannot read {file}: {exc.strerror}") from exc
    except (ValueError, StateError) as exc:
        raise StartupError(
            f"--data-path: {file} is damaged: {exc}. Without this file, the folder is that of a new member, which "
            "copies all messages from the leader; so remove it only if another member has them"
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
