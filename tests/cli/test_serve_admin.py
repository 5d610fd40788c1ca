"""Tests for `qcli serve --admin`: the console's process beside a broker, its start, its ends, and its access."""

import json
import os
import re
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from access.support import ALL_ROLES, AuthFile, bearer, everything
from broker.certificates import Certificates
from cli.support import DEADLINE_S, Cli
from interop.peers import Broker, qcli_serve

pytest.importorskip("starlette")


@dataclass(frozen=True)
class Site:
    """A broker with its console."""

    broker: Broker
    addresses: dict[str, str]

    def get(self, path: str = "/", token: str = "") -> tuple[int, str]:
        """Return status and text of a page. A console that starts answers late."""
        url = urlsplit(self.addresses["admin_url"])
        assert url.hostname is not None
        if url.scheme == "https":
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            connection: HTTPConnection = HTTPSConnection(
                url.hostname, url.port, timeout=DEADLINE_S, context=context
            )
        else:
            connection = HTTPConnection(url.hostname, url.port, timeout=DEADLINE_S)
        try:
            connection.request("GET", path, headers={"Authorization": bearer(token)} if token else {})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def await_page(self, text: str, path: str = "/", token: str = "") -> None:
        """Wait until a page has a text."""
        until(lambda: text in self.get(path, token)[1], f"{path} has {text!r}")

    @property
    def console(self) -> int:
        """The process of the console; 0: there is none."""
        pid = self.broker.process.pid
        children = Path(f"/proc/{pid}/task").glob("*/children")
        found = [int(word) for file in children for word in file.read_text().split()]
        return found[0] if found else 0


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            if condition():
                return
        except (OSError, HTTPException):
            pass  # the console was killed meanwhile
        assert time.monotonic() < deadline, f"not within {DEADLINE_S:g} s: {what}"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def running(folder: Path, *flags: str, env: dict[str, str] | None = None) -> Iterator[Site]:
    file = folder / "addresses.json"
    with qcli_serve(folder / "data", "--admin=127.0.0.1:0", *flags, env=env, address_file=file) as broker:
        yield Site(broker, json.loads(file.read_text()))


def refused(folder: Path, *flags: str, env: dict[str, str] | None = None) -> str:
    """Run a broker that must not start, and return what it says."""
    addresses = ("--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0", "--https-address=127.0.0.1:0")
    nowhere = Cli("127.0.0.1:1", "127.0.0.1:1", env or {})
    done = nowhere("serve", f"--data-path={folder}", *addresses, *flags)
    assert done.code == 1, done.err
    assert "ready:" not in done.err
    return done.err


def test_one_command_and_one_url(tmp_path: Path) -> None:
    with running(tmp_path) as site:
        address = site.addresses["admin_address"]
        assert site.addresses["admin_url"] == f"http://{address}/"
        (ready,) = [line for line in site.broker.log() if line.startswith("ready: ")]
        assert f", admin http://{address}/, data " in ready
        site.broker.http("POST", "/topic/create", topic="clicks")
        site.await_page("clicks")
        site.await_page(site.broker.http_address, "/health")
        console = site.console
        command = Path(f"/proc/{console}/cmdline").read_bytes().split(b"\0")[1:]
        assert command == [b"-P", b"-m", b"qcli.commands.serve.console_process", b""]
        site.broker.process.send_signal(signal.SIGHUP)
        site.broker.process.send_signal(signal.SIGHUP)
        site.await_page("clicks")
        assert site.console == console
        polls = [line for line in site.broker.log() if "GET /stats" in line or "GET /info" in line]
        assert polls == []
    assert not is_alive(console)
    assert not (tmp_path / "addresses.json").exists()


def test_killed_console_is_started_again_and_a_killed_broker_ends_it(tmp_path: Path) -> None:
    with running(tmp_path) as site:
        site.await_page("No topics yet")
        first = site.console
        os.kill(first, signal.SIGKILL)
        assert site.get()[0] == 200  # it waits for the next console
        second = site.console
        assert second not in (0, first)
        until(lambda: any("the console has ended" in line for line in site.broker.log()), "the log tells")
        told = [line for line in site.broker.log() if "the console has ended" in line]
        assert len(told) == 1
        assert "(exit status -9); starting it again" in told[0]
        assert site.broker.http("GET", "/ping") == b"OK"
        site.broker.process.kill()
        until(lambda: not is_alive(second), "the console has ended")


