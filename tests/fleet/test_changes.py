"""What a deletion or emptying removes. No IO."""

import pytest

from console.fleet.fake_brokers import channel, topic
from trio_nsq.api.broker import Action
from trio_nsq.fleet.changes import Change, Count, removed_by
from trio_nsq.fleet.stats import parse_topics


@pytest.mark.parametrize(
    ("verb", "name", "removed"),
    [
        ("delete", "", Count(1 + 4 + 2 + 3 + 5 + 7, 2, 6)),
        ("empty", "", Count(1 + 4)),
        ("delete", "c", Count(2 + 3 + 5, 0, 6)),
        ("empty", "d", Count(7)),
        ("delete", "absent", None),
    ],
)
def test_what_is_removed(verb: Action, name: str, removed: Count | None) -> None:
    busy = channel("c", depth=2, in_flight_count=3, deferred_count=5, client_count=6)
    found = parse_topics({"topics": [topic("t", busy, channel("d", depth=7), depth=1, deferred_count=4)]})
    assert removed_by(Change(verb, "t", name), found["t"]) == removed
