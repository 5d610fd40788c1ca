"""Tests for /jobs: reports over HTTP, who sees them, and the log of requests."""

import json
import logging
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from access.support import ALL_ROLES, AuthFile, Given, bearer, everything
from broker.api import running_api
from broker.support import running_broker


def job(**values: Any) -> bytes:
    return json.dumps({"kind": "replay", "started_at": 12.5, "topic": "t"} | values).encode()


async def test_what_is_reported_is_listed(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        assert (await api.get("/jobs")).json() == {"jobs": []}
        answer = await api.send("PUT", "/jobs/one", body=job(done=3, total=9, host="h", pid=7, name="<b>"))
        assert (answer.status_code, answer.content) == (200, b"")
        (found,) = (await api.get("/jobs")).json()["jobs"]
        assert abs(found.pop("reported_at") - time.time()) < 60
        assert found == {
            "id": "one", "kind": "replay", "topic": "t", "channel": "", "name": "<b>", "host": "h", "pid": 7,
            "started_at": 12.5, "done": 3, "total": 9, "per_second": None, "unit": "messages",
            "state": "running", "message": "", "client": "", "lag": None, "lag_s": None, "failures": None,
        }  # fmt: skip


async def test_refusals(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        for path, body, status, code in (
            ("/jobs/one", b"{", 400, "INVALID_BODY"),
            ("/jobs/one", b"[" * 4000, 400, "INVALID_BODY"),
            ("/jobs/one", job(done="x"), 400, "INVALID_JOB"),
            ("/jobs/one", job(lag=-1), 400, "INVALID_JOB"),
            ("/jobs/one", job(lag_s="x"), 400, "INVALID_JOB"),
            ("/jobs/one", job(failures=True), 400, "INVALID_JOB"),
            ("/jobs/a%20b", job(), 400, "INVALID_JOB"),
            ("/jobs/one", job(message="x" * 4096), 413, "BODY_TOO_BIG"),
        ):
            answer = await api.send("PUT", path, body=body)
            assert (answer.status_code, answer.json()["message"].partition(":")[0]) == (status, code)
        assert (await api.get("/jobs")).json() == {"jobs": []}


@pytest.mark.parametrize("name", ["name", "host", "unit", "message", "channel"])
async def test_text_that_is_not_unicode(tmp_path: Path, name: str) -> None:
    """The list of jobs can still be sent to every client."""
    async with running_api(tmp_path / "d") as api:
        assert (await api.send("PUT", "/jobs/one", body=job(**{name: "a\ud800"}))).status_code == 200
        (found,) = (await api.get("/jobs")).json()["jobs"]
        assert found[name] == "a\ufffd"


async def test_reports_are_not_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with running_api(tmp_path / "d") as api:
        await api.send("PUT", "/jobs/one", body=job())
        await api.get("/info")
    requests = [record.getMessage() for record in caplog.records if record.name == "trio_nsq.broker"]
    assert any("/info" in text for text in requests)
    assert not any("/jobs" in text for text in requests)


async def test_roles(tmp_path: Path) -> None:
    file = AuthFile(tmp_path / "auth.toml")
    file.add_token("all", everything(*ALL_ROLES))
    file.add_token("reader", Given(["read"], ["t"]))
    file.add_token("publisher", Given(["publish"], ["t"]))
    file.add_token("other", Given(["read"], ["other"]))
    async with running_broker(tmp_path / "d", auth_file=file.write()) as bound:
        async with httpx.AsyncClient(base_url=f"http://{bound.http_address}", timeout=20) as client:

            async def put(job_id: str, token: str, body: bytes) -> int:
                headers = {"Authorization": bearer(token)}
                return (await client.put(f"/jobs/{job_id}", headers=headers, content=body)).status_code

            async def seen(token: str) -> dict[str, str]:
                answer = await client.get("/jobs", headers={"Authorization": bearer(token)})
                return {job["id"]: job["client"] for job in answer.json()["jobs"]}

            assert (await client.put("/jobs/one", content=job())).status_code == 401
            assert await put("one", "other", job()) == 403
            assert await put("one", "reader", job()) == 200
            assert await put("one", "publisher", job()) == 403  # not its job
            assert await put("two", "publisher", job()) == 200
            assert await put("all", "reader", job(topic="")) == 403
            assert await put("all", "all", job(topic="")) == 200
            assert await seen("reader") == {"one": "reader", "two": "publisher"}
            assert await seen("other") == {}
            assert await seen("all") == {"one": "reader", "two": "publisher", "all": "all"}
