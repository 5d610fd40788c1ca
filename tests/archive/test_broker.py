"""A broker with an archive, in the test's trio run: what it tells of the archive, and what is refused."""

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from broker.metrics import OPENMETRICS, described, documented
from broker.support import PATIENCE_S, connected, dpub, mpub, pub, refusal, running_broker
from trio_nsq.archive.manifest import LEASE, read_manifest
from trio_nsq.broker import BrokerOptions
from trio_nsq.broker.restoring import restore_folder
from trio_nsq.broker.startup_check import startup_problems
from trio_nsq.broker.storage.verify import verify_broker_file
from trio_nsq.event_loop.pacing import Pacing
from trio_nsq.log.inspection.findings import Kind
from trio_nsq.protocol.errors import StartupError
from trio_nsq.storage import LocalStorage, StorageError


async def _archived(client: httpx.AsyncClient) -> dict[str, object]:
    """Wait until everything is archived, and return what `/stats` says."""
    with trio.fail_after(PATIENCE_S):
        while True:
            found: dict[str, object] = (await client.get("/stats?format=json")).json()["archive"]
            if found["state"] == "archiving" and not found["lag_operations"]:
                return found
            await trio.sleep(0.02)


async def _archive_of(client: httpx.AsyncClient) -> dict[str, Any]:
    found: dict[str, Any] = (await client.get("/stats?format=json")).json()["archive"]
    return found


def _client(address: object) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://{address}", timeout=PATIENCE_S)


async def test_what_a_broker_tells_of_its_archive(tmp_path: Path) -> None:
    archive = str(tmp_path / "archive")
    async with running_broker(tmp_path / "data", archive=archive, archive_interval_ms=10) as bound:
        async with _client(bound.http_address) as client, connected(bound.tcp_address) as nsq:
            await nsq.publish("t", b"one")
            found = await _archived(client)
            assert (found["url"], found["error"], found["checkpoints"]) == (archive, "", 1)
            ping = await client.get("/ping")
            assert (ping.text, ping.headers["X-NSQ-Archive-Lag"]) == ("OK", "0.0")
            answer = await client.get("/metrics", headers=OPENMETRICS)
            metrics = described(answer.text)
    of_archive = {name: about for name, about in metrics.items() if name.startswith("nsq_archive")}
    assert of_archive == documented("archive")
    async with running_broker(tmp_path / "without") as bound, _client(bound.http_address) as client:
        assert "archive" not in (await client.get("/stats?format=json")).json()
        assert "X-NSQ-Archive-Lag" not in (await client.get("/ping")).headers


async def test_a_broker_does_not_write_to_the_archive_of_another_one(tmp_path: Path) -> None:
    archive = str(tmp_path / "archive")
    for name in ("one", "one"):  # its own again
        async with running_broker(tmp_path / name, archive=archive, archive_interval_ms=10) as bound:
            async with _client(bound.http_address) as client, connected(bound.tcp_address) as nsq:
                await nsq.publish("t", b"one")
                await _archived(client)
    before = read_manifest(LocalStorage(tmp_path / "archive")).manifest
    pacing = Pacing(archive_stop_s=0.1)
    async with running_broker(tmp_path / "two", archive=archive, pacing=pacing) as bound:
        async with _client(bound.http_address) as client, connected(bound.tcp_address) as nsq:
            await nsq.publish("other", b"two")
            with trio.fail_after(PATIENCE_S):
                while "is the archive of another broker" not in (await _archive_of(client))["error"]:
                    await trio.sleep(0.02)
    assert read_manifest(LocalStorage(tmp_path / "archive")).manifest == before
    restore_folder(archive, tmp_path / "restored")
    async with (
        running_broker(tmp_path / "restored", archive=archive) as bound,
        _client(bound.http_address) as client,
    ):
        await _archived(client)
        assert [each["topic_name"] for each in (await client.get("/stats?format=json")).json()["topics"]] == [
            "t"
        ]


async def test_everything_is_restored(tmp_path: Path) -> None:
    archive = str(tmp_path / "archive")
    async with running_broker(tmp_path / "data", archive=archive, archive_before_ok=True) as bound:
        async with _client(bound.http_address) as client, connected(bound.tcp_address) as nsq:
            for path in (
                "topic/create?topic=t",
                "channel/create?topic=t&channel=c",
                "channel/pause?topic=t&channel=c",
            ):
                assert (await client.post(f"/{path}")).status_code == 200
            for command in (pub("t", b"one"), mpub("t", b"two", b"three"), dpub("t", 3_600_000, b"deferred")):
                await nsq.send(command)
                await nsq.ok()
            await client.post("/topic/create", params={"topic": "other"})
            before = (await client.get("/stats?format=json")).json()["topics"]
            restore_folder(archive, tmp_path / "while it runs")
            restore_folder(archive, tmp_path / "one topic", is_wanted=lambda name: name == "other")
    restore_folder(archive, tmp_path / "after it")
    async with running_broker(tmp_path / "one topic") as bound, _client(bound.http_address) as client:
        found = (await client.get("/stats?format=json")).json()["topics"]
        assert [each["topic_name"] for each in found] == ["other"]
    for name in ("while it runs", "after it"):
        async with running_broker(tmp_path / name) as bound, _client(bound.http_address) as client:
            found = (await client.get("/stats?format=json")).json()["topics"]
            keys = ("topic_name", "depth", "paused")
            assert [[each[key] for key in keys] for each in found] == [
                [each[key] for key in keys] for each in before
            ]
            (channel,) = next(each for each in found if each["topic_name"] == "t")["channels"]
            assert (channel["depth"], channel["deferred_count"], channel["paused"]) == (3, 1, True)
            lines = (await client.get("/topic/read?topic=t&from=0&count=10")).text.splitlines()
            assert [json.loads(line)["body"] for line in lines if "body" in line][:3] == [
                "one",
                "two",
                "three",
            ]


