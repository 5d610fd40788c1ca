"""Numbered messages, most of them only in the archive: every reader gets each once and in order, after kills.

The bucket fails at times. It takes long, and runs with `FAULT_KILLS=3` or more, such as in `make soak`.
"""

import os
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from broker.support import PATIENCE_S
from cli.support import Cli
from interop.peers import Broker, qcli_serve
from storage.stores import Fault, Store, proxy
from trio_nsq.client.reading.broker_log import BrokerLog
from trio_nsq.log.gaps import Gap, Span
from trio_nsq.protocol.errors import NSQError

LIVES = int(os.environ.get("FAULT_KILLS", "0"))
SEED = int(os.environ.get("FAULT_SEED", "7"))
BATCH, BATCHES = 20, 8
FLAGS = (
    "--archive-interval=50ms",
    "--checkpoint-interval=50ms",
    "--max-bytes-per-file=4000",
    "--broadcast-address=127.0.0.1",
)


def bodies(first: int, end: int) -> list[bytes]:
    return [b"%08d" % number + b"." * 40 for number in range(first, end)]


def read_all(broker: Broker, topic: str = "t") -> list[bytes]:
    """Read a topic, again from where an error has ended it."""
    log, found, at = BrokerLog(broker.http_address, topic), list[bytes](), 0
    end = time.monotonic() + PATIENCE_S
    while at < (bounds := log.bounds()).end:
        assert time.monotonic() < end, f"only {at} of {bounds.end} messages could be read"
        try:
            for each in log.read(Span(at, bounds.end)):
                assert not isinstance(each, Gap), each
                found += each.messages.bodies()
                at = each.next_sequence
        except (OSError, NSQError):
            pass  # the archive was away, or the answer was cut off
    return found


def until_mostly_archived(broker: Broker, folder: Path, published: int) -> None:
    """Wait until the disk has only the newest messages."""
    end = time.monotonic() + PATIENCE_S
    while min(int(path.stem) for path in folder.glob("*.log")) < published * 3 // 4:
        assert time.monotonic() < end, "\n".join(broker.log()[-20:])
        time.sleep(0.05)


def lives(
    folder: Path, flags: tuple[str, ...], env: dict[str, str], chance: random.Random
) -> Iterator[Broker]:
    """Run brokers that are killed while they archive and delete files; yields the last one when it has all."""
    published = 0
    for life in range(LIVES):
        with qcli_serve(folder / "data", *flags, env=env) as broker:
            cli = Cli(broker.tcp_address, broker.http_address)
            broker.post("/topic/create", b"", topic="t")
            broker.post("/channel/create", b"", topic="t", channel="c")
            for _ in range(BATCHES):
                cli.publish("t", bodies(published, published + BATCH))
                published += BATCH
                broker.post("/channel/empty", b"", topic="t", channel="c")
                time.sleep(chance.random() * 0.1)
            if life < LIVES - 1:
                time.sleep(chance.random())
                broker.process.kill()
                broker.process.wait()
                continue
            until_mostly_archived(broker, folder / "data" / "topics" / "t.topic", published)
            yield broker


@pytest.mark.slow
@pytest.mark.skipif(LIVES < 3, reason="it takes long: FAULT_KILLS=3 runs it")
@pytest.mark.parametrize("kind", ["folder", "s3", "moto_s3", "azure"])
def test_every_reader_gets_each_message_once(
    tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    chance, env, place = random.Random(SEED), dict[str, str](), str(tmp_path / "archive")

    def judge(method: str, path: str) -> Fault | None:
        if method in ("PUT", "GET") and chance.random() < 0.1:
            return Fault(is_sent=chance.random() < 0.5, status=chance.choice((None, 500, 503)))
        return None

    with ExitStack() as stack:
        if kind != "folder":
            store: Store = request.getfixturevalue(kind)
            env, place = store.env, store.new_place()
            if kind != "azure":  # its address is part of what is signed
                running = stack.enter_context(proxy(store))
                running.judge = judge
                env = store.behind(running.endpoint).env
        for broker in lives(tmp_path, (*FLAGS, f"--archive={place}"), env, chance):
            wanted = bodies(0, LIVES * BATCHES * BATCH)
            cli = Cli(broker.tcp_address, broker.http_address)
            assert read_all(broker) == wanted
            tailed = cli("tail", "t", "--from", "0", "--to", "now")
            assert tailed.code == 0, tailed
            assert tailed.out.splitlines() == wanted
            broker.post("/channel/seek", b"", topic="t", channel="c", to="earliest")
            consumed = cli("tail", "t/c", "-n", str(len(wanted)))
            assert consumed.code == 0, consumed
            assert consumed.out.splitlines() == wanted
            assert (replayed := cli("replay", "t", "again")).code == 0, replayed
            assert cli.retained("again") == wanted
            exported = cli("to-parquet", "t", str(tmp_path / "files"), "--engine", "inline")
            assert exported.code == 0, exported
            table = pq.read_table(tmp_path / "files", columns=["seq", "body"]).sort_by("seq")
            assert table["body"].to_pylist() == wanted
