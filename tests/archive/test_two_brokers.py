"""Two brokers and one archive in a bucket: the second one waits, and takes over when the first has not run for long.

It waits for the time of a lease: only with `FAULT_COMPLETE=1`.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from cli.support import Cli
from interop.peers import Broker, qcli_serve
from spark.support import until
from storage.stores import Store

pytestmark = pytest.mark.skipif(
    "FAULT_COMPLETE" not in os.environ, reason="waits for a lease: FAULT_COMPLETE=1"
)


def archive_of(broker: Broker) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(broker.http("GET", "/stats", format="json"))["archive"]
    return found


def is_archived(broker: Broker) -> bool:
    found = archive_of(broker)
    return bool(found["state"] == "archiving" and not found["lag_operations"])


def bodies(broker: Broker) -> list[str]:
    lines = broker.http("GET", "/topic/read", topic="t", **{"from": 0, "count": 1000}).splitlines()
    return [message["body"] for message in map(json.loads, lines) if "body" in message]


def gets_ok(broker: Broker, body: bytes) -> bool:
    try:
        url = f"http://{broker.http_address}/pub?topic=t"
        return httpx.post(url, content=body, timeout=3).status_code == 200
    except httpx.HTTPError:
        return False


def test_a_broker_that_wakes_after_another_took_over_its_archive(tmp_path: Path, s3: Store) -> None:
    place = s3.new_place()
    offline = Cli("", "", env=s3.env)
    flags = (f"--archive={place}", "--archive-before-ok")
    with qcli_serve(tmp_path / "one", *flags, env=s3.env) as first:
        expected = [f"first {number}" for number in range(50)]
        for body in expected:
            first.post("/pub", body.encode(), topic="t")
        with qcli_serve(tmp_path / "waits", f"--archive={place}", env=s3.env) as waiting:
            until(lambda: "writes to it" in archive_of(waiting)["error"])
        first.process.send_signal(signal.SIGSTOP)
        restored = offline("archive", "restore", place, "--data-path", str(tmp_path / "two"))
        assert restored.code == 0, restored
        with qcli_serve(tmp_path / "two", *flags, env=s3.env) as second:
            until(
                lambda: is_archived(second) and httpx.get(f"http://{second.http_address}/ping").text == "OK"
            )
            more = [f"second {number}" for number in range(50)]
            for body in more[:25]:
                second.post("/pub", body.encode(), topic="t")
            first.process.send_signal(signal.SIGCONT)
            assert not gets_ok(first, b"of a broker that has lost the archive")
            for body in more[25:]:
                second.post("/pub", body.encode(), topic="t")
            until(lambda: "process" in archive_of(first)["error"])
            first.process.kill()
            first.process.wait()
            assert bodies(second) == expected + more
    checked = offline("archive", "verify", place, "--all")
    assert checked.code == 0, checked
    restored = offline("archive", "restore", place, "--data-path", str(tmp_path / "three"))
    assert restored.code == 0, restored
    with qcli_serve(tmp_path / "three") as third:
        assert bodies(third) == expected + more
