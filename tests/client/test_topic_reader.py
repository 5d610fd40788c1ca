"""Tests for TopicReader with `qcli serve`, also over cut connections and restarts."""

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from broker.state import damage
from broker.support import PATIENCE_S, RawClient, connected, dpub, running_broker
from interop.peers import nsqd
from trio_nsq import Gap, TopicReader
from trio_nsq.broker import BoundAddresses
from trio_nsq.client import ConnectionFailed, RequestRefused
from trio_nsq.log import RecordBatch


@asynccontextmanager
async def broker(path: Path, **options: Any) -> AsyncIterator[tuple[str, RawClient, BoundAddresses]]:
    """The HTTP address of a broker, a client to publish with, and all addresses."""
    async with running_broker(path / "d", **options) as bound, connected(bound.tcp_address) as client:
        yield str(bound.http_address), client, bound


async def publish(client: RawClient, *counts: int, start: int = 0) -> None:
    """Publish one record for each number of messages; the bodies are the sequences."""
    for count in counts:
        await client.publish("t", *(b"%d" % number for number in range(start, start + count)))
        start += count


async def read_all(reader: TopicReader) -> list[int | Gap]:
    """Return bodies, as integers, and gaps, up to the end."""
    found: list[int | Gap] = []
    with trio.fail_after(PATIENCE_S):
        while some := await reader.receive():
            for each in some:
                if isinstance(each, Gap):
                    found.append(each)
                else:
                    numbers = [int(body) for body in each.messages.bodies()]
                    assert numbers == list(range(each.base_sequence, each.next_sequence))
                    assert each.messages.sizes == [len(body) for body in each.messages.bodies()]
                    found += numbers
    return found


# ---------------------------------------------------------------------- ranges


@pytest.mark.parametrize(
    ("start", "end", "expected", "places"),
    [
        ("earliest", None, range(12), (0, 12)),
        (0, 12, range(12), (0, 12)),
        (4, 8, range(4, 8), (4, 8)),
        ("4", "8", range(4, 8), (4, 8)),
        (5, 6, [5], (5, 6)),
        (8, 4, [], (8, 8)),
        ("latest", None, [], (12, 12)),
        ("-1h", None, range(12), (0, 12)),
        ("earliest", "-1h", [], (0, 0)),
        (7, 99, range(7, 12), (7, 12)),
        (99, None, [], (12, 12)),
    ],
)
async def test_requested_range_is_exact(
    tmp_path: Path,
    start: int | str,
    end: int | str | None,
    expected: range | list[int],
    places: tuple[int, int],
) -> None:
    async with broker(tmp_path) as (address, client, _):
        await publish(client, 3, 1, 4, 1, 3)
        async with TopicReader(address, "t", start=start, end=end) as reader:
            assert (reader.start_sequence, reader.end_sequence) == places
            assert await read_all(reader) == list(expected)
            assert reader.position == places[1]
            assert await reader.receive() == []


async def test_records_keep_their_fields(tmp_path: Path) -> None:
    async with broker(tmp_path) as (address, client, _):
        await client.publish("t", b"a", b"b", b"c")
        await client.send(dpub("t", 60_000, b"later"))
        await client.ok()
        async with TopicReader(address, "t") as reader:
            found: list[Any] = []
            while some := await reader.receive():
                found += some
        async with TopicReader(address, "t", start=1, end=2) as reader:
            (part,) = await reader.receive()
        whole, later = found
        assert isinstance(part, RecordBatch)
        assert (part.base_sequence, part.first_id, part.timestamp_ns, part.messages.bodies()) == (
            1,
            whole.first_id + 1,
            whole.timestamp_ns,
            [b"b"],
        )
        assert (whole.due_ns, part.due_ns) == (0, 0)
        assert 59 < (later.due_ns - later.timestamp_ns) / 1e9 < 61