def test_signals_that_also_reach_the_console_are_for_the_broker(tmp_path: Path) -> None:
    """As from a service manager that signals all processes of a service."""
    with running(tmp_path) as site:
        site.await_page("No topics yet")
        console, broker = site.console, site.broker.process
        for pid in (console, broker.pid):
            os.kill(pid, signal.SIGHUP)
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            os.kill(console, number)
            assert site.get()[0] == 200
        assert site.console == console
        for pid in (console, broker.pid):
            os.kill(pid, signal.SIGINT)
        assert broker.wait(DEADLINE_S) == 0
        assert not is_alive(console)
        log = site.broker.log()
        assert not [line for line in log if "the console has ended" in line or "Traceback" in line]


def test_viewers_stay_logged_in_when_the_console_is_started_again(tmp_path: Path) -> None:
    file = AuthFile(tmp_path / "auth.toml")
    file.add_token("all", everything(*ALL_ROLES))
    with running(tmp_path, f"--auth-file={file.write()}") as site:
        with httpx.Client(base_url=site.addresses["admin_url"], timeout=DEADLINE_S) as browser:
            form = re.search(r'name="csrf" value="([^"]*)"', browser.get("/login").text)
            assert form is not None
            fields = {"csrf": form[1], "token": "all-secret"}
            origin = {"Origin": site.addresses["admin_url"].rstrip("/")}
            assert browser.post("/login", data=fields, headers=origin).status_code == 303
            first = site.console
            assert browser.get("/").status_code == 200
            os.kill(first, signal.SIGKILL)
            until(lambda: site.console not in (0, first), "another console runs")
        with httpx.Client(
            base_url=str(browser.base_url), cookies=browser.cookies, timeout=DEADLINE_S
        ) as later:
            assert later.get("/").status_code == 200


def test_a_console_that_hangs_does_not_keep_the_broker(tmp_path: Path) -> None:
    with running(tmp_path) as site:
        site.await_page("No topics yet")
        console = site.console
        os.kill(console, signal.SIGSTOP)
        assert site.broker.http("GET", "/ping") == b"OK"
    assert not is_alive(console)


def test_a_console_beside_a_follower_asks_the_leader_with_the_token_of_the_members(tmp_path: Path) -> None:
    file = AuthFile(tmp_path / "auth.toml")
    file.add_token("all", everything(*ALL_ROLES))
    file.add_token("member", everything("replicate", "read"))
    secret = tmp_path / "secret"
    secret.write_text("member-secret\n")
    flags = ("--cluster=prod", f"--auth-file={file.write()}", f"--cluster-auth-secret-file={secret}")
    with qcli_serve(tmp_path / "one", "--coordinator=static:", *flags) as leader:
        connection = HTTPConnection(leader.http_address, timeout=DEADLINE_S)
        for path in ("/cluster/promote", "/topic/create?topic=clicks"):
            connection.request("POST", path, headers={"Authorization": bearer("all"), "Connection": "close"})
            assert connection.getresponse().read() == b""
        with running(tmp_path, f"--coordinator=static:{leader.http_address}", *flags) as site:
            site.await_page("clicks", "/", "all")
            site.await_page("2 members", "/clusters", "all")
            assert "member-secret" not in Path(f"/proc/{site.console}/cmdline").read_text()


def test_viewers_log_in_with_their_tokens(tmp_path: Path) -> None:
    file = AuthFile(tmp_path / "auth.toml")
    file.add_token("all", everything(*ALL_ROLES))
    # In a fork, `/proc` has the environment of the first Python.
    with running(tmp_path, f"--auth-file={file.write()}", env={"TEST_PROCESSES": "new"}) as site:
        connection = HTTPConnection(site.broker.http_address, timeout=DEADLINE_S)
        connection.request("POST", "/topic/create?topic=clicks", headers={"Authorization": bearer("all")})
        assert connection.getresponse().read() == b""
        connection.close()
        site.await_page("clicks", "/", "all")
        status, page = site.get()
        assert "clicks" not in page
        assert status in (303, 401, 403)
        assert site.get("/", "nobody")[0] in (303, 401, 403)
        environment = Path(f"/proc/{site.console}/environ").read_bytes()
        ours = Path(f"/proc/{site.broker.process.pid}/environ").read_bytes()
        assert sorted(environment.split(b"\0")) == sorted(ours.split(b"\0"))
        # At SIGHUP, the identity of the console stays.
        file.add_token("more", everything("read"))
        file.write()
        site.broker.process.send_signal(signal.SIGHUP)
        site.await_page("clicks", "/", "more")


