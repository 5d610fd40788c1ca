"""Tests for `qcli pub --rate`: the rate, and what a signal does with messages that were read."""

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from cli.support import Cli
from interop.peers import Broker
from qcli.commands.pub.batches import Batch, BatchSource, Lines
from qcli.commands.pub.input import FrameSplitter, Splitter
from qcli.commands.pub.keys import whole_bodies
from qcli.commands.pub.pipeline import PublishPipeline
from qcli.commands.pub.publisher import Publisher
from qcli.commands.pub.records import RecordParser, Records
from qcli.commands.pub.strategy import AllBrokers, KeyHash, RoundRobin, Strategy
from qcli.commands.shared.rate_limiter import RateLimiter
from qcli.framework.errors import ExitCode
from soak import examples

MOST_BYTES = 4096


def test_rate_is_kept(qcli: Cli, topic: str) -> None:
    begun = time.monotonic()
    assert qcli("pub", topic, "--rate", "50", stdin=b"x\n" * 21).code == 0
    assert time.monotonic() - begun >= 20 / 50 - 0.1  # the allowed burst


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, id="SIGINT"), pytest.param(signal.SIGTERM, id="SIGTERM")]
)
def test_signal_takes_no_message_from_a_pipe_that_is_not_published(
    qcli: Cli, broker: Broker, topic: str, number: signal.Signals
) -> None:
    broker.create(topic, "check")
    given = b"".join(b"%d\n" % place for place in range(10_000))
    reader, writer = os.pipe()
    try:
        os.write(writer, given)
        begun = time.monotonic()
        with qcli.running("pub", topic, "--rate", "50", stdin=reader) as pub:
            qcli.wait_until(topic, lambda record: record["message_count"] >= 2)
            pub.process.send_signal(number)
            assert pub.process.wait(30) == 128 + number
        os.set_blocking(reader, False)
        left = os.read(reader, len(given))
    finally:
        os.close(reader)
        os.close(writer)
    published = b"".join(body + b"\n" for body in qcli.retained(topic))
    assert given.startswith(published)
    unfinished = given[len(published) : len(given) - len(left)]
    assert b"\n" not in unfinished
    assert len(published.splitlines()) <= 50 * (time.monotonic() - begun) + 10


class Recorder:
    """A broker that stores everything."""

    may_repeat = True
    at_once = 4
    batch_size = 1000

    def __init__(self) -> None:
        self.stored: list[bytes] = []

    async def send(self, batch: Batch) -> None:
        await trio.lowlevel.checkpoint()
        self.stored += batch.bodies

    async def end(self) -> None:
        """Nothing to send."""


def as_lines(bodies: Sequence[bytes]) -> list[bytes]:
    return [body + b"\n" for body in bodies]


def as_frames(bodies: Sequence[bytes]) -> list[bytes]:
    return [len(body).to_bytes(4, "big") + body for body in bodies]


def as_records(bodies: Sequence[bytes]) -> list[bytes]:
    """Records of as many topics as there are, or nearly."""
    return [
        json.dumps({"topic": f"t{place % 200}", "body": body.decode()}).encode() + b"\n"
        for place, body in enumerate(bodies)
    ]


def lines_source(batch_size: int) -> BatchSource:
    return Lines(Splitter(b"\n", 10_000), batch_size, "t")


def frames_source(batch_size: int) -> BatchSource:
    return Lines(FrameSplitter(10_000), batch_size, "t")


def records_source(batch_size: int) -> BatchSource:
    return Records(RecordParser(None, None, 10_000), 10_000, batch_size, skip_bad=False)


@settings(max_examples=examples(25), deadline=None)
@given(
    form=st.sampled_from(
        [(as_lines, lines_source), (as_frames, frames_source), (as_records, records_source)]
    ),
    strategy=st.sampled_from([AllBrokers, RoundRobin, partial(KeyHash, keys=whole_bodies)]),
    rate=st.sampled_from([0.5, 20, 300, 5000]),
    lengths=st.lists(st.sampled_from([1, 7, 300, 3000]), min_size=1, max_size=4),
    stop_after_s=st.floats(0, 12),
)
def test_signal_publishes_what_was_read_and_little_is_read_ahead(
    tmp_path_factory: pytest.TempPathFactory,
    form: tuple[Callable[[Sequence[bytes]], list[bytes]], Callable[[int], BatchSource]],
    strategy: Callable[[Sequence[Publisher]], Strategy],
    rate: float,
    lengths: list[int],
    stop_after_s: float,
) -> None:
    """Messages are of one length for a while, then of the next."""
    to_input, to_source = form
    bodies = [b"%d" % (place % 10) * length for length in lengths for place in range(300)]
    given = to_input(bodies)
    path = tmp_path_factory.getbasetemp() / "rated"
    path.write_bytes(b"".join(given))
    brokers = [Recorder(), Recorder()]

    async def main() -> tuple[PublishPipeline, float]:
        limiter = RateLimiter(rate, trio.current_time())
        pipeline = PublishPipeline(
            {f"{place}": broker for place, broker in enumerate(brokers)},
            to_source(limiter.max_messages),
            strategy=strategy,
            limiter=limiter,
        )
        ended_s = 0.0

        async def stop() -> None:
            nonlocal ended_s
            while not pipeline.result.read_bytes:  # a thread opens the file, in real time
                await trio.lowlevel.checkpoint()
            await trio.sleep(stop_after_s)
            ended_s = trio.current_time()
            pipeline.stop(ExitCode.TERMINATED)

        async with trio.open_nursery() as nursery:
            begun_s = trio.current_time()
            nursery.start_soon(stop)
            await pipeline.run([str(path)], MOST_BYTES)
            ended_s = ended_s or trio.current_time()
            nursery.cancel_scope.cancel()
        return pipeline, ended_s - begun_s

    pipeline, elapsed_s = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    complete, end = 0, 0
    while complete < len(given) and end + len(given[complete]) <= pipeline.result.read_bytes:
        end += len(given[complete])
        complete += 1
    copies = 2 if strategy is AllBrokers else 1
    assert sorted(brokers[0].stored + brokers[1].stored) == sorted(bodies[:complete] * copies)
    assert pipeline.result.unfinished_bytes == pipeline.result.read_bytes - end
    due = rate * (elapsed_s + RateLimiter.MAX_CREDIT_S)
    ahead = 4 * max(1, RateLimiter.SLICE_S * rate)
    if len(set(lengths)) > 1:  # the first messages of a length are read with the size for the messages before
        ahead += MOST_BYTES / min(map(len, given))
    assert complete <= due + ahead