async def test_max_messages_splits_records(tmp_path: Path) -> None:
    async with broker(tmp_path) as (address, client, _):
        await publish(client, *([2] * 10))
        async with TopicReader(address, "t", max_messages=5) as reader:
            first = await reader.receive()
            assert sum(each.count for each in first if isinstance(each, RecordBatch)) == 4
            assert await read_all(reader) == list(range(4, 20))


@pytest.mark.parametrize(
    ("bodies", "start", "expected"),
    [
        ([b"<3>"], 0, [Gap(3, 6, "damaged")]),
        ([b"<3>"], 4, [Gap(4, 6, "damaged")]),
        ([b"<6>"], 0, [Gap(6, 9, "damaged")]),
        ([b"<0>", b"<3>", b"<6>"], 0, [Gap(0, 9, "damaged")]),
    ],
)
async def test_damage_is_a_gap(tmp_path: Path, bodies: list[bytes], start: int, expected: list[Gap]) -> None:
    async with broker(tmp_path) as (_, client, _):
        for first in (0, 3, 6):
            await client.publish("t", *(b"<%d>" % number for number in range(first, first + 3)))
    for body in bodies:
        damage(tmp_path / "d" / "topics" / "t.topic", body)
    async with broker(tmp_path) as (address, client, _), TopicReader(address, "t", start=start) as reader:
        gaps: list[Gap] = []
        at = start
        while some := await reader.receive():
            for each in some:
                assert (each.first_sequence if isinstance(each, Gap) else each.base_sequence) == at
                at = each.next_sequence
                if isinstance(each, Gap):
                    gaps.append(each)
        assert (gaps, at) == (expected, 9)


async def test_deleted_messages_are_a_gap(tmp_path: Path) -> None:
    async with broker(tmp_path, mem_queue_size=4) as (address, client, _):
        for number in range(10):
            await client.publish("t#ephemeral", b"%d" % number)
        async with TopicReader(address, "t#ephemeral", start=2) as reader:
            assert (reader.first_sequence, reader.start_sequence, reader.start_is_time) == (6, 6, False)
            assert await read_all(reader) == [Gap(2, 6, "discarded"), 6, 7, 8, 9]
        async with TopicReader(address, "t#ephemeral", start="-1h") as reader:
            assert (reader.first_sequence, reader.start_sequence, reader.start_is_time) == (6, 6, True)
            assert await read_all(reader) == [6, 7, 8, 9]


# ---------------------------------------------------------------------- following


async def test_follow_new_messages(tmp_path: Path) -> None:
    async with broker(tmp_path) as (address, client, _):
        await publish(client, 3)
        async with TopicReader(address, "t", start=1, follow=True) as reader:
            assert reader.end_sequence is None
            got: list[int] = []
            for start in range(3, 30, 3):
                (batch,) = await reader.receive()
                assert isinstance(batch, RecordBatch)
                got += [int(body) for body in batch.messages.bodies()]
                await publish(client, 3, start=start)
        assert got == list(range(1, 27))


async def test_damage_at_the_end_is_reported_before_new_messages(tmp_path: Path) -> None:
    async with broker(tmp_path) as (_, client, _):
        for first in (0, 3):
            await client.publish("t", *(b"<%d>" % number for number in range(first, first + 3)))
    damage(tmp_path / "d" / "topics" / "t.topic", b"<4>")
    async with (
        broker(tmp_path) as (address, client, _),
        TopicReader(address, "t", start=2, follow=True) as reader,
    ):
        with trio.fail_after(PATIENCE_S):
            (last,) = await reader.receive()
            assert isinstance(last, RecordBatch)
            assert last.next_sequence == 3
            assert await reader.receive() == [Gap(3, 6, "damaged")]
            await client.publish("t", b"<6>")
            (more,) = await reader.receive()
            assert isinstance(more, RecordBatch)
            assert more.base_sequence == 6


