"""The content of an archive's objects: compressed frames, as a leader sends them to a follower.

     0                 8         12     16
    +-----------------+---------+------+----------------+
    | 89 NSQARC 0a    | version | crc  | snappy(frames) |
    +-----------------+---------+------+----------------+

Integers are big-endian; the crc covers the name of the run that has written the object, and the bytes after the head:
objects of other runs, such as those of an archive that was copied over this one, are as wrong as damaged ones.
`trio_nsq.replication.link` describes the frames.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from struct import Struct
from typing import Final

from ..platform.checksum import crc32
from ..protocol.errors import NSQError
from ..replication.catch_up import Piece
from ..replication.link import FrameKind, decode_piece
from ..storage import LocalStorage, Storage
from .manifest import ArchiveDamaged, read_object

Progress = Callable[[int], None]
"""Called with the number of bytes that were read since the last call."""

_READ_AHEAD: Final = 6
"""So many objects are requested at once. Most have at most 4 MiB, and none has much more than 8 MiB."""
_MAGIC: Final = b"\x89NSQARC\n"
_VERSION: Final = 1
_HEAD = Struct(">8sII")
_FRAME = Struct(">IB")


def encode_content(frames: Sequence[bytes | memoryview], run: str) -> bytes:
    """Return the content of an object with these frames. `run`: see `Checkpoint`."""
    import snappy  # here, because Spark's workers may not have it, and read only

    compressed: bytes = snappy.compress(b"".join(frames))
    return _HEAD.pack(_MAGIC, _VERSION, _checksum(compressed, run)) + compressed


def read_contents(storage: Storage, names: Sequence[str]) -> Iterator[bytes]:
    """Yield the contents of objects, in order. Those of a bucket are read ahead: a request takes longer to start than
    most objects take to transfer.

    Raises, when it is the turn of an object:
        ArchiveDamaged: It is missing.
        StorageError, OSError: It cannot be read.
    """
    if isinstance(storage, LocalStorage) or len(names) < 2:
        yield from (read_object(storage, name) for name in names)
        return
    pool = ThreadPoolExecutor(_READ_AHEAD, "trio-nsq-archive")
    try:
        ahead = deque(pool.submit(read_object, storage, name) for name in names[:_READ_AHEAD])
        for name in names[_READ_AHEAD:]:
            content = ahead.popleft().result()
            ahead.append(pool.submit(read_object, storage, name))
            yield content
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def read_pieces(storage: Storage, name: str, run: str, on_read: Progress) -> Iterator[Piece]:
    """Yield the pieces in an object of a run; their data are views.

    Raises:
        ArchiveDamaged: It is missing, or cannot be understood.
        StorageError, OSError: It cannot be read.
    """
    content = read_object(storage, name)
    on_read(len(content))
    yield from decode_pieces(storage, name, run, content)


def decode_pieces(storage: Storage, name: str, run: str, content: bytes) -> Iterator[Piece]:
    """As `read_pieces`, of an object with this content."""
    try:
        frames = memoryview(_decompressed(content, run))
        at = 0
        while at < len(frames):
            size, code = _FRAME.unpack_from(frames, at)
            begin, at = at + _FRAME.size, at + _FRAME.size + size - 1
            if size < 1 or at > len(frames):
                raise ValueError("a frame is cut off")
            yield decode_piece(FrameKind(code), frames[begin:at])
    except (NSQError, ValueError) as exc:
        raise ArchiveDamaged(f"{storage.url_of(name)} is damaged: {exc}") from exc


def _checksum(compressed: bytes | memoryview, run: str) -> int:
    return crc32(compressed, crc32(run.encode()))


def _decompressed(content: bytes, run: str) -> bytes:
    if len(content) < _HEAD.size:
        raise ValueError("it is cut off")
    magic, version, crc = _HEAD.unpack_from(content)
    if magic != _MAGIC:
        raise ValueError("it is no object of an archive")
    if version != _VERSION:
        raise ValueError(f"it has version {version}: a newer trio-nsq has written it")
    compressed = memoryview(content)[_HEAD.size :]
    if _checksum(compressed, run) != crc:
        raise ValueError("its checksum does not match its content, or another run of a broker has written it")
    return _uncompress(bytes(compressed))


def _uncompress(compressed: bytes) -> bytes:
    try:
        import snappy
    except ImportError:
        import pyarrow as pa

        size = shift = 0
        for byte in compressed[:5]:  # snappy begins with the size, seven bits a byte, the lowest first
            size |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        try:
            return bytes(pa.Codec("snappy").decompress(compressed, size, asbytes=True))
        except OSError as exc:  # pyarrow's error for wrong input
            raise ValueError(str(exc)) from exc
    found: bytes = snappy.decompress(compressed)
    return found
