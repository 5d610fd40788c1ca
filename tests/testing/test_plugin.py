"""The pytest plugin in projects of its users: each kind of tests, several workers, and what is left afterwards."""

import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from testing.support import PATIENCE_S, processes_of, run_pytest

pytestmark = pytest.mark.slow  # each test runs pytest, with a broker

_PROGRAM = """
import pytest, trio_nsq

async def forward(address, source, to):
    '''The program under test: passes messages on.'''
    async with trio_nsq.Producer(address) as producer:
        async with trio_nsq.Consumer(source, "c", nsqd_tcp_addresses=address, reconnect_min_s=0.01) as consumer:
            async for message in consumer:
                await producer.publish(to, message.body.upper())
                message.finish()
                if message.body == b"last":
                    return

async def scenario(nsq):
    nsq.publish("orders", b"first", b"last")
    await forward(nsq.tcp_address, "orders", "copies")
    await nsq.await_empty("orders", "c")
    assert await nsq.await_published("copies", 2) == [b"FIRST", b"LAST"]
    with pytest.raises(RuntimeError, match="await_empty"):
        nsq.wait_empty("orders", "c")
    with pytest.raises(TimeoutError, match="has 2 messages; 3 are expected"):
        await nsq.await_published("copies", 3, timeout_s=0)

    async with trio_nsq.Producer(nsq.tcp_address) as producer:
        nsq.kill()
        with pytest.raises(trio_nsq.PublishFailed):
            await producer.publish("copies", b"while it is down")
        nsq.restart()
        await producer.publish("copies", b"after")
    assert nsq.published("copies") == [b"FIRST", b"LAST", b"after"]
    nsq.hang()  # the next test finds a broker that runs
"""
_CHECKS = """
def test_topics_of_other_tests_are_gone(nsq):
    assert nsq.topics() == []
    assert nsq.published("orders") == []
"""
_PLAIN = """
import pytest
from trio_nsq.sync import Consumer, Producer

def test_plain(nsq):
    orders = nsq.topic("orders")
    with Producer(nsq.tcp_address) as producer:
        producer.publish(orders, b"one")
        producer.publish(orders, b"\\xff")
    assert nsq.wait_published(orders, 2) == [b"one", b"\\xff"]
    nsq.publish("later", b"x", defer_s=3600)
    assert nsq.published("later") == [b"x"]
    assert nsq.topics() == sorted([orders, "later"])
    assert nsq.depth(orders) == 2
    assert nsq.depth("nothing") == nsq.depth(orders, "nothing") == 0
    with Consumer(orders, "c", nsqd_tcp_addresses=nsq.tcp_address) as consumer:
        next(consumer).finish()
        message = next(consumer)
        assert message.timeout_s == 7
        assert nsq.in_flight(orders, "c") == 1
        with pytest.raises(TimeoutError, match="1 in flight"):
            nsq.wait_empty(orders, "c", timeout_s=0)
        message.requeue(delay_s=3600)
    assert nsq.deferred(orders, "c") == 1
    with pytest.raises(TimeoutError, match="'nothing' does not exist"):
        nsq.wait_empty("nothing", "c", timeout_s=0)
    with pytest.raises(TimeoutError, match="no channel 'd'"):
        nsq.wait_empty(orders, "d", timeout_s=0)
    nsq.kill()  # the next test finds a broker that runs
"""

_KINDS = {
    "pytest-trio": (
        ["-p", "trio", "-o", "trio_mode=true"],
        _PROGRAM + "\nasync def test_trio(nsq):\n    await scenario(nsq)\n",
    ),
    "pytest-asyncio": (
        ["-p", "asyncio", "-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function"],
        _PROGRAM + "\nasync def test_asyncio(nsq):\n    await scenario(nsq)\n",
    ),
    "anyio": (
        ["-p", "anyio"],
        _PROGRAM + "\n@pytest.mark.anyio\nasync def test_anyio(nsq):\n    await scenario(nsq)\n",
    ),
}


