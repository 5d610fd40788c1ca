"""Tests for `qcli admin --oidc-issuer`: its options, `--check-config`, and a console of several fleets."""

import re
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from cli.contexts import NO_ADDRESSES, contexts_file, write
from cli.support import Cli, CliHere, Run
from console.oidc_support import ScriptedProvider, scripted_provider
from interop.peers import Broker, qcli_admin

VALID = "The configuration is valid.\n"


@pytest.fixture
def cli(run_here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs commands in this process, in a fresh folder."""
    monkeypatch.chdir(tmp_path)
    return CliHere("", "", run=run_here)


@pytest.fixture
def provider() -> Iterator[ScriptedProvider]:
    with scripted_provider() as running:
        yield running


def check(provider: ScriptedProvider, *more: str, how: str = "") -> list[str]:
    """The arguments that check a console for a provider."""
    given = [f"--oidc-issuer={provider.issuer}", "--oidc-client-id=c", "--oidc-role=ops=all"]
    return ["admin", "--http-address=127.0.0.1:0", f"--check-config{how}", *given, *more]


def test_check_config_asks_the_provider(cli: Cli, provider: ScriptedProvider) -> None:
    assert cli(*check(provider)).err == VALID
    assert [path for _, path, _, _ in provider.requests] == ["/.well-known/openid-configuration", "/jwks"]
    provider.metadata["issuer"] += "/"
    found = cli(*check(provider))
    assert (found.code, found.err) == (
        1,
        f"Error: --oidc-issuer: the provider {provider.issuer} cannot be used: the discovery document is that of the "
        f"issuer '{provider.issuer}/': --oidc-issuer must be the same.\n",
    )


def test_check_config_names_a_provider_that_does_not_answer(cli: Cli) -> None:
    with scripted_provider() as gone:
        pass
    found = cli(*check(gone))
    assert (found.code, "Connection refused" in found.err, found.err.count("\n")) == (1, True, 1)


def test_files_that_cannot_be_used_are_named(cli: Cli, provider: ScriptedProvider, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for flag in ("--oidc-client-secret-file", "--oidc-root-ca-file"):
        for file in ("missing", "empty"):
            found = cli(*check(provider, f"{flag}={file}"))
            assert found.code != 0
            assert flag in found.err
            assert file in found.err


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--oidc-client-id=c"], "--oidc-client-id needs --oidc-issuer"),
        (["--oidc-role=ops=all"], "--oidc-role needs --oidc-issuer"),
        (["--oidc-name=x"], "--oidc-name needs --oidc-issuer"),
        (["--oidc-issuer=https://a.example"], "needs --oidc-client-id"),
        (["--oidc-issuer=https://a.example", "--oidc-client-id=c"], "needs --oidc-role"),
        (["--oidc-issuer=http://a.example"], "not https"),
        (["--oidc-issuer=https://a.example/?b"], "query"),
        (["--oidc-issuer=https://a:b@a.example"], "not a URL"),
        (["--oidc-issuer=a.example"], "not a URL"),
        (["--oidc-role=ops"], "GROUP=ROLES"),
        (["--oidc-role=ops="], "GROUP=ROLES"),
        (["--oidc-role==read"], "GROUP=ROLES"),
        (["--oidc-role=ops=read,manage"], "unknown role 'read,manage'"),
        (["--oidc-role=ops=write"], "the roles are publish, consume, read, manage"),
        (["--oidc-role=ops=read@"], "a pattern has"),
        (["--oidc-role=ops=read@a/b"], "names have only letters"),
        (["--oidc-redirect-url=https://a.example/callback"], "/oidc/callback"),
    ],
)
def test_options_that_cannot_be_used(cli: Cli, args: list[str], text: str) -> None:
    found = cli("admin", "--http-address=127.0.0.1:0", "--check-config", *args)
    assert (found.code, text in found.err) == (2, True), found.err


def test_options_that_do_not_belong_together(cli: Cli, provider: ScriptedProvider) -> None:
    for more, text in (
        (["--oidc-scopes=profile"], "needs openid"),
        (["--base-path=/nsq", "--oidc-redirect-url=https://a.example/oidc/callback"], "/nsq/oidc/callback"),
        ([f"--oidc-role=g{number}=read" for number in range(201)], "more than 200 groups"),
    ):
        found = cli(*check(provider, *more))
        assert (found.code, text in found.err) == (2, True), found.err


def test_options_of_a_file_and_the_environment(cli: Cli, provider: ScriptedProvider, tmp_path: Path) -> None:
    roles = ["a, b=c=read+manage@x-*", "*=read"]
    file = f'oidc_issuer = "{provider.issuer}"\noidc_client_id = "c"\noidc_roles = {roles}\n'
    (tmp_path / "console.toml").write_text(file)
    shown = cli("admin", "--config=console.toml", "--http-address=127.0.0.1:0", "--check-config=show")
    assert shown.code == 0, shown.err
    assert tomllib.loads(shown.out.decode())["oidc_roles"] == roles
    env = {"QCLI_OIDC_ROLE": "ops=read+manage,dev=read"}
    shown = cli(
        "admin", "--config=console.toml", "--http-address=127.0.0.1:0", "--check-config=show", env=env
    )
    assert tomllib.loads(shown.out.decode())["oidc_roles"] == ["ops=read+manage", "dev=read"]


class _Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: object) -> None:
        """Do not follow a redirection."""


@pytest.mark.parametrize("redirect_url", ["", "https://nsq.example.com/base/oidc/callback"])
def test_each_fleet_has_a_redirect_url(
    provider: ScriptedProvider,
    tmp_path: Path,
    broker: Broker,
    monkeypatch: pytest.MonkeyPatch,
    redirect_url: str,
) -> None:
    contexts = "".join(
        f'[context.{name}]\nnsqd_http_address = "{broker.http_address}"\n' for name in ("one", "two")
    )
    write(contexts_file(tmp_path), contexts)
    for name, value in {"XDG_CONFIG_HOME": str(tmp_path), **NO_ADDRESSES}.items():
        monkeypatch.setenv(name, value)
    flags = check(provider, "--fleet=one,two", "--base-path=/base", f"--oidc-redirect-url={redirect_url}")
    with qcli_admin(*(flag for flag in flags[2:] if flag != "--check-config")) as console:
        opener = urllib.request.build_opener(_Stay)
        for fleet in ("one", "two"):
            url = f"{console.origin}/base/c/{fleet}/oidc/login"
            with pytest.raises(urllib.error.HTTPError) as caught, opener.open(url):
                pass
            found = parse_qs(urlsplit(caught.value.headers["Location"]).query)["redirect_uri"]
            origin = "https://nsq.example.com" if redirect_url else console.origin
            assert found == [f"{origin}/base/c/{fleet}/oidc/callback"]
            assert re.search(rf"Path=/base/c/{fleet};", caught.value.headers["Set-Cookie"])
            caught.value.close()
