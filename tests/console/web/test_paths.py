"""Any name can be a part of a path, and comes back as it was."""

from urllib.parse import unquote, urljoin

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_nsq.console.web.paths import name_of, reserved_segments, segment

RESERVED = frozenset({"settings", "messages"})


def arrives_as(name: str) -> str:
    """Return what a handler gets after a browser has resolved the link and a server has split and decoded its path."""
    url = urljoin("http://console/", f"/topics/{segment(name, RESERVED)}")
    (_, part) = url.removeprefix("http://console/").split("/")
    return unquote(part)


@pytest.mark.parametrize(
    "name", [".", "..", "...", "a#ephemeral", "settings", "a/b", "%2e", "100%", "ü", "https://h:1", "?x=1"]
)
def test_names_come_back(name: str) -> None:
    decoded = arrives_as(name)
    assert "/" not in decoded
    assert decoded not in RESERVED
    assert name_of(decoded) == name


@given(
    st.text(min_size=1, max_size=64).filter(
        lambda name: not any("\ud800" <= each <= "\udfff" for each in name)
    )
)
def test_all_names_come_back(name: str) -> None:
    assert name_of(unquote(segment(name, RESERVED))) == name


def test_usual_names_are_as_in_nsqadmin() -> None:
    assert segment("clicks.v2-eu_1", RESERVED) == "clicks.v2-eu_1"


def test_pages_of_topics_are_reserved() -> None:
    paths = [
        "/",
        "/topics/{topic}/settings",
        "/topics/{topic}/{channel}",
        "/topics/{topic}/messages/{id}",
        "/nodes/{node}",
    ]
    assert reserved_segments(paths) == {"settings", "messages"}
