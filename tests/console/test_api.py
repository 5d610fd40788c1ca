"""The console's API beside what nsqadmin has: who may use it, and brokers that are found in two ways."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from access.support import ALL_ROLES, AuthFile, Given, everything
from console.support import WebServer, qcli_admin
from fleet.support import await_nodes, await_peers, lookupd_flags, wait_until
from interop.peers import Broker, qcli_lookupd, qcli_serve

PAUSE = b'{"action": "pause"}'


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with qcli_serve(tmp_path_factory.mktemp("broker") / "data") as running:
        running.create("clicks", "archive")
        yield running


def console(folder: Path, broker: Broker, *flags: str):  # type: ignore[no-untyped-def]
    """Run a console of this broker."""
    return qcli_admin(folder, f"--nsqd-http-address={broker.http_address}", *flags)


@pytest.fixture(scope="module")
def site(broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebServer]:
    with console(tmp_path_factory.mktemp("console"), broker) as running:
        yield running


def message(
    site: WebServer, method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, str]:
    """Return the status and the message of an answer."""
    answer = site.ask(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    return answer.status, answer.json()["message"]


def is_paused(broker: Broker) -> bool:
    return bool(broker.channel_stats("clicks", "archive")["paused"])


# --------------------------------------------------------------------- web pages


def test_curl_needs_no_content_type(site: WebServer, broker: Broker) -> None:
    kind = "application/x-www-form-urlencoded"  # as curl -d sends it
    assert message(site, "POST", "/api/topics/clicks/archive", PAUSE, Content_Type=kind) == (200, "")
    assert is_paused(broker)
    assert message(site, "POST", "/api/topics/clicks/archive", b'{"action": "unpause"}') == (200, "")
    assert not is_paused(broker)


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Sec_Fetch_Site": "cross-site", "Origin": "null"},
        {"Referer": "http://evil.example/page"},
    ],
)
def test_pages_of_other_origins_change_nothing(
    site: WebServer, broker: Broker, headers: dict[str, str]
) -> None:
    status, text = message(site, "POST", "/api/topics/clicks/archive", PAUSE, **headers)
    assert (status, text.partition(":")[0]) == (403, "NOT_FOR_WEB_PAGES")
    assert not is_paused(broker)


def test_another_host_name_is_refused(site: WebServer) -> None:
    status, text = message(site, "GET", "/api/topics", Host="evil.example", Origin="http://evil.example")
    assert (status, text.partition(":")[0]) == (403, "HOST_NOT_ALLOWED")
    assert site.ask("GET", "/api/topics", headers={"Host": "evil.example"}).status == 200


def test_large_bodies_are_refused(site: WebServer) -> None:
    body = json.dumps({"topic": "x" * 100_000}).encode()
    assert message(site, "POST", "/api/topics", body)[0] == 413


def test_names_are_not_parts_of_a_path(site: WebServer, broker: Broker) -> None:
    broker.create("odd#ephemeral", "c.1#ephemeral")
    answer = site.ask("GET", "/api/topics/odd%23ephemeral/c.1%23ephemeral").json()
    assert (answer["topic_name"], answer["channel_name"]) == ("odd#ephemeral", "c.1#ephemeral")
    for path in ("/api/topics/..%2F..%2Finfo", "/api/topics/a%3Fb=c", "/api/topics/a%0d%0aX:y"):
        answer = site.ask("GET", path)
        assert answer.status == 404, path
        assert answer.json()["message"] in ("TOPIC_NOT_FOUND", "NOT_FOUND"), path


def test_topics_that_no_broker_has(site: WebServer, broker: Broker) -> None:
    for name in ("clicks,x", "clicksx"):
        for path in (f"/api/topics/{name}", f"/api/topics/{name}/archive"):
            assert message(site, "GET", path) == (404, "TOPIC_NOT_FOUND")


def test_a_topic_that_no_broker_has_while_another_is_down(tmp_path: Path, broker: Broker) -> None:
    with console(tmp_path, broker, "--nsqd-http-address=127.0.0.1:1") as site:
        status, text = message(site, "GET", "/api/topics/clicksx")
        assert (status, text.startswith("TOPIC_NOT_FOUND: 127.0.0.1:1: ")) == (404, True)


def test_the_server_as_a_whole(site: WebServer) -> None:
    answer = site.ask("OPTIONS", "*")
    assert (answer.status, answer.body) == (200, b"")
    assert answer.headers["allow"] == "DELETE, GET, HEAD, OPTIONS, POST, PUT"
    assert message(site, "GET", "*") == (405, "METHOD_NOT_ALLOWED")


# --------------------------------------------------------------- who may do what


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebServer]:
    """A console of a broker with tokens."""
    folder = tmp_path_factory.mktemp("guarded")
    file = AuthFile(folder / "auth.toml")
    file.add_token("operator", everything(*ALL_ROLES), secret="all")
    file.add_token("reader", everything("read"), secret="reads")
    file.add_token("team", Given(["read", "manage"], ["clicks*"]), secret="clicks-only")
    secret = folder / "secret"
    secret.write_text("all\n")
    with qcli_serve(folder / "data", f"--auth-file={file.write()}") as broker:
        with console(folder / "console", broker, f"--auth-secret-file={secret}") as running:
            for topic in ("clicks", "secrets"):
                body = json.dumps({"topic": topic, "channel": "archive"}).encode()
                assert message(running, "POST", "/api/topics", body, Authorization="Bearer all") == (200, "")
            yield running


def test_without_a_token_nothing_is_shown(guarded: WebServer) -> None:
    for path in ("/api/topics", "/api/topics/clicks", "/api/nodes", "/api/counter", "/config/log_level"):
        status, text = message(guarded, "GET", path)
        assert (status, text.partition(":")[0]) == (401, "AUTH_REQUIRED"), path
    assert message(guarded, "POST", "/api/topics/clicks", PAUSE)[0] == 401
    assert guarded.ask("GET", "/ping").body == b"OK"


def test_a_reader_reads(guarded: WebServer) -> None:
    token = "Bearer reads"
    assert guarded.ask("GET", "/api/topics", None, {"Authorization": token}).json()["topics"] == [
        "clicks",
        "secrets",
    ]
    status, text = message(guarded, "POST", "/api/topics/clicks", PAUSE, Authorization=token)
    assert (status, text) == (403, "FORBIDDEN: This needs the role manage on topic clicks.")
    assert message(guarded, "DELETE", "/api/topics/clicks/archive", Authorization=token)[0] == 403
    assert message(guarded, "PUT", "/config/log_level", b"debug", Authorization=token)[0] == 403


def test_a_viewer_of_some_topics_sees_no_other(guarded: WebServer) -> None:
    headers = {"Authorization": "Bearer clicks-only"}
    assert guarded.ask("GET", "/api/topics", None, headers).json()["topics"] == ["clicks"]
    assert b"secrets" not in guarded.ask("GET", "/api/nodes", None, headers).body
    assert b"secrets" not in guarded.ask("GET", "/api/counter", None, headers).body
    assert guarded.ask("GET", "/api/topics/secrets", None, headers).status == 403
    assert guarded.ask("POST", "/api/topics/clicks", PAUSE, headers).status == 200
    assert guarded.ask("POST", "/api/topics/secrets", PAUSE, headers).status == 403
    assert guarded.ask("POST", "/api/topics", b'{"topic": "other"}', headers).status == 403
    assert guarded.ask("POST", "/api/topics/clicks", b'{"action": "unpause"}', headers).status == 200


def test_tokens_of_the_console_itself(tmp_path: Path, broker: Broker) -> None:
    """The broker has no authentication, so the console alone decides what a viewer sees."""
    broker.create("secrets", "archive")
    file = AuthFile(tmp_path / "auth.toml")
    file.add_token("team", Given(["read"], ["clicks*"]), secret="clicks-only")
    headers = {"Authorization": "Bearer clicks-only"}
    with console(tmp_path, broker, f"--auth-file={file.write()}") as site:
        for path in ("/api/topics", "/api/nodes", f"/api/nodes/{broker.http_address}", "/api/counter"):
            answer = site.ask("GET", path, None, headers)
            assert (answer.status, b"clicks" in answer.body, b"secrets" in answer.body) == (
                200,
                True,
                False,
            ), path
        assert site.ask("GET", "/api/topics/secrets", None, headers).status == 403
        assert site.ask("GET", "/api/topics/secrets/archive", None, headers).status == 403
        assert site.ask("POST", "/api/topics/clicks", PAUSE, headers).status == 403


def test_basic_authorization(guarded: WebServer) -> None:
    headers = {"Authorization": "Basic OmFsbA=="}  # the password is the token
    assert guarded.ask("POST", "/api/topics/clicks", PAUSE, headers).status == 200


def test_a_wrong_token(guarded: WebServer) -> None:
    assert message(guarded, "GET", "/api/topics", Authorization="Bearer none")[0] == 401


# ---------------------------------------------------------- header of a proxy


def test_the_header_names_the_admin(tmp_path: Path, broker: Broker) -> None:
    with console(
        tmp_path, broker, "--admin-user=ann", "--admin-user=bob", "--acl-http-header=X-User"
    ) as site:
        for user, status in (("ann", 200), ("bob", 200), ("eve", 403), ("", 403)):
            headers = {"X_User": user} if user else {}
            path = "/api/topics/clicks/archive"
            assert message(site, "POST", path, b'{"action": "empty"}', **headers)[0] == status, user
        assert site.ask("GET", "/api/topics", None, {"X-User": "eve"}).status == 200
        assert message(site, "POST", "/api/topics/clicks", PAUSE, X_Forwarded_User="ann")[0] == 403


def test_the_header_counts_only_from_a_trusted_proxy(tmp_path: Path, broker: Broker) -> None:
    with console(tmp_path, broker, "--admin-user=ann", "--trusted-proxy=10.0.0.0/8") as site:
        assert message(site, "POST", "/api/topics/clicks", PAUSE, X_Forwarded_User="ann")[0] == 403


# ----------------------------------------------------------------------- /config


def test_config_only_from_its_network(tmp_path: Path, broker: Broker) -> None:
    for number, network in enumerate(("10.0.0.0/8", "")):
        with console(tmp_path / str(number), broker, f"--allow-config-from-cidr={network}") as site:
            for method, body in (("GET", None), ("PUT", b"debug")):
                status, text = message(site, method, "/config/log_level", body)
                assert (status, text.partition(":")[0]) == (403, "FORBIDDEN")


def test_config_needs_the_role_admin(guarded: WebServer) -> None:
    assert guarded.ask("GET", "/config/log_level", None, {"Authorization": "Bearer all"}).body == b"2"
    assert guarded.ask("GET", "/config/log_level", None, {"Authorization": "Bearer reads"}).status == 403


def test_changed_log_level_takes_effect(tmp_path: Path, broker: Broker) -> None:
    with console(tmp_path, broker) as site:
        assert site.ask("PUT", "/config/log_level", b"fatal").body == b"5"
        assert site.ask("GET", "/config/log_level").body == b"5"


# ------------------------------------------------------------ brokers twice found


def test_given_and_listed_brokers_together(tmp_path: Path) -> None:
    with qcli_lookupd() as lookupd, qcli_serve(tmp_path / "alone") as alone:
        with qcli_serve(tmp_path / "listed", *lookupd_flags([lookupd])) as listed:
            await_peers(listed, [lookupd])
            await_nodes(lookupd, 1)
            for each in (alone, listed):
                each.create("shared", "c")
                each.post("/pub", b"x", topic="shared")
            alone.create("only")
            addresses = [alone.http_address, listed.http_address.replace("127.0.0.1", "localhost")]
            flags = [f"--nsqd-http-address={address}" for address in addresses]
            lookupds = f"--lookupd-http-address={lookupd.http_address}"
            with qcli_admin(tmp_path / "console", lookupds, "--poll-interval=50ms", *flags) as site:
                wait_until(
                    lambda: site.ask("GET", "/api/topics").json()["topics"] == ["only", "shared"],
                    "both topics",
                )
                wait_until(
                    lambda: len(site.ask("GET", "/api/nodes").json()["nodes"]) == 2, "each broker once"
                )
                found = site.ask("GET", "/api/topics/shared").json()
                assert found["message_count"] == 2
                assert sorted(node["node"] for node in found["nodes"]) == sorted(
                    [alone.http_address, listed.http_address]
                )
                assert message(site, "POST", "/api/topics/shared", PAUSE) == (200, "")
