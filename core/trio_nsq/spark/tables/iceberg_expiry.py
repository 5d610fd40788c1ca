"""Expire old snapshots of an Iceberg table, and remove the files that only they need; pyiceberg removes none."""

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from pyiceberg.manifest import ManifestEntryStatus
from pyiceberg.table import Table


def expire(table: Table, before: datetime) -> None:
    """Expire the snapshots before a time, except the current one.

    Files are removed only if the history has one branch, no tags and no rollbacks, and the table's property
    `gc.enabled` is not false: otherwise an older snapshot may still be needed.
    """
    metadata = table.metadata
    limit_ms = int(before.timestamp() * 1000)
    current = metadata.current_snapshot_id
    old = [
        each for each in metadata.snapshots if each.timestamp_ms < limit_ms and each.snapshot_id != current
    ]
    if not old or current is None:
        return
    line = history(table)
    kept = [each for each in line if each not in old]
    is_line = set(metadata.refs) == {"main"} and len(line) == len(metadata.snapshots)
    unused = (
        _unused_files(table, old, kept) if is_line and table.properties.get("gc.enabled") != "false" else []
    )
    table.maintenance.expire_snapshots().by_ids([each.snapshot_id for each in old]).commit()
    for path in unused:
        table.io.delete(path)


def history(table: Table) -> list[Any]:
    """Return the current snapshot and its ancestors, newest first."""
    found = []
    each = table.current_snapshot()
    while each is not None:
        found.append(each)
        parent = each.parent_snapshot_id
        each = None if parent is None else table.snapshot_by_id(parent)
    return found


def _unused_files(table: Table, old: Iterable[Any], kept: list[Any]) -> list[str]:
    """Return the files that no kept snapshot has; `kept` is newest first.

    A snapshot has the manifests of its parent, or others in their place. So what the oldest kept one lacks, the others
    lack too, unless another program has added a file again.
    """
    oldest = kept[-1]
    needed = {each.manifest_path for each in oldest.manifests(table.io)}
    found = {each.manifest_list for each in old if each.manifest_list}
    deleted: set[str] = set()
    for snapshot in (*old, oldest):
        for manifest in snapshot.manifests(table.io):
            if manifest.manifest_path not in needed:
                found.add(manifest.manifest_path)
            if manifest.added_snapshot_id != snapshot.snapshot_id or not manifest.deleted_files_count:
                continue
            for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=False):
                if entry.status == ManifestEntryStatus.DELETED:
                    deleted.add(entry.data_file.file_path)
    if deleted:
        for manifest in kept[0].manifests(table.io):
            deleted -= {entry.data_file.file_path for entry in manifest.fetch_manifest_entry(table.io)}
    return sorted(found | deleted)
