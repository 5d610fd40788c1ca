"""Followers that are too slow to be waited for."""

from contextlib import suppress
from pathlib import Path

import pytest
import trio

from broker.leading import leading, no_answer
from broker.support import HeldFiles, connected, pub, settle, until
from trio_nsq.broker.slow_followers import SlowFollowers
from trio_nsq.replication.answer_times import AnswerTimes
from trio_nsq.replication.leader import Follower
from trio_nsq.replication.link import FrameKind, LinkError, encode_json, encode_number


class Followed:
    """A leader that adds ten operations each second, and looks for slow followers each second."""

    def __init__(self, *followers: Follower) -> None:
        self.slow = SlowFollowers(stall_s=3.0, most_lag_s=10.0, pause_s=30.0)
        self.followers = list(followers)
        self.now_s = self.last_number = 0

    def step(self, *, adds: int = 10, spares_lag: bool = False) -> dict[str, str]:
        """Let a second pass; returns the followers that are too slow, and why."""
        self.now_s += 1
        self.last_number += adds
        found = self.slow.find(float(self.now_s), self.last_number, self.followers, spares_lag=spares_lag)
        return {follower.member: reason for follower, reason in found}

    def may_join(self, follower: Follower, *, is_needed: bool = False) -> bool:
        return self.slow.may_join(float(self.now_s), follower, is_needed=is_needed)


def test_a_follower_that_stores_nothing_is_too_slow() -> None:
    two, three = Follower("two"), Follower("three")
    leader = Followed(two, three)
    for _ in range(3):
        two.stored = leader.last_number
        assert leader.step() == {}
    two.stored = leader.last_number
    assert leader.step() == {"three": "it has stored nothing for 3 s, and lacks 40 operations"}


def test_a_follower_that_lacks_nothing_is_not_too_slow() -> None:
    two = Follower("two")
    leader = Followed(two)
    for _ in range(20):
        two.stored = leader.last_number + 10
        assert leader.step() == {}
    for _ in range(20):
        assert leader.step(adds=0) == {}


def answer(leader: Followed, follower: Follower, took_s: float) -> list[str]:
    """Let a second pass, in which a follower stores an operation in this time; returns what is reported."""
    leader.step()
    follower.stored = leader.last_number
    follower.answers.sent(leader.last_number, leader.now_s)
    if took_s < 1:
        follower.answers.stored(leader.last_number, leader.now_s + took_s)
    return [text for _, text in leader.slow.report(leader.now_s + min(took_s, 1.0))]


def test_a_follower_that_answers_slowly_is_reported_once() -> None:
    two = Follower("two")
    leader = Followed(two)
    assert not any(answer(leader, two, 0.4) for _ in range(60))
    assert leader.slow.answer_s(two) == pytest.approx(0.4, abs=0.01)
    reported = [text for _ in range(60) for text in answer(leader, two, 0.8)]
    assert reported == ["slow: each OK waits for it, about 0.5 s"]
    assert leader.slow.is_slow(two)
    reported = [text for _ in range(60) for text in answer(leader, two, 0.01)]
    assert reported == ["no longer slow"]
    assert not leader.slow.is_slow(two)


def test_a_follower_that_stalls_once_is_not_slow() -> None:
    two = Follower("two")
    leader = Followed(two)
    for _ in range(20):
        assert answer(leader, two, 0.01) == []
    for _ in range(4):
        assert answer(leader, two, 5.0) == []
    two.answers.stored(leader.last_number, leader.now_s)
    for _ in range(20):
        assert answer(leader, two, 0.01) == []


def test_answers_are_measured_from_the_send_that_they_answer() -> None:
    answers = AnswerTimes()
    answers.sent(1, 0.0)
    answers.sent(2, 1.0)
    answers.sent(3, 2.0)  # not measured: two sends wait already
    answers.stored(1, 2.5)
    assert answers.take_longest_s(2.5) == 2.5
    answers.stored(3, 3.0)
    assert answers.take_longest_s(3.0) == 2.0
    assert answers.take_longest_s(9.0) == 0.0, "nothing waits"
    answers.sent(4, 10.0)
    assert answers.take_longest_s(12.0) == 2.0, "it has not answered yet"


def test_a_follower_that_lags_is_too_slow() -> None:
    """It stores something each second."""
    two = Follower("two")
    leader = Followed(two)
    for _ in range(10):
        two.stored += 1
        assert leader.step(spares_lag=True) == {}
    two.stored = 9  # it lacks the operation 10, which is 10 s old after the next step
    assert leader.step() == {}
    two.stored = 10
    assert leader.step() == {}
    two.stored = 15
    assert leader.step(spares_lag=True) == {}
    two.stored = 16
    assert leader.step() == {"two": "it has not stored what is 12.0 s old, and lacks 124 operations"}


