"""What the members of a cluster have on disk and in their logs, when nothing changes."""

import base64
import hashlib
import json
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx

from broker.support import PATIENCE_S
from cluster.ledger import LogEntry
from trio_nsq.replication.operations import is_shared

_PAGE = 20_000


async def read_log(address: str, topic: str, page: int = _PAGE) -> AsyncIterator[list[LogEntry]]:
    """Yield the whole log of a topic, some entries at a time, by the HTTP API of a member."""
    start: int | str = "earliest"
    async with httpx.AsyncClient(base_url=f"http://{address}", timeout=PATIENCE_S) as client:
        while True:
            query: dict[str, str | int] = {"topic": topic, "from": start, "max_messages": page}
            answer = await client.get("/topic/read", params=query)
            assert answer.status_code == 200, answer.text
            entries = [_entry(line) for line in answer.content.splitlines()]
            if not entries:
                return
            yield entries
            start = entries[-1].sequence + 1


def _entry(line: bytes) -> LogEntry:
    fields = json.loads(line)
    assert "gap" not in fields, fields
    body = base64.b64decode(fields["body_base64"]) if "body_base64" in fields else fields["body"].encode()
    return LogEntry(fields["sequence"], fields["id"], fields["timestamp_ns"], body)


def shared_files(folder: Path) -> Iterator[bytes]:
    """Yield the relative paths of all files and folders that members share; those of folders end with a slash."""
    root = os.fsencode(folder)
    for path, folders, files in os.walk(root):
        below = b"" if path == root else os.path.relpath(path, root) + b"/"
        folders[:] = [name for name in folders if is_shared(below + name)]
        yield from (below + name + b"/" for name in folders)
        yield from (below + name for name in files if is_shared(below + name))


def content_of(folder: Path) -> dict[bytes, str]:
    """Return the size and the digest of each file that members share."""
    found: dict[bytes, str] = {}
    for path in shared_files(folder):
        if path.endswith(b"/"):
            found[path] = "folder"
            continue
        try:
            with open(folder / os.fsdecode(path), "rb") as file:
                digest = hashlib.file_digest(file, "blake2b").hexdigest()[:16]
                found[path] = f"{os.fstat(file.fileno()).st_size} bytes, {digest}"
        except FileNotFoundError:
            pass  # removed meanwhile
    return found


def differences(one: Path, other: Path) -> list[str]:
    """Return what is not the same in two data folders."""
    ours, theirs = content_of(one), content_of(other)
    return [
        f"{os.fsdecode(path)}: {ours.get(path, 'missing')} in {one.name}, {theirs.get(path, 'missing')} in {other.name}"
        for path in sorted(ours.keys() | theirs.keys())
        if ours.get(path) != theirs.get(path)
    ]
