"""Check the list of top-level domains against the pinned package that it is made from."""

import subprocess
import sys
from pathlib import Path

import pytest

from trio_nsq.http.top_level_domains import GENERIC

TOOL = Path(__file__).parents[2] / "tools" / "top_level_domains.py"


def test_the_list_is_that_of_the_pinned_package() -> None:
    pytest.importorskip("publicsuffixlist")
    done = subprocess.run([sys.executable, TOOL, "--check"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_list_has_public_domains_only() -> None:
    assert {"com", "org", "net", "arpa", "dev", "prod", "zip"} <= GENERIC
    assert GENERIC.isdisjoint(
        {"local", "lan", "corp", "home", "internal", "svc", "nsqd", "localhost", "consul"}
    )
