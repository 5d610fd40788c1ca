import pytest
import trio.testing

from client.fake_broker import bounded
from trio_nsq.client.consuming.message import MessageBatch
from trio_nsq.client.consuming.receive_queue import Inbox
from trio_nsq.protocol import MessageRun


class StubFeed:
    """Stands for a connection; only its identity matters here, and what is held."""

    address = "stub:1"
    heard_at = 0.0

    def __init__(self) -> None:
        self.held: list[MessageBatch] = []

    def hold(self, batch: MessageBatch) -> None:
        self.held.append(batch)

    def release(self, batch: MessageBatch) -> None:
        self.held.remove(batch)

    def finish(self, ids: list[bytes]) -> None:
        pass

    def finish_one(self, message_id: bytes) -> None:
        pass


def batch(bodies: str, feed: StubFeed | None = None) -> MessageBatch:
    data = [body.encode() for body in bodies]
    run = MessageRun([body * 16 for body in data], data, [0] * len(data), [1] * len(data))
    return MessageBatch(run, feed or StubFeed())  # type: ignore[arg-type]


def test_a_batch_is_handed_over_as_it_came() -> None:
    inbox, first, second = Inbox(), batch("abc"), batch("de")
    inbox.put(first)
    inbox.put(second)
    assert inbox.take_batch(None) is first
    assert inbox.take_batch(2) is second
    assert inbox.take_batch(None) is None


def test_a_larger_batch_is_handed_out_in_pieces() -> None:
    feed, inbox = StubFeed(), Inbox()
    inbox.put(batch("abcde", feed))
    pieces = [inbox.take_batch(2) for _ in range(4)]
    assert [piece and piece.bodies for piece in pieces] == [[b"a", b"b"], [b"c", b"d"], [b"e"], None]
    # All of the first batch is given away, so only the pieces wait for answers.
    assert feed.held == pieces[:3]


def test_messages_and_batches_can_be_taken_in_turn() -> None:
    inbox = Inbox()
    inbox.put(batch("abcd"))
    inbox.put(batch("e"))
    taken = [inbox.take_message(), inbox.take_batch(None), inbox.take_message(), inbox.take_message()]
    first, rest, last, none = taken
    assert first.body == b"a"  # type: ignore[union-attr]
    assert rest.bodies == [b"b", b"c", b"d"]  # type: ignore[union-attr]
    assert last.body == b"e"  # type: ignore[union-attr]
    assert none is None


def test_what_came_from_a_lost_connection_is_forgotten_and_nothing_else() -> None:
    lost, inbox = StubFeed(), Inbox()
    for item in (batch("ab", lost), batch("cd"), batch("ef", lost), batch("g")):
        inbox.put(item)
    assert inbox.take_message().body == b"a"  # type: ignore[union-attr]
    inbox.discard(lost)  # type: ignore[arg-type]
    assert inbox.take_message().body == b"c"  # type: ignore[union-attr]
    inbox.discard(lost)  # type: ignore[arg-type]
    assert [inbox.take_message().body for _ in range(2)] == [b"d", b"g"]  # type: ignore[union-attr]


def test_it_knows_how_many_messages_there_are() -> None:
    lost, inbox = StubFeed(), Inbox()
    for item in (batch("abcd", lost), batch("ef"), batch("ghi", lost)):
        inbox.put(item)
    assert inbox.available == 9
    inbox.take_message()
    inbox.take_batch(2)
    assert inbox.available == 6
    inbox.discard(lost)  # type: ignore[arg-type]
    assert inbox.available == 2
    inbox.take_message()
    inbox.put(batch("jk"))
    inbox.discard(lost)  # type: ignore[arg-type]
    assert inbox.available == 3
    inbox.close()
    assert inbox.available == 0


def test_batches_are_gathered_up_to_the_number_wanted() -> None:
    inbox = Inbox()
    assert inbox.take_gathered(3) is None
    for bodies in ("ab", "cd", "ef"):
        inbox.put(batch(bodies))
    gathered = [inbox.take_gathered(number) for number in (3, 1, None)]
    assert [one and one.bodies for one in gathered] == [[b"a", b"b", b"c"], [b"d"], [b"e", b"f"]]
    assert inbox.available == 0


def test_a_closed_inbox_gives_and_takes_nothing() -> None:
    inbox = Inbox()
    inbox.put(batch("ab"))
    inbox.take_message()
    inbox.close()
    inbox.put(batch("c"))
    assert inbox.take_message() is None
    assert inbox.take_batch(None) is None


def test_a_batch_is_held_until_its_last_message_is_answered_or_carved_out() -> None:
    feed, inbox = StubFeed(), Inbox()
    inbox.put(batch("abc", feed))
    for place in range(3):
        (held,) = feed.held
        assert len(held.unanswered_ids()) == 3 - place
        taken = inbox.take_message()
        assert taken is not None
        taken.finish()
    assert feed.held == []


@bounded
async def test_waiting_ends_with_the_next_batch_and_with_closing() -> None:
    inbox = Inbox()
    woken = []

    async def wait(what: str) -> None:
        await inbox.wait()
        woken.append(what)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait, "batch")
        await trio.testing.wait_all_tasks_blocked()
        assert woken == []
        inbox.put(batch("a"))
        await trio.testing.wait_all_tasks_blocked()
        assert woken == ["batch"]
        with trio.fail_after(0), pytest.raises(trio.Cancelled):  # a checkpoint also when there is something
            await inbox.wait()
        inbox.take_message()
        nursery.start_soon(wait, "closed")
        await trio.testing.wait_all_tasks_blocked()
        assert woken == ["batch"]
        inbox.close()
    assert woken == ["batch", "closed"]
