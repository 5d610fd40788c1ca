"""Check the packages of the base installation, what works without the others, and the hints for extras."""

import importlib.metadata
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from interop.peers import qcli_serve
from trio_nsq.platform.extras import install_hint

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
TIMEOUT_S = 60
WITHOUT_SERVER = """
import sys
for name in ("click", "rich", "httptools", "OpenSSL", "cryptography", "prometheus_client", "re2", "msgspec", "zlib_ng"):
    sys.modules[name] = None  # then, importing it raises ModuleNotFoundError
"""


def names(requirements: list[str]) -> set[str]:
    found = {requirement.partition(">")[0].partition("<")[0].lower() for requirement in requirements}
    return found - {"trio-nsq[server]"}


def run(program: str, *args: str) -> tuple[int, str, str]:
    """Run a program as if only the base installation was there."""
    command = [sys.executable, "-c", WITHOUT_SERVER + program, *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    return done.returncode, done.stdout, done.stderr


def test_base_installation_is_small() -> None:
    """Each package more is one more that a program's environment must agree with."""
    assert names(PROJECT["dependencies"]) == {"trio", "anyio", "python-snappy", "httpcore", "h11"}


def test_server_with_every_option_needs_one_extra() -> None:
    assert "google-re2" in names(EXTRAS["server"])


@pytest.mark.parametrize("extra", ["spark", "delta", "iceberg", "keyring", "zstd", "schemas", "admin"])
def test_extras_of_commands_have_the_command(extra: str) -> None:
    assert "trio-nsq[server]" in EXTRAS[extra]


def test_extra_of_logins_has_the_console() -> None:
    assert "trio-nsq[admin]" in EXTRAS["oidc"]


@pytest.mark.slow  # starts a broker
def test_client_works_without_the_packages_of_servers(tmp_path: Path) -> None:
    program = """
import asyncio, trio, trio_nsq, trio_nsq.sync
for name in trio_nsq.__all__:
    getattr(trio_nsq, name)
tcp, http = sys.argv[1:]
async def main():
    for options in {}, {"snappy": True}, {"deflate": True}:
        async with trio_nsq.Producer(tcp, **options) as producer:
            await producer.publish("topic", b"m")
        async with trio_nsq.Consumer("topic", "c", nsqd_tcp_addresses=tcp, **options) as consumer:
            (await anext(consumer)).finish()
    async with trio_nsq.TopicReader(http, "topic", start="earliest") as reader:
        assert await reader.receive()
trio.run(main)
asyncio.run(main())
with trio_nsq.sync.Consumer("topic", "new", nsqd_tcp_addresses=tcp, max_in_flight=6) as consumer:
    for _ in range(2):
        next(consumer).finish()
print(trio_nsq.IdempotentProducer(http, "topic", "name").publish([b"n"], 1))
"""
    with qcli_serve(tmp_path / "data", "--sync=interval") as broker:
        broker.create("topic", "c")
        broker.create("topic", "new")
        code, out, errors = run(program, broker.tcp_address, broker.http_address)
    assert (code, errors) == (0, "")
    assert out.splitlines()[-1] == "published"


def test_version_needs_no_extra() -> None:
    """Without a package of the server, a user has to be able to tell what is installed."""
    done = subprocess.run(
        [sys.executable, "-m", "qcli", "--version"], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    program = "from qcli import main; sys.argv[1:] = ['--version']; main()"
    for some in "", "del sys.modules['click'];":
        assert run(some + program) == (0, done.stdout, "")
    assert done.stdout.startswith("qcli ")


@pytest.mark.parametrize("arguments", ["", "--help", "serve", "pub t", "help exit-codes", "no-such-command"])
def test_command_without_its_packages_says_what_to_install(arguments: str) -> None:
    program = f"from qcli import main; sys.argv[1:] = {arguments.split()}; main()"
    code, out, errors = run(program)
    assert (code, out) == (1, "")
    assert errors == (
        "Error: the extra 'server' is not installed (click is missing): pip install 'trio-nsq[server]'\n"
    )


def test_command_with_some_of_its_packages_says_what_to_install() -> None:
    program = """
del sys.modules["click"], sys.modules["rich"]
from qcli import main
sys.argv[1:] = ["serve", "--data-path", "/nonexistent/data"]
main()
"""
    code, out, errors = run(program)
    assert (code, out) == (1, "")
    assert errors.startswith("Error: the extra 'server' is not installed (")
    assert errors.count("\n") == 1


def test_broker_of_a_program_says_what_to_install() -> None:
    code, _, errors = run("import trio_nsq.broker")
    assert code == 1
    assert "ModuleNotFoundError: trio_nsq.broker: the extra 'server' is not installed" in errors


@pytest.mark.parametrize("extra", sorted(EXTRAS.keys() - {"dev"}))
def test_hint_names_the_extra(extra: str) -> None:
    assert shlex.split(install_hint(extra)) == ["pip", "install", f"trio-nsq[{extra}]"]


@pytest.mark.parametrize("extra", ["spark", "server"])
def test_hint_without_an_installation(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def distribution(name: str) -> importlib.metadata.Distribution:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    assert names(shlex.split(install_hint(extra))[2:]) == names(EXTRAS[extra])
