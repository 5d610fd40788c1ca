"""Run the blocks of README and docs as they are: in order, in a fresh folder, with a real broker.

- `sh` blocks are command lines.
- `console` blocks are command lines after `$ ` and their output. Output is compared except for numbers, ages, ids
  and spacing; but no messages are not some. A line `...` stands for any lines. Tables of `qcli stat` are those of a
  terminal, as readers see them. In pages with `EXACT` parts, numbers are compared, too, except in lines with a rate.
- `python` blocks run if they are complete programs, that is, if they import something.

The comment `<!-- not run: REASON -->` before a block excludes it. tests/client runs the programs of python-client.md
and also checks the state of the broker after each.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from cli.support import Cli
from interop.peers import free_ports, qcli_serve
from processes.shell import CLIENT, serving

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted(
        path
        for path in (ROOT / "docs").rglob("*.md")
        if not {"commands", "decisions", "python-client.md", "python-api.md"} & set(path.parts)
    ),
]
EXACT = {"cookbook", "size-a-broker.md", "what-no-setting-removes.md"}
TIMEOUT_S = 600
"""A page may start Spark while other processes use the machine."""
_FENCE = re.compile(
    r"(?P<skip><!-- not run: [^\n]+ -->\n)?^```(?P<kind>sh|console|python)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
_NUMBER = re.compile(
    r"\b(?:[0-9a-f]{16}){1,2}\b|\d{4}-\d\d-\d\d[T ][\d:.]+Z?|\d[\d,.]*(?:[smhd](?:\d\d[smh])?\b| (?:[KMG]i)?B\b)?"
)
_NONE = re.compile(r"(?<![\d.,])0 messages(?!/s)")
_PATIENCE_S = 60
_PORTS = (4150, 4151, 4152, 4160, 4161)
_END = "--end-of-command--"
_NOT_FORWARDED = re.compile(r"\bkill -(?:9|KILL|STOP)\b")
_STAT = re.compile(r"qcli stat\b[^|>]* --once\b[^|>]*")
_TERMINAL = """
import os, pty, subprocess, sys
terminal, stdout = pty.openpty()
process = subprocess.Popen(sys.argv[1:], stdout=stdout, env=os.environ | {"COLUMNS": "130"})
os.close(stdout)
try:
    while data := os.read(terminal, 65536):
        os.write(1, data)
except OSError:  # the last writer has ended
    pass
sys.exit(process.wait())
"""
"""A program that runs a command whose standard output is a terminal."""
_PYTHON = """
import os, sys
if sys.argv[1:] != ["-"]:
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
exec(compile(sys.stdin.read(), "<stdin>", "exec"))
sys.stdout.flush()
sys.stderr.flush()
if "pyarrow" in sys.modules or "deltalake" in sys.modules:
    os._exit(0)
"""
"""Python, for programs of pages. Threads of Arrow that still run when Python ends may abort the process."""


@dataclass
class Step:
    """A command line of a page and the output that the page shows; None: the page shows no output."""

    line: str
    output: list[str] | None = None


def steps_of(page: Path) -> list[Step]:
    """Return the command lines of a page, without excluded blocks."""
    steps: list[Step] = []
    for block in _FENCE.finditer(page.read_text()):
        if block["skip"]:
            continue
        if block["kind"] == "python":
            if "import " in block["text"]:
                steps.append(Step(f"python - <<'END'\n{block['text']}END"))
        elif block["kind"] == "sh":
            steps.append(Step(block["text"].rstrip("\n")))
        else:
            steps += console_steps(block["text"])
    return steps


def console_steps(text: str) -> Iterator[Step]:
    """Yield the commands of a `console` block, each with its output."""
    step: Step | None = None
    for line in text.splitlines():
        if line.startswith("$ "):
            if step is not None:
                yield step
            step = Step(line[2:], [])
        elif step is not None and step.line.endswith("\\"):
            step.line += f"\n{line}"
        else:
            assert step is not None, f"output without a command: {line}"
            assert step.output is not None
            step.output.append(line)
    if step is not None:
        yield step


def script(steps: list[Step], ports: dict[int, int]) -> str:
    """Return a bash script of all steps that uses these ports instead of NSQ's.

    The pages themselves wait for the servers that they start; here they are more patient.
    """
    lines = ["set -e"]
    for step in steps:
        line = re.sub(
            r"(?<=[\w.]:)(4150|4151|4152|4160|4161)\b", lambda match: str(ports[int(match[1])]), step.line
        )
        line = re.sub(r"(?<=--wait )10s\b", f"{_PATIENCE_S}s", line)
        if step.output and _STAT.fullmatch(line):
            line = f"terminal {line}"
        lines += [f"printf '%s\\n' {shlex.quote('+ ' + line)} >&$1", line, f"echo {_END}"]
    return "\n".join(lines) + "\n"


def wrapper(steps: list[Step], ports: dict[int, int], socket: Path) -> str:
    """Return a script `qcli` that makes servers listen on these ports, unless the page sets addresses.

    Commands are forks: see `processes.shell`. Where a page sends signals that cannot be forwarded, servers are new
    processes.
    """
    forked = f"exec {shlex.quote(sys.executable)} -I -S {shlex.quote(str(CLIENT))} {shlex.quote(str(socket))}"
    is_new = any(_NOT_FORWARDED.search(step.line) for step in steps)
    server = f"exec {shlex.quote(sys.executable)} -m qcli" if is_new else forked
    return f"""#!/bin/sh
