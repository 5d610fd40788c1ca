"""Tests for messages as JSON, the form of all tools."""

import base64
import json

from hypothesis import given
from hypothesis import strategies as st

from trio_nsq.protocol.message_json import json_line, json_lines, message_record, rfc3339

MARK = "\N{RIGHT-TO-LEFT OVERRIDE}\x9b\N{LINE SEPARATOR}\x7f"


@given(st.binary(), st.integers(0, 2**63 - 1), st.none() | st.integers(0, 2**40), st.integers(0, 2**63 - 1))
def test_record_has_the_whole_message(
    body: bytes, timestamp_ns: int, sequence: int | None, due_ns: int
) -> None:
    record = message_record("t", "00ab", timestamp_ns, 3, body, sequence=sequence, due_ns=due_ns)
    line = json_line(record)
    assert line.endswith("\n")
    found = json.loads(line)
    text, encoded = found.pop("body", None), found.pop("body_base64", None)
    assert body == (base64.b64decode(encoded) if text is None else text.encode())
    of_log = {"sequence": sequence, "due_ns": due_ns or None, "due": rfc3339(due_ns) if due_ns else None}
    times = {"timestamp_ns": timestamp_ns, "timestamp": rfc3339(timestamp_ns)}
    assert found == {"topic": "t", "id": "00ab", "attempts": 3} | times | ({} if sequence is None else of_log)


def test_lines_do_not_act_on_terminals() -> None:
    lines = json_lines([{"body": f"a{MARK}b"}, {"body": "ü\n"}])
    assert lines == '{"body": "a\\u202e\\u009b\\u2028\\u007fb"}\n{"body": "ü\\n"}\n'
    assert json.loads(lines.splitlines()[0]) == {"body": f"a{MARK}b"}
