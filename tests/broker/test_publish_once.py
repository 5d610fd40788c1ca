"""Tests for numbered batches: stored once, however often they are sent, and whatever happens in between."""

import json
import shutil
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from struct import pack
from typing import Any

import httpx
import pytest
import trio

from broker.api import Api, running_api
from broker.support import FailingFiles, HeldFiles, connected, mpub, running_broker, settle, until
from log.support import CountingFiles
from trio_nsq.broker.state import producers
from trio_nsq.broker.storage import retention
from trio_nsq.broker.storage.data_folder import decode_state
from trio_nsq.log import DiskLog

HOUR_MS = 3_600_000
PUBLISHED, REPEATED = (200, "OK", "published"), (200, "OK", "repeated")


async def send(
    api: Api | httpx.AsyncClient, number: int, *bodies: bytes, producer: str = "p", **query: Any
) -> tuple[int, str, str | None]:
    """Send one batch as binary /mpub; return the status, the text or error code, and the result for the
    batch.
    """
    content = pack(">i", len(bodies)) + b"".join(pack(">i", len(body)) + body for body in bodies)
    client = api if isinstance(api, httpx.AsyncClient) else api.client
    params: dict[str, Any] = {"topic": "t", "binary": "true", "producer": producer, "number": number} | query
    response = await client.post("/mpub", params=params, content=content)
    return response.status_code, _text(response), response.headers.get("NSQ-Batch")


def _text(response: httpx.Response) -> str:
    return response.text if response.status_code == 200 else response.json()["message"]


async def number_of(api: Api, producer: str = "p", topic: str = "t") -> int | None:
    response = await api.get("/topic/producer", topic=topic, producer=producer)
    answer = response.json()
    assert answer.pop("may_be_forgotten") is (producer in ("late", "other0"))
    assert answer == {"producer": producer, "number": answer["number"], "instance": None}
    number: int | None = answer["number"]
    return number


async def stored(api: Api, topic: str = "t") -> list[str]:
    """Return the bodies in the topic's log."""
    lines = (await api.get("/topic/read", topic=topic)).text.splitlines()
    return [json.loads(line)["body"] for line in lines]


# ---------------------------------------------------------------------- without restarts


