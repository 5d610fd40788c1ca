"""Send the same bytes to nsqd and our broker, and compare the frames: limits that options set."""

from collections.abc import Iterator

import pytest

from interop.same.limits import FLAGS, OURS_ONLY, SCRIPTS
from interop.same.stage import Pair, check, pair

pytestmark = pytest.mark.interop


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with pair(tmp_path_factory.mktemp("limits"), *FLAGS, ours_only=OURS_ONLY) as running:
        yield running


@pytest.mark.parametrize("name", SCRIPTS)
def test_same_limits(brokers: Pair, name: str) -> None:
    check(brokers, f"topic{list(SCRIPTS).index(name):03d}", SCRIPTS[name])
