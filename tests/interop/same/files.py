"""Run nsq_to_file and `qcli to-file` with the same options on the same messages, and compare the files."""

import re
import signal
import socket
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fleet.support import wait_until
from interop.connectors import await_finished, connector, publish, stop
from interop.peers import Broker, Child

ALWAYS = ("--sync-interval=50ms", "--skip-empty-files")
"""nsq_to_file keeps the last messages of a burst in flight until the sync; a file per sync is no part of a case."""
WITHOUT_TICKS = ("--sync-interval=1h", "--max-in-flight=1")
"""Makes nsq_to_file sync after each message. Otherwise a tick may come when a file of a work folder is above the size:
nsq_to_file moves it, and exits with "file already closed" when it closes it again for the next message."""
ENDS = {
    ("nsq_to_file", signal.SIGTERM): 0,
    ("nsq_to_file", signal.SIGINT): 0,
    ("to-file", signal.SIGTERM): 128 + signal.SIGTERM,
    ("to-file", signal.SIGINT): 128 + signal.SIGINT,
}
"""The exit codes after a signal, which differ in all cases: `to-file-exit`."""

CHECKPOINT = ".qcli-to-file"
"""The folder in `out` where `to-file` keeps its positions."""

YEAR, DAY = "<the year>", "<the day of the year>"

Files = Mapping[str, bytes]
"""The contents of the files by their names below `out/` or `work/`, decompressed."""


@dataclass
class Stage:
    """Where a case is played by one of the two programs.

    Attributes:
        program: `nsq_to_file` or `to-file`.
        folder: It has the folders `out` and `work`.
        child: The running program.
    """

    program: str
    broker: Broker
    topic: str
    folder: Path
    child: Child = field(init=False)

    @property
    def channel(self) -> str:
        return "nsq_to_file"

    def files(self) -> dict[str, bytes]:
        """Return the files that are there now."""
        found = {}
        for path in sorted(self.folder.rglob("*")):
            name = str(path.relative_to(self.folder))
            if path.is_file() and CHECKPOINT not in path.parts:
                found[self._plain(name)] = content(path)
        return found

    def _plain(self, name: str) -> str:
        """Return a name without what differs between the programs."""
        return name.replace(self.topic, "TOPIC").replace(str(self.child.process.pid), "PID")

    def has_open_files(self) -> bool:
        """Return whether the program has a file open, other than our checkpoint."""
        for descriptor in Path(f"/proc/{self.child.process.pid}/fd").iterdir():
            try:
                path = descriptor.readlink()
            except FileNotFoundError:
                continue  # it was closed meanwhile
            if path.is_relative_to(self.folder) and CHECKPOINT not in path.parts and not path.is_dir():
                return True
        return False


def content(path: Path) -> bytes:
    """Return what is in a file; of a compressed one that ends in the middle of a member, `...` at its end."""
    data = path.read_bytes()
    if ".gz" not in path.name:
        return data
    found = b""
    while data:
        member = zlib.decompressobj(wbits=31)
        found += member.decompress(data)
        if not member.eof:
            return found + b"..."
        data = member.unused_data
    return found


Step = Sequence[bytes] | Callable[[Stage], None]
"""Messages, which are published and then awaited to be written; or what is done while the program runs."""


@dataclass(frozen=True)
class Run:
    """A run of a program, from its start to its end.

    Attributes:
        flags: `OUT` and `WORK` stand for the folders.
        ends: The signal that ends it, if it still runs.
        theirs: Further flags of nsq_to_file only.
    """

    flags: tuple[str, ...]
    steps: tuple[Step, ...]
    ends: signal.Signals = signal.SIGTERM
    theirs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """Runs of a program one after the other, on the same folder.

    Attributes:
        row: The key of the row of docs/reference/differences.md that it shows; empty if the files are the same.
        there: The files that nsq_to_file leaves, if `row` is set. `YEAR` and `DAY` in names stand for today's.
        here: Ours, if `row` is set.
    """

    runs: tuple[Run, ...]
    row: str = ""
    there: Files = field(default_factory=dict)
    here: Files = field(default_factory=dict)

    def expected(self) -> tuple[Files, Files]:
        """Return `there` and `here` of today: the tests may have begun before midnight."""
        today = {YEAR: time.strftime("%Y"), DAY: time.strftime("%j")}
        return _renamed(self.there, today), _renamed(self.here, today)


