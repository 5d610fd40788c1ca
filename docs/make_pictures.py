"""Make the pictures of the documentation: `make pictures`.

Charts are drawn from the newest files in `bench/results`, always the same for the same file. Pictures of terminals are
made from real runs of qcli: on a terminal emulator, drawn by rich. `--charts` makes the charts only.
"""

import argparse
import io
import json
import math
import os
import pty
import re
import select
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable
from contextlib import ExitStack
from fcntl import ioctl
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import pyte
from matplotlib import pyplot as plt
from matplotlib.ticker import EngFormatter, LogLocator, NullLocator
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench/results"
PICTURES = ROOT / "docs/pictures"
OURS, THEIRS, DURABLE, GOAL = "#0b7285", "#868e96", "#e8590c", "#c2255c"
PEERS = (OURS, "#868e96", "#c2255c", "#f08c00")
"""This broker and the servers of other projects."""
DEADLINE_S = 60.0
WORKLOADS = {
    "publish-batch-2": ("rate", "publish, batches of 200, 2 connections"),
    "publish-batch-32": ("rate", "publish, batches of 200, 32 connections"),
    "publish-one-200": ("rate", "publish, one message each, 200 connections"),
    "publish-one-2": ("rate", "publish, one message each, 2 connections"),
    "consume": ("rate", "consume, 2 connections"),
    "publish-and-consume": ("published", "publish while consuming: published"),
    "fan-out": ("rate", "10 channels, until all are drained"),
    "topics": ("rate", "100 topics with 4 channels each"),
    "mixed": ("delivered", "mixed load of 20 topics"),
    "body-1kib": ("rate", "bodies of 1 KiB"),
    "body-16kib": ("rate", "bodies of 16 KiB"),
    "body-256kib": ("rate", "bodies of 256 KiB"),
    "http-pub": ("rate", "HTTP /pub"),
    "http-mpub": ("rate", "HTTP /mpub of 200"),
}


# ---------------------------------------------------------------------- charts


