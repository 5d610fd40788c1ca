"""Tests for `serve --check-config` and `lookupd --check-config`: what is wrong is named, and nothing is changed."""

import itertools
import os
import re
import socket
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import processes
from broker.certificates import Certificates
from cli.support import FREE_PORTS, Cli, CliHere, Run, command_line, lines_until_ready, options, serving
from client.support.tokens import AuthFile
from interop.peers import qcli_lookupd, qcli_serve
from soak import examples

VALID = "The configuration is valid.\n"


@pytest.fixture
def cli(run_here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs commands in this process, in a fresh folder."""
    monkeypatch.chdir(tmp_path)
    return CliHere("", "", run=run_here)


def contents(folder: Path) -> dict[str, tuple[int, int, int, bytes]]:
    """Return everything about a folder that a program may change."""
    return {
        str(path): (path.stat().st_mtime_ns, path.stat().st_ctime_ns, path.stat().st_mode, read(path))
        for path in (folder, *folder.rglob("*"))
    }


def read(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def errors(cli: Cli, *args: str, code: int = 1, **env: str) -> list[str]:
    """Return the problems of a configuration."""
    result = cli(*args, "--check-config", env=env)
    assert (result.code, result.out) == (code, b""), result.err
    lines = result.err.splitlines()
    assert all(line.startswith("Error: ") for line in lines), result.err
    return [line.removeprefix("Error: ") for line in lines]


@pytest.mark.parametrize("server", ["serve", "lookupd"])
def test_defaults_are_valid(cli: Cli, tmp_path: Path, server: str) -> None:
    for spelling in ("--check-config", "-check-config", "--check-config=true"):
        result = cli(server, "--data-path", "data", spelling)
        assert (result.code, result.out, result.err) == (0, b"", VALID)
    assert list(tmp_path.iterdir()) == []
    assert cli(server, "--check-config=nonsense").code == 2


def test_everything_that_is_valid_stays_as_it_is(cli: Cli, tmp_path: Path) -> None:
    certificates, auth_file = Certificates(tmp_path), AuthFile(tmp_path)
    flags = [f"--{name.replace('_', '-')}={path}" for name, path in certificates.options.items()]
    flags += [
        f"--auth-file={auth_file.path}",
        "--tls-required",
        f"--audit-log={tmp_path}/audit",
        "--address-file=addresses",
    ]
    with serving(tmp_path, "--https-address=127.0.0.1:0", *flags) as broker:
        lines_until_ready(broker)
    # the broker was killed: its data folder is as a crash leaves it
    (tmp_path / "addresses").unlink()
    before = contents(tmp_path)
    result = cli("serve", *flags, "--data-path=data", "--check-config")
    assert (result.code, result.err) == (0, VALID)
    assert contents(tmp_path) == before
    with qcli_lookupd(f"--data-path={tmp_path}/names", *flags[:-1]):
        pass
    before = contents(tmp_path)
    assert cli("lookupd", *flags, "--data-path=names", "--check-config").err == VALID
    assert contents(tmp_path) == before


def test_no_port_is_opened(cli: Cli, tmp_path: Path) -> None:
    with serving(tmp_path) as broker:
        ready = lines_until_ready(broker)[-1]
        tcp, http = ready.split()[2].rstrip(","), ready.split()[4].rstrip(",")
        result = cli(
            "serve", f"--tcp-address={tcp}", f"--http-address={http}", "--data-path=x", "--check-config"
        )
        assert (result.code, result.err) == (0, VALID)


def test_all_problems_are_named(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(
        'sync = "never"\nmsg_timeout = true\nmax_rdy_count = 5\nlog_levl = "x"\n'
    )
    result = cli(
        *(
            "serve",
            "--config=c.toml",
            "--check-config",
            "--tcp-address=x",
            "--auth-file=auth.toml",
            "--max-topics=-1",
        ),
        *(
            "--data-path=missing/data",
            "--tls-cert=cert.pem",
            "--tls-key=key.pem",
            "--audit-log=missing/audit",
        ),
        *("--lookupd-auth-secret-file=secret", "--address-file=missing/a.json"),
        env={"QCLI_SYNC_TIMEOUT": "5"},
    )
    assert (result.code, result.out) == (2, b"")
    assert result.err.splitlines() == [
        "Error: configuration: unknown key log_levl (did you mean log_level?).",
        "Error: --config: c.toml: sync: 'never' is not one of 'always', 'interval'.",
        'Error: --config: c.toml: msg_timeout: true is not a duration such as "1m30s", or an integer, milliseconds.',
        "Error: Invalid value for '--tcp-address': 'x' is not host:port, such as 127.0.0.1:4150.",
        "Error: Invalid value for '--max-topics': -1 is not in the range x>=0.",
        "Error: Invalid value for 'QCLI_SYNC_TIMEOUT' in the environment: '5' has no unit: write 5s for seconds, or "
        "ms, m, h.",
        "Error: --address-file: the folder missing does not exist; create it first.",
        "Error: --tls-cert: cannot read cert.pem: No such file or directory.",
        "Error: --auth-file: cannot read the auth file auth.toml: No such file or directory; 'qcli token create' "
        "creates it.",
        "Error: --lookupd-auth-secret-file: secret: No such file or directory.",
        "Error: --audit-log: the folder missing does not exist; create it first.",
        f"Error: --data-path: the folder {tmp_path}/missing does not exist; create it first.",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.toml"]


@pytest.mark.parametrize("server", ["serve", "lookupd"])
def test_configuration_file(cli: Cli, tmp_path: Path, server: str) -> None:
    assert errors(cli, server, "--config=c.toml") == [
        "--config: cannot read c.toml: No such file or directory."
    ]
    (tmp_path / "c.toml").write_text("a b")
    assert errors(cli, server, QCLI_CONFIG="c.toml")[0].startswith("--config: c.toml is not valid TOML: ")
    (tmp_path / "c.toml").write_text("tcp_address = 1\nhttp_address = 2\n")
    assert errors(cli, server, "--config=c.toml") == [
        f"--config: c.toml: {name}: {value} is not a string."
        for name, value in (("tcp_address", 1), ("http_address", 2))
    ]


@pytest.mark.parametrize("server", ["serve", "lookupd"])
def test_certificate_and_key(cli: Cli, tmp_path: Path, server: str) -> None:
    (tmp_path / "other").mkdir()
    certificates, other = Certificates(tmp_path), Certificates(tmp_path / "other")
    cert, key = certificates.options["tls_cert"], other.options["tls_key"]
    assert (
        f"--tls-key: {key} is not the key of {cert}"
        in errors(cli, server, f"--tls-cert={cert}", f"--tls-key={key}")[0]
    )
    assert errors(cli, server, f"--tls-cert={cert}") == ["--tls-cert and --tls-key go together: give both."]
    (tmp_path / "ca.pem").write_text("nonsense")
    flags = [
        f"--tls-cert={cert}",
        f"--tls-key={certificates.options['tls_key']}",
        "--tls-root-ca-file=ca.pem",
    ]
    assert (
        "ca.pem has no PEM certificate"
        in errors(cli, server, *flags, "--tls-client-auth-policy=require-verify")[0]
    )


@pytest.mark.parametrize("server", ["serve", "lookupd"])
def test_auth_file(cli: Cli, tmp_path: Path, server: str) -> None:
    (tmp_path / "auth.toml").write_text("[[token]]\nname = 1\n")
    assert "auth.toml is not valid: line 1:" in errors(cli, server, "--auth-file=auth.toml")[0]


@pytest.mark.parametrize("server", ["serve", "lookupd"])
def test_addresses(cli: Cli, tmp_path: Path, server: str) -> None:
    same = ("--tcp-address=127.0.0.1:4250", "--http-address=127.0.0.1:4250")
    assert errors(cli, server, *same) == [
        "--http-address: 127.0.0.1:4250 is also the address of --tcp-address."
    ]
    assert errors(cli, server, "--tcp-address=host.invalid:1")[0].startswith(
        "--tcp-address: cannot listen on host.invalid:1: "
    )
    assert cli(server, *FREE_PORTS, "--data-path=data", "--check-config").err == VALID


ADDRESSES = st.one_of(
    st.text(st.sampled_from("./:[]0123456789a%é\u0663\\ -"), max_size=9),
    st.text(st.characters(exclude_characters="\0"), max_size=9),
    st.sampled_from(
        [".", "..", ".5s", ".:", "a..b:1", "x" * 64 + ":1", "[a/b]:1", "./a:1", "a/b:1", "http://h:1/"]
    ),
)


@settings(
    max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(ADDRESSES)
@example(".")
@example("..")
@example(".5s")
@example("a..b:1")
@example("[a/b]:1")
def test_every_address_is_valid_or_named(cli: Cli, address: str) -> None:
    """No value ends with a traceback, and only a path with a slash is a unix socket."""
    for flag in ("--tcp-address", "--http-address"):
        with without_names():
            result = cli("serve", "--data-path=data", f"{flag}={address}", "--check-config")
        assert "Traceback" not in result.err
        if result.code == 0:
            assert result.err == VALID
        else:
            assert all(line.startswith(("Error: ", "Usage: ", "Try ")) for line in result.err.splitlines())
        if "/" not in address and not re.search(":[0-9]{1,5}$", address):
            assert result.code == (0 if flag == "--http-address" and not address else 2)


@contextmanager
def without_names() -> Iterator[None]:
    """Let each host name be unknown: the test must not ask the network."""

    def lookup(host: str | None, *args: Any, **kwargs: Any) -> Any:
        if host is not None and not re.fullmatch("[0-9a-fA-F.:]+", host):
            host.encode("idna")
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return getaddrinfo(host, *args, **kwargs)

    getaddrinfo = socket.getaddrinfo
    with patch("socket.getaddrinfo", lookup):
        yield


@pytest.mark.parametrize(
    "key",
    [
        "audit_log",
        "auth_file",
        "lookupd_auth_secret_file",
        "data_path",
        "address_file",
        "tls_cert",
        "http_address",
    ],
)
def test_a_path_has_no_nul(cli: Cli, tmp_path: Path, key: str) -> None:
    (tmp_path / "c.toml").write_text(f'{key} = "./a\\u0000b"\n')
    assert errors(cli, "serve", "--config=c.toml") == [f"--config: c.toml: {key}: It has a NUL character."]
    result = cli("serve", "--config=c.toml")
    assert (result.code, result.err) == (1, f"Error: --config: c.toml: {key}: It has a NUL character.\n")


def test_unix_sockets(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert errors(cli, "serve", "--tcp-address=./missing/socket", "--http-address=./file") == [
        "--tcp-address: the folder missing does not exist; create it first.",
        "--http-address: file already exists and is not a socket.",
    ]
    assert cli("serve", "--http-address=./socket", "--data-path=data", "--check-config").err == VALID


@pytest.mark.parametrize("server", ["serve", "lookupd"])
def test_data_folder(cli: Cli, tmp_path: Path, server: str) -> None:
    (tmp_path / "file").touch()
    assert errors(cli, server, "--data-path=file") == [f"--data-path: {tmp_path}/file is not a folder."]
    (tmp_path / "data").mkdir()
    for name in ("broker.json", "lookupd.json"):
        (tmp_path / "data" / name).write_text("{}")
    (problem,) = errors(cli, server, "--data-path=data")
    assert ("broker.json" if server == "serve" else "lookupd.json is damaged") in problem


def test_data_folder_of_nsqd(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "nsqd.dat").touch()
    assert "holds the queues of an nsqd" in errors(cli, "serve", "--data-path=.")[0]


def test_data_folder_of_a_running_server(cli: Cli, tmp_path: Path) -> None:
    """A configuration is checked before a restart, while the server runs."""
    with serving(tmp_path) as broker:
        lines_until_ready(broker)
        assert cli("serve", "--data-path=data", "--check-config").err == VALID
    with qcli_lookupd(f"--data-path={tmp_path}/names"):
        assert cli("lookupd", "--data-path=names", "--check-config").err == VALID


def refused_at_both(cli: Cli, *args: str) -> str:
    """Return the reason that both `--check-config` and a start give."""
    (problem,) = errors(cli, *args)
    started = cli(*args)
    assert (started.code, started.err) == (1, f"Error: {problem}\n")
    return problem


def test_files_that_the_broker_uses_in_its_data_folder(cli: Cli, tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "data") as broker:
        broker.create("clicks", "archive")
        while_it_runs = {path.name for path in (tmp_path / "data").iterdir()}
    names = while_it_runs | {path.name for path in (tmp_path / "data").iterdir()}
    assert {"broker.json", "broker.json.copy", "topics"} <= names
    used = [f"data/{name}" for name in names if not (tmp_path / "data" / name).is_dir()]
    used += [f"data/{name}" for name in ("broker.json.tmp", "write-ahead.7", "spare-room.probe", "nsqd.dat")]
    used += ["data/topics/clicks.topic/state.json", f"{tmp_path}/link", "./way/broker.json", "missing/topics"]
    (tmp_path / "link").symlink_to("data/broker.json")
    (tmp_path / "way").symlink_to("data")
    before = contents(tmp_path / "data")
    (tmp_path / "x").mkdir()
    for flag, path in itertools.product(("--address-file", "--audit-log", "--tcp-address"), used):
        folder = "missing" if "missing" in path else "data"
        result = cli("serve", f"--data-path={folder}", f"{flag}={path}", "--check-config")
        wanted = (
            f"Error: {flag}: the server itself uses {Path(path)} in its data folder: choose another name."
        )
        assert result.code == 1
        assert wanted in result.err.splitlines()
    assert f"uses {tmp_path}/link" in refused_at_both(
        cli, "serve", "--data-path=data", f"--address-file={tmp_path}/link"
    )
    assert contents(tmp_path / "data") == before
    assert "--address-file: the server itself uses data" in refused_at_both(
        cli, "serve", "--data-path=./x/../data", "--address-file=data/broker.json"
    )


def test_other_files_in_the_data_folder(cli: Cli, tmp_path: Path) -> None:
    """An address file there is useful: scripts find it with the data."""
    (tmp_path / "data").mkdir()
    flags = ("--data-path=data", "--address-file=data/addresses.json", "--audit-log=data/audit.log")
    assert cli("serve", *flags, "--check-config").err == VALID
    assert cli("lookupd", *flags, "--check-config").err == VALID
    names = ("lookupd.json", "lookupd.json.tmp")
    for name in names:
        assert f"uses data/{name} in" in refused_at_both(
            cli, "lookupd", "--data-path=data", f"--address-file=data/{name}"
        )


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--address-file=a", "--audit-log=./a"], "--audit-log: a is also the file of --address-file"),
        (
            ["--http-address=./a", "--address-file=b/../a"],
            "--address-file: b/../a is also the file of --http-address",
        ),
        (["--http-address=./a", "--audit-log=link"], "--audit-log: link is also the file of --http-address"),
        (["--config=c.toml", "--audit-log=c.toml"], "--audit-log: c.toml is also the file of --config"),
        (
            ["--lookupd-auth-secret-file=a", "--address-file=a"],
            "--lookupd-auth-secret-file: a is also the file of --address-file",
        ),
    ],
)
def test_files_with_two_uses(cli: Cli, tmp_path: Path, flags: list[str], reason: str) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "c.toml").touch()
    (tmp_path / "link").symlink_to("a")
    flags = ["--data-path=data", "--tcp-address=127.0.0.1:0", *flags]
    assert f"Error: {reason}." in cli("serve", *flags, "--check-config").err.splitlines()
    started = cli("serve", *flags)
    assert (started.code, started.err) == (1, f"Error: {reason}.\n")
    assert not (tmp_path / "data").exists()


def test_a_certificate_with_its_key_is_one_file(cli: Cli, tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    both = tmp_path / "both.pem"
    both.write_text(
        "".join(Path(certificates.options[f"tls_{name}"]).read_text() for name in ("key", "cert"))
    )
    flags = (f"--tls-cert={both}", f"--tls-key={both}")
    assert cli("serve", "--data-path=data", *flags, "--check-config").err == VALID


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_folders_without_permission(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "read").mkdir(mode=0o500)
    for flag in (
        "--data-path=read",
        "--data-path=read/data",
        "--audit-log=read/audit",
        "--address-file=read/file",
    ):
        assert (
            "cannot write to "
            in errors(cli, "serve", flag, *([] if "data" in flag else ["--data-path=d"]))[0]
        )


def test_contradictions(cli: Cli) -> None:
    assert errors(cli, "serve", "--min-output-buffer-timeout=1h") == [
        "--min-output-buffer-timeout is longer than --max-output-buffer-timeout."
    ]


def test_options_without_effect_are_warnings(cli: Cli) -> None:
    result = cli(
        "serve", "--worker-id=7", "--log-level=info", "--log-level=warn", "--data-path=d", "--check-config"
    )
    assert result.code == 0
    assert result.err.splitlines() == [
        "Warning: --log-level is given 2 times: the last value is used",
        "Warning: --worker-id has no effect here: see --node-id",
        VALID.strip(),
    ]


def test_usage_errors_end_the_check(cli: Cli) -> None:
    for args in (["--nonsense"], ["extra"]):
        result = cli("serve", *args, "--check-config")
        assert (result.code, "Usage: " in result.err) == (2, True)


def test_options_in_effect(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(
        'retention_time = "forever"\nsync_timeout = 5\nnsqlookupd_tcp_addresses = ["a:1"]\n'
    )
    flags = ["--config=c.toml", "--retention-bytes=unlimited", "--e2e-processing-latency-percentile=0.99,0.5"]
    shown = cli("serve", *flags, "--check-config=show", env={"QCLI_SERVE_MAX_TOPICS": "3"})
    assert (shown.code, shown.err) == (0, VALID)
    lines = shown.out.decode().splitlines()
    for line in (
        'retention_time = "forever"  # c.toml',
        "sync_timeout = 5  # c.toml",
        'nsqlookupd_tcp_addresses = ["a:1"]  # c.toml',
        'retention_bytes = "unlimited"  # command line',
        "e2e_processing_latency_percentiles = [0.99, 0.5]  # command line",
        "max_topics = 3  # QCLI_SERVE_MAX_TOPICS",
        'sync = "always"  # default',
    ):
        assert line in lines
    (tmp_path / "effective.toml").write_bytes(shown.out)
    assert options("--config=effective.toml") == options(*flags, "--max-topics=3")
    assert b"# default" in cli("lookupd", "--check-config=show").out


def test_process_exits_with_the_code(tmp_path: Path) -> None:
    environment = Cli("", "").environment()
    for flags, code in (([], 0), (["--data-path=/nowhere/x"], 1), (["--sync=x"], 2)):
        done = processes.run(
            command_line("serve", "--check-config", *flags), cwd=tmp_path, env=environment, timeout=30
        )
        assert done.returncode == code, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_repeated_options_of_the_console_accept_commas(cli: Cli) -> None:
    wanted = {
        "nsqd_http_addresses": ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"],
        "nsqlookupd_http_addresses": ["127.0.0.1:4", "127.0.0.1:5"],
        "lookupd_allowed_hosts": ["*.example.com", "localhost"],
        "http_allowed_hosts": ["a", "b"],
        "trusted_proxies": ["10.0.0.0/8", "::1"],
    }
    flags = [
        "--nsqd-http-address=127.0.0.1:1,127.0.0.1:2",
        "--nsqd-http-address=127.0.0.1:3",
        "--lookupd-http-address=127.0.0.1:4, 127.0.0.1:5",
        "--lookupd-allowed-host=*.example.com,localhost",
        "--http-allowed-host=a,b",
        "--trusted-proxy=10.0.0.0/8,::1",
    ]
    env = {
        "QCLI_NSQD_HTTP_ADDRESS": "127.0.0.1:1,127.0.0.1:2, 127.0.0.1:3",
        "QCLI_LOOKUPD_HTTP_ADDRESS": "127.0.0.1:4,127.0.0.1:5",
        "QCLI_LOOKUPD_ALLOWED_HOST": "*.example.com,localhost",
        "QCLI_HTTP_ALLOWED_HOST": "a,b",
        "QCLI_TRUSTED_PROXY": "10.0.0.0/8,::1",
    }
    show = ("admin", "--http-address=127.0.0.1:0", "--check-config=show")
    for result in (cli(*show, *flags), cli(*show, env=env)):
        assert result.code == 0, result.err
        shown = tomllib.loads(result.out.decode())
        assert {key: shown[key] for key in wanted} == wanted
    refused = cli(*show, "--nsqd-http-address=127.0.0.1:1,")
    assert (refused.code, "'--nsqd-http-address'" in refused.err) == (2, True)
    # nsqadmin takes a name as it is: one of a directory service has commas.
    names = cli(*show, "--admin-user=cn=web,dc=example", "--admin-user=root")
    assert tomllib.loads(names.out.decode())["admin_users"] == ["cn=web,dc=example", "root"]
