"""Several messages in one request."""

import json
from base64 import b64decode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_nsq.connectors.to_http.payloads import PayloadFormat, is_json, payload
from trio_nsq.connectors.to_http.templates import Values


def _values(*bodies: bytes) -> list[Values]:
    return [Values("t", "c", b"0cb2f1a3c9400001", 1795393750935605523, 3, body) for body in bodies]


JSON_BODIES = [b'{"n":12345678901234567890123456789}', b" [1, 2.50, 1e999] ", b'"text"', b"null", b"7" * 5000]
OTHER_BODIES = [
    b"text",
    b"NaN",
    b"[Infinity]",
    b"{'a': 1}",
    b"",
    b"[" * 100_000,
    b"\xef\xbb\xbf{}",
    b"\xff\xfe{\x00}\x00",
]


@pytest.mark.parametrize("body", JSON_BODIES)
def test_json_goes_in_unchanged(body: bytes) -> None:
    assert is_json(body)
    assert (
        payload(_values(body, body), PayloadFormat.JSON, metadata=False) == b"[" + body + b"," + body + b"]"
    )


@pytest.mark.parametrize("body", OTHER_BODIES)
def test_other_bodies_become_text_or_base64(body: bytes) -> None:
    assert not is_json(body)
    (found,) = json.loads(payload(_values(body), PayloadFormat.JSON, metadata=False))
    assert (found.encode() if isinstance(found, str) else b64decode(found["body_base64"])) == body


def test_line_breaks_of_json_become_blanks_in_ndjson() -> None:
    body = b'{\r\n  "a": "x\\ny",\n  "b": 1\n}'
    data = payload(_values(body, b"two\nlines"), PayloadFormat.NDJSON, metadata=False)
    first, second = data.splitlines()
    assert (json.loads(first), json.loads(second)) == ({"a": "x\ny", "b": 1}, "two\nlines")


def test_metadata() -> None:
    data = payload(_values(b'{"a":1}', b"\xff"), PayloadFormat.NDJSON, metadata=True)
    first, second = map(json.loads, data.splitlines())
    assert first == {
        "topic": "t",
        "id": "0cb2f1a3c9400001",
        "timestamp_ns": 1795393750935605523,
        "timestamp": "2026-11-23T00:29:10.935605523Z",
        "attempts": 3,
        "body": '{"a":1}',
    }
    assert (second["body_base64"], "body" in second) == ("/w==", False)


@given(st.lists(st.binary() | st.text().map(str.encode), min_size=1), st.booleans())
def test_every_body_makes_valid_json(bodies: list[bytes], metadata: bool) -> None:
    array = json.loads(payload(_values(*bodies), PayloadFormat.JSON, metadata=metadata))
    lines = payload(_values(*bodies), PayloadFormat.NDJSON, metadata=metadata).split(b"\n")
    assert len(array) == len(bodies)
    assert [json.loads(line) for line in lines[:-1]] == array
    assert lines[-1] == b""
