"""A log that nobody reads must not stop a server."""

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

PATIENCE_S = 60


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("form", ["text", "json"])
def test_broker_serves_clients_although_nobody_reads_its_log(tmp_path: Path, form: str) -> None:
    addresses = tmp_path / "addresses.json"
    free = ("--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0")
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "qcli", "serve", *free, f"--data-path={tmp_path / 'd'}"),
            *(f"--address-file={addresses}", f"--log-format={form}"),
        ],
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        fcntl.fcntl(process.stderr, fcntl.F_SETPIPE_SZ, 4096)
        until(addresses.exists)
        http = json.loads(addresses.read_text())["http_address"]

        def ask(word: str) -> None:
            assert httpx.get(f"http://{http}/{word}", timeout=PATIENCE_S).status_code == 404

        began_s = time.monotonic()
        for length in [*[20] * 100, 5000, 20_000, *[20] * 100]:
            ask("x" * length)
        assert time.monotonic() < began_s + PATIENCE_S / 2
        os.set_blocking(process.stderr.fileno(), False)
        said = b""

        def read() -> bool:
            nonlocal said
            said += process.stderr.read() or b"" if process.stderr is not None else b""
            ask("read")
            return b" lines of the log were left out: nobody read them" in said and b"/read" in said

        until(read)
        if form == "json":
            assert all(json.loads(line) for line in said.splitlines()[:-1])
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
        process.stderr.close()
    assert process.returncode == 0