def test_only_https(tmp_path: Path) -> None:
    options = Certificates(tmp_path / "certificates").options
    flags = (f"--tls-cert={options['tls_cert']}", f"--tls-key={options['tls_key']}", "--tls-required=true")
    with running(tmp_path, *flags) as site:
        site.await_page("No topics yet")
        site.await_page(site.broker.https_address, "/health")


def test_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    with running(tmp_path, f"--http-address={path}") as site:
        site.await_page("No topics yet")
        site.await_page(str(path), "/health")


def test_other_machines_get_https_if_there_is_a_certificate(tmp_path: Path) -> None:
    options = Certificates(tmp_path / "certificates").options
    flags = (f"--tls-cert={options['tls_cert']}", f"--tls-key={options['tls_key']}", "--admin=0.0.0.0:0")
    with running(tmp_path, *flags) as site:
        assert site.addresses["admin_url"].startswith("https://0.0.0.0:")
        assert site.get()[0] == 200


def test_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = "127.0.0.1:%d" % taken.getsockname()[1]
        said = refused(tmp_path, f"--admin={address}")
    assert f"Error: --admin: cannot listen on {address}: Address already in use" in said
    assert "choose another --admin" in said


def test_refusals(tmp_path: Path) -> None:
    said = refused(tmp_path, "--admin=127.0.0.1:0", "--http-address=")
    assert "Error: --admin uses the broker's HTTP API, which is off: give --http-address" in said
    certificates = Certificates(tmp_path / "certificates")
    tls = [f"--tls-{name}={certificates.options[f'tls_{name}']}" for name in ("cert", "key")]
    required = (*tls, "--tls-client-auth-policy=require-verify", f"--tls-root-ca-file={certificates.ca_path}")
    said = refused(tmp_path, "--admin=127.0.0.1:0", "--tls-required", *required)
    assert "--admin has no client certificate" in said
    said = refused(tmp_path, "--admin=127.0.0.1:0", "--http-address=", "--check-config")
    assert "--admin uses the broker's HTTP API" in said


def test_missing_package(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['jinja2'] = None\n")
    said = refused(tmp_path / "d", "--admin=127.0.0.1:0", env={"PYTHONPATH": str(tmp_path)})
    assert "Error: --admin needs the package jinja2: pip install 'trio-nsq[admin]'" in said
    assert not (tmp_path / "d").exists()


def configured(folder: Path, text: str) -> str:
    """Write the options of the console to a file, and return the option that names it."""
    (folder / "admin.toml").write_text(text)
    return f"--admin-config={folder / 'admin.toml'}"


def test_the_console_has_the_options_of_its_file(tmp_path: Path) -> None:
    """Without those that the environment has for the broker."""
    (tmp_path / "bodies.toml").write_text('[[topic]]\nname = "clicks"\nmask = ["card"]\n')
    flag = configured(
        tmp_path,
        f"""
        title = "production"
        title_color = "red"
        base_path = "/nsq"
        anonymous = "read"
        hide_topics = ["test-*"]
        audit_log = "{tmp_path / "audit.log"}"
        bodies_file = "{tmp_path / "bodies.toml"}"
        """,
    )
    with running(tmp_path, flag) as site:
        assert site.addresses["admin_url"].endswith("/nsq/")
        site.broker.http("POST", "/topic/create", topic="clicks")
        site.broker.post("/pub", b'{"card": "4111"}', topic="clicks")
        site.await_page("clicks", "/nsq/")
        page = site.get("/nsq/")[1]
        assert "production" in page
        assert "Create topic" not in page
        masked = site.get("/nsq/topics/clicks/messages?format=json")[1]
        assert "***" in masked
        assert "4111" not in masked


def test_users_of_the_console_act_at_a_broker_with_tokens(tmp_path: Path) -> None:
    """A broker that requires tokens lets its console do what its own viewers may do; without them it only reads."""
    broker_file, console_file = AuthFile(tmp_path / "auth.toml"), AuthFile(tmp_path / "console.toml")
    broker_file.add_token("all", everything(*ALL_ROLES))
    console_file.add_token("alice", everything("read", "manage"))
    console_file.add_token("bob", everything("read"))
    flag = configured(tmp_path, f'auth_file = "{console_file.write()}"\n')
    with running(tmp_path, f"--auth-file={broker_file.write()}", flag) as site:
        site.await_page("No topics yet", "/", "alice")
        for token, status in ("bob", 403), ("alice", 200), ("nobody", 401):
            answer = httpx.post(
                f"{site.addresses['admin_url']}api/topics",
                json={"topic": f"by-{token}"},
                headers={"Authorization": bearer(token)},
                timeout=DEADLINE_S,
            )
            assert answer.status_code == status, answer.text
        site.await_page("by-alice", "/", "alice")
        assert "by-bob" not in site.get("/", "alice")[1]
        said = httpx.post(f"http://{site.broker.http_address}/topic/create?topic=x", timeout=DEADLINE_S)
        assert said.status_code in (401, 403)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            'nsqd_http_addresses = ["10.0.0.5:4151"]',
            "nsqd_http_addresses: the broker gives this to its console",
        ),
        ('https_cert = "cert.pem"', "https_cert: the broker gives this to its console"),
        ('log_level = "debug"', "log_level: the broker gives this to its console"),
        ('titel = "x"', "'titel' is no option of 'qcli admin'"),
        ("title = 5", "title: 5 is not a string"),
        ('title_color = "mauve"', "title_color: "),
        ("title = ", "is not valid TOML"),
        ('oidc_client_id = "x"', "--oidc-client-id needs --oidc-issuer"),
        ('oidc_issuer = "https://id.example.com"', "--oidc-issuer needs --oidc-client-id"),
    ],
)
def test_files_that_are_wrong_are_refused(tmp_path: Path, text: str, said: str) -> None:
    flag = configured(tmp_path, text)
    for more in [], ["--check-config"]:
        found = refused(tmp_path / "d", "--admin=127.0.0.1:0", flag, *more)
        assert said in found
        assert "--admin-config: " in found
        assert "Traceback" not in found


