"""Check that a run of the tests fails at once if it would test the other form: compiled, or pure Python."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trio_nsq.protocol.bulk import COMPILED

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("environment", "compiled"),
    [
        ({}, None),
        ({"CI": "true"}, True),
        ({"TRIO_NSQ_COMPILE": "1"}, True),
        ({"TRIO_NSQ_COMPILE": "0"}, False),
        ({"CI": "true", "TRIO_NSQ_COMPILE": "0"}, False),
    ],
    ids=str,
)
def test_form_is_the_selected_one(environment: dict[str, str], compiled: bool | None) -> None:
    inherited = {k: v for k, v in os.environ.items() if k not in ("CI", "TRIO_NSQ_COMPILE")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", __file__],
        cwd=TESTS.parent,
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if compiled in (None, COMPILED):
        assert done.returncode == 0, done.stderr
    else:
        form = "compiled" if COMPILED else "pure Python"
        assert (done.returncode, f"is {form}; run `make" in done.stderr) == (4, True), done.stderr