async def test_broker_that_lost_its_last_messages_has_no_gap_there(tmp_path: Path) -> None:
    async def fill(client: RawClient, numbers: range) -> None:
        for number in numbers:  # more than fits on the way
            await client.publish("t", b"%06d" % number + bytes(200_000))

    for name, count in (("before", 60), ("after", 40)):
        (tmp_path / name).mkdir()
        async with broker(tmp_path / name) as (address, client, _):
            await fill(client, range(count))
    async with broker(tmp_path / "before") as (address, _, _):
        reader = await TopicReader(address, "t", follow=True).__aenter__()
        await reader.receive()
    async with broker(tmp_path / "after", http_address=address) as (_, client, _):
        with trio.fail_after(PATIENCE_S):
            while reader.position < 40:
                await reader.receive()
            for number in (40, 41):
                async with trio.open_nursery() as nursery:
                    found: list[RecordBatch | Gap] = []

                    async def receive(found: list[RecordBatch | Gap] = found) -> None:
                        found += await reader.receive()

                    nursery.start_soon(receive)
                    await trio.testing.wait_all_tasks_blocked(0.05)
                    await fill(client, range(number, number + 1))
                (last,) = found
                assert isinstance(last, RecordBatch)
                assert last.base_sequence == number
        await reader.__aexit__(None, None, None)


async def test_cancelled_read_loses_nothing(tmp_path: Path) -> None:
    """At any point."""
    async with broker(tmp_path) as (address, client, _):
        await publish(client, *([1] * 40))
        async with TopicReader(address, "t") as reader:
            got: list[int] = []
            allowed = 0
            while len(got) < 40:
                with trio.CancelScope() as scope:
                    for _ in range(allowed):
                        await trio.lowlevel.checkpoint()
                    scope.deadline = trio.current_time() + allowed / 10_000
                    for each in await reader.receive():
                        assert isinstance(each, RecordBatch)
                        got.append(each.base_sequence)
                allowed += 1
        assert got == list(range(40))


async def test_cancelled_query_about_missing_messages_loses_nothing(
    tmp_path: Path,
) -> None:
    async with broker(tmp_path) as (_, client, _):
        for number in range(6):
            await client.publish("t", b"<%d>" % number)
    damage(tmp_path / "d" / "topics" / "t.topic", b"<2>")
    scope = trio.CancelScope()

    def cancel(request: bytes) -> None:
        if request.startswith(b"GET /topic/bounds"):
            scope.cancel()

    async with (
        broker(tmp_path) as (address, _, _),
        proxy(address, on_request=cancel) as (through, _),
        TopicReader(through, "t") as reader,
    ):
        with scope:
            while await reader.receive():
                pass
        assert scope.cancelled_caught
        found: list[int | Gap] = []
        while some := await reader.receive():
            found += [each if isinstance(each, Gap) else each.base_sequence for each in some]
        assert found == [0, 1, Gap(2, 3, "damaged"), 3, 4, 5]


@asynccontextmanager
async def proxy(
    address: str, budgets: Sequence[int] = (), on_request: Callable[[bytes], None] = lambda _: None
) -> AsyncIterator[tuple[str, list[int]]]:
    """Run a proxy in front of a broker.

    Args:
        address: The broker's address.
        budgets: The first connections are cut after these numbers of bytes of answers; later ones are
            refused.
        on_request: Called for every request.

    Yields:
        The proxy's address, and the budgets that were used up.
    """
    host, _, port = address.rpartition(":")
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    left, used = list(budgets), []

    async def serve(client: trio.SocketStream) -> None:
        budget: float = float("inf")
        if left:
            budget = left.pop(0)
            used.append(int(budget))
        async with client, await trio.open_tcp_stream(host, int(port)) as server:
            request = await client.receive_some(65536)
            on_request(request)
            await server.send_all(request)
            while budget > 0 and (data := await server.receive_some(int(min(budget, 65536)))):
                budget -= len(data)
                try:
                    await client.send_all(data)
                except trio.BrokenResourceError:
                    break

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        yield f"127.0.0.1:{listener.socket.getsockname()[1]}", used
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("follow", [False, True])
async def test_connections_cut_anywhere(tmp_path: Path, follow: bool) -> None:
    """No message is missing or duplicate."""
    async with broker(tmp_path, max_bytes_per_file=500) as (address, client, _):
        await publish(client, *[1, 2, 3, 4, 5, 6, 7, 8] * 2)
        budgets = [700, 1, 450, 330, 331, 400, 1000, 600, 5, 800]
        async with (
            proxy(address, budgets) as (through, used),
            TopicReader(through, "t", follow=follow, reconnect_min_s=0.001, reconnect_max_s=0.001) as reader,
        ):
            got: list[int] = []
            while len(got) < 72:
                for each in await reader.receive():
                    assert isinstance(each, RecordBatch)
                    assert each.base_sequence == len(got)
                    got += range(each.base_sequence, each.next_sequence)
        assert len(used) > 5


