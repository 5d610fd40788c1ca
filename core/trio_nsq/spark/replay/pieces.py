"""Cutting what is to be replayed into pieces, by what the footers of the files tell. Done once, and written down."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .files import FileStamp, ReplayFile, ReplayFiles, RowGroup
from .rows import RowGroupRange, earliest_time, pack_bits
from .task import MIB

_PIECE_BYTES = 64 * MIB
_SMALLEST_PIECE_BYTES = 4 * MIB
_MOST_PIECES = 2000
"""A broker remembers 10,000 producers of a topic: there is room for several jobs."""

Piece = tuple[RowGroupRange, ...]


def split_into_pieces(
    source: ReplayFiles,
    bits: Mapping[str, bytes] | None,
    first_ns: int | None,
    end_ns: int | None,
    *,
    ordered: bool,
) -> list[Piece]:
    """Pieces of about the same size, enough for all to have work, and not more than a broker can remember.

    Args:
        source: The files.
        bits: Which rows: bitmaps by file, see `select_rows`; None: all.
        first_ns, end_ns: Of times from one on and before another; what is certain to lie outside is left out.
        ordered: Whether the order is that of time: then it is one piece.

    Raises:
        ReplayFileError: A file cannot be read.
    """
    parts = list(_parts(source, bits, first_ns, end_ns))
    if ordered:
        timed = [_with_time(source, part) for part in parts]
        pieces = [[part for part in timed if part.first_ns is not None]]
    else:
        pieces = _cut(parts)
    return [tuple(_segment(part, bits) for part in piece) for piece in pieces if piece]


class _Part(NamedTuple):
    """Row groups, while pieces are cut."""

    file: ReplayFile
    first_group: int
    end_group: int
    first_row: int
    rows: int
    wanted: int
    body_bytes: int
    first_ns: int | None

    def join(self, other: "_Part") -> "_Part | None":
        """Both as one; None if the other does not lie right behind."""
        if self.file is not other.file or self.end_group != other.first_group:
            return None
        return self._replace(
            end_group=other.end_group,
            rows=self.rows + other.rows,
            wanted=self.wanted + other.wanted,
            body_bytes=self.body_bytes + other.body_bytes,
        )


def _parts(
    source: ReplayFiles, bits: Mapping[str, bytes] | None, first_ns: int | None, end_ns: int | None
) -> Iterator[_Part]:
    """The row groups in which there may be something."""
    for file in source.files:
        row = 0
        for number, group in enumerate(file.groups):
            wanted = group.rows
            if bits is not None:
                wanted = _count_bits(bits.get(file.stamp.name, b""), row, group.rows)
            if wanted and not _is_outside(group, first_ns, end_ns):
                size = group.body_bytes * wanted // group.rows
                yield _Part(file, number, number + 1, row, group.rows, wanted, size, group.first_ns)
            row += group.rows


def _count_bits(bits: bytes, first: int, count: int) -> int:
    number = int.from_bytes(bits[first // 8 : (first + count + 7) // 8], "little") >> first % 8
    return (number & ((1 << count) - 1)).bit_count()


def _is_outside(group: RowGroup, first_ns: int | None, end_ns: int | None) -> bool:
    if group.first_ns is None or group.last_ns is None:
        return False
    before = first_ns is not None and group.last_ns < first_ns
    return before or (end_ns is not None and group.first_ns >= end_ns)


def _with_time(source: ReplayFiles, part: _Part) -> _Part:
    if part.first_ns is not None:
        return part
    return part._replace(first_ns=earliest_time(source.place, source.columns, _segment(part, None)))


def _cut(parts: Sequence[_Part]) -> list[list[_Part]]:
    """Pieces of about the same size, enough for all to have work, and not more than a broker can remember."""
    total = sum(part.body_bytes for part in parts)
    share = total // (4 * (os.cpu_count() or 1))
    target = max(min(max(share, _SMALLEST_PIECE_BYTES), _PIECE_BYTES), total // _MOST_PIECES)
    pieces: list[list[_Part]] = []
    size = target
    for part in parts:
        if size >= target:
            pieces.append([])
            size = 0
        size += part.body_bytes
        piece = pieces[-1]
        joined = piece[-1].join(part) if piece else None
        if joined is None:
            piece.append(part)
        else:
            piece[-1] = joined
    return pieces


def _segment(part: _Part, bits: Mapping[str, bytes] | None) -> RowGroupRange:
    packed = None
    if bits is not None:
        packed = pack_bits(bits[part.file.stamp.name], part.first_row, part.rows)
    return RowGroupRange(
        part.file.stamp,
        part.first_group,
        part.end_group,
        part.first_row,
        part.rows,
        part.wanted,
        part.body_bytes,
        packed,
        part.first_ns,
    )


def row_groups_to_json(row_group_range: RowGroupRange, packed_end: int) -> list[Any]:
    """A row_group_range in `job.json`; the bits are elsewhere, and end there."""
    place = (
        None if row_group_range.selected is None else [packed_end - len(row_group_range.selected), packed_end]
    )
    return [[*row_group_range.stamp], *row_group_range[1:7], place, row_group_range.first_ns]


def row_groups_from_json(found: Sequence[Any], packed: bytes) -> RowGroupRange:
    """From there, with the bits of all of them. Raises ValueError, TypeError."""
    stamp, first_group, end_group, first_row, rows, wanted, body_bytes, place, first_ns = found
    bits = None if place is None else packed[slice(*place)]
    return RowGroupRange(
        FileStamp(*stamp), first_group, end_group, first_row, rows, wanted, body_bytes, bits, first_ns
    )