case "$1" in
serve)
    export QCLI_TCP_ADDRESS="${{QCLI_TCP_ADDRESS-127.0.0.1:{ports[4150]}}}"
    export QCLI_HTTP_ADDRESS="${{QCLI_HTTP_ADDRESS-127.0.0.1:{ports[4151]}}}"
    export QCLI_HTTPS_ADDRESS="${{QCLI_HTTPS_ADDRESS-127.0.0.1:{ports[4152]}}}" ;;
lookupd)
    export QCLI_TCP_ADDRESS="${{QCLI_TCP_ADDRESS-127.0.0.1:{ports[4160]}}}"
    export QCLI_HTTP_ADDRESS="${{QCLI_HTTP_ADDRESS-127.0.0.1:{ports[4161]}}}" ;;
*)
    {forked} "$@" ;;
esac
{server} "$@"
"""


def comparable(lines: list[str], *, with_numbers: bool = False) -> str:
    """Return output without the parts that differ between runs. Lines with a rate never keep their numbers."""
    words = [" ".join(line.split()) for line in lines]
    kept = [
        line if with_numbers and "/s" not in line else _NUMBER.sub("0", _NONE.sub("none", line))
        for line in words
    ]
    return re.sub(r"[-─━]{2,}", "--", "\n".join(kept)).strip()


def same(shown: list[str], printed: list[str], *, with_numbers: bool = False) -> bool:
    """Whether output matches what a page shows."""
    parts = re.split(r"^\.\.\.$", "\n".join(shown), flags=re.MULTILINE)
    texts = (comparable(part.splitlines(), with_numbers=with_numbers) for part in parts)
    pattern = r"\s*.*\s*".join(re.escape(text) for text in texts)
    return re.fullmatch(pattern, comparable(printed, with_numbers=with_numbers), re.DOTALL) is not None


@pytest.mark.parametrize(
    "page", [page for page in PAGES if steps_of(page)], ids=lambda page: str(page.relative_to(ROOT))
)
def test_blocks_run_in_order(page: Path, tmp_path: Path) -> None:
    steps = steps_of(page)
    folder = tmp_path / "page"
    folder.mkdir()
    records = "".join(f'{{"user":"u{number % 7}","path":"/page/{number}"}}\n' for number in range(1, 1001))
    (folder / "access.log").write_text(records)
    ports = dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))
    with ExitStack() as stack:
        if not any("qcli serve" in step.line for step in steps):
            # As after the block of how-to/index.md, but five processes fewer.
            broker = stack.enter_context(qcli_serve(folder / "data", "--sync=interval"))
            for port, address in ((4150, broker.tcp_address), (4151, broker.http_address)):
                ports[port] = int(address.rpartition(":")[2])
            broker.create("clicks", "archive")
            Cli(broker.tcp_address, broker.http_address).publish("clicks", records.encode().splitlines())
        processes = stack.enter_context(serving())
        programs = tmp_path / "bin"
        programs.mkdir()
        for name, text in (
            ("qcli", wrapper(steps, ports, processes)),
            ("python", f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(_PYTHON)} "$@"\n'),
            ("terminal", f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(_TERMINAL)} "$@"\n'),
        ):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("QCLI_")} | {
            "PATH": os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "HOME": str(tmp_path),
            "XDG_CONFIG_HOME": str(tmp_path / "config"),
            "QCLI_NSQD_TCP_ADDRESS": f"127.0.0.1:{ports[4150]}",
            "QCLI_NSQD_HTTP_ADDRESS": f"127.0.0.1:{ports[4151]}",
            "PYTHONUNBUFFERED": "1",
        }
        with (tmp_path / "output").open("wb") as output, (tmp_path / "lines").open("wb") as ran:
            # Servers in the background belong to the session, and are killed with it.
            process = subprocess.Popen(
                ["bash", "-c", script(steps, ports), "bash", str(ran.fileno())],
                cwd=folder,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[ran.fileno()],
                start_new_session=True,
            )
            try:
                code = process.wait(TIMEOUT_S)
            finally:
                stop(process)
    printed = (tmp_path / "output").read_text()
    assert code == 0, f"failed at:\n{(tmp_path / 'lines').read_text()[-500:]}\n{printed[-3000:]}"
    for step, part in zip(steps, printed.split(f"{_END}\n"), strict=False):
        if step.output:
            assert same(step.output, part.splitlines(), with_numbers=not EXACT.isdisjoint(page.parts)), (
                f"$ {step.line}\nshown:\n{step.output}\nprinted:\n{part}"
            )


def stop(process: subprocess.Popen[bytes]) -> None:
    """Kill all processes of a page."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def test_numbers_and_spacing_are_not_compared() -> None:
    assert same(["1,000 messages (31.1 KiB) in 0.10 s"], ["5 messages (1.0 KiB)   in 9 s"])
    assert same(["a", "...", "d"], ["a", "b", "c", "d"])
    assert not same(["Copied 1,000 messages (31.1 KiB)."], ["Copied 0 messages (0 B)."])
    assert not same(["channel created"], ["channel deleted"])
    assert not same(["a"], ["a", "b"])
    assert not same(["order 3"], ["order 4"], with_numbers=True)
    assert same(["3 rows in 1 s: 3 rows/s", "3"], ["9 rows in 2 s: 4 rows/s", "3"], with_numbers=True)
