"""Avro object container files as bodies: a header with the schema, then blocks of values.

file:    "Obj" 0x01, metadata (a map of bytes), 16 bytes of a marker, blocks
block:   number of values, number of bytes (both zigzag varints), the values, the marker
"""

import time
import zlib
from collections.abc import Iterator
from typing import Any

from .avro import AvroSchema, read_prefix
from .compression import Compression, decompress, snap_block
from .errors import BodyError, BodySchemaError

MAGIC = b"Obj\x01"
_HEADER = AvroSchema(
    '{"type": "record", "name": "Header", "fields": [{"name": "meta", "type": {"type": "map", "values": "bytes"}}]}'
)
_BLOCK = AvroSchema(
    '{"type": "record", "name": "Block", "fields": '
    '[{"name": "count", "type": "long"}, {"name": "data", "type": "bytes"}]}'
)
_MARKER_BYTES = 16
_CRC_BYTES = 4


def decode_container(body: bytes, most_bytes: int, max_values: int, limit_s: float) -> Iterator[Any]:
    """Yield the values of a file.

    Args:
        most_bytes: How many bytes of a block to decompress.
        max_values: How many values that take no bytes each value may have.
        limit_s: The processor time of this thread after which no further block or value is begun.

    Raises:
        BodyError: The file is damaged, its schema cannot be used, or the time is over.
    """
    until_s = time.thread_time() + limit_s
    header, at = read_prefix(body, len(MAGIC), _HEADER, max_values=max_values)
    meta, marker = header["meta"], body[at : at + _MARKER_BYTES]
    at += _MARKER_BYTES
    try:
        schema = AvroSchema(meta.get("avro.schema", b"").decode())
    except (BodySchemaError, UnicodeDecodeError) as exc:
        raise BodyError(f"the schema in the file cannot be used: {exc}") from exc
    while at < len(body):
        _check_time(until_s)
        block, at = read_prefix(body, at, _BLOCK, max_values=max_values)
        if body[at : at + _MARKER_BYTES] != marker:
            raise BodyError("a block of the file does not end with its marker")
        at += _MARKER_BYTES
        data = _block(block["data"], meta.get("avro.codec", b"null"), most_bytes)
        begin = 0
        for _ in range(block["count"]):
            _check_time(until_s)
            value, begin = read_prefix(data, begin, schema, max_values=max_values)
            yield value


def _check_time(until_s: float) -> None:
    if time.thread_time() > until_s:
        raise BodyError("the file takes too long to decode")


def _block(data: bytes, codec: bytes, most_bytes: int) -> bytes:
    try:
        match codec:
            case b"null":
                return data
            case b"deflate":
                found = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, most_bytes + 1)
            case b"snappy":
                found = snap_block(data[:-_CRC_BYTES], most_bytes)
            case b"zstandard":
                found = decompress(data, Compression.ZSTD, most_bytes + 1)[0]
            case _:
                raise BodyError(
                    f"the file has the codec {codec.decode('ascii', 'replace')}, which is not supported"
                )
    except (zlib.error, ValueError) as exc:
        raise BodyError(f"a block of the file is damaged: {exc}") from exc
    if len(found) > most_bytes:
        raise BodyError(f"a block of the file has more than {most_bytes} bytes")
    return found
