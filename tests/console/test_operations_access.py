"""Jobs and health for viewers whose roles are on some topics only."""

import json
from pathlib import Path

import httpx

from console.access_support import guarded_broker, running_console


async def test_viewers_see_the_jobs_and_reasons_that_their_roles_allow(tmp_path: Path) -> None:
    async with guarded_broker(tmp_path) as broker:
        async with httpx.AsyncClient(headers={"Authorization": "Bearer admin-secret"}) as client:
            for job, topic in (("a", "clicks"), ("b", "orders"), ("c", "")):
                body = {"kind": "replay", "started_at": 1, "topic": topic, "name": f"job on {topic or 'all'}"}
                answer = await client.put(
                    f"http://{broker.http_address}/jobs/{job}", content=json.dumps(body)
                )
                assert answer.status_code == 200
        async with running_console(tmp_path, broker, poll_interval_ms=50) as site:
            async with site.browser() as some, site.browser() as every, site.browser() as nobody:
                for path in ("/jobs", "/health"):
                    assert (await nobody.get(path)).status_code == 303
                await some.log_in("web")
                await every.log_in("admin")
                jobs = {browser: (await browser.get("/jobs")).text for browser in (some, every)}
                shown = {
                    browser: [name for name in ("clicks", "orders", "all") if f"job on {name}" in text]
                    for browser, text in jobs.items()
                }
                assert shown == {some: ["clicks"], every: ["clicks", "orders", "all"]}
                assert "needs the role read" in (await some.get("/health")).text
                assert "iB used" not in (await some.get("/health")).text
                assert "iB used" in (await every.get("/health")).text