async def test_broker_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "trio_nsq.client")
    got: list[int] = []
    read = trio.Event()
    async with trio.open_nursery() as nursery:

        async def follow(address: str) -> None:
            nonlocal read
            async with TopicReader(address, "t", follow=True) as reader:
                while len(got) < 6:
                    for each in await reader.receive():
                        assert isinstance(each, RecordBatch)
                        got.extend(range(each.base_sequence, each.next_sequence))
                    read.set()

        async with broker(tmp_path) as (address, client, _):
            await publish(client, 3)
            nursery.start_soon(follow, address)
            with trio.fail_after(PATIENCE_S):
                await read.wait()
        async with broker(tmp_path, http_address=address) as (_, client, _):
            await publish(client, 3, start=3)
            with trio.fail_after(PATIENCE_S):
                while len(got) < 6:
                    read = trio.Event()
                    await read.wait()
    assert got == [0, 1, 2, 3, 4, 5]


async def test_delays_start_again_after_a_success(tmp_path: Path) -> None:
    """Twice six delays from 20 ms take 3 s at most; twelve delays that keep doubling take 40 s or more."""
    async with broker(tmp_path, max_bytes_per_file=500) as (address, client, _):
        await publish(client, *[8] * 20)
        async with (
            proxy(address, [900, *[1] * 7, 900, *[1] * 7]) as (through, used),
            TopicReader(through, "t", reconnect_min_s=0.02, reconnect_max_s=1000) as reader,
        ):
            with trio.fail_after(30):
                assert await read_all(reader) == list(range(160))
            assert len(used) == 16


