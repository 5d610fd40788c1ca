"""Tests of every command against a broker with an auth file, over plain connections and over TLS: with the right token,
without one, with an unknown one, and with one whose role is too small.
"""

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from broker.certificates import Certificates
from cli.support import DEADLINE_S, Cli, Result, Run, all_contexts, command_line
from client.support.tokens import SECRETS, UNKNOWN, AuthFile
from interop.peers import Broker, qcli_lookupd, qcli_serve
from qcli.framework.options import CONNECTION_OPTIONS
from soak import in_soak
from trio_nsq.access.secret import Secret
from trio_nsq.client.connection.tls import TLSFiles
from trio_nsq.client.http.broker_http import BrokerHTTP


class Guarded(NamedTuple):
    """A broker with an auth file, and commands that connect to it."""

    broker: Broker
    auth_file: AuthFile
    over_tls: bool
    env: dict[str, str]

    def cli(self, role: str | None = None, **env: str) -> Cli:
        """Return a `Cli` with the token of a role, `unknown`, or none."""
        secret = {} if role is None else {"QCLI_CLIENT_AUTH_SECRET": SECRETS.get(role, UNKNOWN)}
        http = f"https://{self.broker.https_address}" if self.over_tls else self.broker.http_address
        return Cli(self.broker.tcp_address, http, self.env | secret | env)


@pytest.fixture(scope="module", params=["plain", *in_soak("TLS")])
def guarded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    auth_file = AuthFile(folder)
    flags, env = [f"--auth-file={auth_file.path}", "--sync=interval"], {}
    if request.param == "TLS":
        certificates = Certificates(folder)
        flags += [f"--{name.replace('_', '-')}={path}" for name, path in certificates.options.items()]
        flags += ["--tls-required=true"]
        env = {"QCLI_CLIENT_TLS_ROOT_CA_FILE": str(certificates.ca_path)}
    with qcli_serve(folder / "data", *flags) as broker:
        yield Guarded(broker, auth_file, request.param == "TLS", env)


def _seek(topic: str) -> list[str]:
    return ["channel", "seek", f"{topic}/c", "--to", "earliest", "--yes"]


COMMANDS: dict[str, tuple[str, Callable[[str, Path], list[str]]]] = {
    "pub": ("publish", lambda topic, folder: ["pub", topic, str(folder / "input")]),
    "pub --no-retry": ("publish", lambda topic, folder: ["pub", topic, "--no-retry", str(folder / "input")]),
    "tail channel": ("consume", lambda topic, folder: ["tail", f"{topic}/c", "-n", "1"]),
    "tail": ("consume", lambda topic, folder: ["tail", topic, "--idle-timeout", "100ms"]),
    "tail --from": ("read", lambda topic, folder: ["tail", topic, "--from", "earliest", "--to", "latest"]),
    "peek": ("read", lambda topic, folder: ["peek", topic]),
    "replay files": ("publish", lambda topic, folder: ["replay", f"{folder}/export", topic]),
    "to-parquet": ("read", lambda topic, folder: ["to-parquet", topic, f"{folder}/{topic}"]),
    "to-parquet --consume": (
        "consume",
        lambda topic, folder: [
            *("to-parquet", topic, f"{folder}/{topic}", "--consume", "--channel", "c"),
            *("--idle-timeout", "200ms"),
        ],
    ),
    "topic create": ("manage", lambda topic, folder: ["topic", "create", f"{topic}-new"]),
    "topic pause": ("manage", lambda topic, folder: ["topic", "pause", topic]),
    "topic unpause": ("manage", lambda topic, folder: ["topic", "unpause", topic]),
    "topic empty": ("manage", lambda topic, folder: ["topic", "empty", topic, "--yes"]),
    "topic delete": ("manage", lambda topic, folder: ["topic", "delete", topic, "--yes"]),
    "topic set": ("manage", lambda topic, folder: ["topic", "set", topic, "ttl=1h"]),
    "channel create": ("manage", lambda topic, folder: ["channel", "create", f"{topic}/d"]),
    "channel pause": ("manage", lambda topic, folder: ["channel", "pause", f"{topic}/c"]),
    "channel unpause": ("manage", lambda topic, folder: ["channel", "unpause", f"{topic}/c"]),
    "channel empty": ("manage", lambda topic, folder: ["channel", "empty", f"{topic}/c", "--yes"]),
    "channel delete": ("manage", lambda topic, folder: ["channel", "delete", f"{topic}/c", "--yes"]),
    "channel set": ("manage", lambda topic, folder: ["channel", "set", f"{topic}/c", "max_attempts=3"]),
    "channel seek": ("manage", lambda topic, folder: _seek(topic)),
    "deferred list": ("read", lambda topic, folder: ["deferred", "list", f"{topic}/c"]),
    "stat": ("any", lambda topic, folder: ["stat", topic, "--once"]),
    "topic list": ("any", lambda topic, folder: ["topic", "list"]),
    "channel list": ("any", lambda topic, folder: ["channel", "list", topic]),
}
"""Command lines that succeed, each with the role that it needs on the topic."""

