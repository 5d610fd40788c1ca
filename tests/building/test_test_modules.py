"""Check that tests survive a move of the code, because they use only public names.

- No test imports another test module: shared helpers are in modules such as `support.py`.
- No test reads or sets a private name: code offers a documented argument or option instead.
- No test looks into the frames of a thread or a task.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

PUBLIC = {"_asdict", "_replace", "_exit"}
"""Documented members of the standard library that only look private."""
FRAMES = {
    "_current_frames",
    "_getframe",
    "cr_frame",
    "currentframe",
    "f_back",
    "f_locals",
    "gi_frame",
    "tb_frame",
}
BY_NAME = {"attrgetter", "delattr", "getattr", "hasattr", "object", "patch", "setattr"}
"""Functions and methods that take the name of an attribute: also `monkeypatch.setattr`, `mock.patch.object`.
"""

EXAMINED = (ast.Import, ast.ImportFrom, ast.Attribute, ast.Call)
"""What `reaches_in` examines: a seventh of all nodes."""
REACHING_IN = frozenset({"conftest.py"})
"""Exceptions: trio's mock clock has no public way to wait for threads, and pytest none to compile a test module."""


def is_private(name: str) -> bool:
    """Return whether a dotted name has a private part."""
    parts = [part for part in name.split(".") if part not in PUBLIC]
    return any(part.startswith("_") and not part.endswith("__") for part in parts)


def is_test_module(name: str) -> bool:
    """Return whether a dotted name has a part from which pytest would collect tests."""
    return any(part.startswith("test_") for part in name.split("."))


def reaches_in(node: ast.AST) -> Iterator[str]:
    """Yield the violations of one node of a test's syntax tree."""
    match node:
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            module = f"{node.module or ''}." if isinstance(node, ast.ImportFrom) else ""
            for name in (module + alias.name for alias in names):
                if is_test_module(name) or is_private(name):
                    yield f"imports {name}"
        case ast.Attribute(value=ast.Name(id="self" | "cls")):
            pass
        case ast.Attribute(attr=name) if is_private(name) or name in FRAMES:
            yield f"uses {name}"
        case ast.Call(func=ast.Attribute(attr=function) | ast.Name(id=function)) if function in BY_NAME:
            for argument in node.args:
                if (
                    isinstance(argument, ast.Constant)
                    and isinstance(argument.value, str)
                    and is_private(argument.value)
                ):
                    yield f"uses {argument.value}"


def findings(source: str) -> list[str]:
    """Return the violations in the source of a test or of a helper, with line numbers."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, EXAMINED)]
    return [f"line {node.lineno} {what}" for node in nodes for what in reaches_in(node)]


def test_tests_use_public_names_only() -> None:
    files = [path for path in sorted(TESTS.rglob("*.py")) if ".build" not in path.parts]
    assert len(files) > 100
    wrong = {str(path.relative_to(TESTS)): findings(path.read_text()) for path in files}
    assert {name for name, what in wrong.items() if what} == REACHING_IN, wrong


@pytest.mark.parametrize(
    "source",
    [
        "from broker.test_stats import figures",
        "from .test_stats import figures",
        "from . import test_stats",
        "from broker import test_stats",
        "import broker.test_stats",
        "from trio_nsq.log.disk import _scan",
        "from trio_nsq._version import __version__",
        "log._segments",
        "log._segments = []",
        "self.log._segments",
        "monkeypatch.setattr(disk, '_BLOCK', 1)",
        "monkeypatch.setattr('trio_nsq.log.disk._BLOCK', 1)",
        "setattr(log, '_segments', [])",
        "getattr(log, '_segments')",
        "patch.object(log, '_segments')",
        "sys._current_frames()",
        "task.coro.cr_frame.f_locals",
    ],
)
def test_violations_are_found(source: str) -> None:
    assert findings(source)


@pytest.mark.parametrize(
    "source",
    [
        "self._broker = broker",
        "cls._started += 1",
        "message._asdict()",
        "os._exit(3)",
        "from .support import figures",
        "from broker.support import figures",
        "module.__doc__",
        "getattr(log, 'segments')",
        "_PRIVATE_TO_THE_TEST = 1",
    ],
)
def test_allowed_code_has_no_violations(source: str) -> None:
    assert not findings(source)
