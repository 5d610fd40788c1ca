"""Send the same bytes to nsqd and our broker, and compare the frames they return."""

from collections.abc import Iterator

import pytest

from interop.same import channels, consuming, identifying, lines, publishing
from interop.same.stage import Pair, check, pair

pytestmark = pytest.mark.interop

TABLES = {
    "lines": lines,
    "identifying": identifying,
    "publishing": publishing,
    "consuming": consuming,
    "channels": channels,
}
SCRIPTS = {
    f"{area}: {name}": script for area, module in TABLES.items() for name, script in module.SCRIPTS.items()
}


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with pair(tmp_path_factory.mktemp("same")) as running:
        yield running


@pytest.mark.parametrize("name", SCRIPTS)
def test_same_frames(brokers: Pair, name: str) -> None:
    check(brokers, f"topic{list(SCRIPTS).index(name):03d}", SCRIPTS[name])
