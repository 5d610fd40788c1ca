"""Reading a carried-forward segment, with or without a running broker, as `segments` reads a segment."""

from collections.abc import Callable, Iterator
from errno import EIO
from pathlib import Path

from ..disk.carried_forward import FILE_NAME, read_index
from ..errors import LogReadError
from ..files import NO_FILE, Files
from ..records import HEADER_BYTES, RecordHeader, decode_header
from .findings import NOT_SERVED, Finding, Kind
from .segments import ScannedRecord, find_identity


def scan_carried_forward(
    folder: Path, files: Files, wanted: Callable[[RecordHeader], bool] = lambda _: True
) -> Iterator[ScannedRecord | Finding]:
    """Yield every record of a log's carried-forward segment, in order, and findings about damage. Most logs have none.

    Some messages may also be in a segment. List the segments first, and read only messages before them here: a message
    is carried forward before its segment is deleted, so no message is missed.

    Args:
        wanted: Whether to return the record with this header.

    Raises:
        LogReadError: The operating system failed to read. A path that is not a file is a finding.
    """
    path = folder / FILE_NAME
    try:
        fd = files.open_read_only(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as exc:
        if exc.errno not in NO_FILE:
            raise LogReadError(path, exc) from exc
        yield Finding(Kind.DAMAGE, path, 0, 0, f"{exc.strerror}; {NOT_SERVED}", None, None)
        return
    try:
        # A broker may replace the file meanwhile; the open one does not change.
        yield from _scan(path, files, fd, wanted)
    except OSError as exc:
        if exc.errno != EIO:
            raise LogReadError(path, exc) from exc
        yield Finding(Kind.DAMAGE, path, 0, 0, "the disk cannot read this", None, None)
    finally:
        files.close(fd)


def _scan(
    path: Path, files: Files, fd: int, wanted: Callable[[RecordHeader], bool]
) -> Iterator[ScannedRecord | Finding]:
    identity, _ = find_identity(files, path.parent)
    incarnation = identity.incarnation if identity is not None else None
    index = read_index(files, fd, incarnation)
    if index is None or (None not in (incarnation, index.incarnation) and index.incarnation != incarnation):
        what = "damaged: the messages carried forward to it are lost"
        if index is not None:
            what = "it belongs to another topic; the broker renames the file at its next start"
        yield Finding(Kind.DAMAGE, path, 0, files.size(fd), what, None, None)
        return
    if index.derived:
        what = "the file's beginning is damaged; its records are still readable"
        yield Finding(Kind.DAMAGE, path, 0, min(index.offsets), what)
    ends = [*index.offsets[1:], index.size]
    for sequence, offset, end in zip(index.sequences, index.offsets, ends, strict=True):
        data = files.read_fully(fd, end - offset, offset)
        header = decode_header(data, 0, index.seed)
        payload = memoryview(data)[HEADER_BYTES : header.record_bytes if header is not None else None]
        if header is not None and header.matches(payload):
            if wanted(header):
                yield ScannedRecord(path, offset, header, payload)
            continue
        what = f"the record of message {sequence}, which was carried forward, is damaged"
        yield Finding(Kind.DAMAGE, path, offset, end, what, sequence, header.count if header else 1)
