"""Open files that earlier versions kept, continue where they ended, and compare all messages.

`make kept` writes them: `tools/kept_files.py` says what they contain. 2026-11-23 is of the last commit before version 2
of the manifest of exports; 2026-11-29 is of the time before 0.1.0.
"""

import json
import signal
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tools.kept_files import KEPT, Written, body

from cli.support import Cli
from interop.peers import Broker, qcli_serve
from spark.support import cli_of, column, export, until
from trio_nsq.log.inspection.verify import verify_log

pytestmark = pytest.mark.slow

NAMES = sorted(KEPT.glob("*.zip"))


@dataclass(frozen=True)
class Kept:
    """A copy of kept files.

    Attributes:
        folder: The folders `data`, `archive`, `export` and `files`.
        written: What the files contain.
    """

    folder: Path
    written: Written

    @property
    def bodies(self) -> list[bytes]:
        """The bodies of all messages of topic `orders`."""
        return [body(number) for number in range(self.written.orders)]

    @contextmanager
    def broker(self, data: str = "data") -> Iterator[Broker]:
        """Run a broker with a data folder."""
        with qcli_serve(self.folder / data, "--max-req-timeout=8760h", "--max-bytes-per-file=3000") as broker:
            yield broker


def kept_with(part: str) -> list[Any]:
    """Return parameters for the fixture `kept`: the archives that have this folder."""
    return [
        pytest.param(path, id=path.stem)
        for path in NAMES
        if any(name.startswith(f"{part}/") for name in zipfile.ZipFile(path).namelist())
    ]


@pytest.fixture
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Kept:
    with zipfile.ZipFile(request.param) as archive:
        archive.extractall(tmp_path)
    return Kept(tmp_path, Written(**json.loads((tmp_path / "about.json").read_text())))


def check_broker(kept: Kept, broker: Broker) -> None:
    """Compare topics, channels and the messages that are left with what was written."""
    stats = httpx.get(f"http://{broker.http_address}/stats?format=json").json()
    channels = {
        f"{topic['topic_name']}/{channel['channel_name']}": channel
        for topic in stats["topics"]
        for channel in topic["channels"]
    }
    assert channels.keys() - {"orders/nsq_to_file"} == {"orders/billing", "orders/paused", "reminders/mail"}
    assert [name for name, channel in channels.items() if channel["paused"]] == ["orders/paused"]
    assert channels["orders/paused"]["depth"] == kept.written.orders
    mail = channels["reminders/mail"]
    assert mail["depth"] + mail["deferred_count"] == kept.written.deferred  # they become due after a year
    left = kept.bodies[kept.written.finished :]
    assert channels["orders/billing"]["depth"] == len(left)
    done = cli_of(broker)("tail", "orders/billing", "-n", str(len(left)))
    assert (done.code, done.out.splitlines()) == (0, left)


@pytest.mark.parametrize("kept", kept_with("data"), indirect=True)
def test_broker_has_all_topics_channels_and_messages(kept: Kept) -> None:
    with kept.broker() as broker:
        check_broker(kept, broker)
    for topic in ("orders", "reminders"):
        assert not verify_log(kept.folder / "data" / "topics" / f"{topic}.topic").findings


@pytest.mark.parametrize("kept", kept_with("archive"), indirect=True)
def test_archive_is_restored(kept: Kept) -> None:
    restored = kept.folder / "restored"
    done = Cli("", "")("archive", "restore", str(kept.folder / "archive"), "--data-path", str(restored))
    assert done.code == 0, done.err
    with kept.broker("restored") as broker:
        check_broker(kept, broker)


@pytest.mark.parametrize("kept", kept_with("export"), indirect=True)
def test_export_continues(kept: Kept) -> None:
    """Each message is exported once, also those that the earlier version has exported."""
    folder = kept.folder / "export"
    assert column(folder, "n") == [*range(kept.written.first)]
    with kept.broker() as broker:
        report = export(cli_of(broker), "orders", folder, "--json")
        assert report["messages"] == kept.written.orders - kept.written.first
        assert export(cli_of(broker), "orders", folder, "--json")["messages"] == 0
    assert column(folder, "n") == [*range(kept.written.orders)]
    assert column(folder, "item") == [json.loads(each)["item"] for each in kept.bodies]


@pytest.mark.parametrize("kept", kept_with("files"), indirect=True)
def test_to_file_continues(kept: Kept) -> None:
    folder = kept.folder / "files"

    def lines() -> list[bytes]:
        # Names of files begin with the machine's: the order of the files says nothing.
        found = b"".join(path.read_bytes() for path in folder.glob("*.log")).splitlines()
        return sorted(found, key=lambda line: int(json.loads(line)["n"]))

    assert lines() == kept.bodies[: kept.written.first]
    with kept.broker() as broker:
        cli = cli_of(broker)
        with cli.running("to-file", "orders", "--output-dir", str(folder), "--sync-interval=100ms") as writer:
            until(lambda: lines() == kept.bodies)
            writer.process.terminate()
            assert writer.end().code == 128 + signal.SIGTERM
    assert lines() == kept.bodies
