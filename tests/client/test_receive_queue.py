import pytest
import trio.testing

from client.support.fake_broker import bounded
from client.support.stub_subscription import StubSubscription, batch
from trio_nsq.client.consuming.receive_queue import ReceiveQueue


def test_batch_is_returned_unchanged() -> None:
    queue, first, second = ReceiveQueue(), batch("abc"), batch("de")
    queue.put(first)
    queue.put(second)
    assert queue.take_batch(None) is first
    assert queue.take_batch(2) is second
    assert queue.take_batch(None) is None


def test_larger_batch_is_split() -> None:
    source, queue = StubSubscription(), ReceiveQueue()
    queue.put(batch("abcde", source))
    pieces = [queue.take_batch(2) for _ in range(4)]
    assert [piece and piece.bodies for piece in pieces] == [[b"a", b"b"], [b"c", b"d"], [b"e"], None]
    # The first batch is handed out completely, so only its pieces wait for answers.
    assert source.held == pieces[:3]


def test_messages_and_batches_in_turn() -> None:
    queue = ReceiveQueue()
    queue.put(batch("abcd"))
    queue.put(batch("e"))
    taken = [queue.take_message(), queue.take_batch(None), queue.take_message(), queue.take_message()]
    first, rest, last, none = taken
    assert first.body == b"a"  # type: ignore[union-attr]
    assert rest.bodies == [b"b", b"c", b"d"]  # type: ignore[union-attr]
    assert last.body == b"e"  # type: ignore[union-attr]
    assert none is None


def test_messages_of_a_lost_connection_are_dropped_and_no_others() -> None:
    lost, queue = StubSubscription(), ReceiveQueue()
    for item in (batch("ab", lost), batch("cd"), batch("ef", lost), batch("g")):
        queue.put(item)
    assert queue.take_message().body == b"a"  # type: ignore[union-attr]
    queue.discard(lost)
    assert queue.take_message().body == b"c"  # type: ignore[union-attr]
    queue.discard(lost)
    assert [queue.take_message().body for _ in range(2)] == [b"d", b"g"]  # type: ignore[union-attr]


def test_number_of_messages() -> None:
    lost, queue = StubSubscription(), ReceiveQueue()
    for item in (batch("abcd", lost), batch("ef"), batch("ghi", lost)):
        queue.put(item)
    assert queue.available == 9
    queue.take_message()
    queue.take_batch(2)
    assert queue.available == 6
    queue.discard(lost)
    assert queue.available == 2
    queue.take_message()
    queue.put(batch("jk"))
    queue.discard(lost)
    assert queue.available == 3
    queue.close()
    assert queue.available == 0


def test_batches_are_combined_up_to_the_requested_size() -> None:
    queue = ReceiveQueue()
    assert queue.take_combined(3) is None
    for bodies in ("ab", "cd", "ef"):
        queue.put(batch(bodies))
    combined = [queue.take_combined(number) for number in (3, 1, None)]
    assert [one and one.bodies for one in combined] == [[b"a", b"b", b"c"], [b"d"], [b"e", b"f"]]
    assert queue.available == 0


def test_closed_queue_drops_everything() -> None:
    queue = ReceiveQueue()
    queue.put(batch("ab"))
    queue.take_message()
    queue.close()
    queue.put(batch("c"))
    assert queue.take_message() is None
    assert queue.take_batch(None) is None


def test_batch_is_held_until_its_last_message_is_answered_or_split_off() -> None:
    source, queue = StubSubscription(), ReceiveQueue()
    queue.put(batch("abc", source))
    for place in range(3):
        (held,) = source.held
        assert len(held.unanswered_ids()) == 3 - place
        taken = queue.take_message()
        assert taken is not None
        taken.finish()
    assert source.held == []


@bounded
async def test_waiting_ends_with_the_next_batch_or_the_close() -> None:
    queue = ReceiveQueue()
    woken = []

    async def wait(what: str) -> None:
        await queue.wait()
        woken.append(what)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait, "batch")
        await trio.testing.wait_all_tasks_blocked()
        assert woken == []
        queue.put(batch("a"))
        await trio.testing.wait_all_tasks_blocked()
        assert woken == ["batch"]
        with trio.fail_after(0), pytest.raises(trio.Cancelled):  # a checkpoint even if there is a message
            await queue.wait()
        queue.take_message()
        nursery.start_soon(wait, "closed")
        await trio.testing.wait_all_tasks_blocked()
        assert woken == ["batch"]
        queue.close()
    assert woken == ["batch", "closed"]
