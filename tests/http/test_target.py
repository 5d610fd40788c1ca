"""Tests for paths and query strings, by nsqd's rules."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_nsq.http.parsing import parse_query, split_target


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (b"/pub", ("/pub", "")),
        (b"/pub?topic=a%20b", ("/pub", "topic=a%20b")),
        (b"/pub?topic=a?b", ("/pub", "topic=a?b")),
        (b"/p%75b", ("/pub", "")),
        (b"/a+b", ("/a+b", "")),
        (b"/pub%3Ftopic", ("/pub?topic", "")),
        (b"*", ("*", "")),
        (b"http://host:4151/pub?topic=a", ("/pub", "topic=a")),
        (b"http://host:4151", ("/", "")),
        (b"/redirect?to=http://host/x", ("/redirect", "to=http://host/x")),
    ],
)
def test_target_is_path_and_query(target: bytes, expected: tuple[str, str]) -> None:
    assert split_target(target) == expected


@pytest.mark.parametrize("target", [b"/p%zzb", b"/p%", b"/p%7", b"/p% 7"])
def test_badly_encoded_path_is_refused(target: bytes) -> None:
    with pytest.raises(ValueError, match="bad percent-encoding"):
        split_target(target)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", {}),
        ("topic=t", {"topic": "t"}),
        ("topic=t&channel=c", {"topic": "t", "channel": "c"}),
        ("topic=a&topic=b", {"topic": "a"}),
        ("binary", {"binary": ""}),
        ("binary=", {"binary": ""}),
        ("&&a=1&", {"a": "1"}),
        ("a=b=c", {"a": "b=c"}),
        ("topic=t%23ephemeral", {"topic": "t#ephemeral"}),
        ("topic=t#ephemeral", {"topic": "t#ephemeral"}),
        ("a+b=c+d", {"a b": "c d"}),
        ("a%2Bb=c%26d%3De", {"a+b": "c&d=e"}),
        ("name=%C3%A9", {"name": "é"}),
        ("topic=%ff", {"topic": "\N{REPLACEMENT CHARACTER}"}),
    ],
)
def test_query_is_decoded_and_the_first_value_wins(query: str, expected: dict[str, str]) -> None:
    assert parse_query(query) == expected


@pytest.mark.parametrize("query", ["%zz", "a=%", "a=%4", "%4=b", "a=1&b=%x1", "a=% 4", "a=1;b=2"])
def test_badly_encoded_query_is_refused(query: str) -> None:
    with pytest.raises(ValueError):
        parse_query(query)


@given(st.text(alphabet=st.characters(min_codepoint=0x21, max_codepoint=0x7E)))
def test_any_query_is_decoded_or_refused(query: str) -> None:
    try:
        parameters = parse_query(query)
    except ValueError:
        return
    for text in (*parameters, *parameters.values()):
        text.encode()
