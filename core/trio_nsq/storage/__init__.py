"""Places for files that several machines may use: local folders and object stores.

A file gets its final name only when its content is complete, and no complete file is replaced by accident: see
`Storage`.
"""

from .access import Access, KnownAccess, keep_secrets, known_access
from .calls import Patience
from .interface import (
    ChangedMeanwhile,
    Lease,
    LeaseLost,
    NewFile,
    Storage,
    StorageError,
    Stored,
    StoredFile,
    not_shared,
)
from .local import PRIVATE_MODE, LocalStorage, lock_file, make_folder, naming_file, not_utf8
from .objects import ObjectStorage
from .opening import storage_at
from .storage_uri import absolute_place, canonical_place, local_path, place_below, shown_place, split_place

__all__ = [
    "PRIVATE_MODE",
    "Access",
    "ChangedMeanwhile",
    "KnownAccess",
    "Lease",
    "LeaseLost",
    "LocalStorage",
    "NewFile",
    "ObjectStorage",
    "Patience",
    "Storage",
    "StorageError",
    "Stored",
    "StoredFile",
    "absolute_place",
    "canonical_place",
    "keep_secrets",
    "known_access",
    "local_path",
    "lock_file",
    "make_folder",
    "naming_file",
    "not_shared",
    "not_utf8",
    "place_below",
    "shown_place",
    "split_place",
    "storage_at",
]
