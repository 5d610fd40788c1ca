"""Attacks from outside: by strangers, through a proxy, and by viewers that have lost rights."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from cryptography import x509
from h2.connection import H2Connection
from h2.events import ResponseReceived

from access.support import ALL_ROLES, Given, everything
from broker.certificates import Certificates
from broker.support import PATIENCE_S, connected, running_broker
from console.access_support import Site, auth_file, guarded, open_site, running_console
from console.fleet.fake_brokers import FakeBroker, fake_brokers
from console.web.support import visited
from trio_nsq.access.secret import NO_SECRET
from trio_nsq.client.connection.tls import TLSFiles


async def test_the_certificate_of_the_console_is_no_login(tmp_path: Path) -> None:
    """To brokers, a secret that is no token is no obstacle to a certificate: any secret would be a login."""
    certificates = Certificates(tmp_path / "certificates")
    cert, key = certificates.client_files("console-certificate")
    file = auth_file(tmp_path)
    subject = x509.load_pem_x509_certificate(cert.read_bytes()).subject.rfc4514_string()
    file.add_certificate("console-certificate", subject, everything(*ALL_ROLES))
    options: dict[str, Any] = {
        "tls_client_auth_policy": "verify-if-given",
        "tls_root_ca_file": certificates.ca_path,
    }
    async with running_broker(
        tmp_path / "d", auth_file=file.write(), **certificates.options, **options
    ) as broker:
        console = running_console(
            tmp_path,
            nsqd_http_addresses=(f"https://{broker.https_address}",),
            tls=TLSFiles(root_ca_file=certificates.ca_path, cert=cert, key=key),
            secret=NO_SECRET,
        )
        async with console as site, site.browser() as browser:
            answer = await browser.get("/api/topics", {"Authorization": "Bearer anything"})
            assert answer.status_code == 401
            assert (await browser.log_in("stranger")).status_code == 401
            assert (await browser.log_in("expired")).status_code == 401
            assert (await browser.log_in("admin")).status_code == 303
            assert (await browser.get("/api/topics")).json() == {"topics": None, "message": ""}


async def test_http2_is_no_way_past_the_proxy(tmp_path: Path) -> None:
    """A proxy that passes `Upgrade: h2c` on does not see the requests that follow, nor removes headers from them."""
    spoofed = {"X-Forwarded-User": "alice"}
    async with open_site(tmp_path, admin_users=("alice",)) as site:
        assert await _status_after_upgrade(site, spoofed) == 505
        async with site.browser() as browser:
            assert (await browser.get("/", spoofed)).status_code == 200


async def _status_after_upgrade(site: Site, headers: dict[str, str]) -> int:
    """Change the protocol as a client behind a proxy would, and return the status of a further request."""
    host = site.root.removeprefix("http://")
    address, _, port = host.rpartition(":")
    connection = H2Connection()
    settings = connection.initiate_upgrade_connection()
    assert isinstance(settings, bytes)
    upgrade = f"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: {settings.decode()}"
    head = [(":method", "GET"), (":path", "/"), (":authority", host), (":scheme", "http")]
    async with await trio.open_tcp_stream(address, int(port)) as stream:
        await stream.send_all(f"OPTIONS /ping HTTP/1.1\r\nHost: {host}\r\n{upgrade}\r\n\r\n".encode())
        received = b""
        with trio.fail_after(PATIENCE_S):
            while b"\r\n\r\n" not in received:
                received += await stream.receive_some()
            if not received.startswith(b"HTTP/1.1 101 "):
                return 505
            received = received.partition(b"\r\n\r\n")[2]
            connection.send_headers(
                3, [*head, *((k.lower(), v) for k, v in headers.items())], end_stream=True
            )
            await stream.send_all(connection.data_to_send())
            while True:
                for event in connection.receive_data(received):
                    if isinstance(event, ResponseReceived) and event.stream_id == 3:
                        return int(dict(event.headers)[b":status"])
                received = bytes(await stream.receive_some())
                assert received


async def test_the_default_network_of_config_is_no_client_of_a_local_proxy(tmp_path: Path) -> None:
    async with guarded(tmp_path) as site, site.browser() as browser:
        token = {"Authorization": "Bearer admin-secret"}
        for client, status in (("203.0.113.5", 403), ("127.0.0.1, 203.0.113.5", 403), ("127.0.0.9", 200)):
            answer = await browser.get("/config/log_level", {**token, "X-Forwarded-For": client})
            assert answer.status_code == status, client
        assert (await browser.get("/config/log_level", token)).status_code == 200


async def test_clients_of_a_local_proxy_only_read(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site, site.browser() as browser:
        for name in ("X-Real-IP", "X-Forwarded-Proto", "X-Forwarded-For", "Forwarded", "Via"):
            answer = await browser.client.post(
                "/api/topics", content=b'{"topic": "t"}', headers={name: "192.0.2.1"}
            )
            assert answer.status_code == 403, name
        assert (await browser.client.post("/api/topics", content=b'{"topic": "t"}')).status_code == 200


@pytest.mark.parametrize(
    ("version", "host", "status"),
    [
        ("1.1", "127.0.0.1:1", 200),
        ("1.1", "localhost", 200),
        ("1.1", "[::1]:4171", 200),
        ("1.0", "127.0.0.1:1", 403),  # nginx without further settings
        ("1.1", "nsq.example", 403),
        ("1.1", "nsq", 403),
        ("1.1", "10.0.0.5:80", 403),  # a loopback listener is not reached by it
        ("1.1", "localhost.nsq.example", 403),
        ("1.0", "", 403),
    ],
)
async def test_clients_of_a_proxy_that_does_not_name_itself_only_read(
    version: str, host: str, status: int, tmp_path: Path
) -> None:
    async with open_site(tmp_path, http_allowed_hosts=("*nsq.example",)) as site:
        assert await _creation_status(site, version, host, "") == status


async def test_clients_below_a_path_of_a_proxy_only_read(tmp_path: Path) -> None:
    async with open_site(tmp_path, base_path="/nsq") as site:
        assert await _creation_status(site, "1.1", "127.0.0.1", "/nsq") == 403
    (tmp_path / "second").mkdir()
    async with open_site(tmp_path / "second", base_path="/nsq", anonymous="manage") as site:
        assert await _creation_status(site, "1.1", "127.0.0.1", "/nsq") == 200


async def _creation_status(site: Site, version: str, host: str, base_path: str) -> int:
    """Create a topic as curl does, and return the status."""
    body = b'{"topic": "t"}'
    head = (
        f"POST {base_path}/api/topics HTTP/{version}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    )
    if host:
        head += f"Host: {host}\r\n"
    port = int(site.root.removesuffix(base_path).rpartition(":")[2])
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(head.encode() + b"\r\n" + body)
        with trio.fail_after(PATIENCE_S):
            return int(bytes(await stream.receive_some()).split()[1])


async def test_a_link_leads_to_no_other_host(tmp_path: Path) -> None:
    async with guarded(tmp_path) as site, site.browser() as browser:
        headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
        for path in ("//evil.example/x", "///evil.example/x", "/%2Fevil.example/x"):
            answer = await browser.client.get(site.root + path, headers=headers)
            assert 'content="0; url=/evil.example/x"' in answer.text


async def test_a_stream_ends_with_the_rights(tmp_path: Path) -> None:
    """The browser connects again, with its new rights."""
    file = auth_file(tmp_path)
    send, receive = trio.open_memory_channel[None](1)
    async with open_site(tmp_path, auth_file=file.path, reloads=receive, poll_interval_ms=100) as site:
        async with site.browser() as admin, site.browser() as web:
            await admin.log_in("admin")
            await admin.post("/create", {"topic": "clicks"})
            await web.log_in("web")
            path = "/live?path=/topics/clicks"
            with trio.fail_after(PATIENCE_S):
                async with web.client.stream("GET", path) as events:
                    pieces = events.aiter_raw()
                    assert "clicks" in (await anext(pieces)).decode()
                    file.entries.pop("web")
                    file.add_token("web", Given(["read"], ["orders"]))
                    file.write()
                    await send.send(None)
                    async for _ in pieces:
                        pass
            assert (await web.client.head(path)).status_code == 404


async def test_secrets_of_addresses_are_not_shown(tmp_path: Path) -> None:
    lookupd = "http://name:hidden-secret@127.0.0.1:1"
    options = {"lookupd_http_addresses": (lookupd,), "auth_file": auth_file(tmp_path).path}
    async with open_site(tmp_path, **options) as site, site.browser() as browser:
        await browser.log_in("admin")
        await browser.post("/create", {"topic": "clicks", "channel": "archive"})
        change = {"typed": "clicks/archive", "messages": "0", "channels": "0"}
        shown = await browser.post("/topics/clicks/archive/delete", change)
        assert shown.status_code == 303
        pages = [await browser.get(shown.headers["location"])]
        for path in (
            "/",
            "/lookup",
            "/nodes",
            "/health",
            "/topics/clicks",
            "/topics/clicks/delete",
            "/api/topics",
        ):
            pages.append(await browser.get(path))
        headers = {"Authorization": "Bearer admin-secret"}
        pages.append(await browser.client.post("/api/topics", content=b'{"topic": "t"}', headers=headers))
        for page in pages:
            assert "hidden-secret" not in page.text, page.url
        assert "127.0.0.1:1" in pages[0].text
        await site.await_audited("action")
        assert "hidden-secret" not in site.audit.read_text()


async def test_messages_do_not_leave_the_topics_of_a_token_of_the_console(tmp_path: Path) -> None:
    """The brokers cannot check it: they see the console's own credentials."""
    file = auth_file(tmp_path)
    file.add_token("web", Given(["manage"], ["clicks", "failed"]), Given(["read"], ["clicks"]))
    file.add_token("blind", Given(["manage"], ["clicks"]), Given(["publish", "read"], ["failed"]))
    async with open_site(tmp_path, auth_file=file.write()) as site:
        async with site.browser() as admin, site.browser() as web, site.browser() as blind:
            await admin.log_in("admin")
            for topic, channel in (("orders", "billing"), ("clicks", "archive")):
                await admin.post("/create", {"topic": topic, "channel": channel})
            await web.log_in("web")
            path = "/topics/clicks/archive/settings"
            for target, status in (("orders", 422), ("failed", 200)):
                fields = {"dead_letter_topic": target, "was_dead_letter_topic": ""}
                answer = await web.post(path, {**fields, "max_attempts": "3", "was_max_attempts": ""})
                assert answer.status_code == status, target
            assert (
                "publish or manage on topic orders"
                in (await web.post(path, {"dead_letter_topic": "orders"})).text
            )
            await blind.log_in("blind")
            for fields in ({"dead_letter_topic": "failed"}, {"max_attempts": "1"}):
                answer = await blind.post(path, fields)
                assert (answer.status_code, "role read on topic clicks" in answer.text) == (422, True), fields


