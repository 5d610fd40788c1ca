"""Check that the protocol is free of IO and clocks: it imports nothing that has either."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import trio_nsq.protocol

FOLDER = Path(str(trio_nsq.protocol.__file__)).parent
MODULES = sorted(FOLDER.glob("*.py"))
ALLOWED = {
    "__future__",
    "base64",
    "bisect",
    "collections",
    "dataclasses",
    "datetime",  # to write times
    "enum",
    "functools",
    "ipaddress",
    "itertools",
    "json",
    "math",
    "mypy_extensions",  # for the type checker only
    "re",
    "snappy",
    "struct",
    "typing",
    "zlib",
}
"""Pure modules: no sockets, tasks or clocks."""


def imported(module: Path) -> set[str]:
    """Return the top-level packages that a module imports anywhere; "." for the package itself, ".." for
    other packages.
    """
    found = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." * min(node.level, 2) or str(node.module).partition(".")[0])
    return found


def test_modules_are_found() -> None:
    assert {"__init__.py", "commands.py", "frames.py", "identify.py"} <= {path.name for path in MODULES}
    assert not [path for path in FOLDER.iterdir() if path.is_dir() and path.name != "__pycache__"]


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.name)
def test_a_module_imports_only_the_package_and_pure_modules(module: Path) -> None:
    assert imported(module) <= ALLOWED | {"."}


@pytest.mark.parametrize(
    "source",
    ["import time", "import os.path", "from time import monotonic", "from ..log import disk", "def f():\n import trio"],
)  # fmt: skip
def test_forbidden_imports_are_detected(source: str, tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(source)
    assert not imported(module) <= ALLOWED | {"."}


def test_protocol_can_be_imported_without_trio() -> None:
    """In a new interpreter, without running `trio_nsq/__init__.py`, which imports more."""
    program = f"""
import sys, types
package = types.ModuleType("trio_nsq")
package.__path__ = [{str(FOLDER.parent)!r}]
sys.modules["trio_nsq"] = package
before = set(sys.modules)
for name in ("trio", "asyncio", "socket", "select", "selectors", "threading", "logging", "datetime", "random"):
    sys.modules.setdefault(name, None)  # importing it would raise
from trio_nsq.protocol.command_reader import CommandReader
from trio_nsq.protocol.frames import FrameReader
from trio_nsq.protocol.limits import Limits
reader = CommandReader(Limits())
reader.receive_data(b"  V2NOP\\n")
assert reader.next_command() is not None
print(*sorted({{name.partition(".")[0] for name in set(sys.modules) - before if sys.modules[name]}}))
"""
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "trio_nsq" in done.stdout.split()
    assert "trio" not in done.stdout.split()