async def test_other_producers_cannot_displace_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Beyond the maximum, new producers are refused until one has been unused for an hour."""
    monkeypatch.setattr(producers, "MAX_PRODUCERS", 5)
    now_ns = time.time_ns()
    async with running_api(tmp_path / "d") as api:
        monkeypatch.setattr(time, "time_ns", lambda: now_ns)
        assert await send(api, 1, b"first") == PUBLISHED
        for other in range(4):
            assert await send(api, 1, b"other", producer=f"other{other}") == PUBLISHED
        status, text, told = await send(api, 1, b"late", producer="late")
        assert (status, told) == (503, None)
        assert "remembers" in text
        assert await number_of(api, "late") is None
        assert await send(api, 1, b"first") == REPEATED
        assert await send(api, 2, b"second") == PUBLISHED
        assert await stored(api) == ["first", *["other"] * 4, "second"]
        now_ns += HOUR_MS * 1_000_000
        assert await send(api, 1, b"late", producer="late") == PUBLISHED
        assert "forgot the batch number of producer other0" in caplog.text
        assert await number_of(api, "other0") is None
        assert await send(api, 2, b"second") == REPEATED


async def test_only_a_higher_number_is_stored(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        assert await send(api, 3, b"a", b"b") == PUBLISHED
        assert await send(api, 3, b"a", b"b") == REPEATED
        assert await send(api, 0, b"zero") == REPEATED
        assert await send(api, 2**63 - 2, b"c") == PUBLISHED
        assert await send(api, 2**63 - 1, b"d") == PUBLISHED
        assert await send(api, 2**63 - 1, b"d") == REPEATED
        assert await stored(api) == ["a", "b", "c", "d"]
        assert await number_of(api) == 2**63 - 1


async def test_numbers_are_per_producer_and_topic(tmp_path: Path) -> None:
    longest = "aZ0._:-" + "x" * 57
    async with running_api(tmp_path / "d") as api:
        assert await send(api, 5, b"a") == PUBLISHED
        assert await send(api, 5, b"b", producer=longest) == PUBLISHED
        assert await send(api, 5, b"c", topic="other") == PUBLISHED
        assert await number_of(api, longest) == 5
        assert await number_of(api, "nobody") is None
        unknown = await api.get("/topic/producer", topic="nowhere", producer="p")
        assert (unknown.status_code, unknown.json()) == (404, {"message": "TOPIC_NOT_FOUND"})


async def test_every_way_to_publish_over_http_accepts_a_number(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        for path, body, number in (("/pub", b"one", 1), ("/mpub", b"two\nthree\n", 2)):
            for expected in ("published", "repeated"):
                answer = await api.client.post(
                    path, params={"topic": "t", "producer": "p", "number": number}, content=body
                )
                assert (answer.status_code, answer.text) == (200, "OK")
                assert answer.headers["NSQ-Batch"] == expected
        assert await stored(api) == ["one", "two", "three"]


async def test_without_a_number_nothing_changes(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        for path in ("/pub", "/mpub"):
            answer = await api.client.post(path, params={"topic": "t", "defer": HOUR_MS}, content=b"x")
            assert (answer.text, answer.headers.get("NSQ-Batch")) == ("OK", None)
    log = DiskLog(tmp_path / "d" / "topics" / "t.topic")
    assert [(record.metadata, bool(record.due_ns)) for record in log.read(0)] == [(b"", True), (b"", False)]
    log.close()
    assert "producers" not in decode_state(
        (tmp_path / "d" / "topics" / "t.topic" / "state.json").read_bytes()
    )


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ({"producer": "p"}, "MISSING_ARG_NUMBER"),
        ({"number": "1"}, "MISSING_ARG_PRODUCER"),
        ({"producer": "", "number": "1"}, "INVALID_PRODUCER: "),
        ({"producer": "x" * 65, "number": "1"}, "INVALID_PRODUCER: "),
        ({"producer": "a b", "number": "1"}, "INVALID_PRODUCER: "),
        ({"producer": "ä", "number": "1"}, "INVALID_PRODUCER: "),
        ({"producer": "p\n", "number": "1"}, "INVALID_PRODUCER: "),
        ({"producer": "p", "number": ""}, "INVALID_NUMBER: "),
        ({"producer": "p", "number": "-1"}, "INVALID_NUMBER: "),
        ({"producer": "p", "number": "+1"}, "INVALID_NUMBER: "),
        ({"producer": "p", "number": "1.0"}, "INVALID_NUMBER: "),
        ({"producer": "p", "number": str(2**63)}, "INVALID_NUMBER: "),
        ({"producer": "p", "number": "1" * 5000}, "INVALID_NUMBER: "),
        ({"producer": "p", "number": "1", "first": "2"}, "INVALID_FIRST: "),
        ({"producer": "p", "number": "1", "first": "x"}, "INVALID_FIRST: "),
        ({"producer": "p", "number": "1", "defer": "soon"}, "INVALID_DEFER"),
    ],
)
async def test_invalid_names_and_numbers(tmp_path: Path, query: dict[str, str], error: str) -> None:
    async with running_api(tmp_path / "d") as api:
        for there in ([], ["t"]):
            for path in ("/pub", "/mpub"):
                status, text = await api.post(path, b"x", topic="t", **query)
                assert (status, text[: len(error)]) == (400, error)
            assert [topic["topic_name"] for topic in (await api.stats())["topics"]] == there
            await api.post("/topic/create", topic="t")
        assert await stored(api) == []


async def test_batch_that_is_stored_in_part_is_refused(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        assert await send(api, 14, b"a", first=10) == PUBLISHED
        refused = (409, "OVERLAP: numbers up to 14 of this producer are stored", None)
        assert await send(api, 19, b"b", first=14) == refused
        assert await send(api, 19, b"b", first=0) == refused
        assert await send(api, 14, b"a", first=10) == REPEATED
        assert await send(api, 12, b"a", first=12) == REPEATED
        assert await send(api, 19, b"b", first=15) == PUBLISHED
        assert await send(api, 30, b"c", first=25) == PUBLISHED
        assert await send(api, 31, b"d") == PUBLISHED
        assert await stored(api) == ["a", "b", "c", "d"]


async def test_batch_without_messages_has_no_number(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        assert await api.post("/mpub", b"\n\n", topic="t", producer="p", number=7) == (200, "OK")
        assert await send(api, 3, b"a") == PUBLISHED


async def test_consumers_do_not_see_the_numbers(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.post("/channel/create", topic="t", channel="c")
        await send(api, 1, b"a", b"b")
        await send(api, 2, b"later", defer=HOUR_MS)
        await api.tcp.subscribe("t", "c", ready_count=10)
        assert [(await api.tcp.message()).body for _ in range(2)] == [b"a", b"b"]
        await api.tcp.nothing_more()
        channel = await api.channel("t", "c")
        assert (channel["message_count"], channel["deferred_count"]) == (3, 1)
        (line,) = (await api.get("/channel/deferred", topic="t", channel="c")).text.splitlines()
        assert json.loads(line)["body"] == "later"
        # They are not treated as dead letters either.
        assert (await api.get("/topic/read", topic="t", format="json")).text.count("dead") == 0


async def test_emptied_topic_keeps_numbers_and_a_deleted_one_does_not(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await send(api, 1, b"a")
        await api.post("/topic/empty", topic="t")
        assert await send(api, 1, b"a") == REPEATED
        await api.post("/topic/delete", topic="t")
        assert await send(api, 1, b"a") == PUBLISHED
        assert await stored(api) == ["a"]


async def test_ephemeral_topics_keep_numbers_while_they_exist(tmp_path: Path) -> None:
    topic = "t#ephemeral"
    async with running_api(tmp_path / "d") as api:
        assert await send(api, 1, b"a", topic=topic) == PUBLISHED
        assert await send(api, 1, b"a", topic=topic) == REPEATED
    async with running_api(tmp_path / "d") as api:
        assert await send(api, 1, b"a", topic=topic) == PUBLISHED


async def test_batch_refused_by_a_full_topic_is_stored_later(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.post("/topic/create", topic="t")
        await api.send("PUT", "/topic/settings?topic=t", body=b'{"max_messages": 2}')
        assert await send(api, 1, b"a", b"b") == PUBLISHED
        assert (await send(api, 2, b"c"))[0] == 503
        assert await send(api, 1, b"a", b"b") == REPEATED  # needs no room
        await api.send("PUT", "/topic/settings?topic=t", body=b'{"max_messages": null}')
        assert await send(api, 2, b"c") == PUBLISHED


# ---------------------------------------------------------------------- during a write


async def send_together(
    address: str, files: HeldFiles, numbers: Sequence[int], first: Sequence[int] | None = None
) -> list[tuple[int, str, str | None]]:
    """Send batches, each while the previous one waits for the disk; return the answers after the disk
    continues.
    """
    answers: dict[int, tuple[int, str, str | None]] = {}
    queries: list[dict[str, Any]] = (
        [{} for _ in numbers] if first is None else [{"first": each} for each in first]
    )

    async def one(at: int, number: int) -> None:
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=20) as client:
            answers[at] = await send(client, number, b"body of %d" % number, **queries[at])

    async with trio.open_nursery() as nursery:
        for at, number in enumerate(numbers):
            nursery.start_soon(one, at, number)
            await files.reached()
            await settle()
        assert not answers
        files.release()
    return [answers[at] for at in range(len(numbers))]


async def test_batch_in_part_the_same_as_one_in_progress_is_refused(tmp_path: Path) -> None:
    files = HeldFiles()
    async with running_api(tmp_path / "d", files=files) as api:
        await api.post("/pub", b"before", topic="t")
        files.hold("sync")
        address = str(api.client.base_url.netloc, "ascii")
        answers = await send_together(address, files, [20, 25], first=[10, 15])
        assert [answer[:2] for answer in answers] == [
            (200, "OK"),
            (409, "OVERLAP: numbers up to 20 of this producer are stored"),
        ]


class FailingHeldFiles(HeldFiles):
    """Files that can also fail this many times after their release."""

    fails = 0

    def sync(self, fd: int) -> None:
        super().sync(fd)
        if self.fails:
            self.fails -= 1
            raise OSError(5, "Input/output error")


async def test_repeated_batch_waits_for_the_first_to_be_stored(tmp_path: Path) -> None:
    files = FailingHeldFiles()
    async with running_broker(tmp_path / "d", files=files) as bound, trio.open_nursery():
        assert bound.http_address is not None
        async with connected(bound.tcp_address) as client:
            await client.publish("t", b"first")
        files.hold("sync")
        answers = await send_together(bound.http_address, files, [5, 5, 4, 6, 5])
        assert answers == [PUBLISHED, REPEATED, REPEATED, PUBLISHED, REPEATED]


async def test_batch_sent_twice_while_it_waits_for_another_is_stored_once(tmp_path: Path) -> None:
    files = HeldFiles()
    async with running_api(tmp_path / "d", files=files) as api:
        await api.post("/pub", b"first", topic="t")
        files.hold("sync")
        answers = await send_together(str(api.client.base_url.netloc, "ascii"), files, [5, 6, 6])
        assert answers[0] == PUBLISHED
        assert sorted(answers[1:]) == sorted([PUBLISHED, REPEATED]), "either may be first"
        assert await stored(api) == ["first", "body of 5", "body of 6"]


async def test_all_batches_behind_a_failed_one_fail(tmp_path: Path) -> None:
    """If a later number were stored, the retried earlier one would be treated as a repeat."""
    files = FailingHeldFiles()
    async with running_api(tmp_path / "d", files=files) as api:
        await api.post("/pub", b"first", topic="t")
        address = str(api.client.base_url.netloc, "ascii")
        files.hold("sync")
        files.fails = 1
        answers = await send_together(address, files, [5, 5, 6])
        assert [status for status, _, _ in answers] == [503] * 3
        assert all("Input/output error" in text for _, text, _ in answers)
        assert await number_of(api) is None
        assert [await send(api, number, b"%d" % number) for number in (5, 6)] == [PUBLISHED] * 2
        assert await stored(api) == ["first", "5", "6"]


async def test_full_disk_loses_neither_the_batch_nor_its_number(tmp_path: Path) -> None:
    files = FailingFiles()
    async with running_api(tmp_path / "d", files=files) as api:
        assert await send(api, 1, b"a") == PUBLISHED
        files.full_after = 80
        assert (await send(api, 2, b"x" * 100))[0] == 503
        assert await send(api, 1, b"a") == REPEATED
        files.full_after = None
        assert await send(api, 2, b"b") == PUBLISHED
        assert await stored(api) == ["a", "b"]


# ---------------------------------------------------------------------- restarts


@pytest.mark.parametrize("saved", [False, True])
async def test_numbers_survive_a_kill(tmp_path: Path, saved: bool) -> None:
    """From the state, the log alone, or the state and later records."""
    async with running_api(tmp_path / "d", checkpoint_interval_ms=HOUR_MS, max_bytes_per_file=300) as api:
        await send(api, 1, b"a" * 100, producer="before")
        await send(api, 1, b"b" * 100)
        if saved:
            await api.post("/channel/create", topic="t", channel="c")
        await send(api, 8, b"c" * 100)
        await send(api, 2, b"d" * 100, producer="after", defer=HOUR_MS)
        shutil.copytree(tmp_path / "d", tmp_path / "killed")
    async with running_api(tmp_path / "killed") as api:
        assert [await number_of(api, name) for name in ("before", "p", "after")] == [1, 8, 2]
        assert await send(api, 8, b"c") == REPEATED
        assert await send(api, 9, b"e") == PUBLISHED
        assert [body[0] for body in await stored(api)] == ["a", "b", "c", "d", "e"]


async def test_number_outlives_the_file_with_its_batch(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d", max_bytes_per_file=300, checkpoint_interval_ms=20) as api:
        await api.post("/channel/create", topic="t", channel="c")
        await send(api, 1, b"a" * 100)
        await api.tcp.subscribe("t", "c", ready_count=1)
        for _ in range(6):
            await api.post("/pub", b"b" * 100, topic="t")
        for _ in range(7):
            await api.tcp.send(b"FIN %s\n" % (await api.tcp.message()).id)
        first = tmp_path / "d" / "topics" / "t.topic" / f"{0:020}.log"
        await until(lambda: not first.exists())
        assert await send(api, 1, b"a") == REPEATED
    for _ in range(2):
        async with running_api(tmp_path / "d") as api:
            assert await send(api, 1, b"a") == REPEATED


async def test_start_reads_only_records_after_the_saved_state(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d", checkpoint_interval_ms=HOUR_MS, max_bytes_per_file=10_000) as api:
        for number in range(30):
            await send(api, number, b"x" * 5_000)
        await api.post("/channel/create", topic="t", channel="c")  # and so the topic is saved
        await send(api, 30, b"y" * 5_000)
        shutil.copytree(tmp_path / "d", tmp_path / "killed")
    files = CountingFiles()
    async with running_api(tmp_path / "killed", files=files) as api:
        assert files.read_bytes < 40_000
        assert await number_of(api) == 30


async def test_log_that_lost_its_end_loses_those_numbers(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await send(api, 1, b"a")
        await send(api, 1, b"b", producer="q")
    (segment,) = (tmp_path / "d" / "topics" / "t.topic").glob("*.log")
    segment.write_bytes(segment.read_bytes()[:-10])
    async with running_api(tmp_path / "d") as api:
        assert await send(api, 1, b"a") == REPEATED
        assert await send(api, 1, b"b", producer="q") == PUBLISHED


class OrderedFiles(CountingFiles):
    """Records what was synced when a state was saved."""

    def __init__(self) -> None:
        super().__init__()
        self.unsynced = False
        self.saved_before: list[bool] = []

    def write(self, fd: int, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        super().write(fd, offset, parts)
        self.unsynced |= any(b"NSQB" in part for part in parts)

    def sync(self, fd: int) -> None:
        super().sync(fd)
        self.unsynced = False

    def replace(self, path: Path, content: bytes) -> None:
        if b'"producers":' in content:
            self.saved_before.append(self.unsynced)
        super().replace(path, content)


async def test_state_with_numbers_is_saved_after_their_messages_are_synced(tmp_path: Path) -> None:
    files = OrderedFiles()
    options = {"sync": "interval", "sync_timeout_ms": HOUR_MS, "checkpoint_interval_ms": HOUR_MS}
    async with running_api(tmp_path / "d", files=files, **options) as api:
        await send(api, 1, b"a")
        for number in range(2, 5):
            await send(api, number, b"a")
            assert files.unsynced
            await api.post("/channel/create", topic="t", channel=f"c{number}")
    assert files.saved_before
    assert not any(files.saved_before)


class OnceHeldFiles(HeldFiles):
    """Holds only operations that wait already."""

    def pass_others(self) -> None:
        self._held = set()


async def test_save_waits_for_a_running_sync(tmp_path: Path) -> None:
    files = OnceHeldFiles()
    state = tmp_path / "d" / "topics" / "t.topic" / "state.json"
    options = {"sync": "interval", "sync_every": 2, "sync_timeout_ms": HOUR_MS}
    async with running_api(tmp_path / "d", files=files, checkpoint_interval_ms=HOUR_MS, **options) as api:
        await send(api, 1, b"a")
        files.hold("sync")
        await send(api, 2, b"b")
        await files.reached()
        files.pass_others()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(api.post, "/topic/pause", topic="t"))
            await settle()
            assert not state.exists()
            files.release()
        assert decode_state(state.read_bytes())["producers"] == [["p", 2, 1]]


async def test_numbers_that_cannot_be_synced_are_not_saved(tmp_path: Path) -> None:
    files = FailingFiles()
    options = {"sync": "interval", "sync_timeout_ms": HOUR_MS, "checkpoint_interval_ms": HOUR_MS}
    async with running_api(tmp_path / "d", files=files, **options) as api:
        await send(api, 1, b"a")
        files.sync_fails = True
        status, text = await api.post("/channel/create", topic="t", channel="c")
        assert (status, "cannot be" in text or "cannot save" in text) == (503, True)
        assert not (tmp_path / "d" / "topics" / "t.topic" / "state.json").exists()
        files.sync_fails = False
        assert await api.post("/channel/create", topic="t", channel="c") == (200, "")


async def test_carried_forward_messages_lose_their_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "PINNED_BYTES", 20_000)
    monkeypatch.setattr(retention, "CARRIED_MESSAGES_SHARE", 0.5)
    monkeypatch.setattr(retention, "RETRY_NS", 1)  # a checkpoint may run before the last FIN
    async with running_api(tmp_path / "d", max_bytes_per_file=10_000, checkpoint_interval_ms=20) as api:
        await api.post("/channel/create", topic="t", channel="c")
        await send(api, 1, *(b"%04d" % n * 20 for n in range(100)))
        for _ in range(5):
            await api.tcp.send(mpub("t", *(b"x" * 80 for _ in range(100))))
            await api.tcp.ok()
        await api.tcp.subscribe("t", "c", ready_count=600)
        first, *others = [await api.tcp.message() for _ in range(600)]
        await api.tcp.send(b"".join(b"FIN %s\n" % each.id for each in others))
        path = tmp_path / "d" / "topics" / "t.topic" / "stragglers"
        await until(path.exists)
        assert path.stat().st_size < 1000
        assert first.body in path.read_bytes()
        assert await send(api, 1, b"again") == REPEATED


async def test_unused_producer_is_forgotten(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        for producer in ("done", "other"):
            await api.post("/pub", b"x", topic="t", producer=producer, number=7)
        assert await api.post("/topic/producer/forget", topic="t", producer="done") == (200, "")
        assert await api.post("/topic/producer/forget", topic="t", producer="unknown") == (200, "")
        assert await api.post("/topic/producer/forget", topic="u", producer="done") == (
            404,
            "TOPIC_NOT_FOUND",
        )
        assert await api.post("/topic/producer/forget", topic="t") == (400, "MISSING_ARG_PRODUCER")
        told = [
            (await api.get("/topic/producer", topic="t", producer=producer)).json()["number"]
            for producer in ("done", "other")
        ]
        assert told == [None, 7]
    async with running_api(tmp_path / "d") as api:
        response = await api.get("/topic/producer", topic="t", producer="done")
        assert response.json()["number"] is None
