"""Check what a program loads that uses only the client: no server, and no package that only servers need."""

import json
import subprocess
import sys

import pytest

TIMEOUT_S = 60
LOADED = {
    "trio_nsq": {
        "_version",
        "access",
        "api",
        "client",
        "event_loop",
        "http",
        "lookup",
        "platform",
        "protocol",
        "sync",
    }
    | {"text", "tls", "hot_path__mypyc"},  # the last one has the compiled modules
    "trio_nsq.access": {"secret"},
    "trio_nsq.api": {"https", "lookupd", "request"},
    "trio_nsq.event_loop": {"retries", "runtime", "sides"},
    "trio_nsq.http": {"client", "failures", "urls"},
    "trio_nsq.lookup": {"hosts", "query"},
    "trio_nsq.platform": {"requirements"},
    "trio_nsq.tls": {"client_session", "errors"},
}
"""What a consumer and a producer may load of some packages. The others belong to the client."""


def test_programs_on_asyncio_do_not_load_trio() -> None:
    program = """
import asyncio, socket, sys, trio_nsq

async def fail(client):
    try:
        async with client:
            pass
    except trio_nsq.ConnectionFailed as error:
        print(error.reason)

async def main():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = "127.0.0.1:%d" % server.getsockname()[1]
        closing = asyncio.create_task(asyncio.to_thread(lambda: server.accept()[0].close()))
        await fail(trio_nsq.Producer(address))
        await closing
    await fail(trio_nsq.Consumer("t", "c", nsqd_tcp_addresses=address))
    print("trio" in sys.modules)

asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    first, second, is_loaded = done.stdout.splitlines()
    assert first
    assert second == "Connection refused"
    assert is_loaded == "False"


@pytest.mark.parametrize("loop", ["trio", "asyncio"])
def test_client_loads_no_server(loop: str) -> None:
    program = f"""
import json, sys, {loop}
before = set(sys.modules)
import trio_nsq, trio_nsq.sync
trio_nsq.Consumer, trio_nsq.Producer, trio_nsq.Message, trio_nsq.PublishFailed
trio_nsq.sync.Consumer("topic", "channel"), trio_nsq.sync.Producer()
print(json.dumps(sorted(set(sys.modules) - before)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    modules: list[str] = json.loads(done.stdout)
    for package, loaded in LOADED.items():
        start = f"{package}."
        found = {name.removeprefix(start).partition(".")[0] for name in modules if name.startswith(start)}
        assert found <= loaded, package
    others = {name.partition(".")[0] for name in modules} - sys.stdlib_module_names - {"trio_nsq"}
    with_trio = {"trio", "attr", "attrs", "outcome", "sniffio", "sortedcontainers", "idna", "_cffi_backend"}
    assert others <= (with_trio if loop == "asyncio" else set())
