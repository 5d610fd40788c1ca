"""Measure in how far type checkers know the types of what programs import: `make type-completeness`.

pyright counts a name as known if its type, and all types in it, are declared, and not inferred. Only the modules that
programs import count, and those whose classes their objects have.
"""

import argparse
import json
import os
import subprocess
import sys
import sysconfig
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = "trio_nsq"
MODULES = ("client", "sync", "protocol", "testing", "integrations", "event_loop")
"""Besides the names of the package itself."""
TIMEOUT_S = 900


def symbols() -> list[dict[str, Any]]:
    """Have pyright list all names of the package."""
    paths = [str(ROOT / "core"), sysconfig.get_path("purelib"), *filter(os.path.isdir, sys.path)]
    command = ["-m", "pyright", "--verifytypes", PACKAGE, "--ignoreexternal", "--outputjson"]
    with TemporaryDirectory() as folder:  # not the project's, whose files it would take for the program's
        done = subprocess.run(
            [sys.executable, *command, "--pythonpath", sys.executable],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,  # it fails if anything is unknown
        )
    found: list[dict[str, Any]] = json.loads(done.stdout)["typeCompleteness"]["symbols"]
    return [each for each in found if each["isExported"]]


def main() -> int:
    """Print the share of known names, and those that are not; return 1 if it is less than wanted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--least", type=float, default=0.0, help="the share that is wanted, in percent")
    parser.add_argument("--all", action="store_true", help="count all modules, also those of the broker")
    options = parser.parse_args()
    counts: Counter[bool] = Counter()
    for each in symbols():
        module, _, inner = each["name"].removeprefix(f"{PACKAGE}.").partition(".")
        if options.all or not inner or module in MODULES:
            counts[each["isTypeKnown"]] += 1
            if not each["isTypeKnown"]:
                print(each["name"])
    share = 100 * counts[True] / max(1, counts.total())
    print(f"{share:.1f} % of {counts.total()} names have known types")
    return 0 if share >= options.least else 1


if __name__ == "__main__":
    sys.exit(main())
