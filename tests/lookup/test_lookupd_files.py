"""Tests for the saved state of a discovery service, and for unusable folders and files."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
import trio.testing

from broker.support import PATIENCE_S, until
from lookup.support import Lookupd, ours, producer
from trio_nsq.log import Files
from trio_nsq.lookup.service.names_file import FILE_NAME, NamesFile
from trio_nsq.lookup.service.names_saver import SAVE_RETRY_S
from trio_nsq.protocol.errors import StartupError


async def names(lookupd: Lookupd) -> dict[str, list[str]]:
    async with httpx.AsyncClient(base_url=f"http://{lookupd.http_address}", timeout=PATIENCE_S) as client:
        topics = (await client.get("/topics")).json()["topics"]
        return {
            topic: (await client.get("/channels", params={"topic": topic})).json()["channels"]
            for topic in topics
        }


async def post(lookupd: Lookupd, path: str) -> None:
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        (await client.post(f"http://{lookupd.http_address}{path}")).raise_for_status()


def saved(folder: Path) -> Any:
    return json.loads((folder / FILE_NAME).read_bytes())["topics"]


async def test_restart_loses_only_ephemeral_names(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    async with ours(data_path=folder) as lookupd:
        async with producer(lookupd) as one:
            await one.register("REGISTER t c", "REGISTER t d#ephemeral", "REGISTER u#ephemeral e")
        await post(lookupd, "/channel/create?topic=v&channel=f")
        await post(lookupd, "/topic/create?topic=w")
        await post(lookupd, "/topic/delete?topic=w")
    async with ours(data_path=folder) as lookupd:
        assert await names(lookupd) == {"t": ["c"], "v": ["f"]}
    assert [path.name for path in folder.iterdir()] == [FILE_NAME]


async def test_without_a_folder_a_restart_loses_everything() -> None:
    async with ours() as lookupd:
        await post(lookupd, "/topic/create?topic=t")
    async with ours() as lookupd:
        assert await names(lookupd) == {}


async def test_names_are_saved_at_once_and_not_only_at_the_end(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with ours(data_path=tmp_path / "d") as lookupd:
        for topics in (["t"], ["t", "u"]):
            await post(lookupd, f"/topic/create?topic={topics[-1]}")
            with trio.fail_after(1):
                while not (tmp_path / "d" / FILE_NAME).exists() or [*saved(tmp_path / "d")] != topics:
                    await trio.sleep(0.01)


class BrokenDisk(Files):
    """A disk that cannot be written while `error` is not 0."""

    def __init__(self, error: int) -> None:
        self.error = error

    def replace(self, path: Path, content: bytes) -> None:
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        super().replace(path, content)


async def test_full_disk_stops_nothing_and_is_retried(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    disk = BrokenDisk(errno.ENOSPC)
    async with ours(data_path=tmp_path / "d", files=disk) as lookupd:
        await post(lookupd, "/topic/create?topic=t")
        assert await names(lookupd) == {"t": []}
        await until(lambda: "No space left on device" in caplog.text)
        disk.error = 0
        with trio.fail_after(SAVE_RETRY_S + 1):
            while not (tmp_path / "d" / FILE_NAME).exists():
                await trio.sleep(0.1)
        assert saved(tmp_path / "d") == {"t": []}


@pytest.mark.parametrize("error", [errno.EACCES, errno.EROFS])
async def test_read_only_folder_is_refused(tmp_path: Path, error: int) -> None:
    with pytest.raises(BaseExceptionGroup) as refused:
        async with ours(data_path=tmp_path / "d", files=BrokenDisk(error)):
            pass
    assert refused.group_contains(StartupError, match=r"--data-path: cannot write to .*/d: ")
    NamesFile(tmp_path / "d").close()


async def test_folder_in_use(tmp_path: Path) -> None:
    async with ours(data_path=tmp_path / "d"):
        with pytest.raises(StartupError, match=rf"--data-path: .*/d is in use by process {os.getpid()}, "):
            NamesFile(tmp_path / "d")
    NamesFile(tmp_path / "d").close()


def test_folder_that_cannot_be_created(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"--data-path: cannot use .*/no/d: No such file or directory"):
        NamesFile(tmp_path / "no" / "d")
    (tmp_path / "file").touch()
    with pytest.raises(StartupError, match=r"--data-path: cannot use .*/file: "):
        NamesFile(tmp_path / "file")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff",
        b"null",
        b"[" * 100_000,
        b'{"format": 2, "topics": {}}',
        b'{"format": 1}',
        b'{"format": 1, "topics": {"t": null}}',
        b'{"format": 1, "topics": {"|": []}}',
        b'{"format": 1, "topics": {"t": ["|"]}}',
        b'{"format": 1, "topics": {"t": [1]}}',
    ],
)
def test_damaged_file_is_not_overwritten(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    file = NamesFile(tmp_path)
    with pytest.raises(
        StartupError, match=r"lookupd\.json is damaged: .*; restore it, or move it away "
    ) as refused:
        file.load()
    assert str(refused.value).isprintable()
    file.close()
    assert (tmp_path / FILE_NAME).read_bytes() == content


async def test_service_with_a_damaged_file_releases_the_folder(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"{")
    with pytest.raises(BaseExceptionGroup) as refused:
        async with ours(data_path=tmp_path):
            pass
    assert refused.group_contains(StartupError, match="damaged")
    NamesFile(tmp_path).close()
