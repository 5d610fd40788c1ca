"""Tests for producers with a name over TCP: numbered publishes are stored once, in order, for one writer."""

import json
from pathlib import Path
from struct import pack
from typing import Any

import pytest

from broker.api import running_api
from broker.support import (
    BOTH_SYNCS,
    FailingFiles,
    HeldFiles,
    RawClient,
    connected,
    identify,
    mpub,
    pub,
    running_broker,
    settle,
)


def numbered(command: bytes, first: int) -> bytes:
    """Return a publish with the number of its first message."""
    line, _, rest = command.partition(b"\n")
    return b"%s %d\n%s" % (line, first, rest)


async def introduce(client: RawClient, name: str = "writer", instance: str = "i1") -> None:
    """IDENTIFY as a producer with a name."""
    await client.send(identify(feature_negotiation=True, producer=name, producer_instance=instance))
    frame = await client.frame()
    assert frame is not None
    assert json.loads(frame[1])["producer"] == name


async def claim(client: RawClient, topic: str = "t") -> dict[str, Any]:
    """Send PRODUCER; return the answer."""
    await client.send(b"PRODUCER %s\n" % topic.encode())
    frame = await client.frame()
    assert frame is not None
    assert frame[0] == 0, frame
    answer: dict[str, Any] = json.loads(frame[1])
    return answer


async def bodies(address: str, count: int, topic: str = "t") -> list[bytes]:
    """Read this many messages of a topic, and check that there are no more."""
    async with connected(address) as reader:
        await reader.subscribe(topic, "check", 100)
        found = []
        for _ in range(count):
            message = await reader.message()
            await reader.send(b"FIN %s\n" % message.id)
            found.append(message.body)
        await reader.nothing_more()
    return found


@BOTH_SYNCS
async def test_repeated_batches_get_ok_and_are_not_stored(tmp_path: Path, sync: str) -> None:
    async with running_broker(tmp_path / "d", sync=sync) as at, connected(at.tcp_address) as client:
        await introduce(client)
        assert await claim(client) == {"number": None}
        one, two, three = (
            numbered(pub("t", b"0"), 0),
            numbered(mpub("t", b"1", b"2"), 1),
            numbered(b"DPUB t 1\n" + pack(">i", 1) + b"3", 3),
        )
        await client.send(one + one + two + one + two + three + three)
        for _ in range(7):
            await client.ok()
        assert await claim(client) == {"number": 3, "instance": "i1"}
        await client.send(two)
        await client.ok()
        await client.send(pub("t", b"plain"))
        await client.ok()
        assert sorted(await bodies(at.tcp_address, 5)) == [b"0", b"1", b"2", b"3", b"plain"]


