"""The pytest plugin: fixtures for tests of programs that use a broker. docs/how-to/test-your-program.md shows them.

pytest imports this module in every project of the environment, so it imports nothing of the library until a test needs
a broker. PYTEST_DONT_REWRITE
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from trio_nsq.testing import NSQ, NSQServer
    from trio_nsq.testing.server import ServerProcess

_launched: "pytest.StashKey[ServerProcess]" = pytest.StashKey()


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """Import the library as it is. Because of this plugin, pytest would rewrite the assertions of all its modules.

    pytest has no API for this. Programs that import the library would take 0.3 s longer for it the first time, and
    0.02 s later. If pytest keeps the names elsewhere, nothing else changes.
    """
    hook = getattr(pluginmanager, "rewrite_hook", None)
    marked = getattr(hook, "_must_rewrite", None)
    if isinstance(marked, set):
        marked -= {"trio_nsq", "qcli", "pyspark_nsq"}


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Launch the broker's process if a test needs it: it imports its modules while other tests run."""
    if session.config.option.collectonly:
        return
    if any("nsq_server" in getattr(item, "fixturenames", ()) for item in session.items):
        from trio_nsq.testing.server import ServerProcess

        session.config.stash[_launched] = ServerProcess()


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the broker's process if no test came to use it."""
    process = config.stash.get(_launched, None)
    if process is not None:
        process.close()


@pytest.fixture(scope="session")
def nsq_options() -> Mapping[str, Any]:
    """Options of `nsq_server`; override this fixture to change them, for example to `{"msg_timeout_ms": 1000}`."""
    return {}


@pytest.fixture(scope="session")
def nsq_server(
    nsq_options: Mapping[str, Any], pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> "Iterator[NSQServer]":
    """A broker in a process of its own, for all tests: a `trio_nsq.testing.NSQServer`."""
    from trio_nsq.testing import NSQServer

    folder = tmp_path_factory.mktemp("nsq")
    with NSQServer(folder, nsq_options, process=pytestconfig.stash.get(_launched, None)) as server:
        yield server


@pytest.fixture
def nsq(nsq_server: "NSQServer") -> "Iterator[NSQ]":
    """The broker of `nsq_server` without the topics of other tests: a `trio_nsq.testing.NSQ`."""
    from trio_nsq.testing import NSQ

    with NSQ(nsq_server) as nsq:
        yield nsq
