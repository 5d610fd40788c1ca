"""Stream a file through a broker, and check that every line arrives.

    make demo                       # a log file found on this machine
    make demo FILE=access.log

Starts a broker with a temporary data folder on free ports, publishes the file with `qcli pub`, shows `qcli stat`,
reads it back with `qcli tail`, compares, and stops the broker. Exits with 0 only if all lines arrive unchanged.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MAX_DEFAULT_BYTES = 64 * 1024 * 1024
TIMEOUT_S = 300


def main() -> int:
    """Run the demonstration; return the exit code."""
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else find_log()
    try:
        every_line = file.read_bytes().removesuffix(b"\n").split(b"\n")
    except OSError as exc:
        print(f"demo: cannot read {file}: {exc.strerror}", file=sys.stderr)
        return 1
    lines = [line for line in every_line if line]
    if not lines:
        print(f"demo: {file} has no line to publish", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="trio-nsq-demo-") as folder, broker(Path(folder)) as environment:
        returned = Path(folder) / "returned"
        qcli("pub", "demo", environment=environment, stdin=file)
        qcli("stat", "demo", environment=environment)
        qcli("tail", "demo/archive", "-n", str(len(lines)), environment=environment, stdout=returned)
        qcli("stat", "demo/archive", environment=environment)
        came_back = returned.read_bytes().split(b"\n")[:-1]
    same = came_back == lines
    empty = len(every_line) - len(lines)
    skipped = f" ({empty} empty ones left out: NSQ has no empty messages)" if empty else ""
    print(f"\n{file}: lines in: {len(lines)}{skipped}, lines out: {len(came_back)}: ", end="")
    print("all came back as they were, in order" if same else "THEY DIFFER")
    return 0 if same else 1


def find_log() -> Path:
    """Return the largest log of this machine within a size limit, or else a text file of Python."""
    logs = [*Path("/var/log").rglob("*.log"), Path("/var/log/syslog"), Path("/var/log/messages")]
    sizes = [(size, log) for log in logs if 0 < (size := readable_bytes(log)) <= MAX_DEFAULT_BYTES]
    return max(sizes, default=(0, Path(os.__file__)))[1]


def readable_bytes(path: Path) -> int:
    """Return the size of a readable file; 0 otherwise."""
    try:
        return path.stat().st_size if path.is_file() and os.access(path, os.R_OK) else 0
    except OSError:
        return 0


@contextmanager
def broker(folder: Path) -> Iterator[dict[str, str]]:
    """Run `qcli serve`; yield the environment variables with its addresses for client commands."""
    addresses = folder / "addresses.json"
    arguments = ["--tcp-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0"]
    arguments += ["--data-path", str(folder / "data"), "--address-file", str(addresses)]
    process = subprocess.Popen([sys.executable, "-m", "qcli", "serve", *arguments], stderr=subprocess.PIPE)
    assert process.stderr is not None
    try:
        said = []
        for line in process.stderr:
            said.append(line)
            if line.startswith(b"ready"):
                break
        else:
            raise SystemExit("demo: the broker did not start:\n" + b"".join(said).decode())
        print("$ qcli serve", *arguments, flush=True)
        bound = json.loads(addresses.read_bytes())
        yield os.environ | {
            "QCLI_NSQD_TCP_ADDRESS": bound["tcp_address"],
            "QCLI_NSQD_HTTP_ADDRESS": bound["http_address"],
        }
        process.send_signal(signal.SIGTERM)
        process.stderr.read()
        if process.wait(TIMEOUT_S) != 0:
            raise SystemExit(f"demo: the broker ended with code {process.returncode}")
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def qcli(
    *arguments: str, environment: dict[str, str], stdin: Path | None = None, stdout: Path | None = None
) -> None:
    """Print and run a command; exit if it fails."""
    shown = "$ qcli " + shlex.join(arguments)
    shown += f" < {shlex.quote(str(stdin))}" if stdin else ""
    shown += " > returned" if stdout else ""
    print(f"\n{shown}", flush=True)
    with open(stdin or os.devnull, "rb") as source, open(stdout or os.devnull, "wb") as sink:
        code = subprocess.run(
            [sys.executable, "-m", "qcli", *arguments],
            stdin=source,
            stdout=sink if stdout else None,
            env=environment,
            timeout=TIMEOUT_S,
            check=False,
        ).returncode
    if code:
        raise SystemExit(f"demo: qcli {arguments[0]} ended with code {code}")


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
        sys.exit()
    sys.exit(main())