TOO_SMALL = {"publish": "read", "consume": "publish", "read": "consume", "manage": "read"}
"""A role that does not include another one."""
ALSO_OVER_TLS = {"pub", "tail channel", "tail --from", "to-parquet", "topic create", "stat"}
"""One command for each way to connect."""


def each_command(*, but: str = "") -> pytest.MarkDecorator:
    """Run a test for each command but those that need this role, over plain connections, and for some over TLS."""
    names = [name for name, (role, _) in COMMANDS.items() if role != but]
    over_tls = [name for name in names if name in ALSO_OVER_TLS]
    pairs = [
        *(("plain", name) for name in names),
        *(("TLS", name) for name in over_tls),
        *in_soak(*(("TLS", name) for name in names if name not in over_tls)),
    ]
    return pytest.mark.parametrize(("guarded", "name"), pairs, indirect=["guarded"])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with input, and with exported files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = tmp_path_factory.mktemp("files")
    (folder / "input").write_bytes(b"one\n")
    (folder / "export").mkdir()
    pq.write_table(pa.table({"body": [b"one"]}), folder / "export" / "a.parquet")
    return folder


def publish_one(guarded: Guarded, run_here: Run, topic: str, files: Path) -> None:
    """Create a channel, and publish a message to it."""
    qcli = guarded.cli("all")
    assert run_here(qcli, "topic", "create", topic).code == 0
    assert run_here(qcli, "channel", "create", f"{topic}/c").code == 0
    assert run_here(qcli, "pub", topic, "-q", str(files / "input")).code == 0


@pytest.fixture
def jobs(tmp_path: Path) -> dict[str, str]:
    return {"QCLI_JOBS_FOLDER": str(tmp_path / "jobs")}


@each_command()
def test_command_with_its_role(
    guarded: Guarded, run_here: Run, topic: str, files: Path, jobs: dict[str, str], name: str
) -> None:
    publish_one(guarded, run_here, topic, files)
    role, line = COMMANDS[name]
    result = run_here(guarded.cli("read" if role == "any" else role, **jobs), *line(topic, files))
    assert result.code == 0, result.err
    assert "Warning" not in result.err


def _refused(guarded: Guarded, result: Result, *said: str) -> None:
    """Check that a command failed with one line that has one of these texts and no secret."""
    assert result.code == 1, result.err
    error = result.err.splitlines()[-1]
    assert any(text in error for text in said), error
    assert error.startswith("Error: ")
    shown = result.err + result.out.decode()
    assert not any(secret in shown for secret in (*SECRETS.values(), UNKNOWN))
    assert "Traceback" not in shown


GIVE = "Give --auth-secret-file, or set QCLI_CLIENT_AUTH_SECRET_FILE."
GIVE_OTHER = "Use another one: --auth-secret-file, or QCLI_CLIENT_AUTH_SECRET_FILE."


@each_command()
def test_command_without_a_secret(
    guarded: Guarded, run_here: Run, topic: str, files: Path, jobs: dict[str, str], name: str
) -> None:
    result = run_here(guarded.cli(**jobs), *COMMANDS[name][1](topic, files))
    _refused(guarded, result, f" requires AUTH. {GIVE}", f" requires a secret. {GIVE}")