def test_a_follower_is_waited_for_when_it_lacks_little() -> None:
    two = Follower("two")
    leader = Followed()
    assert leader.may_join(two)
    for _ in range(5):
        leader.step()
    assert not leader.may_join(two)
    assert not leader.may_join(two, is_needed=True)
    two.stored = leader.last_number - 20
    assert leader.may_join(two)
    two.stored -= 1
    assert not leader.may_join(two)


def pause_of(leader: Followed, follower: Follower) -> int:
    """Let a follower store nothing until it is too slow; returns how long it may not join after that."""
    leader.followers = [follower]
    while not leader.step():
        pass
    leader.followers = []
    began_s = leader.now_s
    while not leader.may_join(follower):
        leader.step()
        follower.stored = leader.last_number
        assert leader.may_join(follower, is_needed=True)
    return leader.now_s - began_s


def test_a_follower_that_is_slow_again_waits_longer() -> None:
    two, leader = Follower("two"), Followed()
    assert [pause_of(leader, two) for _ in range(8)] == [30, 60, 120, 240, 480, 960, 1800, 1800]
    assert pause_of(leader, Follower("three")) == 30
    leader.followers = [two]
    for _ in range(1799):
        two.stored = leader.last_number + 10
        leader.step()
    assert pause_of(leader, two) == 30


async def test_a_follower_that_stores_too_slowly_is_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It acknowledges something all the time. When it has all, it is not in sync again for a while."""
    async with (
        leading(tmp_path / "one", most_lag_s=0.2, pause_s=1000.0) as leader,
        trio.open_nursery() as nursery,
    ):
        replication = leader.replication
        number, is_slow = 0, True

        async def follow() -> None:
            nonlocal number
            hello = {"versions": [1], "cluster": "prod", "member": "two", "instance": "two", "addresses": []}
            while True:
                position = {"position": {"epoch": 1, "number": number}}
                async with await trio.open_tcp_stream("127.0.0.1", leader.port) as stream:
                    with suppress(trio.BrokenResourceError):
                        await stream.send_all(b"".join(encode_json(FrameKind.HELLO, hello | position)))
                        while True:
                            if number < replication.operations.last_number:
                                number = number + 1 if is_slow else replication.operations.last_number
                                await stream.send_all(b"".join(encode_number(FrameKind.STORED, number)))
                            await trio.sleep(0.1 if is_slow else 0.01)

        async def publish(topic: str) -> None:
            async with connected(leader.addresses.tcp_address) as client:
                await client.publish(topic, b"x")

        number = replication.operations.last_number
        nursery.start_soon(follow)
        await leader.until_in_sync("two")
        async with trio.open_nursery() as publishing:
            for topic in ("a", "b", "c", "d"):  # several operations each, because they are new
                publishing.start_soon(publish, topic)
        assert number < replication.operations.last_number
        assert "disconnected: it has not stored what is" in caplog.text
        is_slow = False
        await until(lambda: number == replication.operations.last_number)
        await until(lambda: [each.lag_operations for each in replication.followers()] == [0])
        await publish("a")
        assert replication.waited_for == frozenset()
        assert [each.state for each in replication.followers()] == ["catching up"]
        nursery.cancel_scope.cancel()


async def test_what_followers_lack(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = HeldFiles()
    # The leader looks often, and disconnects nobody, because none may be missing.
    async with (
        leading(tmp_path / "one", most_lag_s=0.2, min_in_sync=2) as leader,
        trio.open_nursery() as nursery,
    ):
        replication = leader.replication

        async def follow() -> None:
            with suppress(LinkError, trio.BrokenResourceError):
                await leader.follow(tmp_path / "two", "two", files)

        assert replication.followers() == ()
        nursery.start_soon(follow)
        await leader.until_in_sync("two")
        async with connected(leader.addresses.tcp_address) as client:
            await client.publish("t", b"x")
            await until(lambda: replication.followers()[0].lag_operations == 0)
            (two,) = replication.followers()
            assert (two.member, two.state, two.lag_bytes, two.lag_s) == ("two", "in sync", 0, 0.0)
            since_s = two.since_s
            assert since_s > 0
            files.hold("sync")
            await client.send(pub("t", b"y" * 1000))
            await files.reached()
            await settle()
            (two,) = replication.followers()
            assert (two.state, two.since_s) == ("in sync", since_s)
            assert two.lag_operations >= 1
            assert 1000 < two.lag_bytes < 3000
            await until(lambda: replication.followers()[0].lag_s > 1)
            await until(lambda: replication.followers()[0].is_slow)
            assert replication.followers()[0].ok_wait_s > 0.4
            assert "follower two: slow: each OK waits for it" in caplog.text
            await no_answer(client)
            files.release()
            await client.ok()
            await until(lambda: not replication.followers()[0].is_slow)
        nursery.cancel_scope.cancel()
