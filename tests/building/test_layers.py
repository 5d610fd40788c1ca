"""Check that imports point from higher layers to lower ones, and never in a circle.

The sources are parsed, so imports inside functions and below `if TYPE_CHECKING` count, too.
"""

import ast
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

LAYERS = (
    ("qcli", "pyspark_nsq", "pytest_trio_nsq"),
    ("trio_nsq.spark", "trio_nsq.testing"),
    ("trio_nsq",),  # only its `__init__.py`: the public names
    (
        "trio_nsq.connectors",
        "trio_nsq.console",
        "trio_nsq.otel",
        "trio_nsq.sync",
        "trio_nsq.integrations",
        "trio_nsq.nsqd_import",
        "trio_nsq.cluster",
    ),
    ("trio_nsq.fleet", "trio_nsq.bodies"),
    ("trio_nsq.client", "trio_nsq.broker"),
    ("trio_nsq.lookup",),
    ("trio_nsq.coordination", "trio_nsq.archive"),
    ("trio_nsq.http", "trio_nsq.filters", "trio_nsq.storage"),
    ("trio_nsq.server", "trio_nsq.replication"),
    ("trio_nsq.log", "trio_nsq.access", "trio_nsq.tls"),
    ("trio_nsq.api",),
    ("trio_nsq.event_loop",),
    ("trio_nsq.protocol",),
    ("trio_nsq.platform", "trio_nsq.text", "trio_nsq._version"),
)
"""From the top down. A package may import itself and lower rows, but not its neighbours in a row."""

WITHIN = {
    "trio_nsq.broker.state": {"errors", "options"},
    "trio_nsq.broker.storage": {"errors", "state"},
    "trio_nsq.broker.clock": {"state"},
    "trio_nsq.broker.delivery": {"options", "reader_pool", "state", "clock"},
    "trio_nsq.broker.ingest": {
        "delivery",
        "errors",
        "monitoring",
        "options",
        "state",
        "storage",
        "topic_registry",
    },
    "trio_nsq.broker.session": {
        "delivery",
        "errors",
        "ingest",
        "options",
        "siblings",
        "state",
        "clock",
        "topic_registry",
    },
    "trio_nsq.client.connection": {"errors", "hooks"},
    "trio_nsq.client.discovery": {"connection", "errors"},
    "trio_nsq.client.consuming": {
        "arguments",
        "background",
        "connection",
        "discovery",
        "errors",
        "hooks",
        "publishing",
        "topics",
    },
    "trio_nsq.client.publishing": {
        "arguments",
        "background",
        "connection",
        "discovery",
        "errors",
        "hooks",
        "topics",
    },
    "trio_nsq.client.reading": {"arguments", "connection", "errors", "http"},
    "trio_nsq.client.http": {"arguments", "connection", "errors"},
    "trio_nsq.log.files": {"errors"},
    "trio_nsq.log.segment": {"errors", "files", "records"},
    "trio_nsq.log.disk": {"errors", "files", "interface", "records", "segment"},
    "trio_nsq.spark.spool": {"ranges", "segments"},
    "qcli.framework": set(),
    "qcli.terminal": {"framework"},
    "qcli.contexts": {"framework"},
    "qcli.broker": {"contexts", "framework"},
}
"""Additional imports of some packages from their parent package."""


def modules_of(*roots: Path) -> dict[str, Path]:
    """Return the files of all modules below some source roots, by import name."""
    found = {}
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(name: str, modules: Mapping[str, Path]) -> set[str]:
    """Return which of these modules a module imports, anywhere in its source.

    `from package import name` is an import of the module `package.name`, if there is one, else of `package`.
    """
    path = modules[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            members = {f"{base}.{alias.name}" for alias in node.names}
            found |= {member if member in modules else base for member in members}
    return found & modules.keys()


def circles_in(graph: Mapping[str, set[str]]) -> set[frozenset[str]]:
    """Return the groups of modules that import each other, directly or through others of the group."""

    def reached_from(start: str) -> set[str]:
        reached: set[str] = set()
        ahead = [start]
        while ahead:
            new = graph[ahead.pop()] - reached
            reached |= new
            ahead += new
        return reached

    reached = {module: reached_from(module) for module in graph}
    return {
        frozenset(other for other in reached[module] if module in reached[other])
        for module in graph
        if module in reached[module]
    }


def layer_of(module: str) -> tuple[int, str]:
    """Return the row of a module in `LAYERS`, and its package in that row."""
    for row, packages in enumerate(LAYERS):
        for package in packages:
            if module == package or (package != "trio_nsq" and module.startswith(f"{package}.")):
                return row, package
    pytest.fail(f"{module} has no place in LAYERS")


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    """All modules of the project, with their imports."""
    modules = modules_of(ROOT / "core", ROOT / "cli")
    assert {"trio_nsq.protocol.frames", "trio_nsq.broker", "qcli.app"} <= modules.keys()
    return {name: imports_of(name, modules) for name in modules}


def test_imports_point_down(graph: Mapping[str, set[str]]) -> None:
    wrong = []
    for module, imported in graph.items():
        row, package = layer_of(module)
        for other in sorted(imported):
            other_row, other_package = layer_of(other)
            if other_package != package and other_row <= row:
                wrong.append(f"{module} imports {other}")
    assert not wrong


@pytest.mark.parametrize("package", WITHIN)
def test_package_imports_little_from_its_parent(package: str, graph: Mapping[str, set[str]]) -> None:
    around, _, own = package.rpartition(".")
    inside = [module for module in graph if module == package or module.startswith(f"{package}.")]
    assert inside, "the package has moved: change WITHIN"
    neighbours = {
        other.removeprefix(f"{around}.").partition(".")[0]
        for module in inside
        for other in graph[module]
        if other.startswith(f"{around}.")
    }
    assert neighbours <= WITHIN[package] | {own}


def test_no_module_imports_itself_through_others(graph: Mapping[str, set[str]]) -> None:
    assert not circles_in(graph)


@pytest.mark.parametrize(
    "source",
    [
        "from .beta import name",
        "from . import beta",
        "import package.beta",
        "from package.beta import name",
        "from package import beta",
        "def f():\n    from ..package import beta",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .beta import name",
    ],
)
def test_circle_is_found_however_it_is_imported(source: str, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "alpha.py").write_text(source)
    (tmp_path / "package" / "beta.py").write_text("from .gamma import name")
    (tmp_path / "package" / "gamma.py").write_text("from . import alpha")
    modules = modules_of(tmp_path)
    graph = {name: imports_of(name, modules) for name in modules}
    assert circles_in(graph) == {frozenset({"package.alpha", "package.beta", "package.gamma"})}


@pytest.mark.parametrize(
    ("proof", "maker"),
    [
        # Nothing is deleted before the state that no longer needs it is on disk: deletions take one.
        ("SavedCheckpoint", "data_folder.py"),
        # The write-ahead log gets only parts of segments that were not cut since their last sync.
        ("UnsyncedPart", "writer.py"),
    ],
)
def test_proofs_are_made_in_one_place(proof: str, maker: str) -> None:
    makers = {path.name for path in (ROOT / "core").rglob("*.py") if f"{proof}(" in path.read_text()}
    assert makers == {maker}
