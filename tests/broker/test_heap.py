"""Tests for the freed memory that a broker keeps, counted in page faults of another process."""

import os
import platform
import subprocess
import sys

import pytest

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_EACH_BYTES, _TOGETHER, _TIMES = 4 * 1024 * 1024, 3, 20
_PROGRAM = f"""
import resource, sys
from trio_nsq.platform.malloc_tuning import keep_freed_memory, trim

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range({_TIMES}):
        blocks = [b"x" * {_EACH_BYTES} for _ in range({_TOGETHER})]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if sys.argv[1:] == ["keep"]:
    keep_freed_memory()
faults()
print(faults())
trim()
print(faults())
"""

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")


def faults(*arguments: str, **environ: str) -> list[int]:
    """Return how many pages a process gets for the same memory again and again, and again after `trim`."""
    unset = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    argv = [sys.executable, "-c", _PROGRAM, *arguments]
    done = subprocess.run(argv, env=unset | environ, capture_output=True, text=True, check=True)
    return [int(line) for line in done.stdout.splitlines()]


@glibc
def test_freed_memory_is_kept_until_it_is_trimmed() -> None:
    pages = _TOGETHER * _EACH_BYTES // _PAGE_BYTES
    kept, after_trim = faults("keep")
    assert kept < pages // 10
    assert pages // 2 < after_trim < 2 * pages
    assert faults()[0] > _TIMES * pages // 2  # otherwise the broker need not do this


@glibc
@pytest.mark.parametrize(
    "environ", [{"MALLOC_ARENA_MAX": "8"}, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=8"}]
)
def test_settings_of_the_user_are_respected(environ: dict[str, str]) -> None:
    assert faults("keep", **environ)[0] > _TIMES
