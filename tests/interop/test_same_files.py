"""nsq_to_file at an nsqd and `qcli to-file` at our broker write the same files, but for the named differences."""

import itertools
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from fleet.support import wait_until
from interop.connectors import await_finished, connector, publish, stop
from interop.peers import Broker, nsqd, qcli_serve
from interop.same.files import ALWAYS, CASES, CHECKPOINT, Case, Files, Stage, content, play
from interop.same.table import rows
from soak import in_soak

pytestmark = [pytest.mark.interop, pytest.mark.slow]

HEX = [random.Random(number).randbytes(1000).hex().encode() for number in range(3000)]
"""Bodies that compress by half only: what a compressor has not written yet is small."""
_numbers = itertools.count()


@dataclass(frozen=True)
class Brokers:
    """An nsqd and a broker of ours."""

    nsqd: Broker
    ours: Broker


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    folder = tmp_path_factory.mktemp("brokers")
    with nsqd(folder / "nsqd", "--mem-queue-size=100000") as theirs, qcli_serve(folder / "ours") as ours:
        yield Brokers(theirs, ours)


def play_both(case: Case, brokers: Brokers, folder: Path) -> tuple[Files, Files]:
    """Play a case with both programs at the same time; return the files of nsq_to_file, then ours."""
    number = next(_numbers)
    stages = [
        Stage("nsq_to_file", brokers.nsqd, f"theirs{number}", folder / f"{number}" / "theirs"),
        Stage("to-file", brokers.ours, f"ours{number}", folder / f"{number}" / "ours"),
    ]
    day = time.strftime("%d")
    with ThreadPoolExecutor(2) as players:
        theirs, ours = players.map(lambda stage: play(stage, case), stages)
    if day != time.strftime("%d"):  # names may have dates
        return play_both(case, brokers, folder)
    return theirs, ours


@pytest.mark.parametrize("name", CASES)
def test_same_files(brokers: Brokers, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    theirs, ours = play_both(case, brokers, tmp_path)
    assert theirs
    if case.row:
        assert case.row in rows()
        assert (theirs, ours) == case.expected()
    else:
        assert ours == theirs


@pytest.mark.parametrize("name", ["gzip, more runs", *in_soak("size, more runs", "SIGHUP")])
def test_same_files_of_nsqd(brokers: Brokers, tmp_path: Path, name: str) -> None:
    """`to-file` consumes a channel of nsqd, as nsq_to_file does."""
    theirs, ours = play_both(CASES[name], Brokers(brokers.nsqd, brokers.nsqd), tmp_path)
    assert ours == theirs


def test_same_permissions(brokers: Brokers, tmp_path: Path) -> None:
    play_both(CASES["folders"], brokers, tmp_path)

    def permissions(program: str) -> list[int]:
        found = (path for path in tmp_path.glob(f"*/{program}/out/**/*") if CHECKPOINT not in path.parts)
        return sorted(path.stat().st_mode & 0o777 for path in found)

    assert permissions("ours") == permissions("theirs")
    assert len(permissions("ours")) == 4


def test_kill_leaves_files_that_can_be_read(brokers: Brokers, tmp_path: Path) -> None:
    """Row `to-file-kill`. nsq_to_file leaves a gzip file that ends in the middle, and writes its messages again."""
    # Fewer messages than nsq_to_file has in flight, so that it does not sync; more than to-file collects.
    found = {}
    for program, broker, count in (("nsq_to_file", brokers.nsqd, 150), ("to-file", brokers.ours, 3000)):
        topic, folder = f"killed-{program}", tmp_path / program
        folder.mkdir()
        broker.create(topic, "nsq_to_file")
        flags = (
            *(f"--topic={topic}", f"--output-dir={folder}", "--gzip", "--filename-format=f<REV>"),
            "--consumer-opt=msg_timeout,1s",  # then the messages of the killed program are sent again
        )
        with connector(program, broker, *flags, "--sync-interval=1h") as first:
            publish(broker, topic, HEX[:count])
            wait_until(partial(has_begun, program, folder), "it writes")
            first.process.kill()
        with connector(program, broker, *flags, *ALWAYS) as second:
            publish(broker, topic, [b"last"])
            await_finished(broker, topic, "nsq_to_file", second)
            stop(second)
        found[program] = {path.name: content(path) for path in folder.iterdir() if path.name != CHECKPOINT}
    assert b"".join(found["to-file"].values()) == b"".join(b"%s\n" % body for body in [*HEX, b"last"])
    theirs = found["nsq_to_file"]
    assert theirs["f-000000.gz"].endswith(b"...")
    assert {*HEX[:150], b"last"} <= {*b"\n".join(theirs.values()).splitlines()}


def has_begun(program: str, folder: Path) -> bool:
    """Return whether a program has written something that is not synced."""
    for path in folder.iterdir():
        if path.is_file() and path.stat().st_size > 1000:
            return program == "to-file" or content(path).endswith(b"...")
    return False


def test_format_without_revision(brokers: Brokers, tmp_path: Path) -> None:
    """Row `to-file-rev`. nsq_to_file logs an error, runs on, and writes nothing."""
    brokers.nsqd.create("no-rev", "nsq_to_file")
    flags = ("--topic=no-rev", f"--output-dir={tmp_path}", "--gzip", "--filename-format=<TOPIC>")
    with connector("nsq_to_file", brokers.nsqd, *flags) as theirs:
        wait_until(lambda: any("missing <REV>" in line for line in theirs.stderr.seen), "the error")
        assert stop(theirs) == 0
    with connector("to-file", brokers.ours, *flags) as ours:
        assert ours.wait(30) == 2
    assert any("has no <REV>" in line for line in ours.stderr.seen)