def make_charts(folder: Path) -> None:
    """Draw all charts into a folder."""
    mpl.rcParams.update(
        {
            "svg.hashsalt": "trio-nsq",
            "svg.fonttype": "none",
            "font.family": "sans-serif",
            "font.size": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    )
    draw_ratios(newest("compare"), folder / "ratios.svg")
    draw_losses(newest("kills"), folder / "kills.svg")
    draw_growth(newest("growth"), folder / "growth.svg")
    draw_peers(newest("peers"), folder / "peers.svg")


def newest(kind: str) -> dict[str, Any]:
    """The newest result of a benchmark."""
    path = max(RESULTS.glob(f"*-{kind}-*.json"))
    return {"file": path.name, **json.loads(path.read_text())}


def save(figure: Any, path: Path, source: str) -> None:
    """Write a figure, with the name of the file that it shows, and without anything that changes from run to run."""
    figure.text(0.01, 0.01, f"bench/results/{source}", fontsize=7, color="#868e96")
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    plt.close(figure)


def ratios_of(results: list[dict[str, Any]], workload: str, figure: str, ours: str) -> list[float]:
    """Our rate divided by that of nsqd in memory, for each round."""
    rates: dict[tuple[int, str], float] = {
        (each["round"], each["broker"]): each["figures"][figure]
        for each in results
        if each["workload"] == workload
    }
    rounds = sorted({number for number, _ in rates})
    return [rates[number, ours] / rates[number, "nsqd, in memory"] for number in rounds]


def draw_ratios(data: dict[str, Any], path: Path) -> None:
    """Throughput beside nsqd in memory, median with the smallest and largest ratio of the rounds, and the goals."""
    goals = {
        (one["workload"], one["figure"], one["ours"]): (one["goal"], one["verdict"])
        for one in data.get("comparisons", [])
        if one["other"] == "nsqd, in memory" and one["goal"] is not None
    }
    measured = {each["workload"] for each in data["results"]}
    rows = [(workload, *row) for workload, row in WORKLOADS.items() if workload in measured]
    figure, axes = plt.subplots(figsize=(8.5, 1.2 + 0.42 * len(rows)))
    series = [
        ("ours, --sync=interval", OURS, "--sync=interval"),
        ("ours, every OK synced", DURABLE, "every OK synced"),
    ]
    for offset, (broker, color, label) in zip((0.2, -0.2), series, strict=True):
        for place, (workload, name, _) in enumerate(reversed(rows)):
            ratios = ratios_of(data["results"], workload, name, broker)
            middle = statistics.median(ratios)
            axes.barh(place + offset, middle, 0.38, color=color, label=label if place == 0 else None)
            axes.plot([min(ratios), max(ratios)], [place + offset] * 2, color="black", linewidth=1)
            goal, verdict = goals.get((workload, name, broker), (None, ""))
            end, text = max(ratios), f"{middle:.2f}"
            if goal is not None:
                axes.plot([goal] * 2, [place + offset - 0.19, place + offset + 0.19], color=GOAL, linewidth=2)
                end, text = max(end, goal), f"{text}  (goal {goal:g}{', ' if verdict else ''}{verdict})"
            axes.text(end * 1.06, place + offset, text, va="center", fontsize=8)
    axes.plot([], [], color="black", linewidth=1, label="smallest to largest of the rounds")
    if goals:
        axes.plot([], [], color=GOAL, linewidth=2, label="goal")
    axes.axvline(1, color=THEIRS, linewidth=1)
    axes.set_xscale("log")
    axes.set_xlim(0.1, 40)
    axes.set_xticks([0.1, 0.2, 0.5, 1, 2, 5, 10], ["0.1", "0.2", "0.5", "1 = nsqd", "2", "5", "10"])
    axes.minorticks_off()
    axes.set_yticks(range(len(rows)), [label for _, _, label in reversed(rows)])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    figure.suptitle("Throughput divided by that of nsqd in memory", x=0.01, ha="left", fontweight="bold")
    handles = axes.get_legend_handles_labels()
    figure.legend(
        *handles, loc="lower center", bbox_to_anchor=(0.5, 0.02), ncols=4, frameon=False, fontsize=9
    )
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    save(figure, path, data["file"])


def draw_losses(data: dict[str, Any], path: Path) -> None:
    """What was lost in 20 kills."""
    names = {
        "nsqd": "nsqd",
        "nsqd, on disk": "nsqd --mem-queue-size=0",
        "nsqd, on disk, every message synced": "nsqd --mem-queue-size=0 --sync-every=1",
        "ours, --sync=interval": "qcli serve --sync=interval",
        "ours, every OK synced": "qcli serve",
    }
    figure, axes = plt.subplots(figsize=(8.5, 2.6))
    for place, result in enumerate(reversed(data["results"])):
        share = 100 * result["lost"] / result["copies"]
        axes.barh(place, share, 0.6, color=OURS if result["broker"].startswith("ours") else THEIRS)
        text = (
            f"{result['lost']:,} of {result['copies']:,} ({share:.1f} %)"
            if share
            else f"0 of {result['copies']:,}"
        )
        axes.text(share + 0.5, place, text, va="center", fontsize=9)
    axes.set_yticks(range(len(names)), [names[each["broker"]] for each in reversed(data["results"])])
    axes.set_xlim(0, 60)
    axes.set_xlabel("% of the acknowledged copies lost")
    axes.set_title(f"Lost in {data['results'][0]['kills']} kills under load", loc="left", fontweight="bold")
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    save(figure, path, data["file"])


def draw_growth(data: dict[str, Any], path: Path) -> None:
    """How rate and processor time change with channels, topics and connections; medians and spread of the rounds."""
    sizes = {
        "channels": "channels of one topic",
        "topics": "topics",
        "connections": "connections with one PUB at a time",
    }
    rates = {"channels": "through/s", "topics": "through/s", "connections": "published/s"}
    brokers = sorted({each["broker"] for each in data["points"]})
    figure, panels = plt.subplots(2, len(sizes), figsize=(10, 5.6), sharex="col")
    for column, (curve, title) in enumerate(sizes.items()):
        for panel, name in zip(panels[:, column], (rates[curve], "CPU us/msg"), strict=True):
            for broker in brokers:
                found = [
                    each for each in data["points"] if (each["broker"], each["curve"]) == (broker, curve)
                ]
                draw_curve(panel, broker, [(each["size"], each["figures"][name]) for each in found])
            panel.set_xscale("log")
            panel.set_yscale("log")
            panel.xaxis.set_major_formatter(EngFormatter(sep=""))
            panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
            panel.yaxis.set_major_formatter(EngFormatter(sep=""))
            panel.yaxis.set_minor_locator(NullLocator())
            panel.minorticks_off()
            panel.grid(alpha=0.3)
        panels[1, column].set_xlabel(title)
    panels[0, 0].set_ylabel("messages/s")
    panels[1, 0].set_ylabel("processor time, us/message")
    figure.suptitle("Growth of throughput and processor time", x=0.01, ha="left", fontweight="bold")
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.legend(
        *panels[0, 0].get_legend_handles_labels(), loc="lower center", ncols=len(brokers), frameon=False
    )
    save(figure, path, data["file"])


def draw_curve(panel: Any, broker: str, points: list[tuple[int, float]]) -> None:
    """Draw the medians of a curve, with the smallest and the largest figure of the rounds."""
    rounds: dict[int, list[float]] = {}
    for size, value in sorted(points):
        rounds.setdefault(size, []).append(value)
    if not rounds:
        return
    middle = [statistics.median(values) for values in rounds.values()]
    below = [median - min(values) for median, values in zip(middle, rounds.values(), strict=True)]
    above = [max(values) - median for median, values in zip(middle, rounds.values(), strict=True)]
    color = THEIRS if broker.startswith("nsqd") else OURS if "interval" in broker else DURABLE
    name = broker.replace("ours,", "qcli serve")
    panel.errorbar(list(rounds), middle, yerr=[below, above], fmt="o-", color=color, markersize=4, label=name)


def draw_peers(data: dict[str, Any], path: Path) -> None:
    """Throughput of this broker and of servers of other projects, for both promises; medians and spread."""
    rates: dict[tuple[str, str, str], list[float]] = {}
    for each in data["results"]:
        key = (each["promise"], each["load"], each["contender"])
        rates.setdefault(key, []).append(each["figures"]["rate"])
    loads = {
        load: title for load, title in data["loads"].items() if any(load == each for _, each, _ in rates)
    }
    names = list(data["versions"])
    limits = [min(map(min, rates.values())), max(map(max, rates.values()))]
    step = 0.8 / len(names)
    figure, panels = plt.subplots(
        1, len(data["promises"]), figsize=(10, 1.6 + 0.62 * len(loads)), sharey=True
    )
    for panel, promise in zip(panels, data["promises"], strict=True):
        for number, name in enumerate(names):
            for place, load in enumerate(reversed(loads)):
                values = rates.get((promise["name"], load, name))
                if not values:
                    continue
                height = place + 0.4 - step * (number + 0.5)
                panel.barh(height, statistics.median(values), step * 0.95, color=PEERS[number], zorder=2)
                panel.plot([min(values), max(values)], [height] * 2, color="black", linewidth=1, zorder=3)
        panel.set_xscale("log")
        panel.set_xlim(10 ** math.floor(math.log10(limits[0])), 10 ** math.ceil(math.log10(limits[1])))
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.grid(axis="x", alpha=0.3)
        panel.set_xlabel("messages/s")
        panel.set_title(promise["title"], loc="left", fontsize=10)
    panels[0].set_yticks(range(len(loads)), list(reversed(loads.values())))
    figure.suptitle("Throughput beside other servers", x=0.01, ha="left", fontweight="bold")
    for number, name in enumerate(names):
        panels[0].plot([], [], "s", color=PEERS[number], label=name)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="lower center", ncols=len(names), frameon=False)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    save(figure, path, data["file"])


