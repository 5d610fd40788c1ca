"""Tests for the commands of `qcli context`."""

import stat
import subprocess
from pathlib import Path

import pytest

from cli.contexts import cli_with_contexts, contexts_file, shown
from cli.support import DEADLINE_S, Cli, Run, command_line
from processes import popen


@pytest.fixture
def cli(tmp_path: Path, run_here: Run) -> Cli:
    """Runs commands in this process, with its own contexts and no addresses in the environment."""
    return cli_with_contexts(tmp_path / "config", run_here)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The file of contexts."""
    return contexts_file(tmp_path / "config")


def test_save_use_list_and_delete(cli: Cli, file: Path) -> None:
    saved = cli("context", "save", "prod", "--nsqd-http-address", "a:1,b:1", "--lookupd-http-address", "l:1")
    assert (saved.code, saved.out) == (0, b"")
    assert saved.err == (
        f"context prod saved in {file}\n"
        "Use it with --context prod, or from now on with 'qcli context use prod'.\n"
    )
    cli("context", "save", "local", "--nsqd-tcp-address", "c:1", "--description", "my machine")
    used = cli("context", "use", "prod")
    assert (used.code, used.err) == (0, "context prod is used from now on: a:1, b:1, l:1\n")
    assert cli("context", "list").out.decode().splitlines() == [
        "   name   addresses  secret  description",
        "*  prod   a:1",
        "          b:1",
        "          l:1",
        "   local  c:1                my machine",
    ]
    assert cli("context", "list", "--format", "json").records == [
        {
            "name": "prod",
            "current": True,
            "nsqd_http_address": ["a:1", "b:1"],
            "lookupd_http_address": ["l:1"],
        },
        {"name": "local", "current": False, "description": "my machine", "nsqd_tcp_address": ["c:1"]},
    ]
    deleted = cli("context", "delete", "prod")
    assert (deleted.code, deleted.err) == (0, "context prod deleted\nNo context is used from now on.\n")
    assert [each["name"] for each in cli("context", "list", "--format", "json").records] == ["local"]
    missing = cli("context", "delete", "local", "prod")
    assert (missing.code, missing.err) == (
        2,
        f"Error: There is no context prod. {file} has local. Nothing was deleted.\n",
    )
    assert cli("context", "delete", "local").code == 0
    listed = cli("context", "list")
    assert (listed.out, listed.err) == (
        b"",
        "There are no contexts. 'qcli context save NAME' and the options of a command save one.\n",
    )


def test_save_changes_the_given_options(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "ca.pem").touch()
    save = ("context", "save", "prod")
    cli(*save, "--nsqd-http-address", "a:1", "--tls-root-ca-file", str(tmp_path / "ca.pem"), "--tls")
    changed = cli(*save, "--nsqd-http-address", "b:1", "--no-tls", "--auth-secret-command", "true")
    assert changed.err.startswith("context prod changed in ")
    expected = {
        "name": "prod",
        "current": False,
        "nsqd_http_address": ["b:1"],
        "tls_root_ca_file": str(tmp_path / "ca.pem"),
        "tls": False,
        "auth_secret_command": "true",
    }
    assert cli("context", "list", "--format", "json").records == [expected]
    # another place of the secret replaces the first one, and an empty value removes a key
    cli(*save, "--auth-secret-keyring", "nsq/prod", "--tls-root-ca-file", "", "--use")
    del expected["auth_secret_command"], expected["tls_root_ca_file"]
    expected |= {"current": True, "auth_secret_keyring": "nsq/prod"}
    assert cli("context", "list", "--format", "json").records == [expected]


def test_variables_are_not_saved_and_paths_are_absolute(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret").touch()
    env = {"QCLI_LOOKUPD_HTTP_ADDRESS": "other:1", "QCLI_CLIENT_AUTH_SECRET": "x", "QCLI_CLIENT_TLS": "1"}
    cli("context", "save", "a", "--nsqd-http-address", "a:1", "--auth-secret-file", "./secret", env=env)
    assert cli("context", "list", "--format", "json").records == [
        {
            "name": "a",
            "current": False,
            "nsqd_http_address": ["a:1"],
            "auth_secret_file": str(tmp_path / "secret"),
        }
    ]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "Nothing to save: give an address"),
        (["--tls"], "it has no address"),
        (["--nsqd-http-address", ""], "it has no address"),
        (["--nsqd-http-address", "a"], "'a' is not host:port"),
        (
            ["--nsqd-http-address", "a:1", "--auth-secret", "x"],
            "A context holds no secret. Write it to a file",
        ),
        (["--nsqd-http-address", "a:1", "--auth-secret-file", "-"], "cannot read standard input"),
        (["--nsqd-http-address", "a:1", "--auth-secret-file", "/nowhere"], "does not exist"),
        (
            ["--nsqd-http-address", "a:1", "--auth-secret-command", "a 'b"],
            "is not a command: No closing quotation",
        ),
        (["--nsqd-http-address", "a:1", "--auth-secret-keyring", "a"], "is not SERVICE/USER"),
        (["--nsqd-http-address", "a:1", "--snappy", "--deflate"], "snappy and deflate exclude each other"),
        (["--nsqd-http-address", "a:1", "--tls-key", "/dev/null"], "tls_key needs tls_cert"),
        (
            ["--nsqd-http-address", "a:1", "--auth-secret-command", "x", "--auth-secret-keyring", "a/b"],
            "--auth-secret-command and --auth-secret-keyring exclude each other",
        ),
    ],
)
def test_contexts_that_are_not_saved(cli: Cli, file: Path, args: list[str], said: str) -> None:
    result = cli("context", "save", "prod", *args)
    assert (result.code, result.out) == (2, b"")
    assert said in " ".join(result.err.split())
    assert not file.exists()


@pytest.mark.parametrize("name", ["a b", "", ".a", "a/b", "a" * 65, "ä"])
def test_names_that_are_not_valid(cli: Cli, name: str) -> None:
    result = cli("context", "save", name, "--nsqd-http-address", "a:1")
    assert (result.code, "is not a name" in result.err) == (2, True)


def test_nobody_else_can_read_the_file(cli: Cli, file: Path) -> None:
    cli("context", "save", "a", "--nsqd-http-address", "a:1")
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (file, file.parent, file.parent.parent)]
    assert modes == [0o600, 0o700, 0o700]
    file.chmod(0o644)
    cli("context", "use", "a")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in file.parent.iterdir()] == ["contexts.toml"]


def test_default_folder(cli: Cli, tmp_path: Path) -> None:
    for base in ("", "relative"):  # the specification of XDG: ignore relative paths
        cli(
            "context",
            "save",
            "a",
            "--nsqd-http-address",
            "a:1",
            env={"XDG_CONFIG_HOME": base, "HOME": str(tmp_path)},
        )
        (tmp_path / ".config" / "qcli" / "contexts.toml").unlink()


def test_concurrent_changes_lose_nothing(cli: Cli) -> None:
    names = {f"c{number}" for number in range(6)}
    saving = [
        popen(
            command_line("context", "save", name, "--nsqd-http-address", "a:1"),
            stderr=subprocess.DEVNULL,
            env=cli.environment(),
        )
        for name in names
    ]
    assert [process.wait(DEADLINE_S) for process in saving] == [0] * len(names)
    assert {each["name"] for each in cli("context", "list", "--format", "json").records} == names


def test_use_says_what_overrides_it(cli: Cli) -> None:
    cli("context", "save", "a", "--nsqd-http-address", "a:1")
    assert cli("context", "use", "a", env={"QCLI_CONTEXT": "b"}).err.endswith(
        "Note: QCLI_CONTEXT=b overrides this.\n"
    )
    env = {"QCLI_NSQD_TCP_ADDRESS": "b:1"}
    assert "the variable QCLI_NSQD_TCP_ADDRESS is set" in cli("context", "use", "a", env=env).err
    assert cli("context", "use", "--none").err == "no context is used from now on\n"
    assert shown(cli)["nsqd-http-address"] == ("127.0.0.1:4151", "default")
    for args in ([], ["a", "--none"]):
        assert cli("context", "use", *args).code == 2
    unknown = cli("context", "use", "aa")
    shown_unknown = cli("context", "show", "aa")
    assert (unknown.code, shown_unknown.code) == (2, 2)
    assert unknown.err.startswith("Error: There is no context aa (did you mean a?). ")
    assert (
        "Error: Invalid value for '[NAME]': There is no context aa (did you mean a?). " in shown_unknown.err
    )
