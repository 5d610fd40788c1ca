"""Tests of the data source, and of `to-parquet` and `replay`, with a broker that requires TLS and a secret."""

import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.types import BinaryType, StructField, StructType

from broker.certificates import Certificates
from cli.support import Cli
from client.support.tokens import SECRETS, AuthFile
from interop.peers import qcli_serve
from soak import in_soak
from trio_nsq.access.secret import SecretFileError
from trio_nsq.client import BrokerUnreachable, RequestRefused
from trio_nsq.spark.data_source import NsqDataSource
from trio_nsq.spark.options import OptionError
from trio_nsq.spark.source.batch import NsqReader


class Guarded(NamedTuple):
    """A broker that requires TLS and a token, and the data source's options without and with a token."""

    cli: Cli
    options: dict[str, str]
    secret_file: Path


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    certificates, auth_file = Certificates(folder), AuthFile(folder)
    secret_file = folder / "token"
    secret_file.write_text(SECRETS["all"])
    flags = [f"--{name.replace('_', '-')}={path}" for name, path in certificates.options.items()]
    flags += ["--tls-required=true", f"--auth-file={auth_file.path}", "--sync=interval"]
    with qcli_serve(folder / "data", *flags) as broker:
        address = f"https://{broker.https_address}"
        options = {"nsqdHttpAddress": address, "tlsRootCaFile": str(certificates.ca_path)}
        env = {
            "QCLI_CLIENT_TLS_ROOT_CA_FILE": str(certificates.ca_path),
            "QCLI_CLIENT_AUTH_SECRET": SECRETS["all"],
        }
        yield Guarded(Cli(broker.tcp_address, address, env), options, secret_file)


def reader(**options: str) -> NsqReader:
    source = NsqDataSource(CaseInsensitiveDict(options))
    return source.reader(source.schema())


def test_certificate_that_is_not_trusted(guarded: Guarded, caplog: pytest.LogCaptureFixture) -> None:
    """A batch ends at once, as to wait does not help."""
    address = guarded.options["nsqdHttpAddress"]
    untrusting = reader(nsqdHttpAddress=address, topic="t", patienceMs="20000")
    with pytest.raises(BrokerUnreachable, match="its certificate is not trusted: unable to get local issuer"):
        untrusting.partitions()
    assert "asked again" not in caplog.text


@pytest.mark.slow
def test_spark_does_not_show_the_secret(guarded: Guarded, tmp_path: Path) -> None:
    """Not in plans, also of SQL, its user interface and API, event log, checkpoints, and errors."""
    options = guarded.options | {"topic": "shown", "authSecretFile": str(guarded.secret_file)}
    task = {"folder": str(tmp_path), "secret": SECRETS["all"], "options": options}
    program = Path(__file__).with_name("secret_program.py")
    done = subprocess.run(
        [sys.executable, str(program), json.dumps(task)],
        capture_output=True,
        timeout=300,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr.decode()[-5000:]
    assert json.loads(done.stdout.splitlines()[-1]) == []
    assert SECRETS["all"] not in done.stderr.decode()


def test_reading(guarded: Guarded, topic: str) -> None:
    assert guarded.cli("pub", topic, stdin=b"one\n").code == 0
    for secret in (
        {"authSecret": SECRETS["read"]},
        {"authSecretFile": str(guarded.secret_file)},
    ):
        found = pickle.loads(pickle.dumps(reader(topic=topic, columns="body", **guarded.options, **secret)))
        (partition,) = found.partitions()
        assert [batch.to_pydict() for batch in found.read(partition)] == [{"body": [b"one"]}]
        assert SECRETS["read"] not in repr(vars(found))
    with pytest.raises(RequestRefused, match="the role read on topic"):
        reader(topic=topic, **guarded.options, authSecret=SECRETS["publish"]).partitions()
    with pytest.raises(RequestRefused, match="AUTH_REQUIRED"):
        reader(topic=topic, **guarded.options).partitions()


def test_options(guarded: Guarded, tmp_path: Path) -> None:
    for options, text in (
        ({"authSecret": "hush", "authSecretFile": "f"}, "authSecret and authSecretFile exclude each other"),
        ({"tlsKey": "k"}, "tlsKey needs tlsCert"),
        ({"tlsInsecureSkipVerify": "perhaps"}, "tlsInsecureSkipVerify must be false or true"),
    ):
        with pytest.raises(OptionError, match=text) as caught:
            reader(topic="t", **options)
        assert "hush" not in str(caught.value)
        schema = StructType([StructField("body", BinaryType())])
        with pytest.raises(OptionError, match=text):
            NsqDataSource(CaseInsensitiveDict({"topic": "t"} | options)).writer(schema, False)
    missing = reader(topic="t", **guarded.options, authSecretFile=str(tmp_path / "missing"))
    with pytest.raises(SecretFileError, match="No such file or directory"):
        missing.partitions()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["inline", *in_soak("spark")])
def test_export_and_replay(guarded: Guarded, topic: str, tmp_path: Path, engine: str) -> None:
    """Over TLS, with the secret from standard input: it can be read only once, and not by workers."""
    assert guarded.cli("pub", topic, stdin=b"one\ntwo\n").code == 0
    env = {name: value for name, value in guarded.cli.env.items() if name != "QCLI_CLIENT_AUTH_SECRET"}
    qcli = Cli(guarded.cli.tcp_address, guarded.cli.http_address, env)
    shared = ("--engine", engine, "--auth-secret-file", "-")
    exported = qcli("to-parquet", topic, str(tmp_path / "files"), *shared, stdin=SECRETS["read"].encode())
    assert exported.code == 0, exported.err
    jobs = {"QCLI_JOBS_FOLDER": str(tmp_path / "jobs")}
    replayed = qcli(
        "replay", f"{tmp_path}/files", f"{topic}.again", *shared, stdin=SECRETS["publish"].encode(), env=jobs
    )
    assert (replayed.code, "2 messages " in replayed.err) == (0, True), replayed.err
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or SECRETS["publish"].encode() not in path.read_bytes()
