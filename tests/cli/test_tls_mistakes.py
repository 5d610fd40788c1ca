"""Tests of what commands say about certificates and ports of TLS that do not fit."""

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread

import pytest
import trustme

from cli.support import Cli, Run

PAST = datetime(2020, 1, 1, tzinfo=UTC)


@contextmanager
def tls_server(leaf: trustme.LeafCert) -> Iterator[str]:
    """Make TLS handshakes with this certificate, and hang up after each. Yields the address."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    leaf.configure_cert(context)

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # the end of the test
                return
            with connection, suppress(OSError):
                connection.settimeout(5)
                context.wrap_socket(connection, server_side=True).close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize(
    ("name", "end", "is_known", "advice"),
    [
        ("127.0.0.1", PAST, True, "has expired. Renew it, or correct the clock of this machine."),
        (
            "10.0.0.1",
            None,
            True,
            "not valid for '127.0.0.1'. Use a name or an address that it contains, or add this one to its "
            "subjectAltName.",
        ),
        ("127.0.0.1", None, False, ". Give its CA: --tls-root-ca-file."),
    ],
)
def test_certificate_that_is_not_trusted(
    run_here: Run, tmp_path: Path, name: str, end: datetime | None, is_known: bool, advice: str
) -> None:
    ca = trustme.CA()
    (ca if is_known else trustme.CA()).cert_pem.write_to_path(tmp_path / "ca.pem")
    with tls_server(ca.issue_cert(name, not_after=end)) as address:
        result = run_here(
            Cli("127.0.0.1:1", f"https://{address}"), "stat", "--tls-root-ca-file", str(tmp_path / "ca.pem")
        )
    assert result.code == 3
    assert result.err.startswith(
        f"Error: TLS with the broker at https://{address} failed: its certificate is "
    )
    assert result.err.endswith(f"{advice}\n")


def test_plain_text_to_a_port_with_tls(run_here: Run) -> None:
    with tls_server(trustme.CA().issue_cert("127.0.0.1")) as address:
        qcli = Cli(address, address)
        for command, kind, advice in (
            ("stat", "HTTP", f" Write https://{address}."),
            ("tail", "TCP", ""),
        ):
            result = run_here(qcli, command, *(["t/c"] if command == "tail" else []))
            assert result.code == 3
            assert result.err.startswith(
                f"Error: {address} is not the {kind} port of an NSQ broker, but a port with TLS, such as that of "
                f"HTTPS.{advice} See --nsqd-"
            )


def test_broker_that_starts_with_an_expired_certificate_warns(nowhere: Cli, tmp_path: Path) -> None:
    leaf = trustme.CA().issue_cert("127.0.0.1", not_after=PAST)
    leaf.private_key_and_cert_chain_pem.write_to_path(tmp_path / "broker.pem")
    flags = [f"--{each}={tmp_path / 'broker.pem'}" for each in ("tls-cert", "tls-key")]
    flags += [f"--{each}-address=127.0.0.1:0" for each in ("tcp", "http", "https")]
    with nowhere.running("serve", f"--data-path={tmp_path / 'data'}", *flags) as broker:
        line = broker.hear_line()
        broker.process.terminate()
        assert broker.end().code == 0
    end = "has expired at 2020-01-01 00:00:00+00:00: clients refuse it until you renew it"
    assert line.endswith(f"WARNING: --tls-cert: {tmp_path / 'broker.pem'} {end}\n")
