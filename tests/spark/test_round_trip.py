"""Publish, export, replay and export again: no message is lost or duplicated.

There are about 20,000 messages by default, and a million with `FAULT_COMPLETE=1` (`make soak`).

A replayed message gets a new publish time, so hours of both exports cannot be compared directly. They are
compared in two ways. Each hour of the first export is replayed by itself, and the second export must have
exactly its messages. And a replay in order must keep the order of the messages, so the hours of the first
export follow each other in the second.
"""

import os
import random
from collections import Counter
from pathlib import Path

import pyarrow.compute as pc

from cli.support import Cli
from interop.peers import qcli_serve
from spark.support import HOUR_NS, NOON_NS, cli_of, column, export, numbers, replayed, rows, write_log

COMPLETE = os.environ.get("FAULT_COMPLETE") == "1"
MESSAGES = 1_000_000 if COMPLETE else 20_000
HOURS = 5


def mixed_bodies(count: int) -> list[bytes]:
    """Return bodies of all sizes with all byte values, some of them twice."""
    chance = random.Random(count)
    found = []
    for number in range(count):
        size = 900_000 if number % 5000 == 4999 and number < 50_000 else int(chance.expovariate(1 / 60)) + 1
        found.append(chance.randbytes(size) if number % 20 else b"again")
    return found


def per_hour(folder: Path) -> Counter[int]:
    """Return the number of messages of each hour."""
    hours = pc.divide(rows(folder, "ts_ns")["ts_ns"], HOUR_NS)
    return Counter(hours.to_pylist())


def test_round_trip(tmp_path: Path) -> None:
    bodies = mixed_bodies(MESSAGES)
    chance = random.Random(1)
    # Records of various sizes, and a different number of messages in each hour.
    records, at = [], 0
    while at < len(bodies):
        count = chance.randrange(1, 200)
        hour = min(HOURS - 1, int(HOURS * (at / len(bodies)) ** 0.7))
        minute = (at * HOURS / len(bodies)) % 1 / 2
        records.append((NOON_NS + int((hour + minute) * HOUR_NS), bodies[at : at + count]))
        at += count
    records.sort(key=lambda record: record[0])
    ordered = [body for _, each in records for body in each]
    write_log(tmp_path / "data", "t", records)
    with qcli_serve(tmp_path / "data") as broker:
        qcli = cli_of(broker)
        first = tmp_path / "first"
        export(
            qcli,
            "t",
            first,
            "--row-group-size",
            "1MiB",
            "--target-file-size",
            "4MiB",
            "--partition-by",
            "hour",
        )
        hours = per_hour(first)
        assert (sum(hours.values()), len(hours)) == (MESSAGES, HOURS)

        said = replayed(qcli, tmp_path, str(first), "all")
        assert (said["published"], said["before"], said["left_out"]) == (MESSAGES, 0, 0)
        export(qcli, "all", tmp_path / "all")
        assert Counter(column(tmp_path / "all", "body")) == Counter(bodies)

        for hour, count in hours.items():
            moments = [f"@{second}" for second in (hour * 3600, hour * 3600 + 3600)]
            into = f"hour{hour}"
            replayed(qcli, tmp_path, str(first), into, "--since", moments[0], "--until", moments[1])
            assert export(qcli, into, tmp_path / into)["messages"] == count
            of_hour = [body for time_ns, each in records for body in each if time_ns // HOUR_NS == hour]
            assert Counter(column(tmp_path / into, "body")) == Counter(of_hour)

        replayed(qcli, tmp_path, str(first), "ordered", "--ordered")
        export(qcli, "ordered", tmp_path / "ordered")
        assert column(tmp_path / "ordered", "body") == ordered


def test_second_round_trip(qcli: Cli, topic: str, tmp_path: Path) -> None:
    """Replayed messages can be exported and replayed again, also into the same topic."""

    qcli.publish(topic, numbers(500))
    for expected in (500, 1000, 2000):
        assert export(qcli, topic, tmp_path / str(expected))["messages"] == expected
        replayed(qcli, tmp_path, str(tmp_path / str(expected)), topic)
    export(qcli, topic, tmp_path / "last")
    assert Counter(column(tmp_path / "last", "body")) == Counter(numbers(500) * 8)
