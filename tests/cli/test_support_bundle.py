"""Tests of `qcli support bundle`: what is in the archive, and that no secret and no message is."""

import json
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.certificates import Certificates
from cli.contexts import cli_with_contexts, contexts_file
from cli.support import Cli, Run
from client.support.tokens import SECRETS, AuthFile
from interop.peers import free_address, qcli_serve
from qcli.commands.support.redaction import Redactor, is_secret_name

AWS = {"AWS_ACCESS_KEY_ID": "AKIAABCDEFGHIJKLMNOP", "AWS_SECRET_ACCESS_KEY": 'wJalr/XUtn"FEMI+K7MDENG'}
SWITCHES = ("true", "false", "none", "null")
BODY = b"body-of-a-message"
HEADER = "Authorization: Bearer header-secret-0"


def contents(path: Path) -> dict[str, bytes]:
    """Return the files of an archive by name."""
    with tarfile.open(path) as archive:
        found = {}
        for entry in archive:
            stream = archive.extractfile(entry)
            assert stream is not None
            found[entry.name.removeprefix("qcli-support/")] = stream.read()
    return found


def assert_without(files: dict[str, bytes], *secrets: str) -> None:
    every = b"\n".join([*files.values(), *(name.encode() for name in files)])
    for secret in secrets:
        assert secret.encode() not in every
        assert json.dumps(secret)[1:-1].encode() not in every


@pytest.mark.parametrize("role", ["all", "read"])
def test_a_broker_with_secrets(tmp_path: Path, run_here: Run, role: str) -> None:
    certificates = Certificates(tmp_path)
    flags = [f"--{name.replace('_', '-')}={path}" for name, path in certificates.options.items()]
    auth = AuthFile(tmp_path)
    statsd = "--auth-http-address=https://user:url-secret-1@127.0.0.1:1/auth?key=query-secret-2"
    file, secret_file = tmp_path / "report.tar.gz", tmp_path / "secret"
    secret_file.write_text(SECRETS[role])
    secret_file.chmod(0o600)
    with qcli_serve(
        tmp_path / "data", f"--auth-file={auth.path}", statsd, "--sync=interval", *flags
    ) as broker:
        env = {
            "QCLI_CLIENT_TLS_ROOT_CA_FILE": str(certificates.ca_path),
            "XDG_CONFIG_HOME": str(tmp_path),
        }
        https = f"https://{broker.https_address}"
        publisher = Cli(broker.tcp_address, https, env | {"QCLI_CLIENT_AUTH_SECRET": SECRETS["all"]})
        assert run_here(publisher, "pub", "clicks", stdin=BODY).code == 0
        cli = Cli(
            broker.tcp_address,
            https,
            env
            | AWS
            | {
                "QCLI_CLIENT_AUTH_SECRET": "variable-secret-5",
                "QCLI_TO_HTTP_HEADER": HEADER,
                "QCLI_TO_HTTP_POST": "https://h:hook-secret-6@example.com/x?token=hook-secret-7",
            },
        )
        contexts = contexts_file(tmp_path)
        contexts.parent.mkdir(parents=True, exist_ok=True)
        contexts.write_text(
            f'[context.a]\nnsqd_http_address = "{https}"\nauth_secret_command = "echo context-secret-8"\n'
            '[context.b]\nauth_secret = "context-secret-9"\n'
        )
        result = run_here(
            cli, "support", "bundle", str(file), "--auth-secret-file", str(secret_file),
            "--nsqd-http-address", https, "--nsqd-http-address", f"https://{free_address()}",
            "--data-path", str(tmp_path / "data"),
        )  # fmt: skip
    assert result.code == 0, result.err
    assert file.stat().st_mode & 0o777 == 0o600
    assert "Look at it before you send it" in result.err
    files = contents(file)
    assert sorted(result.out.decode().split()) == sorted(files)
    assert_without(
        files,
        *SECRETS.values(),
        *AWS.values(),
        BODY.decode(),
        *(f"{word}-{number}" for word, number in [("header-secret", 0), ("url-secret", 1)]),
        *("query-secret-2", "variable-secret-5", "hook-secret-6", "hook-secret-7"),
        *("context-secret-8", "context-secret-9"),
    )
    assert json.loads(files["broker-1/info.json"])["version"]
    assert [t["topic_name"] for t in json.loads(files["broker-1/stats.json"])["topics"]] == ["clicks"]
    assert b"clicks" in files["broker-1/metrics.txt"]
    assert any(each.startswith("trio ") for each in json.loads(files["versions.json"])["packages"])
    assert b"topics/clicks.topic" in files["data-path.txt"]
    assert b"nsqd_http_address" in files["contexts.json"]
    assert files["broker-2/broker.error.txt"]
    if role == "all":
        assert json.loads(files["broker-1/config.json"])["auth_file"] == str(auth.path)
        assert files["broker-1/debug-tasks.txt"]
    else:
        assert files["broker-1/config.json.error.txt"]
        assert files["broker-1/debug-tasks.txt.error.txt"]


