"""Tests for `to-parquet --follow --max-age`: files are written when they have their size, or a message is too old."""

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from cli.support import Cli
from interop.peers import Broker
from spark.support import ToParquet, column, export, parquet_files, until, write_log
from trio_nsq.client.reading.broker_log import BrokerLog
from trio_nsq.spark.export.job import ExportMemory, open_export
from trio_nsq.spark.export.request import ExportRequest
from trio_nsq.spark.runtime.engine import run_inline
from trio_nsq.spark.segments.places import parse_places

BODY = b"x" * 1000
PER_FILE = 50
"""How many messages have the size of a file, nearly: the log has some bytes more for each."""
MINUTE_S = 60


def rounds(folder: Path, ages_s: Sequence[Sequence[float]], max_age_s: float | None) -> list[int]:
    """Return how many messages each round exports.

    Args:
        ages_s: The ages of the messages that are new before each round, in a log that has all of them.
    """
    now_ns, memory, found = time.time_ns(), ExportMemory(), []
    published = [age_s for new in ages_s for age_s in new]
    write_log(folder / "data", "t", [(now_ns - int(age_s * 10**9), [BODY]) for age_s in published])
    (place,) = parse_places([f"b={folder / 'data'}"], "t")
    end = 0
    for new in ages_s:
        end += len(new)
        size = PER_FILE * int(place.open().bounds().mean_bytes or 0) + PER_FILE
        request = ExportRequest(
            "t", str(folder / "out"), end=str(end), target_bytes=size, max_age_s=max_age_s
        )
        with open_export(request, [place], memory=memory) as job:
            job.run(run_inline, job.plan([place]), lambda *_: None)
            found.append(job.result.messages)
            assert job.waiting == end - sum(found)
    return found


@pytest.mark.parametrize(
    ("new", "max_age_s", "wanted"),
    [
        ([[0] * 20, [0] * 20], None, [20, 20]),
        ([[0] * 20, [0] * 20], MINUTE_S, [0, 0]),
        ([[0] * 49, [0]], MINUTE_S, [0, 50]),
        ([[0] * 120, [0] * 20, [0] * 20], MINUTE_S, [100, 0, 50]),
        ([[90] * 3, [30] * 3, [0] * 3], MINUTE_S, [3, 0, 0]),
        ([[30], [20, 0, 0], [0]], MINUTE_S, [0, 0, 0]),
        ([[0] * 3, [90] * 2 + [0]], 2 * MINUTE_S, [0, 0]),
        ([[90] + [0] * 70, [0] * 20], MINUTE_S, [71, 0]),
    ],
)
def test_rounds_wait(
    tmp_path: Path, new: list[list[float]], max_age_s: float | None, wanted: list[int]
) -> None:
    """The oldest message that waits decides, and then all are written."""
    assert rounds(tmp_path, new, max_age_s) == wanted
    assert (column(tmp_path / "out", "seq") if any(wanted) else []) == list(range(sum(wanted)))


def test_what_waits_is_exported_by_the_next_run(
    broker: Broker, to_parquet: ToParquet, qcli: Cli, topic: str, tmp_path: Path
) -> None:
    """The channel stays before messages that wait; a run that does not wait writes them, each once."""
    broker.create(topic, "lake")
    qcli.publish(topic, [BODY] * 200)
    arguments = (
        "to-parquet",
        topic,
        str(tmp_path / "out"),
        "--channel",
        "lake",
        "--target-file-size",
        "64KiB",
        "-q",
    )
    log = BrokerLog(qcli.http_address, topic)
    with qcli.running(*arguments, "--follow", "--every", "50ms", "--max-age", "1h"):
        until(lambda: len(parquet_files(tmp_path / "out")) == 3)
        whole = len(column(tmp_path / "out", "seq"))
        assert 0 < whole < 200
        until(lambda: log.open_channel("lake") == whole)
        qcli.publish(topic, [BODY] * 10)
        assert log.open_channel("lake") == whole
    export(qcli, topic, tmp_path / "out", "--channel", "lake")
    assert column(tmp_path / "out", "seq") == list(range(210))
    assert len(parquet_files(tmp_path / "out")) == 4
    for wrong in (("--max-age", "1h"), ("--max-age", "0s", "--follow")):
        assert to_parquet(topic, tmp_path, *wrong).code == 2