async def test_an_ok_waits_for_the_archive(tmp_path: Path) -> None:
    """Another broker writes to the archive: there is no OK. A stop does not wait for long."""
    archive = tmp_path / "archive"
    options: Any = {"archive": str(archive), "archive_before_ok": True, "pacing": Pacing(archive_stop_s=0.5)}
    with LocalStorage(archive).hold(LEASE, lambda holder: StorageError(holder)):
        async with running_broker(tmp_path / "data", **options) as bound:
            async with connected(bound.tcp_address) as nsq:
                await nsq.send(pub("t", b"one"))
                with trio.move_on_after(0.3):
                    await nsq.frame()
                    pytest.fail("there was an answer before the message was archived")


async def test_publishes_are_refused_while_the_archive_is_late(tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    pacing = Pacing(archive_late_s=0.1, archive_stop_s=0.5)
    options: Any = {"archive": str(archive), "archive_before_ok": True, "pacing": pacing}
    with ExitStack() as stack:
        stack.enter_context(LocalStorage(archive).hold(LEASE, lambda holder: StorageError(holder)))
        async with (
            running_broker(tmp_path / "data", **options) as bound,
            _client(bound.http_address) as client,
        ):
            with trio.fail_after(PATIENCE_S):
                while "the archive is late" not in (await client.get("/ping")).text:
                    await trio.sleep(0.02)
            refused = await client.post("/pub?topic=t", content=b"two")
            assert (refused.status_code, "the archive is late" in refused.text) == (503, True)
            stack.close()
            with trio.fail_after(PATIENCE_S):
                while (await client.get("/ping")).text != "OK":
                    await trio.sleep(0.02)
            assert (await client.post("/pub?topic=t", content=b"three")).text == "OK"


async def test_what_is_refused(tmp_path: Path) -> None:
    assert "--archive: the URL ftp://bucket/nsq is not supported" in await refusal(
        tmp_path / "data", archive="ftp://bucket/nsq"
    )
    inside = await refusal(tmp_path / "data", archive=str(tmp_path / "data" / "archive"))
    assert "is in the data folder" in inside
    settings = BrokerOptions(data_path=tmp_path / "data", archive="s3://")
    assert startup_problems(settings) == ["--archive: the URL s3:// has no bucket: write s3://BUCKET/FOLDER"]
    assert startup_problems(settings, is_member=True) == startup_problems(settings)
    nothing = str(tmp_path / "nothing")
    assert "--restore-from" in (refused := await refusal(tmp_path / "data", restore_from=nothing))
    from_nothing = BrokerOptions(tmp_path / "data", restore_from=nothing)
    assert [text in refused for text in startup_problems(from_nothing)] == [True]
    assert not startup_problems(replace(from_nothing, archive=nothing)), "this broker begins the archive"
    archive, data = str(tmp_path / "archive"), tmp_path / "full"
    async with running_broker(data, archive=archive, archive_interval_ms=10) as bound:
        async with _client(bound.http_address) as client:
            await _archived(client)
    with pytest.raises(StartupError, match=r"full is not empty, it has broker\.json: give a new folder"):
        restore_folder(archive, data)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").touch()
    with pytest.raises(StartupError, match=r"other is not empty, it has mine\.txt"):
        restore_folder(archive, tmp_path / "other")


async def test_an_interrupted_restore_is_not_used_and_can_be_repeated(tmp_path: Path) -> None:
    archive, to = str(tmp_path / "archive"), tmp_path / "restored"
    async with running_broker(tmp_path / "data", archive=archive, archive_interval_ms=10) as bound:
        async with _client(bound.http_address) as client, connected(bound.tcp_address) as nsq:
            await nsq.publish("t", b"one")
            await _archived(client)

    class _Interrupted(Exception):
        pass

    def interrupt(size: int) -> None:
        raise _Interrupted

    with pytest.raises(_Interrupted):
        restore_folder(archive, to, on_read=interrupt)
    assert "was not restored completely" in await refusal(to)
    assert "was not restored completely" in "".join(startup_problems(BrokerOptions(to)))
    assert not startup_problems(BrokerOptions(to, restore_from=archive))
    (finding,) = verify_broker_file(to)
    assert (finding.path, finding.kind, finding.messages) == (to / "restore-incomplete", Kind.DAMAGE, None)
    restore_folder(archive, to)
    assert not verify_broker_file(to)
    assert not startup_problems(BrokerOptions(to))
    async with running_broker(to) as bound, _client(bound.http_address) as client:
        assert '"body": "one"' in (await client.get("/topic/read?topic=t&from=0&count=10")).text.replace(
            '":"', '": "'
        )
