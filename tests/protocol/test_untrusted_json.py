"""Tests for JSON of untrusted peers: what is decoded can be used without surprises."""

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trio_nsq.protocol.untrusted_json import decode_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text() | st.integers(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
ESCAPED = st.lists(st.sampled_from([r"\ud800", r"\udfff", r"\uD83D\uDE00", r"\\ud800", "a", "é"])).map(
    "".join
)


@given(value=VALUES)
def test_json_is_decoded(value: Any) -> None:
    assert (
        decode_json(json.dumps(value)) == decode_json(json.dumps(value, ensure_ascii=False).encode()) == value
    )


@given(escaped=ESCAPED)
@example(escaped=r"\ud800")
def test_text_can_be_encoded_again(escaped: str) -> None:
    found = decode_json(f'{{"{escaped}":["{escaped}"]}}')
    expected = json.loads(f'"{escaped}"').encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    assert found == {expected: [expected]}
    assert json.dumps(found, ensure_ascii=False).encode()


@given(
    digits=st.integers(1, 5000),
    exponent=st.integers(0, 5000),
    form=st.sampled_from(["%s", "-%s", "%s.5", "%se%d"]),
)
def test_numbers_can_be_computed_with(digits: int, exponent: int, form: str) -> None:
    text = form % (("9" * digits, exponent) if "%d" in form else "9" * digits)
    try:
        found = decode_json(text)
    except ValueError:
        assert digits + exponent > 300
        return
    assert abs(found / 1000) < float("inf")


@pytest.mark.parametrize(
    "text", ["NaN", "[Infinity]", '{"a":-Infinity}', "1e999", "", "[" * 100_000, b'"\xed\xa0\x80"', b"\xff"]
)
def test_refused(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        decode_json(text)
