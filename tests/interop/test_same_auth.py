"""Compare nsqd and our broker with auth servers: same bytes in, same frames out, same requests to the auth servers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from broker.auth_server import AuthServer, threaded_auth_server
from interop.peers import nsqd, qcli_serve
from interop.same.authorizing import OVER_TLS, SCRIPTS, answering
from interop.same.certificates import Certificates
from interop.same.stage import Pair, check

pytestmark = pytest.mark.interop

NOBODY = "127.0.0.1:1"
"""An address without an auth server: the broker queries the next one."""


@dataclass(frozen=True)
class Asking:
    """Both brokers, each with its own auth server."""

    brokers: Pair
    by_nsqd: AuthServer
    by_ours: AuthServer


@contextmanager
def asking(folder: Path, certificates: Certificates, flags: Sequence[str]) -> Iterator[Asking]:
    with threaded_auth_server(answering()) as by_nsqd, threaded_auth_server(answering()) as by_ours:
        both = [*flags, f"--auth-http-address={NOBODY}"]
        with (
            nsqd(folder / "nsqd", *both, f"--auth-http-address={by_nsqd.address}") as theirs,
            qcli_serve(folder / "ours", *both, f"--auth-http-address={by_ours.address}") as ours,
        ):
            yield Asking(Pair(theirs, ours, certificates), by_nsqd, by_ours)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def plain(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asking]:
    with asking(tmp_path_factory.mktemp("auth"), certificates, []) as running:
        yield running


@pytest.fixture(scope="module")
def over_tls(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asking]:
    flags = [*certificates.flags, "--tls-client-auth-policy=require"]
    with asking(tmp_path_factory.mktemp("auth-tls"), certificates, flags) as running:
        yield running


def check_with_questions(running: Asking, topic: str, name: str) -> None:
    script = (SCRIPTS | OVER_TLS)[name]
    asked_by_nsqd, asked_by_ours = len(running.by_nsqd.queries), len(running.by_ours.queries)
    check(running.brokers, topic, script)
    if not script.row:
        assert running.by_ours.queries[asked_by_ours:] == running.by_nsqd.queries[asked_by_nsqd:]


@pytest.mark.parametrize("name", SCRIPTS)
def test_same_auth(plain: Asking, name: str) -> None:
    check_with_questions(plain, f"topic{list(SCRIPTS).index(name):03d}", name)


@pytest.mark.parametrize("name", OVER_TLS)
def test_same_auth_over_tls(over_tls: Asking, name: str) -> None:
    check_with_questions(over_tls, "topic", name)


def test_same_headers(plain: Asking) -> None:
    wanted = ("accept", "host")
    ours = {name: plain.by_ours.headers[0].get(name) for name in wanted}
    theirs = {name: plain.by_nsqd.headers[0].get(name) for name in wanted}
    assert ours["accept"] == theirs["accept"] == "application/vnd.nsq; version=1.0"
    assert (ours["host"], theirs["host"]) == (plain.by_ours.address, plain.by_nsqd.address)
