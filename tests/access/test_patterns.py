"""Patterns of topic and channel names, compared with a naive matcher."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_nsq.access.patterns import MAX_PATTERN_CHARACTERS, compile_glob

NAMES = st.text("ab.-_#Z9", max_size=12)
PATTERNS = st.text("ab.*", min_size=1, max_size=10)


def matches(pattern: str, name: str) -> bool:
    """The definition: an asterisk stands for any characters, everything else for itself."""
    if not pattern:
        return not name
    if pattern[0] == "*":
        return any(matches(pattern[1:], name[start:]) for start in range(len(name) + 1))
    return bool(name) and name[0] == pattern[0] and matches(pattern[1:], name[1:])


@given(PATTERNS, st.text("ab.", max_size=10))
def test_a_pattern_matches_as_the_naive_one(pattern: str, name: str) -> None:
    assert bool(compile_glob(pattern).fullmatch(name)) is matches(pattern, name)


@given(NAMES.filter(bool))
def test_a_name_matches_itself_and_nothing_around_it(name: str) -> None:
    pattern = compile_glob(name)
    assert pattern.fullmatch(name)
    for other in ("", name + "a", "a" + name, name[:-1], name.swapcase() + "\n", name + "\n"):
        assert not pattern.fullmatch(other) or other == name


@given(st.lists(NAMES, min_size=2, max_size=6), st.data())
def test_a_name_made_from_a_pattern_matches(parts: list[str], data: st.DataObject) -> None:
    fillings = [data.draw(NAMES) for _ in parts[1:]]
    name = parts[0] + "".join(filling + part for filling, part in zip(fillings, parts[1:], strict=True))
    assert compile_glob("*".join(parts)).fullmatch(name)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("", "1 to 256 characters"),
        ("a" * (MAX_PATTERN_CHARACTERS + 1), "1 to 256 characters"),
        ("a?", "'\\?' in 'a\\?'"),
        ("a b", "' ' in 'a b'"),
        ("[a]", "'\\[' in"),
        ("é", "'é' in"),
        ("a\n", "'\\\\n' in"),
        ("a/b", "'/' in"),
    ],
)
def test_a_pattern_that_no_name_could_match_is_refused(pattern: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        compile_glob(pattern)


def test_a_pattern_takes_linear_time() -> None:
    """A backtracking matcher would need centuries for this."""
    pattern = compile_glob("*a" * 100 + "*b")
    start = time.process_time()
    for _ in range(100):
        assert not pattern.fullmatch("a" * 10_000)
    assert time.process_time() - start < 5