def test_commands_with_an_unknown_secret(
    guarded: Guarded, topic: str, files: Path, jobs: dict[str, str]
) -> None:
    """At the same time, because the broker answers after failed logins more and more slowly.

    One half of the commands over TLS, the other half without: each is a process.
    """
    qcli = guarded.cli("unknown", **jobs)
    lines = [line(topic, files) for _, line in COMMANDS.values()][guarded.over_tls :: 2]
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda line: qcli(*line), lines))
    for result in results:
        _refused(
            guarded,
            result,
            f" rejected your secret: the token is unknown, expired or revoked. {GIVE_OTHER}",
            f" rejected your secret: it is unknown, expired or revoked. {GIVE_OTHER}",
        )


@each_command(but="any")
def test_command_with_another_role(
    guarded: Guarded, run_here: Run, topic: str, files: Path, jobs: dict[str, str], name: str
) -> None:
    publish_one(guarded, run_here, topic, files)
    role, line = COMMANDS[name]
    result = run_here(guarded.cli(TOO_SMALL[role], **jobs), *line(topic, files))
    _refused(guarded, result, f"your secret does not have the role {role} on ", f"granted the role {role}.")


def test_every_command_that_connects_takes_a_secret() -> None:
    for ctx in all_contexts():
        connects = [
            param for param in ctx.command.params if getattr(param, "section", None) == CONNECTION_OPTIONS
        ]
        names = {name for param in connects for name in param.opts}
        assert not connects or {"--auth-secret", "--auth-secret-file"} <= names, ctx.command_path


def test_replay_of_a_topic(guarded: Guarded, run_here: Run, topic: str, files: Path) -> None:
    publish_one(guarded, run_here, topic, files)
    assert run_here(guarded.cli("all"), "replay", topic, f"{topic}.again", "-q").code == 0
    result = run_here(guarded.cli("publish"), "replay", topic, f"{topic}.again")
    _refused(guarded, result, f"does not have the role read on topic {topic}.")
    result = run_here(guarded.cli("read"), "replay", topic, f"{topic}.again")
    _refused(guarded, result, f"does not allow you to publish to {topic}.again. ")


def test_dead_letters(guarded: Guarded, run_here: Run, topic: str) -> None:
    for line, role in (
        (["dlq", "list"], "read"),
        (["dlq", "show", topic], "read"),
        (["dlq", "drop", topic, "--yes"], "manage"),
    ):
        _refused(guarded, run_here(guarded.cli(), *line), f" requires a secret. {GIVE}")
        _refused(guarded, run_here(guarded.cli(TOO_SMALL[role]), *line), f"the role {role} on ")
    assert run_here(guarded.cli("read"), "dlq", "list").code == 0


# ---------------------------------------------------------------------- where the secret comes from


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(f"{SECRETS['all']}\n")
    path.chmod(0o600)
    return path


def test_secret_from_a_file(guarded: Guarded, run_here: Run, topic: str, secret_file: Path) -> None:
    assert run_here(guarded.cli(), "topic", "create", topic, "--auth-secret-file", str(secret_file)).code == 0
    by_variable = guarded.cli(QCLI_CLIENT_AUTH_SECRET_FILE=str(secret_file))
    assert topic in run_here(by_variable, "topic", "list").out.decode()


def test_command_line_overrides_the_environment(guarded: Guarded, run_here: Run, secret_file: Path) -> None:
    wrong = secret_file.with_name("wrong")
    wrong.write_text(UNKNOWN)
    wrong.chmod(0o600)
    for env, option in (
        ({"QCLI_CLIENT_AUTH_SECRET": UNKNOWN}, ["--auth-secret-file", str(secret_file)]),
        ({"QCLI_CLIENT_AUTH_SECRET_FILE": str(wrong)}, ["--auth-secret", SECRETS["all"]]),
        ({"QCLI_CLIENT_AUTH_SECRET_FILE": str(wrong)}, ["--auth-secret-file", str(secret_file)]),
    ):
        assert run_here(guarded.cli(**env), "topic", "list", *option).code == 0
    both = run_here(
        guarded.cli(QCLI_CLIENT_AUTH_SECRET=UNKNOWN, QCLI_CLIENT_AUTH_SECRET_FILE=str(wrong)), "topic", "list"
    )
    assert (both.code, "--auth-secret and --auth-secret-file exclude each other" in both.err) == (2, True)


