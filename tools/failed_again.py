"""Run pytest, and what failed once more, alone.

The tests start a thousand processes on two cores. What fails beside the others and passes alone has a race, or a limit
of time that a busy machine exceeds: it is named at the end, to be mended, and does not fail the run. What fails twice
does.
"""

import json
import subprocess
import sys
from pathlib import Path

MOST_TESTS = 5
"""A change that breaks something usually breaks more tests than this; then nothing runs again."""
LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")


def failed() -> list[str]:
    """Return the names of the tests that failed in the last run in this folder."""
    return sorted(json.loads(LAST_FAILED.read_text())) if LAST_FAILED.exists() else []


def main(arguments: list[str]) -> int:
    """Run pytest with these arguments, and return its exit code; 0 if what failed passes alone."""
    LAST_FAILED.unlink(missing_ok=True)  # it keeps failures of tests that a run leaves out
    pytest = [sys.executable, "-m", "pytest"]
    code = subprocess.call([*pytest, *arguments])
    names = failed()
    if code != 1 or not names or len(names) > MOST_TESTS or not all("::" in name for name in names):
        return code
    print(f"\nOnce more, alone: {len(names)} of the tests failed.", flush=True)
    # The selection of tests does not hold for this run, and several processes do not.
    options = [each for each in arguments if each.startswith(("-W", "--timeout", "-o"))]
    if subprocess.call([*pytest, *options, "--numprocesses=0", *names]):
        return code
    print("\nUnstable: these tests failed beside others and passed alone. Mend them:")
    print("\n".join(f"  {name}" for name in names), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