# ---------------------------------------------------------------------- terminals


class Screen:
    """A terminal of a certain size on which one command after the other runs.

    Args:
        columns, rows: Its size.
        folder: Where the commands run.
        environment: Of the commands.
    """

    def __init__(self, columns: int, rows: int, folder: Path, environment: dict[str, str]) -> None:
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self._folder = folder
        self._environment = environment

    def run(self, line: str, until: Callable[[str], bool] | None = None) -> None:
        """Type a command line, and show what it prints, up to its end or until the text of the screen fits.

        A command that is still running then is interrupted, and what it prints at its end is not shown.
        """
        self._stream.feed(b"\x1b[1;32m$\x1b[0m " + line.encode() + b"\r\n")
        size = struct.pack("HHHH", self._screen.lines, self._screen.columns, 0, 0)
        ours, theirs = pty.openpty()
        ioctl(theirs, termios.TIOCSWINSZ, size)
        process = subprocess.Popen(
            ["bash", "-c", line],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=self._folder,
            env=self._environment,
            start_new_session=True,
        )
        os.close(theirs)
        deadline = time.monotonic() + DEADLINE_S
        try:
            while until is None or not until("\n".join(self._screen.display)):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{line}: {self._screen.display}")
                if select.select([ours], [], [], 0.1)[0]:
                    try:
                        self._stream.feed(os.read(ours, 65536))
                    except OSError:  # it has ended
                        break
        finally:
            if process.poll() is None and until is not None:
                os.killpg(process.pid, signal.SIGINT)
                time.sleep(0.2)
            process.kill()
            process.wait()
            os.close(ours)

    def save(self, path: Path, title: str) -> None:
        """Draw the screen, without the empty lines at its end."""
        segments: list[Segment] = []
        used = max((row for row, text in enumerate(self._screen.display) if text.strip()), default=0)
        for row in range(used + 1):
            line = self._screen.buffer[row]
            for column in range(self._screen.columns):
                char = line[column]
                color, background = _color(char.fg), _color(char.bg)
                look: dict[str, Any] = {"bold": char.bold, "reverse": char.reverse, "italic": char.italics}
                segments.append(Segment(char.data, Style(color=color, bgcolor=background, **look)))
            segments.append(Segment.line())
        console = Console(width=self._screen.columns, record=True, file=io.StringIO(), force_terminal=True)
        console.print(Segments(segments), end="")
        console.save_svg(str(path), title=title, unique_id=path.stem)