@pytest.mark.parametrize(
    ("key", "content", "said"),
    [
        ("bodies_file", None, "No such file"),
        ("bodies_file", "[[topic]]\nname = 5\n", "name"),
        ("auth_file", None, "No such file"),
        ("auth_file", "[anonymous]\ntopics = ['clicks']\n", "has [anonymous]"),
        ("session_key_file", "no key", "does not have 64 hexadecimal digits"),
        ("audit_log", "", "is a directory"),
    ],
)
def test_files_of_the_console_that_cannot_be_used_are_refused(
    tmp_path: Path, key: str, content: str | None, said: str
) -> None:
    """The broker does not start: its console would end, and be started, again and again."""
    file = tmp_path / "file"
    if key == "audit_log":
        file.mkdir()
    elif content is not None:
        file.touch(0o600)
        file.write_text(content)
    flag = configured(tmp_path, f'{key} = "{file}"')
    for more in [], ["--check-config"]:
        found = refused(tmp_path / "d", "--admin=127.0.0.1:0", flag, *more)
        assert said in found
        assert str(file) in found
        assert "listening on" not in found


def test_a_session_key_is_not_written_by_a_check(tmp_path: Path) -> None:
    file = tmp_path / "key"
    flag = configured(tmp_path, f'session_key_file = "{file}"')
    nowhere = Cli("127.0.0.1:1", "127.0.0.1:1", {})
    checked = nowhere("serve", f"--data-path={tmp_path}", "--admin", flag, "--check-config")
    assert (checked.code, file.exists()) == (0, False), checked.err


def test_a_file_needs_the_console(tmp_path: Path) -> None:
    flag = configured(tmp_path, "")
    for more in [], ["--check-config"]:
        assert "Error: --admin-config needs --admin." in refused(tmp_path / "d", flag, *more)


def test_anonymous_of_an_auth_file_is_not_for_the_console(tmp_path: Path) -> None:
    (tmp_path / "auth.toml").write_text('[anonymous]\ntopics = ["clicks"]\n')
    flag = configured(tmp_path, f'auth_file = "{tmp_path / "auth.toml"}"')
    said = refused(tmp_path / "d", "--admin=127.0.0.1:0", flag, "--check-config")
    assert (
        "auth.toml has [anonymous], which is for brokers and discovery services: --anonymous says what"
        in said
    )
