"""The audit log of a broker: which events it has, with which fields, and that no secret is in it or anywhere else."""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from broker.api import running_api
from broker.audit_lines import Line, line, lines_of
from broker.auth_server import auth, authenticated
from broker.certificates import Certificates
from broker.support import connected, pub, running_broker
from client.support.tokens import SECRETS, UNKNOWN, AuthFile
from trio_nsq.access.audit import MAX_REFUSALS_OF_CLIENT
from trio_nsq.broker import BrokerOptions, StartupError, serve


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def test_requests_that_manage_or_administer(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    auth_file = AuthFile(tmp_path)
    async with running_api(
        tmp_path / "d", auth_file=auth_file.path, audit_log=str(path), http_read_only=False
    ) as api:
        for role, method, target in [
            ("all", "POST", "/topic/create?topic=t&unneeded=parameter"),
            ("manage", "POST", "/channel/create?topic=t&channel=c"),
            ("manage", "POST", "/channel/delete?topic=t&channel=none"),
            ("manage", "PUT", "/topic/settings?topic=t"),
            ("admin", "GET", "/config/log_level"),
            ("admin", "PUT", "/config/nothing"),
            ("publish", "POST", "/pub?topic=t"),  # this and reading are not recorded
            ("read", "GET", "/topic/bounds?topic=t"),
            ("read", "GET", "/stats"),
            ("publish", "GET", "/ping"),
        ]:
            await api.send(method, target, bearer(SECRETS[role]), b"{")
    assert lines_of(path) == [
        line("action", "all", action="POST /topic/create", topic="t", status=200),
        line("action", "manage", action="POST /channel/create", topic="t", channel="c", status=200),
        line(
            "action",
            "manage",
            action="POST /channel/delete",
            status=404,
            error="CHANNEL_NOT_FOUND",
            topic="t",
            channel="none",
        ),
        line("action", "manage", action="PUT /topic/settings", topic="t", status=400, error="INVALID_BODY"),
        line("action", "admin", action="GET /config/log_level", status=200),
        line("action", "admin", action="PUT /config/nothing", status=400, error="INVALID_OPTION"),
    ]


async def test_actions_of_a_broker_without_authentication(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    async with running_api(tmp_path / "d", audit_log=str(path)) as api:
        await api.post("/topic/create", topic="t")
    assert lines_of(path) == [line("action", action="POST /topic/create", topic="t", status=200)]


async def test_the_target_of_an_action_is_recorded_without_credentials(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    async with running_api(tmp_path / "d", audit_log=str(path)) as api:
        await api.post("/topic/create", topic="t")
        await api.post("/channel/create", topic="t", channel="c")
        await api.send("POST", "/channel/seek?topic=t&channel=c&to=earliest")
        await api.send("POST", "/topic/move/begin?topic=t&to=alice:secret@b:4151")
    _, _, seek, move = lines_of(path)
    assert seek == line(
        "action", action="POST /channel/seek", topic="t", channel="c", to="earliest", status=200
    )
    assert move == line(
        "action",
        action="POST /topic/move/begin",
        topic="t",
        to="xxxxx@b:4151",
        status=409,
        error="NOT_DRAINING",
    )


async def test_refused_requests(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    auth_file = AuthFile(tmp_path)
    foreign = {"Origin": "https://evil.example"}
    requests: list[tuple[Mapping[str, str], Line]] = [
        ({}, line("refused", status=401, error="AUTH_REQUIRED")),
        (bearer(UNKNOWN), line("login_failed", status=401, error="INVALID_TOKEN")),
        (bearer(SECRETS["publish"]), line("refused", "publish", status=403, error="FORBIDDEN")),
        (foreign, line("refused", status=403, error="NOT_FOR_WEB_PAGES")),
        (
            {"Host": "rebound.example.com", "Referer": ""},
            line("refused", status=403, error="HOST_NOT_ALLOWED"),
        ),
    ]
    async with running_api(tmp_path / "d", auth_file=auth_file.path, audit_log=str(path)) as api:
        for headers, _ in requests:
            response = await api.send("POST", "/topic/delete?topic=t", dict(headers))
            assert response.status_code in (401, 403)
    assert lines_of(path) == [
        expected | {"action": "POST /topic/delete", "topic": "t"} for _, expected in requests
    ]


async def test_refused_tcp_clients(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    auth_file = AuthFile(tmp_path)
    async with running_broker(tmp_path / "d", auth_file=auth_file.path, audit_log=str(path)) as bound:
        for greeting, command, error in [
            (b"", pub("t", b"x"), "E_AUTH_FIRST"),
            (b"", auth(UNKNOWN.encode()), "E_AUTH_FAILED"),
            (SECRETS["publish"].encode(), b"SUB t c\n", "E_UNAUTHORIZED"),
        ]:
            async with connected(bound.tcp_address) as client:
                if greeting:
                    await authenticated(client, greeting)
                await client.send(command)
                assert (await client.error()).startswith(error)
    assert lines_of(path) == [
        line("refused", action="PUB", error="E_AUTH_FIRST"),
        line("login_failed", action="AUTH", error="E_AUTH_FAILED"),
        line("refused", "publish", action="SUB", topic="t", channel="c", error="E_UNAUTHORIZED"),
    ]


async def test_reloads_and_revoked_connections(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    auth_file = AuthFile(tmp_path)
    file = str(auth_file.path)
    admin = bearer(SECRETS["admin"])
    async with running_api(tmp_path / "d", auth_file=auth_file.path, audit_log=str(path)) as api:
        await authenticated(api.tcp, SECRETS["consume"].encode())
        await api.tcp.subscribe("t", "c")
        auth_file.write(["admin"])
        await api.send("PUT", "/config/auth_file", admin, file.encode())
        assert await api.tcp.frame() is None
        auth_file.path.write_text('[[token]]\nname = "x"\n')
        await api.send("PUT", "/config/auth_file", admin, file.encode())
    *changes, failure, answer = lines_of(path)
    assert changes == [
        {"event": "reload", "file": file, "tokens": 1, "certificates": 0},
        line("closed", "consume", topic="t", channel="c"),
        line("action", "admin", action="PUT /config/auth_file", status=200),
    ]
    assert (failure["event"], failure["file"]) == ("reload", file)
    assert failure["error"] == "line 1: token x needs a hash"
    assert answer == line(
        "action", "admin", action="PUT /config/auth_file", status=400, error="INVALID_VALUE"
    )


async def test_answers_that_are_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    auth_file = AuthFile(tmp_path)
    admin = bearer(SECRETS["admin"])
    async with running_api(tmp_path / "d", auth_file=auth_file.path, audit_log=str(path)) as api:
        for _ in range(16):  # more than the socket's buffers hold
            await api.send("POST", "/pub?topic=t", bearer(SECRETS["publish"]), bytes(1 << 20))
        async with api.client.stream("GET", "/topic/read?topic=t", headers=bearer(SECRETS["read"])) as answer:
            pieces = answer.aiter_raw(1024)
            await anext(pieces)
            auth_file.write(["admin"])
            await api.send("PUT", "/config/auth_file", admin, str(auth_file.path).encode())
            with pytest.raises(httpx.RemoteProtocolError):
                async for _ in pieces:
                    pass
    assert lines_of(path)[-1] == line("closed", "read", action="GET /topic/read", topic="t")


async def test_certificates_are_recorded_by_subject(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    certificates = Certificates(tmp_path / "certificates")
    options = {
        **certificates.options,
        "tls_root_ca_file": certificates.ca_path,
        "tls_client_auth_policy": "verify-if-given",
    }
    context = certificates.client_context("backup")
    seen: list[Line] = []
    for entry in (
        "",
        '[[certificate]]\nname = "backup"\nsubject = "SUBJECT"\ngrants = [{roles = ["admin"]}]\n',
    ):
        auth_file = tmp_path / "auth.toml"
        auth_file.write_text(entry.replace("SUBJECT", seen[0]["subject"] if seen else ""))
        async with running_broker(
            tmp_path / "d", auth_file=auth_file, audit_log=str(path), **options
        ) as bound:
            async with httpx.AsyncClient(verify=context) as client:
                await client.get(f"https://{bound.https_address}/config/log_level")
        seen = lines_of(path)
    assert "CN=backup" in seen[0]["subject"]
    assert [(each["event"], each.get("name"), each["subject"]) for each in seen] == [
        ("refused", None, seen[0]["subject"]),
        ("action", "backup", seen[0]["subject"]),
    ]


async def test_flood_of_refusals_is_bounded_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    auth_file = AuthFile(tmp_path)
    async with running_api(tmp_path / "d", auth_file=auth_file.path, audit_log=str(path)) as api:
        for _ in range(300):
            await api.get("/stats")
        metrics = (await api.send("GET", "/metrics", bearer(SECRETS["read"]))).text
    *refused, summary = lines_of(path)
    assert refused == [line("refused", action="GET /stats", status=401, error="AUTH_REQUIRED")] * len(refused)
    assert len(refused) == MAX_REFUSALS_OF_CLIENT
    count = 300 - MAX_REFUSALS_OF_CLIENT
    assert (summary["event"], summary["count"]) == ("suppressed", count)
    assert f"nsq_audit_lines_total {MAX_REFUSALS_OF_CLIENT}.0" in metrics
    assert f"nsq_audit_suppressed_total {count}.0" in metrics
    assert "nsq_audit_failed 0.0" in metrics


async def test_full_disk_does_not_stop_the_broker(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d", audit_log="/dev/full") as api:
        assert (await api.post("/topic/create", topic="t"))[0] == 200
        with trio.fail_after(20):
            while "nsq_audit_failed 1.0" not in (await api.get("/metrics")).text:
                pass
        assert await api.post("/pub", b"x", topic="t") == (200, "OK")


async def test_audit_log_that_cannot_be_opened_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"--audit-log: cannot write .*: Is a directory"):
        await serve(BrokerOptions(data_path=tmp_path / "d", audit_log=str(tmp_path)))


async def test_no_secret_is_told_or_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All tokens and their hashes, after all kinds of use, with debug logging."""
    caplog.set_level(logging.DEBUG)
    path = tmp_path / "audit"
    auth_file = AuthFile(tmp_path)
    body = b"the-body-of-a-message"
    async with running_api(tmp_path / "d", auth_file=auth_file.path, audit_log=str(path)) as api:
        for secret in [*SECRETS.values(), UNKNOWN]:
            async with connected(address_of(api.tcp)) as client:
                await client.send(auth(secret.encode()))
                await client.frame()
            for method, target in [
                ("POST", "/pub?topic=t"),
                ("POST", "/topic/create?topic=t"),
                ("PUT", "/config/log_level"),
            ]:
                await api.send(method, target, bearer(secret), body)
                await api.client.request(method, target, auth=("user", secret), content=body)
        everything = bearer(SECRETS["all"])
        told = ""
        for target in (
            "/stats?format=json", "/stats", "/metrics", "/info", "/debug", "/debug/tasks", "/debug/memory",
            "/config/auth_file", "/config/auth_http_addresses", "/config/audit_log", "/config/tls_key",
        ):  # fmt: skip
            response = await api.send("GET", target, everything)
            assert response.status_code != 401, target
            told += response.text
        auth_file.write([])
        await api.send("PUT", "/config/auth_file", everything, str(auth_file.path).encode())
    assert path.read_text().count("\n") > 30
    stored = "".join(
        file.read_bytes().decode("latin-1") for file in (tmp_path / "d").rglob("*") if file.is_file()
    )
    assert body.decode() in stored
    for secret in [*SECRETS.values(), UNKNOWN]:
        for text in (told, caplog.text, path.read_text(), stored):
            assert secret not in text
            assert f"Bearer {secret[:8]}" not in text
    for text in (told, caplog.text, path.read_text()):
        assert "sha256:" not in text
        assert body.decode() not in text


def address_of(client: Any) -> str:
    return "%s:%d" % client.stream.socket.getpeername()[:2]


async def test_stdout_is_a_target(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async with running_api(tmp_path / "d", audit_log="-") as api:
        await api.post("/topic/create", topic="t")
    (text,) = capfd.readouterr().out.splitlines()
    assert json.loads(text)["topic"] == "t"
    os.fstat(1)  # still open
