"""Split the rows of a replay into pieces, by the footers of files. This is done once; the job stores the result."""

import os
from collections.abc import Iterator, Mapping, Sequence

from ...protocol.limits import MIB
from .files import ReplayFiles, RowGroup
from .rows import RowGroupRange, earliest_time, pack_bits

_PIECE_BYTES = 64 * MIB
_MIN_PIECE_BYTES = 4 * MIB
_MAX_PIECES = 2000
"""A broker keeps the state of 10,000 producers of a topic: enough for several jobs."""

Piece = tuple[RowGroupRange, ...]


def split_into_pieces(
    files: ReplayFiles,
    bits: Mapping[str, bytes] | None,
    first_ns: int | None,
    end_ns: int | None,
    *,
    ordered: bool,
) -> list[Piece]:
    """Split files into pieces of similar size: enough for all cores, and within the broker's limit of producers.

    Args:
        bits: The selected rows, as bitmaps by file, see `select_rows`; None: all rows.
        first_ns, end_ns: A time range. Row groups outside of it are skipped.
        ordered: Replay in the order of time, as a single piece.

    Raises:
        ReplayFileError: A file cannot be read.
    """
    groups = list(_row_groups(files, bits, first_ns, end_ns))
    if ordered:
        timed = (_with_time(files, group) for group in groups)
        pieces = [[group for group in timed if group.first_ns is not None]]
    else:
        pieces = _split(groups)
    return [tuple(_with_bits(group, bits) for group in piece) for piece in pieces if piece]


def _row_groups(
    files: ReplayFiles, bits: Mapping[str, bytes] | None, first_ns: int | None, end_ns: int | None
) -> Iterator[RowGroupRange]:
    """Yield the row groups that may have rows to replay, without the bits of their rows."""
    for file in files.files:
        row = 0
        for number, group in enumerate(file.groups):
            wanted = group.rows
            if bits is not None:
                wanted = _count_bits(bits.get(file.stamp.name, b""), row, group.rows)
            if wanted and not _is_outside(group, first_ns, end_ns):
                size = group.body_bytes * wanted // group.rows
                yield RowGroupRange(
                    file.stamp, number, number + 1, row, group.rows, wanted, size, None, group.first_ns
                )
            row += group.rows


def _count_bits(bits: bytes, first: int, count: int) -> int:
    number = int.from_bytes(bits[first // 8 : (first + count + 7) // 8], "little") >> first % 8
    return (number & ((1 << count) - 1)).bit_count()


def _is_outside(group: RowGroup, first_ns: int | None, end_ns: int | None) -> bool:
    if group.first_ns is None or group.last_ns is None:
        return False
    before = first_ns is not None and group.last_ns < first_ns
    return before or (end_ns is not None and group.first_ns >= end_ns)


def _with_time(files: ReplayFiles, group: RowGroupRange) -> RowGroupRange:
    if group.first_ns is not None:
        return group
    return group._replace(first_ns=earliest_time(files.place, files.columns, group))


def _with_bits(group: RowGroupRange, bits: Mapping[str, bytes] | None) -> RowGroupRange:
    if bits is None:
        return group
    return group._replace(selected=pack_bits(bits[group.stamp.name], group.first_row, group.rows))


def _split(groups: Sequence[RowGroupRange]) -> list[list[RowGroupRange]]:
    total = sum(group.body_bytes for group in groups)
    share = total // (4 * (os.cpu_count() or 1))
    target = max(min(max(share, _MIN_PIECE_BYTES), _PIECE_BYTES), total // _MAX_PIECES)
    pieces: list[list[RowGroupRange]] = []
    size = target
    for group in groups:
        if size >= target:
            pieces.append([])
            size = 0
        size += group.body_bytes
        piece = pieces[-1]
        last = piece[-1] if piece else None
        if last is not None and last.stamp == group.stamp and last.end_group == group.first_group:
            piece[-1] = last.join(group)
        else:
            piece.append(group)
    return pieces