async def test_log_that_lost_its_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After a power cut, or because the topic was deleted and recreated. The reader reports it and continues."""
    for folder in ("shorter", "longer"):
        (tmp_path / folder).mkdir()
    async with broker(tmp_path / "shorter") as (_, client, _):
        await publish(client, 5)
    async with trio.open_nursery() as nursery:
        reading, read, found = trio.Event(), trio.Event(), []

        async def follow(address: str) -> None:
            async with TopicReader(address, "t", start="latest", follow=True) as reader:
                assert reader.position == 99
                reading.set()
                found.extend(await reader.receive())
                read.set()

        async with broker(tmp_path / "longer") as (address, client, _):
            await publish(client, 99)
            nursery.start_soon(follow, address)
            await reading.wait()
        async with broker(tmp_path / "shorter", http_address=address) as (_, client, _):
            with trio.fail_after(PATIENCE_S):
                while "went back" not in caplog.text:  # it has reconnected
                    await trio.lowlevel.checkpoint()
                await publish(client, 1, start=5)
                await read.wait()
    assert isinstance(found[0], RecordBatch)
    assert found[0].base_sequence == 5
    (warning,) = [record.getMessage() for record in caplog.records if "went back" in record.getMessage()]
    assert warning.startswith(f"{address}: topic t went back from sequence 99 to ")


@pytest.mark.parametrize("lost", [1, 7])
async def test_log_with_other_messages(tmp_path: Path, caplog: pytest.LogCaptureFixture, lost: int) -> None:
    """As after a restore that lacks the last messages: others have their sequences, and the reader reports it."""
    for folder in ("before", "after"):
        (tmp_path / folder).mkdir()
    async with broker(tmp_path / "after") as (_, client, _):
        await publish(client, 10 - lost)
        await publish(client, lost + 5, start=10 - lost)
    async with trio.open_nursery() as nursery:
        read, found = trio.Event(), []

        async def follow(address: str) -> None:
            async with TopicReader(address, "t", follow=True) as reader:
                while reader.position < 15:
                    found.extend(await reader.receive())
                    if reader.position == 10:
                        read.set()

        async with broker(tmp_path / "before") as (address, client, _):
            await publish(client, 10)
            nursery.start_soon(follow, address)
            await read.wait()
        async with broker(tmp_path / "after", http_address=address):
            with trio.fail_after(PATIENCE_S):
                while len(found) < 2 or found[-1].next_sequence < 15:
                    await trio.sleep(0.01)
    assert [each.next_sequence for each in found] == [10, 15]
    assert isinstance(found[1], RecordBatch)
    assert found[1].base_sequence == 9, "the other message at the last sequence is read"
    (warning,) = [
        record.getMessage() for record in caplog.records if "another message" in record.getMessage()
    ]
    assert warning.startswith(
        f"{address}: topic t has another message than before at sequence 9: it was recreated"
    )


async def test_the_same_log_after_a_lost_connection_repeats_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with trio.open_nursery() as nursery:
        read, found = trio.Event(), []

        async def follow(address: str) -> None:
            async with TopicReader(address, "t", follow=True, max_messages=12) as reader:
                while reader.position < 12:
                    found.extend(await reader.receive())
                    read.set()

        async with broker(tmp_path) as (address, client, _):
            await publish(client, 10)
            nursery.start_soon(follow, address)
            await read.wait()
        async with broker(tmp_path, http_address=address) as (_, client, _):
            await publish(client, 2, start=10)
            with trio.fail_after(PATIENCE_S):
                while found[-1].next_sequence < 12:
                    await trio.sleep(0.01)
    assert [each.base_sequence for each in found if isinstance(each, RecordBatch)][:2] == [0, 10]
    assert "another message" not in caplog.text


async def test_deleted_topic(tmp_path: Path) -> None:
    async with broker(tmp_path) as (address, client, _):
        await publish(client, 1)
        async with TopicReader(address, "t", follow=True) as reader:
            await reader.receive()
            host, _, port = address.rpartition(":")
            async with await trio.open_tcp_stream(host, int(port)) as stream:
                await stream.send_all(b"POST /topic/delete?topic=t HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert (await stream.receive_some()).startswith(b"HTTP/1.1 200")
                with pytest.raises(RequestRefused, match="TOPIC_NOT_FOUND"), trio.fail_after(PATIENCE_S):
                    await reader.receive()


# ---------------------------------------------------------------------- no broker, no topic


async def test_unreachable_broker() -> None:
    with pytest.raises(ConnectionFailed) as failed:
        async with TopicReader("127.0.0.1:1", "t"):
            pass
    assert isinstance(failed.value.__cause__, OSError)


async def test_missing_topic(tmp_path: Path) -> None:
    async with broker(tmp_path) as (address, _, _):
        with pytest.raises(RequestRefused) as refused:
            async with TopicReader(address, "none"):
                pass
        assert (refused.value.status, refused.value.text, refused.value.topic) == (
            404,
            "TOPIC_NOT_FOUND",
            "none",
        )


async def test_tcp_port_instead_of_http(tmp_path: Path) -> None:
    async with broker(tmp_path) as (_, _, bound):
        with pytest.raises(
            ConnectionFailed, match=r"the answer is not HTTP\. Is this the port of the TCP protocol"
        ):
            async with TopicReader(bound.tcp_address, "t"):
                pass


def test_nsqd_is_refused(tmp_path: Path) -> None:
    async def read(address: str) -> None:
        with pytest.raises(RequestRefused) as refused:
            async with TopicReader(address, "t"):
                pass
        assert (refused.value.status, refused.value.text) == (404, "NOT_FOUND")

    with nsqd(tmp_path / "data") as peer:
        trio.run(read, peer.http_address)