def _renamed(files: Files, texts: Mapping[str, str]) -> Files:
    return {
        re.sub("|".join(texts), lambda found: texts[found[0]], name): data for name, data in files.items()
    }


def run(
    *flags_and_steps: str | Step, ends: signal.Signals = signal.SIGTERM, theirs: tuple[str, ...] = ()
) -> Run:
    """Return a run with these options and steps."""
    flags = tuple(each for each in flags_and_steps if isinstance(each, str))
    return Run(flags, tuple(each for each in flags_and_steps if not isinstance(each, str)), ends, theirs)


def same(*runs: Run) -> Case:
    """Return a case in which both programs leave the same files."""
    return Case(runs)


def differs(row: str, *runs: Run, there: Files, here: Files) -> Case:
    """Return a case in which the files differ, for the reason in this row of differences.md."""
    return Case(runs, row, there, here)


def play(stage: Stage, case: Case) -> dict[str, bytes]:
    """Play a case, and return the files that are left."""
    stage.broker.create(stage.topic, stage.channel)
    for name in ("out", "work"):
        (stage.folder / name).mkdir(parents=True)
    for one in case.runs:
        _play(stage, one)
    return stage.files()


def _play(stage: Stage, one: Run) -> None:
    folders = {"OUT": stage.folder / "out", "WORK": stage.folder / "work"}
    theirs = one.theirs if stage.program == "nsq_to_file" else ()
    flags = [f"--topic={stage.topic}", "--output-dir=OUT", *ALWAYS, *one.flags, *theirs]
    for name, folder in folders.items():
        flags = [flag.replace(f"={name}", f"={folder}") for flag in flags]
    with connector(stage.program, stage.broker, *flags) as stage.child:
        for step in one.steps:
            if callable(step):
                step(stage)
            else:
                publish(stage.broker, stage.topic, step)
                await_finished(stage.broker, stage.topic, stage.channel, stage.child)
        if stage.child.process.poll() is None:
            code = stop(stage.child, one.ends)
            if code != ENDS[stage.program, one.ends]:
                stage.child.fail(f"ended with exit code {code}")


# ---------------------------------------------------------------------- steps


def hang_up(stage: Stage) -> None:
    """Send SIGHUP, and wait until the file is closed. A file that was renamed, `to-file` may have closed by itself."""
    stage.child.process.send_signal(signal.SIGHUP)
    wait_until(lambda: not stage.has_open_files(), "the file is closed")


def move_away(stage: Stage) -> None:
    """Rename the file in `out`, as logrotate does."""
    (file,) = (path for path in (stage.folder / "out").iterdir() if path.is_file())
    file.rename(file.with_name("moved"))


def take_names(stage: Stage) -> None:
    """Create files in `out` with the names of those in `work`."""
    for path in (stage.folder / "work").iterdir():
        if path.is_file():
            (stage.folder / "out" / path.name.removesuffix(".part")).write_bytes(b"another's")


def notice(stage: Stage) -> None:
    """Wait until `to-file` has noticed that its file was renamed."""
    if stage.program == "to-file":
        wait_until(lambda: not stage.has_open_files(), "the file is closed")


def not_shown(stage: Stage) -> None:
    """Check that a file is in `work` only while it is open."""
    assert list((stage.folder / "work").iterdir())
    assert not [path for path in (stage.folder / "out").iterdir() if path.name != CHECKPOINT]


def show_empty(stage: Stage) -> None:
    """Wait until there is a file, before any message."""
    wait_until(stage.has_open_files, "a file is open")


def survive(stage: Stage) -> None:
    """Publish `b`, and wait until it is written or the program has ended."""

    def is_over() -> bool:
        return stage.child.process.poll() is not None or stage.broker.is_drained(stage.topic, stage.channel)

    publish(stage.broker, stage.topic, B)
    wait_until(is_over, "the message is written, or the program has ended")


