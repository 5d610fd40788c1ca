"""Keep files that this version writes, so that tests open them with later versions: `make kept`.

Writes tests/upgrades/kept/NAME.zip; NAME is the version, unless `--name` says otherwise. It has

    about.json    what was written, see `Written`
    data/         the data folder of a broker that was killed
    archive/      the archive of that broker, complete
    export/       the first messages, exported by `qcli to-parquet --json`
    files/        the first messages, written by `qcli to-file`

The broker acknowledges further messages after the export and to-file ended: a later version has to continue there.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from trio_nsq import __version__

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "tests" / "upgrades" / "kept"
TIMEOUT_S = 60
POLL_S = 0.05


@dataclass(frozen=True)
class Written:
    """What the kept files contain. Message N of topic `orders` is the JSON object `body(N)`.

    Attributes:
        first: Messages that are in the export and the files; the broker has `orders` more.
        orders: The messages of the topic, from number 0.
        finished: The messages that channel `billing` has finished, from number 0. Channel `paused` is paused, and has
            finished none.
        deferred: Messages of topic `reminders`, all deferred by 364 days, for channel `mail`.
    """

    first: int = 40
    orders: int = 60
    finished: int = 10
    deferred: int = 2


def body(number: int) -> bytes:
    """Return the body of a message of topic `orders`."""
    return json.dumps({"n": number, "item": f"tea {number}", "price": number / 4}).encode()


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the archive; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", default=__version__, help="name of the archive (default: the version)")
    path = KEPT / f"{parser.parse_args(arguments).name}.zip"
    if path.exists():
        print(f"{path} exists: files of a version are kept once", file=sys.stderr)
        return 1
    KEPT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="trio-nsq-kept-") as name:
        folder = Path(name)
        written = Written()
        write(folder, written)
        (folder / "about.json").write_text(json.dumps(asdict(written)))
        with zipfile.ZipFile(path, "x", zipfile.ZIP_DEFLATED) as kept:
            for file in sorted(folder.rglob("*")):
                if file.is_file() and file.name != "spare-room":  # reserved space, nothing else
                    kept.write(file, file.relative_to(folder))
    print(f"{path}: {path.stat().st_size:,} bytes")
    return 0


def write(folder: Path, written: Written) -> None:
    """Write the files. The broker is killed at the end, so that its folder is as after a crash."""
    with killed_broker(folder) as environment:

        def qcli(*arguments: str, stdin: bytes = b"") -> None:
            command = [sys.executable, "-m", "qcli", *arguments]
            done = subprocess.run(
                command, input=stdin, capture_output=True, env=environment, timeout=TIMEOUT_S, check=False
            )
            if done.returncode:
                raise SystemExit(f"kept: qcli {arguments[0]} failed: {done.stderr.decode().strip()}")

        def publish(first: int, end: int) -> None:
            bodies = [body(number) for number in range(first, end)]
            qcli("pub", "orders", "--header", "source: kept", stdin=b"\n".join(bodies[:10]))
            qcli("pub", "orders", stdin=b"\n".join(bodies[10:]))

        qcli("topic", "create", "orders", "reminders")
        qcli("channel", "create", "orders/billing", "orders/paused", "orders/nsq_to_file", "reminders/mail")
        qcli("channel", "pause", "orders/paused")
        for number in range(written.deferred):
            qcli("pub", "reminders", "--defer", "364d", stdin=b"later %d" % number)
        publish(0, written.first)
        qcli("tail", "orders/billing", "-n", str(written.finished))
        qcli("to-parquet", "orders", str(folder / "export"), "--json", "--quiet")
        lines = [body(number) for number in range(written.first)]
        files = folder / "files"
        command = ["to-file", "orders", "--output-dir", str(files), "--sync-interval", "100ms"]
        writer = subprocess.Popen([sys.executable, "-m", "qcli", *command], env=environment)
        try:
            wait_until(
                lambda: b"".join(path.read_bytes() for path in files.glob("*.log")).splitlines() == lines
            )
            writer.send_signal(signal.SIGTERM)
            writer.wait(TIMEOUT_S)
        finally:
            writer.kill()
        publish(written.first, written.orders)


@contextmanager
def killed_broker(folder: Path) -> Iterator[dict[str, str]]:
    """Run a broker until the block ends, and kill it; yield the environment variables of its clients."""
    addresses = folder.with_name(f"{folder.name}.addresses")
    command = ["serve", "--data-path", str(folder / "data"), "--address-file", str(addresses)]
    command += ["--tcp-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0", "--max-req-timeout", "8760h"]
    command += ["--max-bytes-per-file", "3000", "--archive", str(folder / "archive"), "--archive-before-ok"]
    command += ["--log-level", "error"]
    broker = subprocess.Popen([sys.executable, "-m", "qcli", *command])
    try:
        wait_until(lambda: addresses.exists() or broker.poll() is not None)
        bound = json.loads(addresses.read_bytes())
        yield os.environ | {
            "QCLI_NSQD_TCP_ADDRESS": bound["tcp_address"],
            "QCLI_NSQD_HTTP_ADDRESS": bound["http_address"],
        }
    finally:
        broker.kill()
        broker.wait()
        addresses.unlink(missing_ok=True)


def wait_until(is_done: Callable[[], bool]) -> None:
    """Raises SystemExit if it is not done in time."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not is_done():
        if time.monotonic() > deadline_s:
            raise SystemExit("kept: a program did not become ready in time")
        time.sleep(POLL_S)


if __name__ == "__main__":
    sys.exit(main())
