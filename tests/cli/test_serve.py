"""Tests for `qcli serve`."""

import json
import os
import re
import signal
import socket
import ssl
from pathlib import Path

import pytest
import trustme

from cli.support import DEADLINE_S, Cli, lines_until_ready, refusal, serving


def test_ready_comes_after_the_address_file(tmp_path: Path) -> None:
    file = tmp_path / "addresses.json"
    file.write_text("of an earlier broker")
    with serving(tmp_path, "--address-file", str(file)) as broker:
        ready = lines_until_ready(broker)[-1]
        addresses = json.loads(file.read_text())
        assert ready == (
            f"ready: tcp {addresses['tcp_address']}, http {addresses['http_address']}, data {tmp_path / 'data'}\n"
        )
        qcli = Cli(addresses["tcp_address"], addresses["http_address"])
        assert qcli("topic", "list").code == 0
        assert [path.name for path in tmp_path.iterdir() if path.suffix != ""] == ["addresses.json"]
        broker.process.send_signal(signal.SIGINT)
        assert broker.process.wait(30) == 0
    assert not file.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_stops_the_server_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    with serving(tmp_path) as broker:
        lines_until_ready(broker)
        broker.process.send_signal(number)
        result = broker.end()
    assert (result.code, result.out) == (0, b"")
    assert "Traceback" not in result.err


def test_messages_survive_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "addresses.json"
    for out in (b"", b"a\n"):
        with serving(tmp_path, "--address-file", str(file)) as broker:
            lines_until_ready(broker)
            addresses = json.loads(file.read_text())
            qcli = Cli(addresses["tcp_address"], addresses["http_address"])
            if out:
                assert qcli("tail", "t/c", "-n", "1").out == out
            else:
                assert qcli("pub", "t", stdin=b"a\n").code == 0
            broker.process.terminate()
            assert broker.process.wait(30) == 0


def test_log_has_the_format_of_nsqd(tmp_path: Path) -> None:
    with serving(tmp_path, "--log-prefix", "[b1] ") as broker:
        log = lines_until_ready(broker)[:-1]
        assert log
        for line in log:
            assert re.fullmatch(r"\[b1\] \d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d{6} [A-Z]+: .+\n", line)


def test_control_characters_of_clients_are_escaped_in_the_log(tmp_path: Path) -> None:
    sent = b"\x1b]0;title\x07\x1b[2J\r\xff\xc2\x9b\xe2\x80\xae"
    with serving(tmp_path, "--address-file", str(tmp_path / "a.json")) as broker:
        lines_until_ready(broker)
        host, _, port = json.loads((tmp_path / "a.json").read_text())["tcp_address"].rpartition(":")
        with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as client:
            client.sendall(b"  V2" + sent + b" x\n")
            while client.recv(4096):
                pass
        broker.process.terminate()
        log = broker.end().err
    assert r"invalid command \x1b]0;title\x07\x1b[2J\r\xff\x9b\u202e" in log
    assert all(char.isprintable() or char == "\n" for char in log)


def test_error_of_a_url_hides_its_password(tmp_path: Path) -> None:
    reason = refusal(tmp_path, "--auth-http-address", "ftp://user:hidden@host/", code=2)
    assert "ftp://xxxxx@host/" in reason
    assert "hidden" not in reason


def test_log_level(tmp_path: Path) -> None:
    with serving(tmp_path, "--log-level", "ERROR") as broker:
        assert len(lines_until_ready(broker)) == 1


def test_no_http(tmp_path: Path) -> None:
    with serving(tmp_path, "--http-address", "", "--address-file", str(tmp_path / "a.json")) as broker:
        assert ", http off, " in lines_until_ready(broker)[-1]
        assert json.loads((tmp_path / "a.json").read_text())["http_address"] is None


def test_https_with_a_certificate(tmp_path: Path) -> None:
    certificate, key = tmp_path / "c.pem", tmp_path / "k.pem"
    leaf = trustme.CA().issue_cert("127.0.0.1")
    leaf.cert_chain_pems[0].write_to_path(certificate)
    leaf.private_key_pem.write_to_path(key)
    flags = [f"--tls-cert={certificate}", f"--tls-key={key}", "--https-address=127.0.0.1:0"]
    with serving(tmp_path, *flags, "--address-file", str(tmp_path / "a.json")) as broker:
        ready = lines_until_ready(broker)[-1]
        https_address = json.loads((tmp_path / "a.json").read_text())["https_address"]
        assert f", https {https_address}, " in ready
        host, port = https_address.split(":")
        trusting = ssl.create_default_context()
        trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
        with trusting.wrap_socket(socket.create_connection((host, int(port)))):
            pass


def test_unix_sockets(tmp_path: Path) -> None:
    tcp, http = tmp_path / "tcp.sock", tmp_path / "http.sock"
    with serving(tmp_path, f"--tcp-address={tcp}", f"--http-address={http}") as broker:
        assert f"ready: tcp {tcp}, http {http}, " in lines_until_ready(broker)[-1]
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(DEADLINE_S)
            client.connect(str(http))
            client.sendall(b"GET /ping HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert client.makefile("rb").read().endswith(b"OK")


def test_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert address in refusal(tmp_path, "--tcp-address", address)
        assert address in refusal(tmp_path, "--http-address", address)


def test_folder_in_use(tmp_path: Path) -> None:
    with serving(tmp_path) as broker:
        lines_until_ready(broker)
        assert str(tmp_path / "data") in refusal(tmp_path)


def test_folder_that_cannot_be_created(tmp_path: Path) -> None:
    assert "missing" in refusal(tmp_path, "--data-path", str(tmp_path / "missing" / "data"))


def test_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file") in refusal(tmp_path, "--data-path", str(tmp_path / "file"))


@pytest.mark.parametrize(
    "flags", [[], ["--processes=2"], ["--cluster=c", "--coordinator=static:127.0.0.1:1"]]
)
def test_folder_that_cannot_be_looked_into(tmp_path: Path, flags: list[str]) -> None:
    """The error names the folder and its option, not a file in it that users do not know."""
    folder = tmp_path / ("x" * 300)
    expected = f"Error: --data-path: cannot use {folder}: File name too long"
    assert refusal(tmp_path, "--data-path", str(folder), *flags).strip() == expected


def test_relative_folder_is_logged_as_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert str(tmp_path / "no") in refusal(tmp_path, "--data-path", "./no/such")
    with serving(tmp_path, "--data-path", "./here") as broker:
        assert lines_until_ready(broker)[-1].endswith(f", data {tmp_path / 'here'}\n")


def test_address_file_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "missing" / "a.json"
    expected = f"Error: --address-file: cannot write {file}: No such file or directory."
    assert refusal(tmp_path, "--address-file", str(file)) == expected


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_folder_that_is_not_writable(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir(mode=0o500)
    assert str(tmp_path / "data") in refusal(tmp_path)