# ---------------------------------------------------------------------- cases


HOST = socket.gethostname().partition(".")[0]
A, B = [b"a"], [b"b"]
ANY_BYTES = [b"a", b"b\nc\n", b"\0\xff\r", b"\x1f\x8b\n", b"x" * 100_000]
NUMBERS = [b"%04d" % number for number in range(8)]
DATE = "--datetime-format=DATE"

CASES: dict[str, Case] = {
    "default names, more runs": same(
        run("--datetime-format=%Y-%m-%d", A, ends=signal.SIGINT), run("--datetime-format=%Y-%m-%d", ANY_BYTES)
    ),
    "gzip, more runs": same(run("--gzip", DATE, ANY_BYTES, A), run("--gzip", DATE, B)),
    "a name with a suffix": same(run("--gzip", "--filename-format=<TOPIC><REV>.gz", "--gzip-level=1", A)),
    "all that is replaced": same(
        run(
            "--filename-format=<TOPIC>+<TOPIC>-<HOST>-<PID>-<DATETIME>-<REV>-<OTHER>-%Y",
            "--host-identifier=<SHORT_HOST>+<HOSTNAME>+<TOPIC>",
            "--datetime-format=%B %b %m %A %a %d %Y %y %Z %z %% %%Y %",
            A,
        )
    ),
    "folders": same(run("--filename-format=<TOPIC>/<DATETIME>/<HOST>.log", "--datetime-format=%Y/%m", A)),
    "no date": same(run("--filename-format=log<DATETIME>", "--datetime-format=", A)),
    "many": same(run(DATE, [b"%d" % number for number in range(5_000)])),
    "digits in a date format": differs(
        "to-file-layout",
        run("--filename-format=<DATETIME>", "--datetime-format=2006", A),
        there={f"out/{YEAR}": b"a\n"},
        here={"out/2006": b"a\n"},
    ),
    "other date formats": differs(
        "to-file-strftime",
        run("--filename-format=<DATETIME>", "--datetime-format=%j", A),
        there={"out/%j": b"a\n"},
        here={f"out/{DAY}": b"a\n"},
    ),
    # rotation
    "size, more runs": same(
        run(DATE, "--rotate-size=10", NUMBERS, *([body] for body in NUMBERS[:4])),
        run(DATE, "--rotate-size=10", NUMBERS),
    ),
    "size, gzip": same(run(DATE, "--rotate-size=10", "--gzip", NUMBERS)),
    "interval, more runs": same(
        run(DATE, "--rotate-interval=1h", A), run(DATE, "--rotate-interval=1h", B, hang_up, A)
    ),
    # SIGHUP
    "SIGHUP": same(run(DATE, A, hang_up, B, move_away, hang_up, A)),
    "SIGHUP, gzip": same(run(DATE, "--gzip", A, hang_up, B)),
    "SIGHUP, work folder": differs(
        "to-file-work-sighup",
        run(DATE, "--work-dir=WORK", A, hang_up, survive),
        there={f"out/TOPIC.{HOST}-000000.DATE.log": b"a\n"},
        here={f"out/TOPIC.{HOST}-000000.DATE.log": b"a\n", f"out/TOPIC.{HOST}-000001.DATE.log": b"b\n"},
    ),
    # the work folder
    "work folder, more runs": same(
        run(DATE, "--work-dir=WORK", A, not_shown), run(DATE, "--work-dir=WORK", B, take_names)
    ),
    "work folder, folders, gzip, size": same(
        run(
            *("--filename-format=<TOPIC>/a<REV>", "--work-dir=WORK", "--gzip", "--rotate-size=10"),
            NUMBERS,
            theirs=WITHOUT_TICKS,
        )
    ),
    "no messages": same(run(DATE, "--skip-empty-files=false", show_empty)),
    # renamed without a signal
    "moved": differs(
        "to-file-moved",
        run(DATE, A, move_away, notice, B),
        there={"out/moved": b"a\nb\n"},
        here={"out/moved": b"a\n", f"out/TOPIC.{HOST}.DATE.log": b"b\n"},
    ),
}
