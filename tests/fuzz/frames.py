"""Fuzz target for brokers' data: `FrameReader`."""

from random import Random
from struct import pack

from fuzz.engine import ways
from trio_nsq.protocol import FrameError
from trio_nsq.protocol.frames import ErrorFrame, FrameReader, MessageRun, ResponseFrame
from trio_nsq.protocol.headers import decode_headers, encode_headers

MAX_FRAME_BYTES = 200
DATA = (b"OK", b"CLOSE_WAIT", b"_heartbeat_", b'{"max_rdy_count":2500}', b"", b"x" * 196, b"x" * 197)
ERRORS = (
    b"E_BAD_PROTOCOL",
    b"E_INVALID invalid command \xff",
    b"E_FIN_FAILED FIN 0123456789abcdef failed",
    b"",
    b" ",
)


TEXTS = (b"", b"a:1\n", b"a:1\nb:\xc3\xbc\n", b"a:1\na:2\n", b"A:1\n", b"a:1", b"a:\xff\n")


def frame(kind: int, data: bytes) -> bytes:
    return pack(">ii", 4 + len(data), kind) + data


class Frames:
    """The reader of frames."""

    name = "frames"
    memory_per_byte = 10  # an empty message of 34 bytes becomes four objects in four lists
    memory_bytes = 8_000

    def valid(self, rng: Random) -> list[bytes]:
        return [self._frame(rng) for _ in range(rng.randrange(1, 12))]

    def _frame(self, rng: Random) -> bytes:
        match rng.randrange(4):
            case 0:
                return frame(0, rng.choice(DATA))
            case 1:
                return frame(1, rng.choice(ERRORS))
            case _:
                head = pack(
                    ">qH16s",
                    rng.choice((0, 1, -1, 2**63 - 1)),
                    rng.choice((0, 1, 65535)),
                    b"0123456789abcdef",
                )
                body = rng.choice((b"", b"x", b"y" * 170, b"y" * 171, rng.randbytes(20)))
                if rng.random() < 0.5:
                    return frame(2, head + body)
                text = rng.choice(TEXTS)
                return frame(3, head + pack(">H", len(text)) + text + body)

    def check(self, data: bytes, rng: Random) -> None:
        whole = read([data])
        assert len(whole) <= len(data) // 8 + 1, "frames out of nothing"
        for pieces in ways(data, rng):
            again = read(pieces)
            assert again == whole, f"in pieces of {[*map(len, pieces)][:9]}: {again}; whole: {whole}"

    def read(self, data: bytes) -> None:
        reader = FrameReader(MAX_FRAME_BYTES)
        reader.receive_data(data)
        try:
            while reader.next_event() is not None:
                pass
        except FrameError:
            pass


def read(pieces: list[bytes]) -> list[object]:
    """Read as a client does. Return the events, message by message, and the error if there is one."""
    reader = FrameReader(MAX_FRAME_BYTES)
    found: list[object] = []
    try:
        for piece in pieces:
            reader.receive_data(piece)
            while (event := reader.next_event()) is not None:
                if isinstance(event, MessageRun):
                    assert len(event) > 0
                    assert all(len(message_id) == 16 for message_id in event.ids)
                    assert all(30 + len(body) <= MAX_FRAME_BYTES for body in event.bodies)
                    headers = event.headers or [""] * len(event)
                    for text in headers:
                        assert encode_headers(decode_headers(text)) == text
                    found += zip(
                        event.ids, event.bodies, event.timestamps_ns, event.attempts, headers, strict=True
                    )
                else:
                    assert isinstance(event, ResponseFrame | ErrorFrame)
                    found.append(event)
    except FrameError as error:
        found.append(str(error))
    return found
