"""Archives with missing and damaged objects: verify names them, and a restore has everything else."""

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import httpx
import pytest
import trio

from broker.support import PATIENCE_S, connected, mpub, running_broker
from cli.support import Cli
from trio_nsq.archive.manifest import ArchiveDamaged
from trio_nsq.broker.restoring import restore_folder

OFFLINE = Cli("", "")
BODIES = [f"message {number}" for number in range(400)]


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive with some segments, and operations behind its last checkpoint."""
    folder = tmp_path_factory.mktemp("damage")
    archive = folder / "archive"
    for bodies in (BODIES[:200], BODIES[200:]):  # a start archives the segments that are there
        trio.run(_publish, folder / "data", archive, bodies)
    assert len(list(archive.glob("t/*/*.seg"))) > 3
    return archive


async def _publish(data: Path, archive: Path, bodies: list[str]) -> None:
    options: Any = {"archive": str(archive), "archive_interval_ms": 10, "max_bytes_per_file": 1000}
    async with running_broker(data, **options) as bound, connected(bound.tcp_address) as nsq:
        async with httpx.AsyncClient(base_url=f"http://{bound.http_address}", timeout=PATIENCE_S) as client:
            with trio.fail_after(PATIENCE_S):
                while (await client.get("/stats?format=json")).json()["archive"]["state"] != "archiving":
                    await trio.sleep(0.01)
        for at in range(0, len(bodies), 10):
            await nsq.send(mpub("t", *(body.encode() for body in bodies[at : at + 10])))
            await nsq.ok()


async def bodies_in(data: Path) -> list[str]:
    async with running_broker(data) as bound:
        async with httpx.AsyncClient(base_url=f"http://{bound.http_address}", timeout=PATIENCE_S) as client:
            answer = await client.get("/topic/read?topic=t&from=0&count=1000")
            lines = [json.loads(line) for line in answer.text.splitlines()]
            return [each["body"] for each in lines if "body" in each]


def a_segment(archive: Path) -> Path:
    return sorted(archive.glob("t/*/*.seg"))[1]


async def test_a_whole_archive(archive: Path, tmp_path: Path) -> None:
    _, damage = restore_folder(str(archive), tmp_path / "restored")
    assert damage == []
    assert await bodies_in(tmp_path / "restored") == BODIES
    shown = OFFLINE("archive", "status", str(archive), "--format", "json")
    last = json.loads(shown.out.splitlines()[-1])
    assert (shown.code, last["segments"] > 3, last["objects"] > 0) == (0, True, True)
    assert b"nothing is missing or damaged" in OFFLINE("archive", "verify", str(archive), "--all").out


async def test_a_missing_segment_costs_its_messages(archive: Path, tmp_path: Path) -> None:
    broken = Path(copytree(archive, tmp_path / "broken"))
    a_segment(broken).unlink()
    verified = OFFLINE("archive", "verify", str(broken))
    assert verified.code == 5
    assert f"{a_segment(archive).name} is missing".encode() in verified.out
    restored = OFFLINE("archive", "restore", str(broken), "--data-path", str(tmp_path / "restored"))
    assert restored.code == 5
    assert "is missing: messages are missing." in restored.err
    found = await bodies_in(tmp_path / "restored")
    assert 0 < len(BODIES) - len(found) < 50
    assert set(found) < set(BODIES)


async def test_a_damaged_segment_costs_its_damaged_records(archive: Path, tmp_path: Path) -> None:
    broken = Path(copytree(archive, tmp_path / "broken"))
    content = bytearray(a_segment(broken).read_bytes())
    content[len(content) // 2] ^= 0xFF
    a_segment(broken).write_bytes(content)
    _, (what,) = restore_folder(str(broken), tmp_path / "restored")
    assert what.endswith(f"{a_segment(archive).name} has other content than when it was archived")
    found = await bodies_in(tmp_path / "restored")
    assert 0 < len(BODIES) - len(found) < 50
    assert set(found) < set(BODIES)


@pytest.mark.parametrize("where", ["@checkpoints/*/0*", "@checkpoints/*/segments", "@stream/*/*"])
def test_other_objects_are_needed(archive: Path, tmp_path: Path, where: str) -> None:
    broken = Path(copytree(archive, tmp_path / "broken"))
    victims = sorted(broken.glob(where))
    victim = victims[-1] if where.startswith("@checkpoints") else victims[-2]
    content = victim.read_bytes()
    for damaged in (None, content[:-1] + bytes([content[-1] ^ 1]), content[:10], b""):
        if damaged is None:
            victim.unlink()
        else:
            victim.write_bytes(damaged)
        with pytest.raises(ArchiveDamaged):
            restore_folder(str(broken), tmp_path / "restored")
        assert OFFLINE("archive", "verify", str(broken)).code == 5
    victim.write_bytes(content)
    restore_folder(str(broken), tmp_path / "restored")


def test_prune(archive: Path, tmp_path: Path) -> None:
    copy = str(copytree(archive, tmp_path / "copy"))
    planned = OFFLINE("archive", "prune", copy, "--keep", "0s", "--dry-run").out
    pruned = OFFLINE("archive", "prune", copy, "--keep", "0s").out
    assert b"1 checkpoint and" in planned
    assert planned.replace(b"would be removed", b"removed") == pruned
    assert len(OFFLINE("archive", "status", copy, "--format", "json").out.splitlines()) == 1
    assert OFFLINE("archive", "verify", copy).code == 0


def test_there_is_no_archive(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere")
    for command in (
        ["status"],
        ["verify"],
        ["prune", "--keep", "1d"],
        ["restore", "--data-path", str(tmp_path / "d")],
    ):
        done = OFFLINE("archive", command[0], nowhere, *command[1:])
        assert (done.code, "is no archive of a broker" in done.err) == (1, True), done
    assert not (tmp_path / "d").exists()
