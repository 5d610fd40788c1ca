"""Tests for the reader of answers to `/topic/read`, without a broker."""

import pytest

from log.support import batch
from trio_nsq.api.request import Request, run
from trio_nsq.client.reading.log_stream import Found, LogStream
from trio_nsq.log import MemoryLog, RecordBatch
from trio_nsq.log.gaps import Gap, Span
from trio_nsq.log.raw import RawStreamError, encode_raw

HEADERS = {"x-nsq-first-sequence": "0", "x-nsq-start-sequence": "0", "x-nsq-end-sequence": "9"}


def raw(*lacks: int) -> bytes:
    """Return the stream of a log with messages 0 to 8 in records of three, without those that begin here."""
    log = MemoryLog()
    log.append([batch(at, b"a", b"b", b"c") for at in (0, 3, 6)], sync=False)
    return b"".join(encode_raw([each for each in log.read_raw(0) if each.base_sequence not in lacks], b""))


def read(stream: LogStream, data: bytes, piece_bytes: int, kept_from: int = 0) -> list[str]:
    """Return the sequences and gaps that a stream has in an answer."""
    asked: list[Request[object]] = []

    def ask(request: Request[object]) -> dict[str, int]:
        asked.append(request)
        return {"first_sequence": kept_from}

    found: list[Found] = []
    for at in range(0, len(data), piece_bytes):
        found += run(stream.receive(data[at : at + piece_bytes]), ask)
    stream.finish()
    found += run(stream.missing(), ask)
    assert bool(asked) == any(isinstance(each, Gap) for each in found)
    return [
        f"{each.base_sequence}-{each.next_sequence}"
        if isinstance(each, RecordBatch)
        else f"{each.first_sequence}-{each.next_sequence} {each.reason}"
        for each in found
    ]


@pytest.mark.parametrize("piece_bytes", [1, 50, 10_000])
@pytest.mark.parametrize(
    ("span", "lacks", "kept_from", "expected"),
    [
        (None, (), 0, ["0-3", "3-6", "6-9"]),
        (Span(4, 7), (), 0, ["4-6", "6-7"]),
        (Span(0, 9), (3,), 0, ["0-3", "3-6 damaged", "6-9"]),
        (Span(0, 9), (0,), 3, ["0-3 discarded", "3-6", "6-9"]),
        (Span(1, 9), (0, 3), 4, ["1-4 discarded", "4-6 damaged", "6-9"]),
        (Span(0, 9), (6,), 0, ["0-3", "3-6", "6-9 damaged"]),
        (Span(2, 9), (0, 3, 6), 9, ["2-9 discarded"]),
    ],
)
def test_records_and_gaps_of_a_range(
    span: Span | None, lacks: tuple[int, ...], kept_from: int, expected: list[str], piece_bytes: int
) -> None:
    stream = LogStream("t", HEADERS.get, span)
    assert read(stream, raw(*lacks), piece_bytes, kept_from) == expected
    assert stream.position == stream.end
    assert stream.kept_from == kept_from


def test_records_that_are_sent_again_are_left_out() -> None:
    assert read(LogStream("t", HEADERS.get), raw() + raw(), 10_000) == ["0-3", "3-6", "6-9"]


def test_end_within_a_record() -> None:
    stream = LogStream("t", HEADERS.get)
    with pytest.raises(RawStreamError):
        read(stream, raw()[:-1], 10_000)


@pytest.mark.parametrize("lacks", ["x-nsq-first-sequence", "x-nsq-start-sequence", "x-nsq-end-sequence"])
def test_headers_of_no_broker(lacks: str) -> None:
    headers = {name: value for name, value in HEADERS.items() if name != lacks}
    with pytest.raises(ValueError):
        LogStream("t", headers.get, Span(0, 9))


def test_answer_without_end() -> None:
    headers = {name: value for name, value in HEADERS.items() if "end" not in name}
    stream = LogStream("t", headers.get)
    assert stream.ends is None
    assert read(stream, raw(), 10_000) == ["0-3", "3-6", "6-9"]