def test_secret_before_messages_on_standard_input(guarded: Guarded, topic: str) -> None:
    secret = SECRETS["all"].encode()
    done = guarded.cli()("pub", topic, "--auth-secret-file", "-", stdin=secret + b"\none\ntwo\n")
    assert done.code == 0, done.err
    assert done.err.startswith("2 messages ")


def test_secret_from_another_program(guarded: Guarded, topic: str, secret_file: Path) -> None:
    words = " ".join(command_line("topic", "create", topic, "--auth-secret-file"))
    done = subprocess.run(
        ["bash", "-c", f"{words} <(cat {secret_file})"],
        env=guarded.cli().environment(),
        capture_output=True,
        timeout=30,
    )
    assert (done.returncode, done.stderr.decode()) == (0, f"topic {topic} created\n")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file or directory"),
        (b"", "its first line is empty"),
        (b"\nsecret", "its first line is empty"),
    ],
)
def test_file_without_a_secret(
    guarded: Guarded, run_here: Run, tmp_path: Path, content: bytes | None, said: str
) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    result = run_here(guarded.cli(), "topic", "list", "--auth-secret-file", str(path))
    assert (result.code, result.err.lower()) == (
        2,
        f"error: --auth-secret-file {path}: {said}.\n".lower(),
    )


def test_file_that_others_can_read(guarded: Guarded, run_here: Run, secret_file: Path) -> None:
    secret_file.chmod(0o644)
    result = run_here(guarded.cli(), "topic", "list", "--auth-secret-file", str(secret_file))
    assert result.code == 0
    assert result.err.startswith(
        f"Warning: --auth-secret-file {secret_file}: other users can read the secret: chmod 600 {secret_file}\n"
    )


def test_names_are_completed_with_the_secret(guarded: Guarded, topic: str, secret_file: Path) -> None:
    assert guarded.cli("all")("topic", "create", topic).code == 0
    for given in (f"--auth-secret-file {secret_file} ", f"--auth-secret {SECRETS['read']} "):
        line = {
            "_QCLI_COMPLETE": "bash_complete",
            "QCLI_LINE": f"qcli stat {given}{topic}",
            "QCLI_COMPLETION_TIMEOUT": "20s",
        }
        assert topic in guarded.cli(**line)().out.decode()
    line["QCLI_LINE"] = f"qcli stat --auth-secret {UNKNOWN} {topic}"
    assert topic not in guarded.cli(**line)().out.decode()


def test_secret_is_not_on_the_command_line(guarded: Guarded, topic: str, secret_file: Path) -> None:
    """`ps` shows the command line; only the user's own processes can see the environment."""
    assert guarded.cli("all")("topic", "create", topic).code == 0
    assert guarded.cli("all")("channel", "create", f"{topic}/c").code == 0
    cli = guarded.cli(QCLI_CLIENT_AUTH_SECRET_FILE=str(secret_file), TEST_PROCESSES="new")
    with cli.running("tail", f"{topic}/c") as tail:
        guarded.cli("all").wait_until(f"{topic}/c", lambda record: bool(record["client_count"]))
        shown = Path(f"/proc/{tail.process.pid}/cmdline").read_bytes()
        assert b"tail" in shown
        assert SECRETS["all"].encode() not in shown


def test_what_a_secret_may_not_read_is_noted(guarded: Guarded, topic: str) -> None:
    """Otherwise what is left out would be taken for missing."""
    every = guarded.cli("all")
    assert every("topic", "create", topic).code == 0
    assert every("channel", "create", f"{topic}/c").code == 0
    with every.running("tail", f"{topic}/c"):
        every.wait_until(f"{topic}/c", lambda record: bool(record["client_count"]))
        hidden = guarded.cli("publish")("clients", topic, "--interval", "0", "--format", "json")
        assert (hidden.code, hidden.records) == (0, [])
        assert (
            f"the consumers of {topic} are not listed: this needs a secret with the role read" in hidden.err
        )
        listed = guarded.cli("read")("clients", topic, "--interval", "0", "--format", "json")
        assert ([each["topic"] for each in listed.records], listed.err) == ([topic], "")
    few = guarded.cli("publish")("definitions", "export")
    assert (few.code, json.loads(few.out)["topics"]) == (0, {})
    assert "your secret may read only some topics and channels of " in few.err
    whole = guarded.cli("read")("definitions", "export")
    assert (topic in json.loads(whole.out)["topics"], whole.err) == (True, "")


