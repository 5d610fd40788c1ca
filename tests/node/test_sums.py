"""The sums of a node, and which process takes the next client."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from trio_nsq.api.answers import ChannelStats
from trio_nsq.broker.node.sums import Steps, encode_json, label_metrics, sum_stats
from trio_nsq.broker.siblings import DRAINING_WAITS_S, WAITS_S, Counts, Siblings
from trio_nsq.http.messages import compact_json

NOT_MEASURED = {"count": 0, "percentiles": None}


def done(steps: Steps[Any]) -> Any:
    """Do all steps; return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def total(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the sum of such answers."""
    found: dict[str, Any] = done(sum_stats(parts))
    return found


def stats(topics: list[dict[str, Any]] | None, **more: Any) -> dict[str, Any]:
    """Return the answer of a process to `/stats`."""
    return {"version": "1", "health": "OK", "start_time": 5, "topics": topics, "producers": None, **more}


def topic(name: str, **more: Any) -> dict[str, Any]:
    """Return a topic of such an answer."""
    plain = {"topic_name": name, "channels": [], "depth": 1, "paused": False, "ttl_ms": 7}
    return plain | {"e2e_processing_latency": NOT_MEASURED} | more


def test_topics_are_added_by_name() -> None:
    sums = total(
        [
            stats([topic("a", first_sequence=5), topic("b", paused=True)], start_time=9),
            stats([topic("b", depth=4, unavailable="damaged", producers=1)]),
        ]
    )
    a, b = sums["topics"]
    assert (a["topic_name"], a["depth"], "first_sequence" in a) == ("a", 1, False)
    assert (b["depth"], b["paused"], b["ttl_ms"], b["unavailable"]) == (5, True, 7, "damaged")
    assert (sums["start_time"], sums["producers"], sums["health"]) == (5, None, "OK")


def test_counts_of_a_channel_are_added() -> None:
    """All counts that `/stats` shows of a channel, also the ones with an order."""
    counts = [each for each in ChannelStats.__annotations__ if each.endswith("_count")]
    assert "blocked_count" in counts
    channel = {"channel_name": "c", "clients": [], "e2e_processing_latency": NOT_MEASURED}
    part = stats([topic("t", channels=[channel | dict.fromkeys(counts, 2)])])
    (summed,) = total([part, part])["topics"][0]["channels"]
    assert {each: summed[each] for each in counts} == dict.fromkeys(counts, 4)


def test_no_process_has_the_topic() -> None:
    assert total([stats(None), stats(None)])["topics"] is None
    assert total([stats(None), stats([])])["topics"] == []


def test_one_process_is_not_healthy_or_drains() -> None:
    parts = [stats([], draining=True), stats([], health="NOK - disk")]
    sums = total(parts)
    assert sums["health"] == "NOK - disk (process 1)"
    assert "draining" not in sums
    assert total([parts[0], parts[0]])["draining"] is True


def test_the_highest_percentile_counts() -> None:
    def measured(count: int, value: int) -> dict[str, Any]:
        return {"count": count, "percentiles": [{"quantile": 0.5, "value": value}]}

    parts = [stats([topic("a", e2e_processing_latency=measured(*each))]) for each in ((2, 30), (1, 50))]
    assert total(parts)["topics"][0]["e2e_processing_latency"] == measured(3, 50)


def test_memory_disk_and_archive() -> None:
    parts = [
        stats(
            [],
            memory={"heap_objects": 1, "gc_pause_usec_99": each},
            disk={"used_bytes": each, "free_bytes": 9, "total_bytes": 10},
            archive={"lag_s": each},
        )
        for each in (2, 3)
    ]
    sums = total(parts)
    assert sums["memory"] == {"heap_objects": 2, "gc_pause_usec_99": 3}
    assert sums["disk"] == {"used_bytes": 5, "free_bytes": 9, "total_bytes": 10}
    assert sums["archive"] == {"lag_s": 3}


LISTS = st.lists(st.integers(0, 450), max_size=4)


@given(st.lists(st.tuples(st.text('t\u00e9"', max_size=3), LISTS), max_size=5))
def test_json_of_any_size_is_encoded_in_small_steps(topics: list[tuple[str, list[int]]]) -> None:
    value: dict[str, Any] = {
        "topics": [
            {
                "topic_name": name,
                "channels": [
                    {"clients": [{"client_id": str(n)} for n in range(count)] or None, "paused": False}
                    for count in counts
                ],
            }
            for name, counts in topics
        ],
        "memory": {},
        "producers": None,
    }
    steps = encode_json(value)
    assert json.loads(done(steps)) == value
    assert done(encode_json(value)) == compact_json(value).encode()
    clients = sum(sum(counts) for _, counts in topics)
    assert sum(1 for _ in encode_json(value)) >= clients / 250


def test_sums_of_many_channels_are_made_in_steps() -> None:
    channels = [
        {"channel_name": f"c{n}", "depth": 1, "clients": None, "e2e_processing_latency": NOT_MEASURED}
        for n in range(1000)
    ]
    parts = [stats([topic("t", channels=channels)])] * 3
    assert sum(1 for _ in sum_stats(parts)) >= 1000
    assert [each["depth"] for each in total(parts)["topics"][0]["channels"]] == [3] * 1000
    lines = "# TYPE a gauge\n" + "".join(f'a{{x="{n}"}} 1.0\n' for n in range(1000))
    assert sum(1 for _ in label_metrics({0: lines, 1: lines})) >= 10
    assert done(label_metrics({0: lines, 1: lines})).count(b'process="1"') == 1000


def test_metrics_get_a_label() -> None:
    part = '# HELP a Text.\n# TYPE a gauge\na 1.0\na{x="b c",y="}"} 2.0\n# HELP b B.\n# TYPE b counter\nb_total{} 3.0\n'
    assert done(label_metrics({0: part, 2: part + "# EOF\n"})) == (
        b"# HELP a Text.\n# TYPE a gauge\n"
        b'a{process="0"} 1.0\na{process="0",x="b c",y="}"} 2.0\n'
        b'a{process="2"} 1.0\na{process="2",x="b c",y="}"} 2.0\n'
        b"# HELP b B.\n# TYPE b counter\n"
        b'b_total{process="0"} 3.0\nb_total{process="2"} 3.0\n'
        b"# EOF\n"
    )


def test_the_process_with_the_fewest_clients_takes_the_next_one() -> None:
    counts = Counts(3)
    parts = [Siblings(index, "i", {}, {}, {}, "abc", "abc", "abc", "abc", counts) for index in range(3)]
    for index in range(3):
        counts.begin(index)
    assert [each.waits_s("TCP", draining=False) for each in parts] == [0, 0, 0]
    counts.add("TCP", 0, 2)
    counts.add("TCP", 1, 1)
    assert [each.waits_s("TCP", draining=False) for each in parts] == [WAITS_S, WAITS_S, 0]
    assert [each.waits_s("HTTP", draining=False) for each in parts] == [0, 0, 0]
    assert parts[2].waits_s("TCP", draining=True) == DRAINING_WAITS_S
    counts.set_ready(2)
    counts.end(2)  # its clients do not count any more
    assert [each.waits_s("TCP", draining=False) for each in parts[:2]] == [WAITS_S, 0]
    assert not parts[0].is_ready(2)
    assert (counts.starts(2), counts.clients("TCP")) == (1, [2, 1, -1])
