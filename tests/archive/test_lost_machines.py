"""Brokers whose machine is lost, again and again: each life begins with an empty disk, and the archive.

With `--archive-before-ok` no acknowledged message is lost, and no change that was acknowledged; a ledger outside the
broker knows them. A few lives by default; `FAULT_KILLS=50` for the long form.
"""

import os
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from shutil import rmtree

import pytest

from cli.support import Cli
from faults.ledger import MS, Ledger
from faults.load import MSG_TIMEOUT_MS, run_and_kill
from interop.peers import Broker, qcli_serve
from soak import in_soak
from storage.stores import Fault, Store, proxy

LIVES = int(os.environ.get("FAULT_KILLS", "2"))
SEED = int(os.environ.get("FAULT_SEED", "7"))
FORGOTTEN_MS = 30_000
"""What was finished so long before may come again: a busy machine delays checkpoints, and this test is about loss."""
FLAGS = (
    "--checkpoint-interval=200ms",
    "--max-bytes-per-file=50000",
    "--archive-before-ok",
    "--broadcast-address=127.0.0.1",
)
OFFLINE = Cli("", "")


def on_a_new_machine(
    folder: Path, archive: str, env: dict[str, str]
) -> Callable[[], AbstractContextManager[Broker]]:
    """Return what runs a broker with an empty disk, and its archive."""

    @contextmanager
    def start() -> Iterator[Broker]:
        data = folder / "data"
        if data.exists():
            rmtree(data)
        with qcli_serve(data, *FLAGS, f"--archive={archive}", f"--restore-from={archive}", env=env) as broker:
            yield broker

    return start


async def lose_machines(folder: Path, archive: str, env: dict[str, str]) -> None:
    ledger = Ledger(FORGOTTEN_MS * MS, MSG_TIMEOUT_MS * MS)
    start = on_a_new_machine(folder, archive, env)
    await run_and_kill(start, ledger, LIVES, random.Random(SEED), operators=True)
    verdict = ledger.judge()
    assert not verdict.wrong, f"{len(verdict.wrong)} wrong:\n" + "\n".join(verdict.wrong[:20])
    assert verdict.copies > 5 * LIVES


@pytest.mark.slow
async def test_nothing_acknowledged_is_lost_with_the_machine(tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    await lose_machines(tmp_path, str(archive), {})
    checked = OFFLINE("archive", "verify", str(archive), "--all")
    assert checked.code == 0, checked


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["s3", *in_soak("moto_s3", "azure")])
async def test_nothing_acknowledged_is_lost_with_a_bucket_that_loses_answers(
    tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    store: Store = request.getfixturevalue(kind)
    chance = random.Random(SEED)

    def judge(method: str, path: str) -> Fault | None:
        if method in ("PUT", "GET") and chance.random() < 0.1:
            return Fault(is_sent=chance.random() < 0.5, status=chance.choice((None, 500, 503)))
        return None

    place = store.new_place()
    if kind == "azure":  # its address is part of what is signed
        await lose_machines(tmp_path, place, store.env)
        return
    with proxy(store) as running:
        running.judge = judge
        await lose_machines(tmp_path, place, store.behind(running.endpoint).env)