async def test_dead_letters_are_requeued_to_topics_of_the_token_only(tmp_path: Path) -> None:
    file = auth_file(tmp_path)
    file.add_token("web", Given(["read", "manage"], ["failed"]))
    settings = b'{"max_attempts": 1, "dead_letter_topic": "failed"}'
    async with running_broker(tmp_path / "d") as broker, connected(str(broker.tcp_address)) as client:
        await client.subscribe("orders", "billing", 1)
        async with httpx.AsyncClient() as http:
            where = f"http://{broker.http_address}/channel/settings?topic=orders&channel=billing"
            assert (await http.put(where, content=settings)).status_code == 200
            await http.post(f"http://{broker.http_address}/pub?topic=orders", content=b"x")
            await client.send(b"REQ %s 0\n" % (await client.message()).id)
            while not (letters := await _letters(http, str(broker.http_address))):
                await trio.lowlevel.checkpoint()
        async with running_console(tmp_path, broker, auth_file=file.write()) as site, site.browser() as web:
            await web.log_in("web")
            chosen = {"action": "requeue-selected", "letter": f"{broker.http_address} {letters[0]}"}
            for fields in (chosen, {"action": "requeue-all"}, {"action": "requeue-all", "to": "topic"}):
                answer = await web.post("/dead-letters/failed", fields)
                assert answer.status_code == 403, fields
                assert "publish or manage on topic orders" in answer.text


async def _letters(http: httpx.AsyncClient, address: str) -> list[str]:
    answer = await http.get(f"http://{address}/dead_letters/messages?topic=failed&channel=dead-letters")
    return [json.loads(line)["id"] for line in answer.text.splitlines()] if answer.status_code == 200 else []


async def test_redirection_to_the_base_path_has_no_foreign_host() -> None:
    broker = FakeBroker()
    async with fake_brokers(broker), visited(broker, base_path="/nsq") as client:
        answer = await client.get("/nsq", headers={"Host": "evil.example"})
    assert (answer.status_code, answer.headers["Location"]) == (307, "/nsq/")
