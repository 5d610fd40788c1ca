"""Who may look at messages and publish; and the newest messages followed live."""

from pathlib import Path

import httpx
import trio

from broker.support import PATIENCE_S
from console.access_support import guarded
from console.message_support import PageText, browsing


async def test_messages_need_the_role_read_on_the_topic(tmp_path: Path) -> None:
    async with guarded(tmp_path) as site, site.browser() as web, site.browser() as nobody:
        await web.log_in("web")
        pages = (
            "messages",
            "messages/0",
            "messages/0/body",
            "messages.ndjson?from=0&until=1",
            "tail",
            "c/messages",
        )
        for page in pages:
            assert (await web.get(f"/topics/orders/{page}")).status_code == 403
            assert (await nobody.get(f"/topics/clicks/{page}")).status_code in (303, 401)
        assert (await web.get("/topics/clicks/messages")).status_code == 200
        assert (await web.get("/topics/clicks/tail")).status_code == 200


async def test_publishing_needs_the_role_and_uses_the_viewers_token(tmp_path: Path) -> None:
    fields = {"body": "from a form", "format": "text"}
    async with guarded(tmp_path) as site, site.browser() as web, site.browser() as reader:
        await web.log_in("web")
        await reader.log_in("reader")
        # The console's own token cannot publish.
        done = await web.post("/topics/clicks/publish", fields)
        assert done.status_code == 200
        assert "has stored 1 message: sequence" in PageText(done.text).text
        for page in ("messages", "tail", "messages.ndjson?from=0&until=1", "messages/0/body"):
            assert (await reader.get(f"/topics/clicks/{page}")).status_code == 200
        shown = await reader.get("/topics/clicks/messages/0")
        assert "from a form" in shown.text
        assert "Authorization: Bearer $TOKEN" in shown.text
        assert "reader-secret" not in shown.text
        for browser, topic in ((reader, "clicks"), (web, "orders")):
            assert (await browser.get(f"/topics/{topic}/publish")).status_code == 403
            assert (await browser.post(f"/topics/{topic}/publish", fields)).status_code == 403


async def test_a_form_with_a_file_needs_its_token(tmp_path: Path) -> None:
    async with guarded(tmp_path) as site, site.browser() as web:
        await web.log_in("web")
        good = await web.csrf()
        for broken in (b"--y\r\nno head", b"", b"--y\r\nContent-Disposition: form-data\r\n\r\nx\r\n--y--"):
            for boundary in ("; boundary=y", "", "; boundary=,", "; boundary=" + "y" * 300):
                answer = await web.client.post(
                    "/topics/clicks/publish",
                    content=broken,
                    headers={
                        "Origin": site.root,
                        "Content-Type": f"multipart/form-data{boundary}",
                        "X-CSRF-Token": good,
                    },
                )
                assert answer.status_code == 400
        for csrf, status in (("wrong", 403), ("", 403), (good, 200)):
            answer = await web.client.post(
                "/topics/clicks/publish",
                data={"csrf": csrf, "format": "text"},
                files={"file": ("x", b"\x00\xff")},
                headers={"Origin": site.root},
            )
            assert answer.status_code == status
        body = await web.get("/topics/clicks/messages/0/body")
        assert body.content == b"\x00\xff"
        assert (await web.get("/topics/clicks/messages/1")).status_code == 404


async def test_the_newest_messages_are_followed(tmp_path: Path) -> None:
    async with browsing(tmp_path) as (site, (broker,)):
        await broker.post("/topic/create", topic="t")
        page = await site.page("/topics/t/tail")
        assert "No messages yet" in page.text
        with trio.fail_after(PATIENCE_S):
            async with site.client.stream("GET", "/live?path=/topics/t/tail", timeout=None) as events:
                assert events.status_code == 200
                await broker.tcp.publish(
                    "t", *(b"number %d" % n for n in range(100)), b"<script>last</script>"
                )
                await _received(events, "&lt;script&gt;last&lt;/script&gt;")
    await trio.lowlevel.checkpoint()


async def _received(events: httpx.Response, text: str) -> None:
    """Read events until they have a text."""
    seen = ""
    with trio.CancelScope() as reading:
        async for piece in events.aiter_raw():
            seen += piece.decode()
            if text in seen:
                reading.cancel()
    assert "<script>last" not in seen
