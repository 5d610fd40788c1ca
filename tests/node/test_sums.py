"""The sums of a node, and which process takes the next client."""

from typing import Any

from trio_nsq.api.answers import ChannelStats
from trio_nsq.broker.node.sums import label_metrics, sum_stats
from trio_nsq.broker.siblings import DRAINING_WAITS_S, WAITS_S, Counts, Siblings

NOT_MEASURED = {"count": 0, "percentiles": None}


def stats(topics: list[dict[str, Any]] | None, **more: Any) -> dict[str, Any]:
    """Return the answer of a process to `/stats`."""
    return {"version": "1", "health": "OK", "start_time": 5, "topics": topics, "producers": None, **more}


def topic(name: str, **more: Any) -> dict[str, Any]:
    """Return a topic of such an answer."""
    plain = {"topic_name": name, "channels": [], "depth": 1, "paused": False, "ttl_ms": 7}
    return plain | {"e2e_processing_latency": NOT_MEASURED} | more


def test_topics_are_added_by_name() -> None:
    sums = sum_stats(
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
    (summed,) = sum_stats([part, part])["topics"][0]["channels"]
    assert {each: summed[each] for each in counts} == dict.fromkeys(counts, 4)


def test_no_process_has_the_topic() -> None:
    assert sum_stats([stats(None), stats(None)])["topics"] is None
    assert sum_stats([stats(None), stats([])])["topics"] == []


def test_one_process_is_not_healthy_or_drains() -> None:
    parts = [stats([], draining=True), stats([], health="NOK - disk")]
    sums = sum_stats(parts)
    assert sums["health"] == "NOK - disk (process 1)"
    assert "draining" not in sums
    assert sum_stats([parts[0], parts[0]])["draining"] is True


def test_the_highest_percentile_counts() -> None:
    def measured(count: int, value: int) -> dict[str, Any]:
        return {"count": count, "percentiles": [{"quantile": 0.5, "value": value}]}

    parts = [stats([topic("a", e2e_processing_latency=measured(*each))]) for each in ((2, 30), (1, 50))]
    assert sum_stats(parts)["topics"][0]["e2e_processing_latency"] == measured(3, 50)


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
    sums = sum_stats(parts)
    assert sums["memory"] == {"heap_objects": 2, "gc_pause_usec_99": 3}
    assert sums["disk"] == {"used_bytes": 5, "free_bytes": 9, "total_bytes": 10}
    assert sums["archive"] == {"lag_s": 3}


def test_metrics_get_a_label() -> None:
    part = '# HELP a Text.\n# TYPE a gauge\na 1.0\na{x="b c",y="}"} 2.0\n# HELP b B.\n# TYPE b counter\nb_total{} 3.0\n'
    assert label_metrics({0: part, 2: part + "# EOF\n"}) == (
        "# HELP a Text.\n# TYPE a gauge\n"
        'a{process="0"} 1.0\na{process="0",x="b c",y="}"} 2.0\n'
        'a{process="2"} 1.0\na{process="2",x="b c",y="}"} 2.0\n'
        "# HELP b B.\n# TYPE b counter\n"
        'b_total{process="0"} 3.0\nb_total{process="2"} 3.0\n'
        "# EOF\n"
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
