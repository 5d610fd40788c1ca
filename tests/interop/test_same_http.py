"""Send the same HTTP requests to nsqd and our broker, and compare the responses."""

from collections.abc import Iterator

import pytest

from interop.same.certificates import Certificates
from interop.same.requests import FLAGS, SCRIPTS, STATS_FLAGS, STATS_SCRIPTS
from interop.same.stage import Pair, check, pair

pytestmark = pytest.mark.interop


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with pair(tmp_path_factory.mktemp("http"), *FLAGS, ours_only=["--max-defer=1h"]) as running:
        yield running


@pytest.mark.parametrize("name", SCRIPTS)
def test_same_http(brokers: Pair, name: str) -> None:
    check(brokers, f"topic{list(SCRIPTS).index(name):03d}", SCRIPTS[name])


@pytest.fixture(scope="module")
def brokers_with_more(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("stats")
    certificates = Certificates.make(folder / "certificates")
    with pair(folder, *certificates.flags, *STATS_FLAGS, certificates=certificates) as running:
        yield running


@pytest.mark.parametrize("name", STATS_SCRIPTS)
def test_same_stats(brokers_with_more: Pair, name: str) -> None:
    check(brokers_with_more, f"topic{list(STATS_SCRIPTS).index(name):03d}", STATS_SCRIPTS[name])