@pytest.mark.parametrize("kind", _KINDS)
def test_kinds_of_tests(kind: str, tmp_path: Path) -> None:
    options, source = _KINDS[kind]
    done = run_pytest(tmp_path, "-W", "error", *options, files={"test_it.py": source + _CHECKS})
    expected = 3 if kind == "anyio" else 2  # anyio runs each test under trio and asyncio
    assert re.search(rf"^{expected} passed", done.stdout, re.MULTILINE), done.stdout + done.stderr
    assert processes_of(tmp_path) == []
    assert not list(tmp_path.rglob("*.dat")), "the data of the broker is left"
    assert list(tmp_path.rglob("broker.log"))


def test_plain_tests_in_two_processes_with_options(tmp_path: Path) -> None:
    conftest = """
import os, pytest

@pytest.fixture(scope="session")
def nsq_options():
    return {"msg_timeout_ms": 7000}

@pytest.fixture(autouse=True)
def seen(nsq):
    with open("seen", "a") as file:
        print(os.environ["PYTEST_XDIST_WORKER"], nsq.tcp_address, file=file)
"""
    files = {
        "conftest.py": conftest,
        "test_it.py": _PLAIN + _CHECKS + _CHECKS.replace("def test", "def test_again"),
    }
    done = run_pytest(tmp_path, "-W", "error", "-p", "xdist", "-n2", files=files)
    assert "3 passed" in done.stdout, done.stdout + done.stderr
    seen = {tuple(line.split()) for line in (tmp_path / "seen").read_text().splitlines()}
    assert len(seen) == len({worker for worker, _ in seen}) == len({address for _, address in seen})
    assert processes_of(tmp_path) == []


def test_project_without_brokers(tmp_path: Path) -> None:
    """Nothing of the library is imported, and no process starts, if no test needs a broker.

    pytest rewrites the assertions of all that is installed together with a plugin, but not of this library.
    """
    source = """
import sys

def test_it():
    assert not [name for name in sys.modules if name.split(".")[0] in ("trio_nsq", "trio")]

def test_it_is_not_rewritten():
    import trio_nsq
    assert type(trio_nsq.__loader__).__name__ == "SourceFileLoader"

def test_chosen(nsq):
    pass
"""
    files = {"early.py": "import pytest\npytest.register_assert_rewrite('trio_nsq')\n", "test_it.py": source}
    done = run_pytest(tmp_path, "-k", "not chosen", before=["-p", "early"], files=files)
    assert "2 passed, 1 deselected" in done.stdout, done.stdout + done.stderr
    assert not list(tmp_path.rglob("broker.log"))


def test_killed_run_leaves_no_process(tmp_path: Path) -> None:
    source = """
import os, pathlib, signal

def test_it(nsq):
    nsq.hang()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = run_pytest(tmp_path, files={"test_it.py": source})
    assert done.returncode == -signal.SIGKILL
    deadline = time.monotonic() + PATIENCE_S
    while left := processes_of(tmp_path):
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def test_interrupted_run_leaves_no_process(tmp_path: Path) -> None:
    """Ctrl+C reaches the test, which can still use the broker, and not the broker's process."""
    source = """
import os, signal, time

def test_it(nsq):
    try:
        os.killpg(0, signal.SIGINT)
        time.sleep(60)
    finally:
        nsq.publish("t", b"x")
        print("the broker answers:", nsq.published("t"))
"""
    (tmp_path / "test_it.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", "-p", "pytest_trio_nsq"]
    done = subprocess.run(
        [*command, f"--basetemp={tmp_path / 'temporary'}"],
        cwd=tmp_path,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        start_new_session=True,
        timeout=PATIENCE_S,
    )
    assert "the broker answers: [b'x']" in done.stdout, done.stdout + done.stderr
    assert "KeyboardInterrupt" in done.stdout
    assert processes_of(tmp_path) == []


def test_plugin_is_an_entry_point() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["pytest11"] == {"pytest_trio_nsq": "pytest_trio_nsq"}
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert included["core/pytest_trio_nsq.py"] == "pytest_trio_nsq.py"
