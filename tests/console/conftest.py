"""A mixed fleet with a console before it, for the tests of one file."""

from collections.abc import Iterator

import pytest

from console.acting import Site, acting_site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Two brokers of ours, one nsqd, two discovery services, and a console before them."""
    with acting_site(tmp_path_factory.mktemp("acting")) as found:
        yield found