# ---------------------------------------------------------------------- tokens that change


def _reload(guarded: Guarded) -> None:
    """Have the broker read its auth file; returns when it has."""
    tls = TLSFiles(guarded.env.get("QCLI_CLIENT_TLS_ROOT_CA_FILE"))
    http = BrokerHTTP(guarded.cli().http_address, tls, Secret(SECRETS["all"]))
    http.request("PUT", "/config/auth_file", body=str(guarded.auth_file.path).encode())


@contextmanager
def revoked(guarded: Guarded, role: str) -> Iterator[None]:
    """Revoke the token of a role; it is valid again after the block."""
    try:
        guarded.auth_file.write([name for name in SECRETS if name != role])
        _reload(guarded)
        yield
    finally:
        guarded.auth_file.write(SECRETS)
        _reload(guarded)


def _rejected(result: Result, code: int, secret: str) -> None:
    assert result.code == code, result.err
    assert re.search(" rejected your secret: the token is (unknown, )?expired or revoked[.] ", result.err), (
        result.err
    )
    assert secret not in result.err


def test_running_tail_ends_when_its_token_is_revoked(guarded: Guarded, topic: str) -> None:
    assert guarded.cli("all")("topic", "create", topic).code == 0
    assert guarded.cli("all")("channel", "create", f"{topic}/c").code == 0
    with guarded.cli("consume").running("tail", f"{topic}/c") as tail:
        guarded.cli("all").wait_until(f"{topic}/c", lambda record: bool(record["client_count"]))
        with revoked(guarded, "consume"):
            done = tail.end()
    _rejected(done, 1, SECRETS["consume"])


@pytest.mark.parametrize("option", ["--quiet", "--snappy"], ids=["over HTTP", "over TCP"])
def test_running_pub_ends_when_its_token_is_revoked(guarded: Guarded, topic: str, option: str) -> None:
    assert guarded.cli("all")("topic", "create", topic).code == 0
    with guarded.cli("publish").running("pub", topic, option) as pub:
        pub.write(b"one\n")
        guarded.cli("all").wait_until(topic, lambda record: record["message_count"] == 1)
        with revoked(guarded, "publish"):
            pub.write(b"two\n")
            done = pub.end()
    _rejected(done, 4, SECRETS["publish"])
    assert "1 message acknowledged" in done.err


def test_running_export_ends_when_its_token_is_revoked(
    guarded: Guarded, topic: str, tmp_path: Path, files: Path
) -> None:
    assert guarded.cli("all")("pub", topic, str(files / "input")).code == 0
    line = ("to-parquet", topic, str(tmp_path / "export"), "--follow", "--every", "100ms", "--format", "json")
    with guarded.cli("read").running(*line) as export:
        assert json.loads(export.read_line())["messages"] == 1
        with revoked(guarded, "read"):
            done = export.end()
    assert done.code == 4
    assert " rejected your secret: it is unknown, expired or revoked. " in done.err


# ---------------------------------------------------------------------- discovery services


