"""A pytest plugin that prints the processor time of each file of the tests, with that of the processes they start.

`make pytest ARGS='-p tools.costs'` prints it at the end. Elapsed time says little where several files run side by
side: the processor time is what `make test` has to become shorter.
"""

import os
import resource
import time
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

_PROPERTY = "cost"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Cost(NamedTuple):
    """Seconds of processor time and of elapsed time."""

    cpu_s: float
    elapsed_s: float

    def since(self, before: "Cost") -> "Cost":
        """Return the difference."""
        return Cost(self.cpu_s - before.cpu_s, self.elapsed_s - before.elapsed_s)


def descendants(pid: int) -> Iterator[int]:
    """Return the running processes that a process has started, and those that these have."""
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:  # it has ended
            continue
        for child in map(int, children):
            yield child
            yield from descendants(child)


def spent_by(pid: int) -> float:
    """Return the processor seconds of a process and of those of its children that have ended; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS_PER_S


def spent() -> Cost:
    """Return what this process and all below it have spent so far."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    own = sum(sum(resource.getrusage(kind)[:2]) for kind in kinds)
    return Cost(own + sum(map(spent_by, descendants(os.getpid()))), time.monotonic())


class _Costs:
    def __init__(self) -> None:
        self._before = Cost(0.0, 0.0)
        self._files: dict[str, list[Cost]] = defaultdict(list)

    def pytest_collection_finish(self) -> None:
        self._before = spent()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Give the report of a test its cost, which xdist sends to the process that prints it."""
        report = yield
        if call.when == "teardown":
            now = spent()
            report.user_properties.append((_PROPERTY, list(now.since(self._before))))
            self._before = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the cost of a test, of this process or of a worker."""
        for name, value in report.user_properties:
            if name == _PROPERTY and report.when == "teardown":
                assert isinstance(value, list)
                self._files[report.nodeid.partition("::")[0]].append(Cost(*value))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the files, those that cost most first."""
        sums = {
            file: Cost(sum(each.cpu_s for each in costs), sum(each.elapsed_s for each in costs))
            for file, costs in self._files.items()
        }
        terminalreporter.section("processor time, elapsed time and number of tests")
        for file, cost in sorted(sums.items(), key=lambda item: -item[1].cpu_s):
            line = f"{cost.cpu_s:8.1f} s {cost.elapsed_s:8.1f} s {len(self._files[file]):6}  {file}"
            terminalreporter.write_line(line)
        cpu_s, elapsed_s = (sum(each[index] for each in sums.values()) for index in (0, 1))
        terminalreporter.write_line(f"{cpu_s:8.1f} s {elapsed_s:8.1f} s in total")


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin, in each process of the tests."""
    config.pluginmanager.register(_Costs(), "costs")