def _color(name: str) -> str | None:
    if name == "default":
        return None
    if re.fullmatch("[0-9a-f]{6}", name):
        return f"#{name}"
    return {"brown": "yellow"}.get(name, name).replace("bright", "bright_")


def make_terminals(folder: Path) -> None:
    """Run a broker and some commands, and draw their screens."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        tools = str(Path(sys.executable).parent)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("QCLI_")} | {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "TERM": "xterm-256color",
            "LC_ALL": "C.UTF-8",
            "COLUMNS": "120",
        }
        flags = ["--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0", "--address-file=addresses.json"]
        broker = subprocess.Popen(
            ["qcli", "serve", "--data-path=data", "--sync=interval", *flags],
            cwd=scratch,
            env=environment,
            stderr=subprocess.DEVNULL,
        )
        stack.callback(broker.wait)
        stack.callback(broker.terminate)
        while not (scratch / "addresses.json").exists():
            time.sleep(0.05)
        addresses = json.loads((scratch / "addresses.json").read_text())
        environment |= {
            "QCLI_NSQD_TCP_ADDRESS": addresses["tcp_address"],
            "QCLI_NSQD_HTTP_ADDRESS": addresses["http_address"],
        }
        _prepare(scratch, environment, stack)

        def screen(rows: int) -> Screen:
            return Screen(120, rows, scratch, environment)

        shown = screen(14)
        shown.run("qcli tail clicks/mail -n 3")
        shown.run("qcli tail clicks --from 10000 --to 10002 --format json")
        shown.save(folder / "tail.svg", "qcli tail")
        shown = screen(14)
        shown.run("qcli stat", until=lambda text: re.search(r"total +in +[▁-▇]{8}", text) is not None)
        shown.save(folder / "stat.svg", "qcli stat")
        shown = screen(8)
        shown.run(
            "qcli to-parquet big ./archive --target-file-size 4MiB",
            until=lambda text: re.search(r"[3-6]\d{5}/800000", text) is not None,
        )
        shown.save(folder / "to-parquet.svg", "qcli to-parquet")
        shown = screen(16)
        shown.run("qcli dlq list clicks.dead")
        shown.run("qcli dlq show clicks.dead -n 2")
        shown.save(folder / "dlq.svg", "qcli dlq")


def _prepare(scratch: Path, environment: dict[str, str], stack: ExitStack) -> None:
    """Topics with a backlog, dead letters, and a publisher and a consumer that go on."""

    def run(line: str) -> None:
        subprocess.run(["bash", "-c", line], cwd=scratch, env=environment, check=True, capture_output=True)

    lines = "".join(f'{{"user":"u{number % 97}","path":"/page/{number}"}}\n' for number in range(200_000))
    (scratch / "access.log").write_text(lines)
    run("qcli topic create clicks; qcli channel create clicks/archive; qcli channel create clicks/mail")
    run("head -20000 access.log | qcli pub clicks; qcli pub big access.log access.log access.log access.log")
    run("qcli channel set clicks/mail max_attempts=1 dead_letter_topic=clicks.dead")
    program = (
        "import os, trio_nsq.sync as nsq\n"
        "address = os.environ['QCLI_NSQD_TCP_ADDRESS']\n"
        "with nsq.Consumer('clicks', 'mail', nsqd_tcp_addresses=[address]) as consumer:\n"
        "    for number, message in enumerate(consumer):\n"
        "        message.requeue(0, backoff=False)\n"
        "        if number == 6: break\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=scratch, env=environment, check=True)
    run("echo later | qcli pub clicks --defer 1h")
    publisher = "while seq $((RANDOM % 9000)) | qcli pub clicks -q; do :; done"
    for line in (publisher, "qcli tail clicks/archive > /dev/null"):
        process = subprocess.Popen(
            ["bash", "-c", line],
            cwd=scratch,
            env=environment,
            start_new_session=True,
            stderr=subprocess.DEVNULL,
        )
        stack.callback(process.wait)
        stack.callback(os.killpg, process.pid, signal.SIGKILL)
    time.sleep(2)  # rates need two looks at a running system


def main() -> None:
    """Make the pictures that the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--charts", action="store_true", help="the charts only")
    parser.add_argument("--folder", type=Path, default=PICTURES, help="where they go")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    make_charts(arguments.folder)
    if not arguments.charts:
        if shutil.which("bash") is None:
            sys.exit("bash is needed for the pictures of terminals")
        make_terminals(arguments.folder)


if __name__ == "__main__":
    main()
