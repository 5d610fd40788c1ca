"""Tests for channels that are saved behind the last state of their topic."""

from pathlib import Path
from typing import Any

import pytest

from broker.api import DONE, OK, running_api
from broker.letters import another
from broker.state import Fixture
from trio_nsq.broker.state.checkpoint import ADDITIONS, Addition, additions_of
from trio_nsq.broker.storage.data_folder import INCOMPLETE, decode_state, encode_checked
from trio_nsq.log import Files

NEVER = {"checkpoint_interval_ms": 10**9}
TOPIC = Path("d") / "topics" / "t.topic"


class CountingFiles(Files):
    """Counts what is written and synced."""

    def __init__(self) -> None:
        self.written_bytes = self.syncs = self.replaced = 0

    def write(self, fd: int, offset: int, parts: Any) -> None:
        self.written_bytes += sum(map(len, parts))
        super().write(fd, offset, parts)

    def sync(self, fd: int) -> None:
        self.syncs += 1
        super().sync(fd)

    def replace(self, path: Path, content: bytes) -> None:
        self.replaced += 1
        super().replace(path, content)


def with_additions(fixture: Fixture, state: dict[str, Any], *additions: Addition) -> Fixture:
    """Restart from a state with these additions."""
    line = encode_checked(b"{" + b'"format":1}')  # the state is given; only the additions are decoded
    content = b"\n".join([line, *[encode_checked(each.encode()) for each in additions]])
    return fixture.restarted(state | {ADDITIONS: decode_state(content)[ADDITIONS]})


def add(fixture: Fixture, name: str) -> Addition:
    """Create a channel as the broker does; return what it saves."""
    addition = fixture.topic.addition([name])
    fixture.channel(name)
    return addition


def depths(fixture: Fixture) -> dict[str, tuple[int, int, int]]:
    return {name: fixture.counts(name) for name in fixture.topic.channels}


def test_channels_get_the_messages_since_they_were_created() -> None:
    fixture = Fixture()
    fixture.channel("a")
    fixture.publish(b"1", b"2")
    state = fixture.topic.snapshot()
    fixture.publish(b"3")
    fixture.publish(b"later 1", defer_ms=1000)
    first = add(fixture, "b")
    fixture.publish(b"4")
    fixture.publish(b"later 2", defer_ms=1000)
    fixture.publish(b"of b", only="b")
    second = add(fixture, "c")
    fixture.publish(b"5")
    restarted = with_additions(fixture, state, first, second)
    assert depths(restarted) == depths(fixture) == {"a": (5, 0, 2), "b": (2, 0, 2), "c": (1, 0, 0)}
    for each in (fixture, restarted):
        each.pass_ms(2000)
    for name in "abc":
        assert sorted(restarted.drain(name)) == sorted(fixture.drain(name))


def test_first_channel_gets_what_has_waited_for_it() -> None:
    fixture = Fixture()
    fixture.publish(b"1")
    state = fixture.topic.snapshot()
    fixture.publish(b"later", defer_ms=1000)
    fixture.publish(b"2")
    first = add(fixture, "a")
    second = add(fixture, "b")
    fixture.publish(b"3")
    restarted = with_additions(fixture, state, first, second)
    assert depths(restarted) == depths(fixture) == {"a": (3, 0, 1), "b": (1, 0, 0)}


def test_what_only_an_ephemeral_channel_had_is_not_given_to_a_later_one() -> None:
    fixture = Fixture()
    state = fixture.topic.snapshot()
    fixture.channel("gone#ephemeral")
    fixture.publish(b"1")
    fixture.publish(b"later", defer_ms=1000)
    addition = add(fixture, "a")
    fixture.publish(b"2")
    restarted = with_additions(fixture, state, addition)
    assert depths(restarted) == {"a": fixture.counts("a")} == {"a": (1, 0, 0)}


