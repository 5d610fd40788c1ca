"""Tests for messages of a log as JSON lines."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from broker.letters import ORIGIN
from trio_nsq.broker.api.json_lines import gap_line, message_line, message_lines
from trio_nsq.log import RecordBatch
from trio_nsq.log.gaps import Gap
from trio_nsq.log.record_metadata import (
    metadata_for_channel,
    metadata_for_dead_letters,
)
from trio_nsq.protocol import pack_messages


def lines_of(batch: RecordBatch, indexes: range) -> list[dict[str, Any]]:
    lines = list(message_lines("t#ephemeral", batch, indexes))
    assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in lines)
    return [json.loads(line) for line in lines]


@given(
    st.lists(st.binary(min_size=1, max_size=20) | st.text(min_size=1).map(str.encode), min_size=1), st.data()
)
def test_one_line_per_message(bodies: list[bytes], data: st.DataObject) -> None:
    batch = RecordBatch(100, 2**64 - 1000, 7, 0, pack_messages(bodies))
    start = data.draw(st.integers(0, len(bodies)))
    indexes = range(start, data.draw(st.integers(start, len(bodies))))
    lines = lines_of(batch, indexes)
    assert len(lines) == len(indexes)
    for index, line in zip(indexes, lines, strict=True):
        place = (line["topic"], line["id"], line["timestamp_ns"], line["attempts"], line["sequence"])
        assert place == ("t#ephemeral", f"{2**64 - 1000 + index:016x}", 7, 0, 100 + index)
        assert line["due_ns"] is None
        # Equal to the line of a single message.
        alone = message_line("t#ephemeral", line["id"], 7, 0, line["sequence"], None, bodies[index])
        assert json.loads(alone) == line


def test_message_for_one_channel_has_its_channel() -> None:
    batch = RecordBatch(0, 1, 7, 9, pack_messages([b"a"]), metadata_for_channel("c"))
    (line,) = lines_of(batch, range(1))
    assert list(line.items()) == [
        ("topic", "t#ephemeral"),
        ("id", f"{1:016x}"),
        ("timestamp_ns", 7),
        ("attempts", 0),
        ("sequence", 0),
        ("due_ns", 9),
        ("channel", "c"),
        ("body", "a"),
    ]


def test_other_metadata_is_not_shown() -> None:
    metadata = metadata_for_dead_letters([ORIGIN])
    (line,) = lines_of(RecordBatch(0, 1, 7, 0, pack_messages([b"a"]), metadata), range(1))
    assert list(line) == ["topic", "id", "timestamp_ns", "attempts", "sequence", "due_ns", "body"]


def test_gap() -> None:
    assert json.loads(gap_line("t", Gap(3, 5, "damaged"), state="fresh")) == {
        "topic": "t",
        "gap": "damaged",
        "first_sequence": 3,
        "next_sequence": 5,
        "state": "fresh",
    }
