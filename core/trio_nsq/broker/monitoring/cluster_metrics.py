"""The metrics of a member of a cluster, from its answers to `GET /cluster/member` and, as the leader, `GET /cluster`.

Counters start at 0 when the process starts, those of a leader when it begins to lead.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

_LAGS: Final = (
    ("nsq_cluster_follower_lag_operations", "Operations that the follower lacks.", "lag_operations"),
    ("nsq_cluster_follower_lag_bytes", "Bytes of the operations that the follower lacks.", "lag_bytes"),
    (
        "nsq_cluster_follower_lag_seconds",
        "Age of the oldest operation that the follower lacks; 0 if it lacks none.",
        "lag_s",
    ),
)


def of_member(about: Mapping[str, Any], times_led: int) -> Iterator[Metric]:
    """Yield what each member tells.

    Args:
        about: What it answers to `GET /cluster/member`.
    """
    yield InfoMetricFamily(
        "nsq_cluster",
        "The cluster, and the id and the role of this member.",
        {"cluster": about["cluster"], "member": about["id"], "role": about["role"]},
    )
    yield GaugeMetricFamily(
        "nsq_cluster_epoch", "Number of the leadership: each leader has a higher one.", about["epoch"]
    )
    yield GaugeMetricFamily(
        "nsq_cluster_leader", "1 if this member leads; 0 if it follows.", about["role"] == "leader"
    )
    yield GaugeMetricFamily(
        "nsq_cluster_coordinator_up",
        "1 if the coordinator answered the last request of this member.",
        not about["coordinator_error"],
    )
    diverged = about["diverged"]
    yield GaugeMetricFamily(
        "nsq_cluster_diverged_folders",
        "Folders of this member with what its leader did not have: look whether messages are missing, and remove them.",
        len(diverged),
    )
    yield GaugeMetricFamily(
        "nsq_cluster_diverged_bytes", "Their bytes.", sum(each["bytes"] for each in diverged)
    )
    yield CounterMetricFamily("nsq_cluster_times_led", "Times that this member became the leader.", times_led)


def of_leader(status: Mapping[str, Any], *, left: int, catch_ups: int) -> Iterator[Metric]:
    """Yield what the leader tells besides.

    Args:
        status: What it answers to `GET /cluster`.
        left: The followers that were in sync and left.
        catch_ups: How often a follower began to catch up.
    """
    members = status["members"]
    yield GaugeMetricFamily("nsq_cluster_members", "Members of the cluster, with the leader.", len(members))
    yield GaugeMetricFamily(
        "nsq_cluster_members_in_sync",
        "Members that are connected and have all messages, with the leader.",
        sum(each["in_sync"] and each["state"] != "disconnected" for each in members),
    )
    yield GaugeMetricFamily(
        "nsq_cluster_min_in_sync",
        "With fewer members in sync, publishes are refused (--min-in-sync).",
        status["min_in_sync"],
    )
    yield GaugeMetricFamily(
        "nsq_cluster_refuses_publishes",
        "1 if publishes are refused: too few members are in sync, or the leader's disk is full.",
        bool(status["refuses_because"]),
    )
    followers = [each for each in members if each["id"] != status["leader"]]
    connected = GaugeMetricFamily(
        "nsq_cluster_follower_connected", "1 if the follower is connected to the leader.", labels=["member"]
    )
    for each in followers:
        connected.add_metric([each["id"]], each["state"] != "disconnected")
    yield connected
    for name, text, key in _LAGS:
        lag = GaugeMetricFamily(name, text, labels=["member"])
        for each in followers:
            if each["state"] != "disconnected":  # then it is not known
                lag.add_metric([each["id"]], each[key])
        yield lag
    wait = GaugeMetricFamily(
        "nsq_cluster_follower_ok_wait_seconds",
        "Recent time in which the follower stores operations, for which OKs wait; 0 without operations.",
        labels=["member"],
    )
    copies = {
        "copied_bytes": GaugeMetricFamily(
            "nsq_cluster_follower_copied_bytes",
            "Bytes of the leader's files that the follower has, while it catches up; 0: it does not.",
            labels=["member"],
        ),
        "copy_bytes": GaugeMetricFamily(
            "nsq_cluster_follower_copy_bytes",
            "Bytes of the leader's files, while the follower catches up; 0: it does not.",
            labels=["member"],
        ),
    }
    for each in followers:
        if each["state"] != "disconnected":
            wait.add_metric([each["id"]], each["ok_wait_s"])
            for name, copy in copies.items():
                copy.add_metric([each["id"]], each[name])
    yield wait
    yield from copies.values()
    free = GaugeMetricFamily(
        "nsq_cluster_follower_free_bytes",
        "Free space of the follower's disk; 0 also if it was full, and cannot be written.",
        labels=["member"],
    )
    for each in followers:
        if each["free_bytes"] is not None:
            free.add_metric([each["id"]], each["free_bytes"])
    yield free
    yield CounterMetricFamily(
        "nsq_cluster_followers_left",
        "Followers that were in sync, and disconnected or were too slow.",
        left,
    )
    yield CounterMetricFamily(
        "nsq_cluster_catch_ups", "Times that a follower began to copy the leader's folder.", catch_ups
    )


def of_follower(
    about: Mapping[str, Any], *, forwarded: int, forwarded_total: int, waiting: int
) -> Iterator[Metric]:
    """Yield what a follower tells besides.

    Args:
        about: What it answers to `GET /cluster/member`.
        forwarded: The clients that it passes on now.
        forwarded_total: Those that it has passed on.
        waiting: The clients that wait for a leader.
    """
    yield GaugeMetricFamily(
        "nsq_cluster_following", "1 if this follower is connected to the leader.", about["is_following"]
    )
    yield GaugeMetricFamily(
        "nsq_cluster_in_sync",
        "1 if the leader counts this follower as in sync, so that it may be elected.",
        about["in_sync"],
    )
    yield GaugeMetricFamily(
        "nsq_cluster_position",
        "Number of the last operation of the leader that this follower has on stable storage.",
        about["position"],
    )
    yield GaugeMetricFamily(
        "nsq_cluster_forwarded_connections", "Clients that this follower passes on to the leader.", forwarded
    )
    yield CounterMetricFamily(
        "nsq_cluster_forwards", "Clients that this follower has passed on to the leader.", forwarded_total
    )
    yield GaugeMetricFamily(
        "nsq_cluster_waiting_connections", "Clients that wait here for a leader.", waiting
    )
