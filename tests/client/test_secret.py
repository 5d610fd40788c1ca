"""Tests of a client's secret: its file, its header, the warning before it is sent in clear, and what shows it."""

import logging
import pickle
from base64 import b64decode
from pathlib import Path

import pytest

from trio_nsq.access.secret import MAX_SECRET_BYTES, Secret, SecretFileError, authorization, warn_in_clear
from trio_nsq.client import ConnectionSettings, IdempotentProducer, TopicReader
from trio_nsq.protocol.address import is_loopback

HUSH = "hush-hush"


@pytest.mark.parametrize("content", [b"hush-hush", b"hush-hush\n", b"hush-hush\r\n", b"hush-hush\n# rest\n"])
def test_secret_is_the_first_line_of_the_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "secret").write_bytes(content)
    assert Secret(file=tmp_path / "secret").read() == HUSH


def test_file_is_read_again_each_time(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("first")
    secret = Secret(file=path)
    assert secret.headers() == {"Authorization": "Bearer first"}
    path.write_text("second")
    assert secret.headers() == {"Authorization": "Bearer second"}


def test_file_that_has_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    with pytest.raises(SecretFileError, match=f"auth_secret_file {path}: No such file or directory"):
        Secret(file=path).read()
    path.write_bytes(b"\nhush\n")
    with pytest.raises(SecretFileError, match="its first line is empty"):
        Secret(file=path).read()
    path.write_bytes(b"h" * (MAX_SECRET_BYTES + 1))
    with pytest.raises(SecretFileError, match="too long") as caught:
        Secret(file=path).read()
    assert "hhh" not in str(caught.value)


def test_no_secret_has_no_headers() -> None:
    assert not Secret()
    assert Secret().headers() == {}


@pytest.mark.parametrize("owner", [ConnectionSettings, Secret])
def test_secret_and_file_exclude_each_other(tmp_path: Path, owner: type[object]) -> None:
    names = ("auth_secret", "auth_secret_file") if owner is ConnectionSettings else ("text", "file")
    (tmp_path / "secret").write_text("other")
    with pytest.raises(ValueError, match="auth_secret and auth_secret_file are both given") as caught:
        owner(**dict(zip(names, (HUSH, tmp_path / "secret"), strict=True)))
    assert HUSH not in str(caught.value)


@pytest.mark.parametrize(
    "secret", ["open sesame", "h\udcffsh", "a\r\nX-Header: b", " padded ", "grüße", "no:password"]
)
def test_secret_that_is_no_token_is_a_password(secret: str) -> None:
    scheme, _, value = authorization(secret).partition(" ")
    assert scheme == "Basic"
    assert b64decode(value) == b":" + secret.encode("utf-8", "surrogateescape")


def test_token_is_a_bearer_token() -> None:
    assert authorization("aZ09-._~+/=") == "Bearer aZ09-._~+/="


def test_no_text_shows_the_secret(tmp_path: Path) -> None:
    producer = IdempotentProducer("127.0.0.1:1", "t", "p", auth_secret=HUSH)
    reader = TopicReader("127.0.0.1:1", "t", auth_secret=HUSH)
    for each in (Secret(HUSH), ConnectionSettings(auth_secret=HUSH), producer, reader):
        assert HUSH not in f"{each!r} {each}"
    assert pickle.loads(pickle.dumps(Secret(HUSH))).read() == HUSH


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("localhost", True),
        ("a.localhost", True),
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("0.0.0.0", True),
        ("10.0.0.1", False),
        ("localhost.example.com", False),
        ("127.0.0.1.example.com", False),
        ("broker", False),
    ],
)
def test_loopback_hosts(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_warning_before_a_secret_is_sent_in_clear(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "trio_nsq.security"):
        for address in ("127.0.0.1:4151", "[::1]:4151", "clear.example:4151", "clear.example:4151"):
            Secret(HUSH).headers(address)
        warn_in_clear("clear.example:4150")
    assert [record.getMessage().partition(" without")[0] for record in caplog.records] == [
        "the secret is sent to clear.example:4151",
        "the secret is sent to clear.example:4150",
    ]
    assert HUSH not in caplog.text