def test_discovery_service_with_an_auth_file(tmp_path: Path, run_here: Run) -> None:
    auth_file = AuthFile(tmp_path)
    token = tmp_path / "token"
    token.write_text(SECRETS["register"])
    with qcli_lookupd(f"--auth-file={auth_file.path}") as lookupd:
        flags = [f"--lookupd-tcp-address={lookupd.tcp_address}", f"--lookupd-auth-secret-file={token}"]
        with qcli_serve(tmp_path / "data", f"--auth-file={auth_file.path}", *flags) as broker:
            # Until it is connected to the service, the broker waits seconds for the channels of a new topic.
            given_up_at_s = time.monotonic() + DEADLINE_S
            while not any(": peer info " in line for line in broker.log()):
                assert time.monotonic() < given_up_at_s
                time.sleep(0.01)
            direct = Cli(broker.tcp_address, broker.http_address, {"QCLI_CLIENT_AUTH_SECRET": SECRETS["all"]})
            assert run_here(direct, "topic", "create", "clicks").code == 0
            assert run_here(direct, "pub", "clicks", stdin=b"one\ntwo\n").code == 0
            asking = {"QCLI_LOOKUPD_HTTP_ADDRESS": lookupd.http_address}
            consumer = Cli(
                "127.0.0.1:1", "127.0.0.1:1", asking | {"QCLI_CLIENT_AUTH_SECRET": SECRETS["consume"]}
            )
            for allowed in ([], ["--lookupd-allowed-host", "127.0.0.*"]):
                assert run_here(consumer, "tail", "clicks/c", "-n", "1", *allowed).code == 0
            reader = Cli("127.0.0.1:1", "127.0.0.1:1", asking | {"QCLI_CLIENT_AUTH_SECRET": SECRETS["read"]})
            export = ("to-parquet", "clicks", str(tmp_path / "export"))
            refused = run_here(reader, *export, "--lookupd-allowed-host", "*.example.com")
            assert refused.err == (
                "Warning: '127.0.0.1' is not among the hosts of --lookupd-allowed-host; left out.\n"
                "Error: The discovery services know no broker with topic clicks.\n"
            )
            assert run_here(reader, *export).code == 0
            # TLS is asked for, and nsqlookupd names ports of plain HTTP: no secret is sent there.
            ca = Certificates(tmp_path / "certificates").ca_path
            refused = run_here(reader, *export, "--tls-root-ca-file", str(ca))
            assert refused.code == 2
            assert "over which the secret would not be encrypted" in refused.err.replace("\n", " ")
            asking["QCLI_NSQD_TCP_ADDRESS"] = ""  # or else the broker there belongs to the command, too
            for env in (asking, asking | {"QCLI_CLIENT_AUTH_SECRET": UNKNOWN}):
                for line in (["tail", "clicks/c", "-n", "1"], list(export)):
                    refused = run_here(Cli("127.0.0.1:1", "127.0.0.1:1", env), *line)
                    said = "requires a secret" if env == asking else "rejected your secret"
                    assert (
                        refused.code,
                        f"The nsqlookupd at {lookupd.http_address} {said}" in refused.err,
                    ) == (
                        1,
                        True,
                    ), refused.err


# ---------------------------------------------------------------------- secrets in clear


def test_warning_before_a_secret_leaves_the_machine_in_clear(run_here: Run) -> None:
    """By its form, the name of this machine may be another one's; nothing listens there."""
    for name in ("localhost", os.uname().nodename):
        qcli = Cli(f"{name}:1", f"{name}:1", {"QCLI_CLIENT_AUTH_SECRET": UNKNOWN})
        result = run_here(qcli, "topic", "list")
        warned = f"Warning: the secret is sent to {name}:1 without encryption" in result.err
        assert warned is (name != "localhost"), result.err
        assert UNKNOWN not in result.err


def test_errors_of_servers_about_access() -> None:
    from qcli.broker.failures import access_refusal

    texts: dict[str, Any] = {
        "HOST_NOT_ALLOWED: evil.example is not a name of this server; see --http-allowed-host": "name evil.example",
        "NOT_FOR_WEB_PAGES: a web page of another origin made this request": "foreign web page",
        "READ_ONLY: this server runs with --http-read-only": "--http-read-only",
        "FORBIDDEN: no role allows this": "to no secret",
        "AUTH_UNAVAILABLE": "auth servers do not answer",
    }
    for text, said in texts.items():
        sentence = access_refusal("The broker at b:4151", text)
        assert sentence is not None
        assert sentence.startswith("The broker at b:4151 ")
        assert said in sentence
        assert sentence.endswith(".")
    assert access_refusal("The broker", "TOPIC_NOT_FOUND") is None


def test_read_only_server(tmp_path: Path, run_here: Run) -> None:
    with qcli_serve(tmp_path / "data", "--http-read-only") as broker:
        qcli = Cli(broker.tcp_address, broker.http_address)
        result = run_here(qcli, "topic", "create", "t")
        assert (result.code, " allows no changes over HTTP: " in result.err) == (1, True)
        assert json.loads(run_here(qcli, "topic", "list", "--format", "json").out or "null") is None
