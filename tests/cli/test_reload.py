"""Tests for SIGHUP: a server reloads its certificate and log level."""

import json
import signal
import socket
import ssl
from pathlib import Path

import pytest
import trustme

from cli.support import DEADLINE_S, Cli, Running, lines_until_ready, serving


def certify(folder: Path, name: str) -> None:
    """Write a new certificate for this name, and its key, to the broker's files."""
    issued = trustme.CA().issue_cert(name)
    issued.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    issued.private_key_pem.write_to_path(folder / "key.pem")


def https_certificate(address: str) -> bytes:
    """Return the broker's certificate in an HTTPS handshake."""
    return _handshake(socket.create_connection(_host_port(address), timeout=DEADLINE_S))


def tcp_certificate(address: str) -> bytes:
    """Return the broker's certificate after IDENTIFY with `tls_v1`."""
    connection = socket.create_connection(_host_port(address), timeout=DEADLINE_S)
    body = json.dumps({"tls_v1": True, "feature_negotiation": True}).encode()
    connection.sendall(b"  V2IDENTIFY\n" + len(body).to_bytes(4, "big") + body)
    with connection.makefile("rb", buffering=0) as answer:
        size = int.from_bytes(answer.read(4) or b"", "big")
        assert json.loads((answer.read(size) or b"")[4:])["tls_v1"] is True
    return _handshake(connection)


def _handshake(connection: socket.socket) -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with context.wrap_socket(connection) as session:
        return session.getpeercert(binary_form=True) or b""


def _host_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def der(path: Path) -> bytes:
    return ssl.PEM_cert_to_DER_cert(path.read_text())


def reloaded(server: Running, last: str) -> list[str]:
    """Send SIGHUP, and return the log lines of the reload, up to the line that contains `last`."""
    server.process.send_signal(signal.SIGHUP)
    heard: list[str] = []
    while not heard or last not in heard[-1]:
        heard.append(server.hear_line())
    return [line.partition("reload: ")[2].rstrip("\n") for line in heard if "reload: " in line]


def test_new_certificate(tmp_path: Path) -> None:
    certify(tmp_path, "first.example")
    first = der(tmp_path / "cert.pem")
    flags = ["--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem")]
    flags += ["--https-address", "127.0.0.1:0", "--address-file", str(tmp_path / "a.json")]
    with serving(tmp_path, *flags) as broker:
        lines_until_ready(broker)
        bound = json.loads((tmp_path / "a.json").read_text())
        https, tcp = bound["https_address"], bound["tcp_address"]
        assert (https_certificate(https), tcp_certificate(tcp)) == (first, first)
        certify(tmp_path, "second.example")
        second = der(tmp_path / "cert.pem")
        assert reloaded(broker, "certificate") == [
            f"read the certificate {tmp_path / 'cert.pem'} and its key"
        ]
        assert (https_certificate(https), tcp_certificate(tcp)) == (second, second)
        (tmp_path / "key.pem").write_text("nothing of the kind")
        (why,) = reloaded(broker, "stay in use")
        key = tmp_path / "key.pem"
        assert why == f"--tls-key: {key} is not a PEM private key for TLS; the previous files stay in use"
        assert (https_certificate(https), tcp_certificate(tcp)) == (second, second)
        broker.process.terminate()
        assert broker.end().code == 0


@pytest.mark.parametrize("command", ["serve", "lookupd"])
def test_log_level(tmp_path: Path, command: str) -> None:
    config = tmp_path / "c.toml"
    config.write_text('log_level = "error"\n')
    flags = ["--config", str(config), "--tcp-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0"]
    flags += ["--data-path", str(tmp_path / "data")]
    with Cli("127.0.0.1:1", "127.0.0.1:1").running(command, *flags) as server:
        assert len(lines_until_ready(server)) == 1
        config.write_text('log_level = "debug"\ntcp_address = "127.0.0.1:1"\n')
        assert reloaded(server, "restart") == [
            "the log level is debug",
            f"tcp_address has changed in {config}: restart to use it",
        ]
        config.write_text("log_level = 3\n")
        (why,) = reloaded(server, "stay in use")
        assert "log_level: 3 is not a string." in why
        server.process.terminate()
        assert server.end().code == 0


def test_reload_without_files(tmp_path: Path) -> None:
    with serving(tmp_path, "--log-level", "debug") as broker:
        lines_until_ready(broker)
        broker.process.send_signal(signal.SIGHUP)
        while "SIGHUP" not in broker.hear_line():
            pass
        broker.process.terminate()
        assert broker.end().code == 0
