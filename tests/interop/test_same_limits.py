"""The same bytes to nsqd and to our broker, and the same frames back: limits that are set by options."""

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
