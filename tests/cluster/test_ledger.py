"""Tests for the ledger of a cluster: it accepts what is right, and names what is wrong."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.clients import short_body_of
from cluster.ledger import (
    PRODUCER_NUMBERS,
    Answer,
    Attachment,
    Channel,
    Epochs,
    Ledger,
    Log,
    LogEntry,
    Verdict,
)
from faults.ledger import body_of


@dataclass
class Story:
    """What clients have seen: messages 0 to 9 of one producer, acknowledged by m0, and delivered to one channel."""

    ledger: Ledger
    channel: Channel
    log: list[LogEntry]
    epochs: Epochs | None = None

    def deliver(self, number: int, by: Attachment, attempts: int = 1) -> None:
        entry = self.log[number]
        assert self.channel.deliver(entry.body, entry.id.encode(), attempts, entry.timestamp_ns, by) == number

    def judge(self) -> Verdict:
        log = Log(self.ledger, "t")
        log.add(self.log)
        return self.ledger.judge({"t": log}, self.epochs)

    @property
    def wrong(self) -> str:
        return "\n".join(self.judge().wrong)


def attachment(server: str, read_until_s: float = 0.0, ended_s: float | None = None) -> Attachment:
    return Attachment(lambda: server, ended_s, read_until_s)


@pytest.fixture
def story(tmp_path: Path) -> Iterator[Story]:
    ledger = Ledger(tmp_path / "acknowledged")
    producer = ledger.new_producer("t")
    told = Story(ledger, ledger.channel("t", "c"), [])
    first = attachment("m0")
    for number in range(5):
        numbers = producer.take(2)
        assert [*numbers] == [2 * number, 2 * number + 1]
        for each in numbers:
            told.log.append(LogEntry(100 + each, f"{each + 1:016x}", 10**18 + each, body_of(each)))
        producer.acknowledge(numbers, sent_s=float(number), served_by=lambda: "m0")
    for number in range(10):
        told.deliver(number, first)
        told.channel.finish(number)
    yield told
    ledger.close()


def test_nothing_is_wrong(story: Story) -> None:
    verdict = story.judge()
    assert (verdict.acknowledged, verdict.copies, verdict.delivered) == (10, 10, 10)
    assert (verdict.lost, verdict.again) == (0, 0)
    assert not verdict.wrong
    assert "10 messages acknowledged, 10 copies in channels: 0 lost, 10 delivered over 0 epochs" in str(
        verdict
    )


def test_what_is_wrong_is_described_by_its_kinds() -> None:
    wrong = [f"m0: message {number} is lost" for number in range(10)]
    described = Verdict(wrong=[*wrong, "epoch 7 had the leaders F1, F2"]).described()
    assert described.startswith("11 wrong:\n10 times:\n  m0: message 0 is lost\n  m0: message 1 is lost")
    assert described.endswith("1 times:\n  epoch 7 had the leaders F1, F2")
    assert "message 9" not in described


def test_messages_have_the_body_that_their_producer_gives_them(story: Story) -> None:
    producer = story.ledger.new_producer("t", short_body_of)
    (number,) = producer.take(1)
    assert story.ledger.find("t", short_body_of(number)) == number
    assert story.ledger.find("t", body_of(number)) == -1


def test_what_the_slowest_channel_has_not_got(story: Story) -> None:
    slow = story.ledger.channel("t", "slow")
    assert (story.ledger.waiting_in("t"), story.ledger.waiting_in("other")) == (10, 0)
    entry = story.log[0]
    slow.deliver(entry.body, entry.id.encode(), 1, entry.timestamp_ns, attachment("m0"))
    assert story.ledger.waiting_in("t") == 9


def test_what_is_acknowledged_is_in_the_file(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "acknowledged")
    producer = ledger.new_producer("t")
    numbers = producer.take(3)
    assert not (tmp_path / "acknowledged").read_bytes()
    producer.acknowledge(numbers, 1.0, lambda: "m0")
    assert len((tmp_path / "acknowledged").read_bytes()) == 28
    ledger.close()


def test_an_acknowledged_message_that_the_log_lacks(story: Story) -> None:
    del story.log[9]
    assert "message 9 is lost: the log does not have it" in story.wrong
    assert "message 9 was delivered, and the log does not have it" in story.wrong
    assert story.judge().lost == 1


def test_a_part_of_a_command(story: Story) -> None:
    story.ledger.producers[0].take(2)
    story.log.append(LogEntry(110, f"{11:016x}", 10**18 + 10, body_of(10)))
    story.deliver(10, attachment("m0"))
    story.channel.finish(10)
    assert "the log has 1 of the 2 messages of one command from 10 on" in story.wrong


def test_a_message_without_an_ok_may_be_stored(story: Story) -> None:
    story.ledger.producers[0].take(1)
    assert not story.wrong
    story.log.append(LogEntry(110, f"{11:016x}", 10**18 + 10, body_of(10)))
    assert "message 10 was never delivered; the log has" in story.wrong
    story.deliver(10, attachment("m0"))
    assert "message 10 was not finished; the log has" in story.wrong
    story.channel.finish(10)
    assert not story.wrong
    assert story.judge().copies == 10


def test_a_log_that_is_not_kept(story: Story) -> None:
    assert not story.ledger.judge({}, None).wrong
    producer = story.ledger.producers[0]
    producer.take(1)
    assert not story.ledger.judge({}, None).wrong
    producer.acknowledge(range(10, 11), 1.0, lambda: "m0")
    verdict = story.ledger.judge({}, None)
    assert (verdict.copies, verdict.lost) == (11, 1)
    assert verdict.wrong == ["t/c: message 10 was never delivered"]


def test_topics_that_were_created_and_deleted(story: Story) -> None:
    story.ledger.topics.update(made=True, gone=False, unknown=None)
    assert not story.ledger.judge({}, None, ["t", "made"]).wrong
    assert story.ledger.judge({}, None, ["gone", "unknown"]).wrong == [
        "made: the topic was created, and is not",
        "gone: the topic was deleted, and is not",
    ]


def test_a_message_that_nobody_has_sent(story: Story) -> None:
    story.log.append(LogEntry(110, f"{11:016x}", 10**18 + 10, body_of(PRODUCER_NUMBERS)))
    assert "which was not published" in story.wrong
    assert story.channel.deliver(b"x", b"0" * 16, 1, 1, attachment("m0")) == -1
    assert "b'x' was not published there" in story.wrong


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda entry: replace_entry(entry, sequence=107), "sequence 107 follows 108"),
        (lambda entry: replace_entry(entry, sequence=110), "sequence 110 follows 108"),
        (lambda entry: replace_entry(entry, id=f"{9:016x}"), "the log has the id 0000000000000009 twice"),
        (lambda entry: replace_entry(entry, id=f"{99:016x}"), "message 9 was delivered as"),
        (lambda entry: replace_entry(entry, timestamp_ns=5), "message 9 was delivered as"),
        (lambda entry: replace_entry(entry, body=body_of(8)), "message 8 has the sequences 108 and 109"),
    ],
)
def test_a_log_that_is_another_one(
    story: Story, change: Callable[[LogEntry], LogEntry], sentence: str
) -> None:
    story.log[9] = change(story.log[9])
    assert sentence in story.wrong


def replace_entry(entry: LogEntry, **fields: object) -> LogEntry:
    return entry._replace(**fields)  # type: ignore[arg-type]  # of their types


def test_a_delivery_with_another_id(story: Story) -> None:
    story.channel.deliver(body_of(3), b"f" * 16, 2, 10**18 + 3, attachment("m1"))
    assert "message 3: id and timestamp were" in story.wrong


class TestDeliveredAgain:
    """The second delivery of message 0, after the first one by m0 in the story."""

    def test_by_the_same_member_whose_connection_is_open(self, story: Story) -> None:
        story.deliver(0, attachment("m0"), 2)
        story.channel.finish(0)
        assert "the connection had not ended" in story.wrong

    def test_by_another_member(self, story: Story) -> None:
        story.deliver(0, attachment("m1"), 2)
        assert "message 0 was not finished; the log has" in story.wrong
        story.channel.finish(0)
        verdict = story.judge()
        assert (verdict.wrong, verdict.again, verdict.forgotten) == ([], 1, 1)

    def test_over_the_same_connection_without_an_answer(self, story: Story) -> None:
        by = attachment("m1")
        story.deliver(0, by, 2)
        story.deliver(0, by, 3)
        assert "its consumer was connected and had not answered" in story.wrong

    def test_after_the_connection_ended_without_an_answer(self, story: Story) -> None:
        by = attachment("m1")
        story.deliver(0, by, 2)
        by.ended_s = 1.0
        story.deliver(0, attachment("m1"), 3)
        story.channel.finish(0)
        assert not story.wrong

    def test_after_a_requeue(self, story: Story) -> None:
        by = attachment("m1")
        story.deliver(0, by, 2)
        story.channel.requeue(0)
        story.deliver(0, by, 3)
        story.channel.finish(0)
        assert not story.wrong

    async def test_after_its_finish_was_stored(self, story: Story) -> None:
        by = attachment("m1", read_until_s=1e12)
        story.deliver(0, by, 2)
        story.channel.finish(0)
        await story.channel.settle({by})
        assert (story.judge().durable, story.judge().wrong) == (1, [])
        story.deliver(0, attachment("m2"), 3)
        story.channel.finish(0)
        assert "all members in sync had stored its FIN" in story.wrong
        story.deliver(0, attachment("m1"), 4)
        story.channel.finish(0)
        assert story.wrong.count("all members in sync had stored its FIN") == 2

    async def test_a_finish_that_was_not_read_for_certain(self, story: Story) -> None:
        by = attachment("m1", read_until_s=1.0)
        story.deliver(0, by, 2)
        story.channel.finish(0)
        await story.channel.settle({by})
        by.ended_s = 2.0
        story.deliver(0, attachment("m1"), 3)
        story.channel.finish(0)
        assert not story.wrong

    @pytest.mark.parametrize("began", [True, False])
    def test_after_its_finish_was_read(self, story: Story, began: bool) -> None:
        """By a member that has led all the time, or has begun to lead since then."""
        story.epochs = Epochs()
        story.epochs.see(1, "m0", ["m0"], 0.0)
        by = attachment("m0", read_until_s=1e12, ended_s=1e12)
        story.deliver(1, by, 2)  # the connection of the first delivery is open: wrong anyway
        story.channel.finish(1)
        story.deliver(1, attachment("m0"), 3)
        story.channel.finish(1)
        if began:
            story.epochs.see(2, "m0", ["m0"], 0.0)
        assert ("the server had read its FIN, and led all the time" in story.wrong) is not began


class TestEpochs:
    def test_ascending_leaders(self) -> None:
        epochs = Epochs()
        epochs.see(1, "m0", ["m0", "m1"], 1.0)
        epochs.see(2, "m1", ["m0", "m1"], 2.0)
        epochs.see(3, "m0", ["m0", "m1"], 3.0)
        answers = [
            answer(1.0, 1.5, "m0"),
            answer(1.4, 2.6, "m1"),
            answer(2.1, 2.7, "m1"),
            answer(1.2, 2.8, "m0"),  # was sent before the others
            answer(3.0, 3.1, "m0"),
        ]
        assert epochs.judge(answers) == []

    def test_two_leaders_of_an_epoch(self) -> None:
        epochs = Epochs()
        epochs.see(1, "m0", ["m0", "m1"], 1.0)
        epochs.see(1, "m1", ["m0", "m1"], 2.0)
        assert epochs.judge([]) == ["epoch 1 had the leaders m0, m1"]

    def test_an_earlier_epoch_after_a_later_one(self) -> None:
        epochs = Epochs()
        epochs.see(2, "m0", ["m0"], 1.0)
        epochs.see(1, "m1", ["m1"], 2.0)
        assert epochs.judge([]) == ["epoch 1 follows epoch 2"]

    def test_a_leader_that_is_not_in_sync(self) -> None:
        epochs = Epochs()
        epochs.see(1, "m0", ["m1"], 1.0)
        assert epochs.judge([]) == ["epoch 1: the leader m0 is not in sync"]

    def test_an_ok_after_another_member_has_led(self) -> None:
        epochs = Epochs()
        epochs.see(1, "m0", ["m0", "m1"], 1.0)
        epochs.see(2, "m1", ["m0", "m1"], 2.0)
        (wrong,) = epochs.judge([answer(2.1, 2.2, "m1"), answer(2.3, 2.4, "m0")])
        assert wrong.startswith("m0 answered OK at 2.400 to a publish of 2.300, when epoch 2 had answered")

    def test_a_member_is_known_by_its_folders(self) -> None:
        epochs = Epochs(names={"F": {"m0"}, "G": {"m0", "m1"}})
        epochs.see(1, "F", ["F"], 1.0)
        epochs.see(2, "G", ["F", "G"], 2.0)
        assert not epochs.judge([answer(1.0, 1.5, "m0"), answer(2.1, 2.2, "m1"), answer(2.3, 2.4, "m0")])
        assert len(epochs.judge([answer(1.0, 1.5, "F")])) == 1

    def test_an_ok_before_an_epoch_began(self) -> None:
        """The member leads again later, but not yet."""
        epochs = Epochs()
        epochs.see(1, "m0", ["m0", "m1"], 1.0)
        epochs.see(2, "m1", ["m0", "m1"], 2.0)
        epochs.see(2, "m1", ["m0", "m1"], 9.0)
        epochs.see(3, "m0", ["m0", "m1"], 10.0)
        assert len(epochs.judge([answer(2.1, 2.2, "m1"), answer(2.3, 2.4, "m0")])) == 1
        assert not epochs.judge([answer(2.1, 2.2, "m1"), answer(2.3, 9.5, "m0")])

    def test_an_ok_of_a_member_that_never_led(self) -> None:
        epochs = Epochs()
        epochs.see(1, "m0", ["m0", "m1"], 1.0)
        assert len(epochs.judge([answer(2.1, 2.2, "m1")])) == 1


def answer(sent_s: float, at_s: float, server: str) -> Answer:
    return Answer(sent_s, at_s, lambda: server)
