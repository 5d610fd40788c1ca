"""Send the same bytes to nsqd and our broker, and compare the frames: TLS, snappy and deflate."""

from collections.abc import Iterator

import pytest

from interop.same.certificates import Certificates
from interop.same.stage import Pair, check, pair
from interop.same.upgrades import SCRIPTS, TLS_REQUIRED, TLS_REQUIRED_OVER_TCP

pytestmark = pytest.mark.interop


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def brokers(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("upgrades")
    with pair(folder, *certificates.flags, certificates=certificates) as running:
        yield running


@pytest.mark.parametrize("name", SCRIPTS)
def test_same_upgrades(brokers: Pair, name: str) -> None:
    check(brokers, f"topic{list(SCRIPTS).index(name):03d}", SCRIPTS[name])


@pytest.fixture(scope="module")
def strict_brokers(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    flags = [
        *certificates.flags,
        f"--tls-root-ca-file={certificates.ca}",
        "--tls-client-auth-policy=require-verify",
        "--tls-required=true",
        "--deflate=false",
    ]
    with pair(tmp_path_factory.mktemp("strict"), *flags, certificates=certificates) as running:
        yield running


@pytest.mark.parametrize("name", TLS_REQUIRED)
def test_same_where_tls_is_required(strict_brokers: Pair, name: str) -> None:
    check(strict_brokers, f"topic{list(TLS_REQUIRED).index(name):03d}", TLS_REQUIRED[name])


@pytest.fixture(scope="module")
def half_strict_brokers(
    certificates: Certificates, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    flags = [*certificates.flags, "--tls-client-auth-policy=require", "--tls-required=tcp-https"]
    with pair(tmp_path_factory.mktemp("tcp-https"), *flags, certificates=certificates) as running:
        yield running


@pytest.mark.parametrize("name", TLS_REQUIRED_OVER_TCP)
def test_same_where_tls_is_required_over_tcp(half_strict_brokers: Pair, name: str) -> None:
    check(
        half_strict_brokers,
        f"topic{list(TLS_REQUIRED_OVER_TCP).index(name):03d}",
        TLS_REQUIRED_OVER_TCP[name],
    )
