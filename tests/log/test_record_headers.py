"""Tests for the headers of messages in record metadata."""

import json

import pytest

from trio_nsq.api.answers import Origin
from trio_nsq.log.record_metadata import (
    batch_number,
    has_headers,
    headers_bytes,
    headers_in,
    is_about_messages,
    is_of_dead_letters,
    metadata_for_batch,
    metadata_for_channel,
    metadata_for_dead_letters,
    metadata_for_moved,
    metadata_of_part,
    metadata_with_headers,
    only_channel,
    origins,
)
from trio_nsq.log.records import MAX_RECORD_MESSAGES, RecordBatch, split_batch
from trio_nsq.protocol import pack_messages

ORIGINS: list[Origin] = [
    {
        "topic": "t",
        "channel": "c",
        "id": f"{n:016x}",
        "sequence": n,
        "attempts": 5,
        "timestamp_ns": 1,
        "reason": "requeued",
    }
    for n in range(3)
]
TEXTS = ['a:1\nb:"],"channel":"x"\n', "", "ü:\\\n"]


def kinds() -> dict[str, bytes]:
    return {
        "alone": b"",
        "channel": metadata_for_channel("c"),
        "dead letters": metadata_for_dead_letters(ORIGINS),
        "numbered": metadata_for_batch("p", 7),
        "moved": metadata_for_moved("m", 7, "c", None),
    }


@pytest.mark.parametrize("kind", kinds())
def test_headers_beside_other_metadata(kind: str) -> None:
    before = kinds()[kind]
    metadata = metadata_with_headers(before, TEXTS)
    assert headers_in(metadata, 3) == TEXTS
    assert has_headers(metadata)
    assert not has_headers(before)
    assert headers_in(before, 3) == ()
    assert is_about_messages(metadata)
    assert only_channel(metadata) == only_channel(before)
    assert origins(metadata) == origins(before)
    assert batch_number(metadata) == batch_number(before)
    assert is_of_dead_letters(metadata) == is_of_dead_letters(before) == (kind == "dead letters")


@pytest.mark.parametrize("kind", kinds())
def test_part_of_messages(kind: str) -> None:
    before = kinds()[kind]
    part = metadata_of_part(metadata_with_headers(before, TEXTS), 1, 3, 3)
    assert headers_in(part, 2) == TEXTS[1:]
    assert origins(part) == origins(before)[1:]
    assert only_channel(part) == only_channel(before)
    assert batch_number(part) == batch_number(before)
    nothing_left = metadata_of_part(metadata_with_headers(before, TEXTS), 1, 2, 3)
    assert not has_headers(nothing_left)


def test_no_headers_are_no_metadata() -> None:
    assert metadata_with_headers(b"", ["", ""]) == b""
    assert metadata_with_headers(metadata_for_channel("c"), [""]) == metadata_for_channel("c")


def test_equal_headers_are_stored_once() -> None:
    metadata = metadata_with_headers(b"", ["a:1\n"] * 1000)
    assert json.loads(metadata) == {"headers": ["a:1\n"]}
    assert headers_in(metadata, 1000) == ["a:1\n"] * 1000
    assert metadata_of_part(metadata, 5, 7, 1000) == metadata


def test_equal_headers_of_a_record_are_decoded_once() -> None:
    texts = ["", "a:1\n", "a:1\n", "b:2\nc:3\n"]
    record = RecordBatch(0, 1, 2, 0, pack_messages([b"x"] * 4), metadata_with_headers(b"", texts))
    assert record.headers() == [{}, {"a": "1"}, {"a": "1"}, {"b": "2", "c": "3"}]
    same = RecordBatch(
        0, 1, 2, 0, pack_messages([b"x"] * 1000), metadata_with_headers(b"", texts[1:2] * 1000)
    )
    headers = same.headers()
    assert headers == [{"a": "1"}] * 1000
    assert len({id(each) for each in headers}) == 1


def test_metadata_of_others_is_not_read() -> None:
    """Spools put binary metadata in records."""
    foreign = b'\0"headers":[' + b"x"
    assert headers_in(foreign, 1) == ()
    assert metadata_of_part(foreign, 0, 1, 2) == foreign


def test_split_batch_gives_each_part_its_headers() -> None:
    count = 2 * MAX_RECORD_MESSAGES + 1
    texts = [f"n:{n}\n" for n in range(count)]
    metadata = metadata_with_headers(metadata_for_batch("p", 1), texts)
    parts = split_batch(RecordBatch(7, 100, 5, 0, pack_messages([b"x"] * count), metadata))
    assert [text for part in parts for text in headers_in(part.metadata, part.count)] == texts


@pytest.mark.parametrize("kind", kinds())
@pytest.mark.parametrize("texts", [TEXTS, ['a:","\n'] * 3, ["", "", "a:1\n"], ["a:" + "x" * 5000 + "\n"] * 3])
def test_bytes_of_headers_count_a_text_for_each_message(kind: str, texts: list[str]) -> None:
    metadata = metadata_with_headers(kinds()[kind], texts)
    least = len("".join(texts).encode())
    assert least <= headers_bytes(metadata, 3) <= least + 100


def test_bytes_of_no_headers() -> None:
    assert headers_bytes(b"", 3) == headers_bytes(metadata_for_channel("headers"), 3) == 0
