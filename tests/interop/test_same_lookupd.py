"""Send the same commands and requests to nsqlookupd and our discovery service, and compare the responses."""

from collections.abc import Iterator

import pytest

from interop.same.discovering import BOUNDS, SCRIPTS, LookupdPair, check, lookupd_pair

pytestmark = pytest.mark.interop

ALL = SCRIPTS | BOUNDS


@pytest.fixture(scope="module")
def lookupds() -> Iterator[LookupdPair]:
    with lookupd_pair() as running:
        yield running


@pytest.mark.parametrize("name", ALL)
def test_same_lookupd(lookupds: LookupdPair, name: str) -> None:
    check(lookupds, f"topic{list(ALL).index(name):03d}", ALL[name])