def test_addresses_of_clients_are_hashed(tmp_path: Path, run_here: Run) -> None:
    with qcli_serve(tmp_path / "data", "--sync=interval") as broker:
        cli = Cli(broker.tcp_address, broker.http_address, {})
        cli.publish("clicks", [BODY])
        with cli.running("tail", "clicks/c") as tail:
            tail.read_line()
            result = run_here(cli, "support", "bundle", str(tmp_path / "a.tar.gz"))
            raw = run_here(cli, "clients", "clicks/c", "--format", "json", "--interval", "0")
    assert result.code == 0, result.err
    files = contents(tmp_path / "a.tar.gz")
    (topic,) = json.loads(files["broker-1/stats.json"])["topics"]
    assert topic["channels"][0]["clients"][0]["remote_address"].startswith("client-")
    assert_without(files, json.loads(raw.out)["address"])


def test_an_address_of_a_client_is_hashed_in_other_texts() -> None:
    redactor = Redactor({})
    hashed = redactor.value({"clients": [{"remote_address": "10.1.2.3:4567"}]})["clients"][0][
        "remote_address"
    ]
    assert redactor.clients("connection 10.1.2.3:4567 waits") == f"connection {hashed} waits"


def test_programs_that_report_jobs_are_hashed() -> None:
    job = {"host": "my-laptop", "client": "me@example.com", "kind": "replay", "name": "to ./a"}
    (found,) = Redactor({}).value({"jobs": [job]})["jobs"]
    assert (found["kind"], found["name"]) == ("replay", "to ./a")
    assert found["host"].startswith("client-")
    assert found["client"].startswith("client-")


@pytest.mark.parametrize("value", ["1000", "2.5", "true", "False"])
def test_numbers_and_switches_are_no_secrets(value: str) -> None:
    """Other numbers and words, such as sizes in metrics, may contain them."""
    assert Redactor({"MAX_TOKENS": value}).text(f"interval 1{value}0") == f"interval 1{value}0"


def test_a_broken_installation(tmp_path: Path, run_here: Run) -> None:
    """An interrupted pip leaves a folder without metadata."""
    (tmp_path / "broken-1.0.dist-info").mkdir()
    cli = Cli("", "", {"PYTHONPATH": str(tmp_path)})
    file = tmp_path / "a.tar.gz"
    result = cli("support", "bundle", str(file), "--nsqd-http-address", free_address())
    assert result.code == 0, result.err
    assert json.loads(contents(file)["versions.json"])["packages"]


def test_a_file_that_exists_stays(tmp_path: Path, run_here: Run) -> None:
    file = tmp_path / "a.tar.gz"
    file.write_bytes(b"mine")
    cli = cli_with_contexts(tmp_path, run_here)
    result = cli("support", "bundle", str(file), "--nsqd-http-address", free_address())
    assert result.code == 1
    assert "exists" in result.err
    assert file.read_bytes() == b"mine"


@given(
    secret=st.text(min_size=4, max_size=40).filter(
        lambda text: text.strip("*x.+-0123456789") and "client" not in text and text.lower() not in SWITCHES
    ),
    name=st.sampled_from(["AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN", "QCLI_CLIENT_AUTH_SECRET", "PGPASSWORD"]),
)
def test_a_secret_of_the_environment_is_removed_from_every_value(secret: str, name: str) -> None:
    redactor = Redactor({name: secret})
    key = f"key{secret}"
    value = redactor.value({key: [f"0{secret}0"]})
    assert not any(secret in text for text in (*value, *(each for found in value.values() for each in found)))


def test_what_looks_like_a_secret_is_removed_from_jobs_and_tasks() -> None:
    job = {
        "place": "s3://user:secret-1@bucket/x?sig=secret-2",
        "error": "GET /hook?key=secret-3 failed, Authorization: Bearer secret-4",
        "options": {"auth_token": "secret-5", "rows": 3},
        "peer": "https://user:a/secret-6@host/?secret-7",
        "token_name": None,
        "headers": {"X-Anything": "secret-8", "X-Api-Key": ["secret-9"]},
        "X-Api-Key": "secret-10",
        "texts": [
            "account_key=secret-11",
            "api_key: secret-12",
            "passphrase=secret-13",
            "X-Api-Key: secret-14",
            "connection_string=AccountKey=secret-15",
            "Authorization: Token secret-16",
            "password='a secret-17 c'",
            'password="secret-18',
            "DefaultEndpointsProtocol=https;AccountKey=secret-19",
        ],
    }
    shown = json.dumps(Redactor({}).value({"jobs": [job]}))
    assert "secret-" not in shown
    assert "bucket/x" in shown
    assert '"rows": 3' in shown


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("QCLI_CLIENT_AUTH_SECRET", True),
        ("QCLI_CLIENT_AUTH_SECRET_FILE", False),
        ("auth_file", False),
        ("AZURE_STORAGE_KEY", True),
        ("AZURE_STORAGE_MASTER_KEY", True),
        ("AZURE_STORAGE_SAS", True),
        ("usastate", False),
    ],
)
def test_names_of_secrets(name: str, secret: bool) -> None:
    assert is_secret_name(name) is secret