async def test_gap_and_overlap_are_refused_and_what_follows_them_too(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d") as at, connected(at.tcp_address) as client:
        await introduce(client)
        await claim(client)
        await client.send(numbered(pub("t", b"x"), 1) + numbered(pub("t", b"y"), 2))
        assert [(await client.error()).split()[0] for _ in range(2)] == ["E_PRODUCER_GAP"] * 2
        await client.send(numbered(mpub("t", b"0", b"1"), 0) + numbered(pub("t", b"z"), 3))
        await client.ok()
        assert (await client.error()).startswith("E_PRODUCER_GAP PUB failed GAP: number 2 of producer writer")
        await client.send(numbered(mpub("t", b"1", b"2"), 1))
        assert (await client.error()).startswith("E_PRODUCER_OVERLAP")
        await client.send(numbered(pub("t", b"2"), 2))
        await client.ok()
        assert await bodies(at.tcp_address, 3) == [b"0", b"1", b"2"]


async def test_newer_run_takes_over_and_the_older_one_cannot_return(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d") as at:
        async with connected(at.tcp_address) as old, connected(at.tcp_address) as new:
            await introduce(old)
            await claim(old)
            await old.send(numbered(pub("t", b"0"), 0))
            await old.ok()
            await introduce(new, instance="i2")
            assert await claim(new) == {"number": 0, "instance": "i1"}
            await old.send(numbered(pub("t", b"old"), 1) + numbered(pub("t", b"0"), 0))
            assert [(await old.error()).split()[0] for _ in range(2)] == ["E_PRODUCER_FENCED"] * 2
            await new.send(numbered(pub("t", b"1"), 1))
            await new.ok()
            # Another topic was not taken over.
            await claim(old, "other")
            await old.send(numbered(pub("other", b"x"), 0))
            await old.ok()
        async with connected(at.tcp_address) as old:
            await introduce(old)
            await old.send(b"PRODUCER t\n")
            assert (await old.error()).startswith("E_PRODUCER_FENCED")
        assert await bodies(at.tcp_address, 2) == [b"0", b"1"]


async def test_repetition_of_another_run_is_refused_also_after_a_restart(tmp_path: Path) -> None:
    """The broker no longer knows who has taken over, but what was stored tells."""
    async with running_broker(tmp_path / "d") as at, connected(at.tcp_address) as client:
        await introduce(client)
        await claim(client)
        await client.send(numbered(pub("t", b"0"), 0))
        await client.ok()
    async with running_broker(tmp_path / "d") as at:
        async with connected(at.tcp_address) as client:
            await introduce(client, instance="i2")
            assert await claim(client) == {"number": 0, "instance": "i1"}
            await client.send(numbered(pub("t", b"x"), 0) + numbered(mpub("t", b"x", b"y"), 0))
            assert [(await client.error()).split()[0] for _ in range(2)] == ["E_PRODUCER_FENCED"] * 2
        async with connected(at.tcp_address) as client:
            await introduce(client, instance="i3")
            await claim(client)
            await client.send(numbered(pub("t", b"1"), 1))
            await client.ok()
        assert await bodies(at.tcp_address, 2) == [b"0", b"1"]


async def test_claim_waits_for_batches_that_are_being_stored(tmp_path: Path) -> None:
    files = HeldFiles()
    async with running_broker(tmp_path / "d", files=files) as at:
        async with connected(at.tcp_address) as first, connected(at.tcp_address) as second:
            await introduce(first)
            await claim(first)
            await first.send(numbered(pub("t", b"0"), 0))
            await first.ok()
            files.hold("sync")
            await first.send(numbered(pub("t", b"1"), 1))
            await files.reached()
            await introduce(second)  # the same run, over another connection
            await second.send(b"PRODUCER t\n")
            await settle()
            await first.send(numbered(pub("t", b"late"), 2))
            await settle()
            files.release()
            frame = await second.frame()
            assert frame is not None
            assert json.loads(frame[1]) == {"number": 1, "instance": "i1"}
            await first.ok()
            assert (await first.error()).startswith("E_PRODUCER_FENCED")
        assert await bodies(at.tcp_address, 2) == [b"0", b"1"]


async def test_batch_that_follows_a_failed_one_is_refused(tmp_path: Path) -> None:
    files = FailingFiles()
    async with running_broker(tmp_path / "d", files=files) as at, connected(at.tcp_address) as client:
        await introduce(client)
        await claim(client)
        await client.send(numbered(pub("t", b"0"), 0))
        await client.ok()
        files.sync_fails = True
        await client.send(numbered(pub("t", b"1"), 1))
        assert (await client.error()).startswith("E_PUB_FAILED")
        files.sync_fails = False
        await client.send(numbered(pub("t", b"2"), 2))
        assert (await client.error()).startswith("E_PRODUCER_GAP")
        await client.send(numbered(pub("t", b"1"), 1) + numbered(pub("t", b"2"), 2))
        await client.ok()
        await client.ok()
        assert await bodies(at.tcp_address, 3) == [b"0", b"1", b"2"]


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (b"PUB t x\n", "E_INVALID PUB could not parse number x"),
        (b"PUB t -1\n", "E_INVALID PUB could not parse number -1"),
        (b"PUB t \n", "E_INVALID PUB could not parse number "),
        (b"MPUB t %d\n" % 2**62, f"E_INVALID MPUB could not parse number {2**62}"),
        (b"DPUB t 5 1.0\n", "E_INVALID DPUB could not parse number 1.0"),
        (b"PRODUCER\n", "E_INVALID PRODUCER insufficient number of parameters"),
        (b"PRODUCER a!b\n", 'E_BAD_TOPIC PRODUCER topic name "a!b" is not valid'),
    ],
)
async def test_malformed_numbers(tmp_path: Path, command: bytes, error: str) -> None:
    async with running_broker(tmp_path / "d") as at, connected(at.tcp_address) as client:
        await introduce(client)
        await client.send(command)
        assert await client.error() == error


@pytest.mark.parametrize("fields", [{"producer": "a b", "producer_instance": "i"}, {"producer": "a"}])
async def test_invalid_names(tmp_path: Path, fields: dict[str, str]) -> None:
    async with running_broker(tmp_path / "d") as at, connected(at.tcp_address) as client:
        await client.send(identify(feature_negotiation=True, **fields))
        assert (await client.error()).startswith("E_BAD_BODY IDENTIFY producer")


async def test_clients_without_a_name_are_served_as_by_nsqd(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d") as at:
        async with connected(at.tcp_address) as client:
            await client.send(numbered(pub("t", b"a"), 5) + numbered(pub("t", b"b"), 5))
            await client.ok()
            await client.ok()
            await client.send(b"PRODUCER t\n")
            assert await client.error() == "E_INVALID invalid command PRODUCER"
        assert await bodies(at.tcp_address, 2) == [b"a", b"b"]


async def test_unclaimed_topic_is_refused(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d") as at, connected(at.tcp_address) as client:
        await introduce(client)
        await client.send(numbered(pub("t", b"a"), 0))
        assert (await client.error()).startswith("E_PRODUCER_FENCED")


async def test_http_tells_the_number_and_the_instance(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        query = {"topic": "t", "producer": "p", "instance": "i1"}
        answers = []
        for number, instance in ((0, "i1"), (0, "i1"), (0, "i2"), (1, "i2"), (0, "i1")):
            params = query | {"number": str(number), "instance": instance}
            response = await api.client.post("/pub", params=params, content=b"x")
            answers.append(response.headers.get("NSQ-Batch") or response.json()["message"].split(":")[0])
        assert answers == ["published", "repeated", "FENCED", "published", "FENCED"]
        state = (await api.get("/topic/producer", topic="t", producer="p")).json()
        assert state == {"producer": "p", "number": 1, "instance": "i2", "may_be_forgotten": False}
        response = await api.client.post(
            "/pub", params=query | {"number": "2", "instance": "a b"}, content=b"x"
        )
        assert response.json()["message"].startswith("INVALID_INSTANCE")
