"""`python -m qcli.generate`: write the files of `FOLDERS`; `--check`: only say whether they are current."""

import sys
from pathlib import Path

from . import stale_files, write_files


def main(arguments: list[str]) -> int:
    """Write or check the files of this repository; return 1 if `--check` finds outdated files."""
    root = Path(__file__).resolve().parents[3]
    if not (root / "pyproject.toml").is_file():
        print("This runs in a checkout of the repository only.", file=sys.stderr)
        return 1
    if arguments not in ([], ["--check"]):
        print("Usage: python -m qcli.generate [--check]", file=sys.stderr)
        return 2
    if not arguments:
        write_files(root)
        return 0
    stale = stale_files(root)
    for name in stale:
        print(f"{name} is not current: run 'make generate'", file=sys.stderr)
    return 1 if stale else 0


sys.exit(main(sys.argv[1:]))
