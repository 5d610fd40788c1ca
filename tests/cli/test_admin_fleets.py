"""Tests for `qcli admin --fleet`: a console of the fleets of several contexts."""

import urllib.request
from pathlib import Path

import pytest

from cli.contexts import NO_ADDRESSES, cli_with_contexts, contexts_file, write
from cli.support import Cli, Run
from interop.peers import Broker, qcli_admin

pytest.importorskip("starlette")


@pytest.fixture
def config(tmp_path: Path, broker: Broker) -> Path:
    """The folder of the contexts `production` and `staging`, both of the broker, and of `tcp`."""
    (tmp_path / "secret").write_text("secret\n")
    write(
        contexts_file(tmp_path),
        f"""\
[context.production]
nsqd_http_address = "{broker.http_address}"
title_color = "red"

[context.staging]
lookupd_http_address = "127.0.0.1:1"
lookupd_allowed_host = "*.example.com"
nsqd_http_address = "{broker.http_address}"
auth_secret_file = "{tmp_path / "secret"}"

[context.tcp]
nsqd_tcp_address = "127.0.0.1:1"
""",
    )
    return tmp_path


@pytest.fixture
def cli(config: Path, run_here: Run) -> Cli:
    """Runs commands with these contexts."""
    return cli_with_contexts(config, run_here)


def test_a_console_of_two_contexts(
    config: Path, broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"XDG_CONFIG_HOME": str(config), **NO_ADDRESSES}.items():
        monkeypatch.setenv(name, value)
    broker.create(topic)
    with qcli_admin("--fleet=staging", "--fleet", "production") as console:
        for name, other in (("staging", "production"), ("production", "staging")):
            with urllib.request.urlopen(f"{console.url}c/{name}/topics/{topic}") as answer:
                html = answer.read().decode()
            assert f"<title>{topic} · {name}</title>" in html
            assert f'href="/c/{other}/topics/{topic}"' in html
            assert ('<html lang="en" data-base="/c/production/" data-color="red">' in html) == (
                name == "production"
            )
        with urllib.request.urlopen(console.url) as answer:
            assert answer.url == f"{console.url}c/staging/"


def test_the_label_is_the_name_of_the_context(
    cli: Cli, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"XDG_CONFIG_HOME": str(config), **NO_ADDRESSES}.items():
        monkeypatch.setenv(name, value)
    for flags, title in (((), "production"), (("--title", "our fleet"), "our fleet")):
        with qcli_admin("--context", "production", *flags) as console:
            with urllib.request.urlopen(console.url) as answer:
                html = answer.read().decode()
        assert f"· {title}</title>" in html
        assert 'data-color="red"' in html


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--fleet", "missing"], "--fleet: There is no context missing."),
        (
            ["--fleet", "production,tcp"],
            "--fleet: the context tcp has no address of HTTP. Add one: qcli context",
        ),
        *(
            (["--fleet", "production", flag, value], f"{flag} and --fleet exclude each other")
            for flag, value in (
                ("--context", "staging"),
                ("--nsqd-http-address", "127.0.0.1:1"),
                ("--lookupd-http-address", "127.0.0.1:1"),
                ("--title", "x"),
                ("--title-color", "red"),
                ("--auth-secret", "x"),
                ("--http-client-tls-cert", "/dev/null"),
            )
        ),
    ],
)
def test_fleets_that_cannot_be_served(cli: Cli, flags: list[str], said: str) -> None:
    result = cli("admin", *flags)
    assert (result.code, said in result.err) == (2, True), result.err


def test_configuration_of_all_fleets_is_checked(cli: Cli, config: Path) -> None:
    text = contexts_file(config).read_text()
    (config / "ca.pem").write_text("no certificate")
    write(
        contexts_file(config),
        text.replace("[context.tcp]", f'tls_root_ca_file = "{config / "ca.pem"}"\n[context.tcp]'),
    )
    assert cli("admin", "--fleet", "production", "--check-config", "--http-address", "127.0.0.1:0").code == 0
    result = cli("admin", "--fleet", "production,staging", "--check-config", "--http-address", "127.0.0.1:0")
    assert (result.code, "ca.pem" in result.err) == (1, True), result.err


def test_the_colour_of_a_context(cli: Cli, config: Path) -> None:
    assert cli("context", "save", "staging", "--title-color", "green").code == 0
    assert 'title_color = "green"' in contexts_file(config).read_text()
    result = cli("context", "save", "staging", "--title-color", "pink")
    assert (result.code, "red, orange, green" in result.err) == (2, True)