def test_deferred_message_below_the_high_watermark_needs_a_whole_state() -> None:
    """The TTL has moved the high watermark past it: with an addition, a restart would drop it."""
    fixture = Fixture()
    fixture.publish(b"later", defer_ms=1000)
    fixture.publish(b"1", b"2")
    assert not fixture.topic.can_save_additions
    fixture.topic.limits.expire_before(3)
    assert not fixture.topic.can_save_additions
    fixture.channel("a")
    assert fixture.topic.can_save_additions
    assert depths(fixture) == {"a": (0, 0, 1)}


def test_paused_topic_keeps_its_messages() -> None:
    fixture = Fixture()
    fixture.channel("a")
    fixture.topic.pause()
    fixture.publish(b"1")
    state = fixture.topic.snapshot()
    addition = add(fixture, "b")
    restarted = with_additions(fixture, state, addition)
    assert depths(restarted) == {"a": (0, 0, 0), "b": (0, 0, 0)}
    restarted.topic.unpause()
    assert depths(restarted) == {"a": (1, 0, 0), "b": (1, 0, 0)}


def test_paused_topic_that_has_dropped_messages() -> None:
    fixture = Fixture()
    fixture.channel("a")
    fixture.topic.pause()
    fixture.publish(b"1", b"2", b"3")
    state = fixture.topic.snapshot()
    fixture.topic.limits.expire_before(2)
    addition = add(fixture, "b")
    restarted = with_additions(fixture, state, addition)
    assert depths(restarted) == depths(fixture) == {"a": (0, 0, 0), "b": (0, 0, 0)}
    assert restarted.topic.depth == 1
    restarted.topic.unpause()
    assert depths(restarted) == {"a": (1, 0, 0), "b": (1, 0, 0)}


def test_log_that_lost_its_end_in_a_power_cut() -> None:
    """Sequences that the addition knows are used again: the state must be saved before."""
    fixture = Fixture()
    fixture.channel("a")
    state = fixture.topic.snapshot()
    addition = Addition(["b"], 5)
    restarted = with_additions(fixture, state, addition)
    assert restarted.was_ahead
    restarted.publish(b"new")
    assert depths(restarted) == {"a": (1, 0, 0), "b": (1, 0, 0)}


def test_addition_leaves_out_what_is_not_saved() -> None:
    fixture = Fixture()
    fixture.channel("there")
    addition = fixture.topic.addition(["new", "there", "x#ephemeral", "new", "other"])
    assert addition.names == ["new", "other"]


def test_incomplete_end_is_ignored_wherever_it_was_cut() -> None:
    state = encode_checked(b'{"format":1,"name":"t"}')
    one, two = (encode_checked(Addition([name], 7).encode()) for name in "ab")
    before = state + b"\n" + one
    for cut in range(len(two)):
        decoded = decode_state(before + b"\n" + two[:cut], "t")
        assert additions_of(decoded) == [Addition(["a"], 7)]
        assert decoded.get(INCOMPLETE, 0) == cut
    assert additions_of(decode_state(before + b"\n" + two, "t")) == [Addition(["a"], 7), Addition(["b"], 7)]


def test_power_cut_leaves_zeros_instead_of_some_bytes() -> None:
    state = encode_checked(b'{"format":1,"name":"t"}') + b"\n"
    line = encode_checked(Addition(["a"], 7).encode()) + b"\n"
    for first in range(len(line) + 1):
        for last in range(first + 1, len(line) + 1):
            torn = line[:first] + bytes(last - first) + line[last:]
            assert additions_of(decode_state(state + torn, "t")) == []


