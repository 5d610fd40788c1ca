"""Actions of viewers with tokens: the console checks their roles, so do the brokers, and the audit log has each one."""

from pathlib import Path

import httpx

from access.support import everything
from console.access_support import auth_file, guarded_broker, running_console


async def test_roles_decide_on_pages_and_actions_and_the_audit_log_tells_them(tmp_path: Path) -> None:
    async with guarded_broker(tmp_path) as broker, running_console(tmp_path, broker) as site:
        async with site.browser() as some, site.browser() as reader:
            await some.log_in("web")
            await reader.log_in("reader")
            for path in ("/topics/clicks/delete", "/topics/clicks/pause"):
                assert (await some.get(path)).status_code == 200
                assert (await reader.get(path)).status_code == 403
                assert (await reader.post(path, {"typed": "clicks"})).status_code == 403
            for path in ("/topics/orders/delete", "/topics/orders/settings", "/dead-letters/orders"):
                assert (await some.post(path, {"typed": "orders", "ttl": "1s"})).status_code == 403
            asked = await some.post("/topics/clicks/settings", {"retention_time": "1h"})
            assert (asked.status_code, "This drops no message" in asked.text) == (200, True)
            done = await some.post("/topics/clicks/pause")
            assert done.status_code == 303
            shown = await some.get(done.headers["location"])
            assert "Topic clicks paused" in shown.text
            assert "Topic clicks paused" not in (await reader.get(done.headers["location"])).text
            settings = (await reader.get("/topics/clicks/settings")).text
            assert "retention_time" in settings
            assert "Preview" not in settings
        line = await site.await_audited("action")
        assert len([each for each in site.audited() if each["event"] == "action"]) == 1, (
            "a question is no action"
        )
        assert (line["action"], line["topic"], line["status"]) == ("POST /topics/clicks/pause", "clicks", 303)
        assert (line["done"], line["failed"]) == (1, 0)
        assert "web" in line.values()


async def test_broker_refuses_a_viewer_whose_role_was_taken_away(tmp_path: Path) -> None:
    async with guarded_broker(tmp_path) as broker, running_console(tmp_path, broker) as site:
        async with site.browser() as some, httpx.AsyncClient() as client:
            await some.log_in("admin")
            assert (await some.get("/topics/clicks/pause")).status_code == 200
            file = auth_file(tmp_path)
            file.add_token("admin", everything("read", "admin"))
            file.write()
            answer = await client.put(
                f"http://{broker.http_address}/config/auth_file",
                content=str(file.path).encode(),
                headers={"Authorization": "Bearer admin-secret"},
            )
            assert answer.status_code == 200
            done = await some.post("/topics/clicks/pause")
            text = (await some.get(done.headers["location"])).text if done.status_code == 303 else done.text
            assert "role manage" in text