async def test_state_ends_with_its_line(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d", **NEVER) as api:
        assert await api.post("/topic/create", topic="t") == DONE
        for name in ("", "a", "b"):
            if name:
                assert await api.post("/channel/create", topic="t", channel=name) == DONE
            content = (tmp_path / TOPIC / "state.json").read_bytes()
            assert content.endswith(b"}\n")
            assert content.count(b"\n") == 1 + len(additions_of(decode_state(content, "t")))


def test_damage_before_the_end_is_damage() -> None:
    state = encode_checked(b'{"format":1,"name":"t"}')
    one, two = (encode_checked(Addition([name], 7).encode()) for name in "ab")
    with pytest.raises(ValueError, match="checksum"):
        decode_state(b"\n".join([state, one.replace(b'"a"', b'"x"'), two]), "t")


def test_state_written_by_hand_may_have_several_lines() -> None:
    assert decode_state(b'{\n"format": 1,\n"name": "t"\n}\n', "t") == {"format": 1, "name": "t"}


async def test_creating_a_channel_writes_as_much_with_many_channels(tmp_path: Path) -> None:
    files = CountingFiles()
    names = [f"c{number:03}" for number in range(200)]
    async with running_api(tmp_path / "d", files=files, **NEVER) as api:
        assert await api.post("/topic/create", topic="t") == DONE
        costs = []
        for name in names:
            before = files.written_bytes, files.syncs, files.replaced
            assert await api.post("/channel/create", topic="t", channel=name) == DONE
            after = files.written_bytes, files.syncs, files.replaced
            costs.append(tuple(new - old for new, old in zip(after, before, strict=True)))
        assert set(costs) == {costs[0]}
        assert costs[0][1:] == (1, 0)
        async with another(api, tmp_path / "d") as restarted:
            (topic,) = (await restarted.stats(topic="t"))["topics"]
            assert [each["channel_name"] for each in topic["channels"]] == names


async def test_a_linked_state_is_not_changed(tmp_path: Path) -> None:
    """A backup links the state and the messages at one moment; a later line is about later messages."""
    async with running_api(tmp_path / "d", **NEVER) as api:
        assert await api.post("/topic/create", topic="t") == DONE
        assert await api.post("/channel/create", topic="t", channel="a") == DONE
        state, link = tmp_path / TOPIC / "state.json", tmp_path / "link"
        link.hardlink_to(state)
        before = link.read_bytes()
        for name in "bc":
            assert await api.post("/channel/create", topic="t", channel=name) == DONE
        assert link.read_bytes() == before
        assert (
            len(additions_of(decode_state(state.read_bytes(), "t"))) == 1
        )  # only the first needed a whole state


async def test_deleted_channel_stays_deleted(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d", **NEVER) as api:
        assert await api.post("/topic/create", topic="t") == DONE
        for name in "abc":
            assert await api.post("/channel/create", topic="t", channel=name) == DONE
        assert await api.post("/channel/delete", topic="t", channel="b") == DONE
        assert await api.post("/channel/create", topic="t", channel="d") == DONE
        assert additions_of(decode_state((tmp_path / TOPIC / "state.json").read_bytes(), "t")) == [
            Addition(["d"], 0)
        ]
        async with another(api, tmp_path / "d") as restarted:
            (topic,) = (await restarted.stats(topic="t"))["topics"]
            assert [each["channel_name"] for each in topic["channels"]] == ["a", "c", "d"]


async def test_channel_after_an_addition_that_was_not_written_completely(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The broker writes a whole state first: after the rest of a line, nothing could be read."""
    async with running_api(tmp_path / "d", **NEVER) as api:
        assert await api.post("/pub", b"kept", topic="t") == OK
        for name in "ab":
            assert await api.post("/channel/create", topic="t", channel=name) == DONE
        content = (tmp_path / TOPIC / "state.json").read_bytes()
        (tmp_path / TOPIC / "state.json").write_bytes(content[:-5])
        async with another(api, tmp_path / "d", **NEVER) as restarted:
            assert "state.json: its last" in caplog.text
            assert await restarted.post("/channel/create", topic="t", channel="c") == DONE
            state = tmp_path / "d-copy" / "topics" / "t.topic" / "state.json"
            decoded = decode_state(state.read_bytes(), "t")
            assert INCOMPLETE not in decoded
            assert [each["name"] for each in decoded["channels"]] == ["a", "c"]
