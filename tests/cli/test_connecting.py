"""Tests for TLS, AUTH, compression and unix sockets."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from broker.auth_server import AuthServer, answer, authorization, threaded_auth_server
from broker.certificates import Certificates
from cli.support import Cli, Run, lines_until_ready, only_ours, serving
from interop.peers import Broker, qcli_admin, qcli_lookupd, qcli_serve
from qcli.broker.failures import refused
from trio_nsq.client import BrokerError
from trio_nsq.http.messages import Request, Response

SECRET = "open sesame"


class Guarded(NamedTuple):
    """A broker that requires TLS with a client certificate, and an auth secret."""

    broker: Broker
    auth: AuthServer
    env: dict[str, str]

    def cli(self, **changes: str) -> Cli:
        """Return a `Cli` with everything needed in its environment, with these changes."""
        return Cli(self.broker.tcp_address, f"https://{self.broker.https_address}", self.env | changes)


def _answer(request: Request) -> Response:
    if request.query["secret"] != SECRET:
        return Response.json({"message": "who?"}, status=403)
    permissions = ("subscribe", "publish", "read", "manage", "admin")
    return answer(authorization(".*", ".*", *permissions), identity="tester")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """A guarded broker."""
    folder = tmp_path_factory.mktemp("guarded")
    certificates = Certificates(folder)
    cert, key = certificates.client_files("somebody")
    with threaded_auth_server(_answer) as auth:
        flags = [f"--{name.replace('_', '-')}={path}" for name, path in certificates.options.items()]
        flags += ["--tls-required=true", "--tls-client-auth-policy=require-verify"]
        flags += [f"--tls-root-ca-file={certificates.ca_path}", f"--auth-http-address={auth.address}"]
        with qcli_serve(folder / "data", *flags) as broker:
            env = {
                "QCLI_CLIENT_TLS_ROOT_CA_FILE": str(certificates.ca_path),
                "QCLI_CLIENT_TLS_CERT": str(cert),
                "QCLI_CLIENT_TLS_KEY": str(key),
                "QCLI_CLIENT_AUTH_SECRET": SECRET,
            }
            yield Guarded(broker, auth, env)


def test_commands_reach_a_guarded_broker(guarded: Guarded, topic: str) -> None:
    qcli = guarded.cli()
    assert qcli("pub", topic, stdin=b"one\ntwo\n").code == 0
    assert qcli("tail", f"{topic}/c", "-n", "2").out == b"one\ntwo\n"
    assert qcli("replay", topic, f"{topic}.again", "-q").code == 0
    assert qcli("tail", f"{topic}.again", "--from", "earliest", "--to", "latest").out == b"one\ntwo\n"
    assert [row["message_count"] for row in qcli("stat", topic, "--format", "json").records] == [2, 2]


def test_options_instead_of_variables(guarded: Guarded, run_here: Run, topic: str) -> None:
    qcli = Cli(guarded.broker.tcp_address, f"https://{guarded.broker.https_address}")
    files = [
        word
        for name in ("root-ca-file", "cert", "key")
        for word in (f"--tls-{name}", guarded.env[f"QCLI_CLIENT_TLS_{name.replace('-', '_').upper()}"])
    ]
    files += ["--auth-secret", SECRET]
    assert qcli("pub", topic, *files, stdin=b"one\n").code == 0
    assert run_here(qcli, "peek", topic, *files, "--format", "raw").out == b"one\n"


def test_certificate_check_can_be_skipped(guarded: Guarded, run_here: Run, topic: str) -> None:
    qcli = guarded.cli(QCLI_CLIENT_TLS_ROOT_CA_FILE="", QCLI_CLIENT_TLS_INSECURE_SKIP_VERIFY="1")
    assert qcli("pub", topic, stdin=b"one\n").code == 0
    assert run_here(qcli, "peek", topic, "--format", "raw").out == b"one\n"


def test_names_are_completed_over_https(guarded: Guarded, topic: str) -> None:
    assert guarded.cli()("topic", "create", topic).code == 0
    asks = {
        "_QCLI_COMPLETE": "bash_complete",
        "QCLI_LINE": f"qcli stat {topic}",
        "QCLI_COMPLETION_TIMEOUT": "20s",
    }
    assert topic in guarded.cli(**asks)().out.decode()


PUB = ("pub", "refused", __file__)
STAT = ("stat",)
LOG = ("tail", "refused", "--from", "1")


@pytest.mark.parametrize(
    ("command", "changes", "code", "said"),
    [
        (PUB, {"QCLI_CLIENT_TLS": "0"}, 1, " requires TLS. Use --tls, "),
        (PUB, {"QCLI_CLIENT_AUTH_SECRET": ""}, 1, "requires AUTH. Give --auth-secret-file"),
        (
            PUB,
            {"QCLI_CLIENT_AUTH_SECRET": "guessed"},
            1,
            " could not verify your secret: its auth server rejected",
        ),
        (PUB, {"QCLI_CLIENT_TLS_ROOT_CA_FILE": ""}, 3, "Give its CA: --tls-root-ca-file."),
        (PUB, {"QCLI_CLIENT_TLS_CERT": "", "QCLI_CLIENT_TLS_KEY": ""}, 3, "See --tls-cert."),
        (STAT, {"QCLI_CLIENT_TLS_CERT": "", "QCLI_CLIENT_TLS_KEY": ""}, 3, "See --tls-cert."),
        (LOG, {"QCLI_CLIENT_TLS_CERT": "", "QCLI_CLIENT_TLS_KEY": ""}, 3, "See --tls-cert."),
        (STAT, {"QCLI_CLIENT_TLS_ROOT_CA_FILE": ""}, 3, "is not trusted: "),
        (LOG, {"QCLI_CLIENT_TLS_ROOT_CA_FILE": ""}, 3, "is not trusted: "),
    ],
)
def test_missing_certificate_or_secret_is_reported(
    guarded: Guarded, run_here: Run, command: tuple[str, ...], changes: dict[str, str], code: int, said: str
) -> None:
    result = run_here(guarded.cli(**changes), *command)
    assert result.code == code, result.err
    assert said in result.err
    assert result.err.count("\n") == 1


@pytest.mark.parametrize("command", [STAT, LOG], ids="-".join)
def test_plain_http_is_refused_with_tls_options(
    guarded: Guarded, run_here: Run, command: tuple[str, ...]
) -> None:
    result = run_here(Cli("127.0.0.1:1", guarded.broker.http_address, guarded.env), *command)
    assert result.code == 1
    assert "requires TLS: write --nsqd-http-address https://HOST:PORT" in result.err


@pytest.mark.parametrize("command", [STAT, LOG], ids="-".join)
def test_plain_http_to_the_https_port(guarded: Guarded, run_here: Run, command: tuple[str, ...]) -> None:
    address = guarded.broker.https_address
    result = run_here(Cli("127.0.0.1:1", str(address)), *command)
    assert result.code == 3
    assert f"but a port with TLS, such as that of HTTPS. Write https://{address}. See" in result.err


def test_plain_http_does_not_replace_tls_that_tcp_requires(tmp_path: Path, run_here: Run) -> None:
    certificates = Certificates(tmp_path)
    flags = [f"--{name.replace('_', '-')}={path}" for name, path in certificates.options.items()]
    with qcli_serve(tmp_path / "data", *flags, "--tls-required=tcp-https") as broker:
        qcli = Cli(broker.tcp_address, broker.http_address)
        for command in (("pub", "t"), ("tail", "t/c"), ("replay", "t", "copy")):
            if command[0] == "replay":
                assert (
                    qcli("pub", "t", "--tls-root-ca-file", str(certificates.ca_path), stdin=b"x\n").code == 0
                )
            result = qcli(*command, stdin=b"secret\n")
            assert result.code == 1
            assert f"The broker at {broker.tcp_address} requires TLS. Use --tls" in result.err
        assert run_here(qcli, "peek", "t", "--format", "raw").out == b"x\n"


def _allowing(*permissions: str) -> Response:
    return answer(authorization("allowed", ".*", *permissions), identity="tester")


@pytest.mark.parametrize(
    ("allows", "command", "said"),
    [
        (answer(), ("pub", "t"), "rejected your secret: it has no rights."),
        (_allowing("publish"), ("pub", "other"), "does not allow you to publish to other."),
        (
            _allowing("publish"),
            ("tail", "allowed/c"),
            "does not allow you to consume allowed/c.",
        ),
    ],
)
def test_what_the_auth_server_denies(
    tmp_path: Path, run_here: Run, allows: Response, command: tuple[str, ...], said: str
) -> None:
    with (
        threaded_auth_server(allows) as auth,
        qcli_serve(tmp_path / "data", f"--auth-http-address={auth.address}") as broker,
    ):
        qcli = Cli(broker.tcp_address, broker.http_address, {"QCLI_CLIENT_AUTH_SECRET": SECRET})
        result = qcli(*command, stdin=b"x\n")
    assert (result.code, said in result.err) == (1, True), result.err
    assert "E_UNAUTHORIZED" not in result.err


TO_HTTP = ("to-http", "t", "--post=http://127.0.0.1:1/")


@pytest.fixture(scope="module")
def lookupd() -> Iterator[Broker]:
    with qcli_lookupd() as service:
        yield service


@pytest.mark.parametrize(
    ("command", "option", "port"),
    [
        *((each, "--nsqd-http-address", "tcp") for each in (("stat",), ("tail", "t", "--from=1"), TO_HTTP)),
        *((each, "--nsqd-tcp-address", "http") for each in (("pub", "t"), ("tail", "t"), TO_HTTP)),
        (("to-nsq", "t"), "--destination-nsqd-tcp-address", "http"),
        *(
            (each, "--lookupd-http-address", port)
            for each in (("pub", "t"), ("stat",), ("tail", "t"), TO_HTTP)
            for port in ("tcp", "http")
        ),
    ],
)
@pytest.mark.parametrize("server", ["broker", "nsqlookupd"])
def test_wrong_ports(
    broker: Broker,
    lookupd: Broker,
    nowhere: Cli,
    run_here: Run,
    server: str,
    command: tuple[str, ...],
    option: str,
    port: str,
) -> None:
    """One sentence says what listens there, and the right port if it is that of the same server."""
    if server == "nsqlookupd" and (option, port) == ("--lookupd-http-address", "http"):
        pytest.skip("the right port")
    at = broker if server == "broker" else lookupd
    address, other = at.tcp_address, at.http_address
    if port == "http":
        address, other = other, address
    sources = [f"--nsqd-tcp-address={broker.tcp_address}"] if "destination" in option else []
    result = run_here(nowhere, *command, *sources, f"{option}={address}", stdin=b"x\n")
    assert result.code == 3, result.err
    article = "a" if server == "broker" else "an"
    assert f"but the {port.upper()} port of {article} {server}" in result.err
    assert f"See {option}." in result.err
    assert result.err.count("\n") == 1
    if (server, port) == ("broker", "http"):
        assert f"port is {other.rpartition(':')[2]}." in result.err
    elif port == "tcp":  # the server does not tell, and it is not the next one
        assert f"port is {4151 if server == 'broker' else 4161} by default." in result.err


@pytest.fixture(scope="module")
def console(lookupd: Broker) -> Iterator[str]:
    with qcli_admin(f"--lookupd-http-address={lookupd.http_address}") as running:
        yield running.http_address


CHANGES = [
    ("topic", "create", "kept"),
    ("topic", "delete", "kept", "--yes"),
    ("topic", "empty", "kept", "--yes"),
    ("topic", "pause", "kept"),
    ("topic", "set", "kept", "retention_time=1h"),
    ("channel", "create", "kept/new"),
    ("channel", "delete", "kept/c", "--yes"),
    ("channel", "empty", "kept/c", "--yes"),
    ("channel", "pause", "kept/c"),
    ("channel", "set", "kept/c", "max_attempts=3"),
    ("channel", "seek", "kept/c", "--to=earliest"),
    ("drain",),
    ("drain", "--move-to=OTHER"),
    ("undrain",),
    ("dlq", "requeue", "kept"),
    ("deferred", "cancel", "kept/c", "0123456789abcdef"),
]
READS = [
    ("peek", "kept"),
    ("dlq", "list"),
    ("dlq", "show", "kept"),
    ("deferred", "list", "kept/c"),
    ("topic", "settings", "kept"),
    ("channel", "settings", "kept/c"),
    ("tail", "kept", "--from=1"),
    ("nodes",),
]


@pytest.mark.parametrize(
    ("server", "command"),
    [
        *(("nsqlookupd", each) for each in (*CHANGES, *READS)),
        *(("console", each) for each in (CHANGES[0], READS[0], ("tail", "kept", "--from=1"))),
    ],
)
def test_http_ports_of_other_servers(
    lookupd: Broker, console: str, nowhere: Cli, run_here: Run, server: str, command: tuple[str, ...]
) -> None:
    """No command changes a discovery service that it takes for a broker."""
    lookupd.http("POST", "/topic/create", topic="kept")
    lookupd.http("POST", "/channel/create", topic="kept", channel="c")
    address, what = {
        "nsqlookupd": (lookupd.http_address, "the HTTP port of an nsqlookupd"),
        "console": (console, "the web console"),
    }[server]
    words = [word.replace("OTHER", nowhere.http_address) for word in command]
    result = run_here(nowhere, *words, f"--nsqd-http-address={address}")
    assert result.code == 3, result.err
    assert result.err.endswith(
        f"{address} is not the HTTP port of an NSQ broker, but {what}. See --nsqd-http-address.\n"
    )
    assert json.loads(lookupd.http("GET", "/channels", topic="kept")) == {"channels": ["c"]}


def test_a_console_is_no_discovery_service(console: str, nowhere: Cli, run_here: Run) -> None:
    result = run_here(nowhere, "stat", f"--lookupd-http-address={console}")
    assert (result.code, "but the web console. See --lookupd" in result.err) == (3, True), result.err


@pytest.mark.parametrize("command", [("to-file", "t", "--output-dir=."), TO_HTTP])
def test_connectors_of_a_discovery_service_use_no_default_broker(
    nowhere: Cli, run_here: Run, command: tuple[str, ...]
) -> None:
    result = run_here(nowhere, *command, "--lookupd-http-address=127.0.0.1:2")
    assert result.code == 3
    assert nowhere.http_address not in result.err


def test_https_needs_an_https_address(guarded: Guarded, nowhere: Cli, run_here: Run) -> None:
    result = run_here(nowhere, "stat", "--tls")
    assert result.code == 2
    assert "for TLS write --nsqd-http-address https://HOST:PORT" in result.err.replace("\n", " ")
    assert "--tls " not in run_here(nowhere, "stat", "--help").out.decode()
    assert run_here(guarded.cli(), "stat", "--tls").code == 0


def test_https_to_the_plain_http_port(guarded: Guarded, run_here: Run) -> None:
    result = run_here(Cli("127.0.0.1:1", f"https://{guarded.broker.http_address}", guarded.env), "stat")
    assert result.code == 3
    assert result.err.startswith("Error: TLS with the broker at https://127.0.0.1:")
    assert "Is that the port of plain HTTP?" in result.err


def test_https_to_the_plain_http_port_of_an_open_broker(broker: Broker, run_here: Run) -> None:
    """It tells what it is, so the error says what to write."""
    result = run_here(Cli("127.0.0.1:1", f"https://{broker.http_address}"), "stat")
    assert result.code == 3
    assert f"It is the port of plain HTTP: write http://{broker.http_address}, or the broker's" in result.err


def test_full_disk_of_a_broker() -> None:
    """The refusal of a publish says what to do."""
    text = "MPUB failed cannot write data/topics/t.topic/0.log: No space left on device"
    said = refused("The broker at b:4150", BrokerError("b:4150", "E_MPUB_FAILED", text))
    assert said.endswith(
        "No space left on device. Free space on the broker's disk, or delete messages: 'qcli topic empty'."
    )


@pytest.mark.parametrize("command", [STAT, LOG], ids="-".join)
def test_tls_options_never_fall_back_to_plain_text(
    guarded: Guarded, nowhere: Cli, run_here: Run, command: tuple[str, ...]
) -> None:
    result = run_here(nowhere, *command, "--tls-root-ca-file", guarded.env["QCLI_CLIENT_TLS_ROOT_CA_FILE"])
    assert result.code == 2
    assert "--tls-root-ca-file: this command sends HTTP requests" in result.err


def test_broker_without_tls_is_refused_if_tls_is_required(guarded: Guarded, qcli: Cli, topic: str) -> None:
    qcli = Cli(qcli.tcp_address, qcli.http_address, guarded.env)
    result = qcli("pub", topic, stdin=b"one\n")
    assert result.code == 1
    assert "does not offer TLS. To connect without encryption, use --no-tls" in result.err
    assert qcli("pub", topic, "--no-tls", stdin=b"one\n").code == 0


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--tls-root-ca-file", "{none}"), 2, "{none}' does not exist"),
        (("--tls-root-ca-file", "{garbage}"), 1, "--tls-root-ca-file {garbage}: "),
        (
            ("--tls-cert", "{garbage}"),
            1,
            "--tls-cert {garbage}, which must hold the key too, as",
        ),
        (
            ("--tls-cert", "{garbage}", "--tls-key", "{garbage}"),
            1,
            "--tls-cert {garbage}, --tls-key {garbage}: ",
        ),
        (("--tls-key", "{garbage}"), 2, "give --tls-cert, too"),
        (("--snappy", "--deflate"), 2, "exclude each other"),
    ],
)
def test_unusable_options(
    nowhere: Cli, run_here: Run, tmp_path: Path, words: tuple[str, ...], code: int, said: str
) -> None:
    names = {"none": tmp_path / "none.pem", "garbage": tmp_path / "garbage.pem"}
    names["garbage"].write_text("no certificate\n")
    result = run_here(nowhere, "pub", "clicks", *(word.format(**names) for word in words))
    assert result.code == code, result.err
    assert said.format(**names) in result.err.replace("\n", " ")


def test_compressed_connections(broker: Broker, qcli: Cli, topic: str) -> None:
    with qcli.running("tail", f"{topic}/c", "--snappy") as tail:
        assert qcli("pub", topic, "--deflate", stdin=b"one\n" * 1000).code == 0
        assert tail.read(4000) == b"one\n" * 1000
        (found,) = json.loads(broker.http("GET", "/stats", format="json", topic=topic))["topics"]
    (client,) = found["channels"][0]["clients"]
    assert (client["snappy"], client["deflate"]) == (True, False)


@only_ours
def test_http_over_a_unix_socket(tmp_path: Path, run_here: Run) -> None:
    path = tmp_path / "http.sock"
    with serving(tmp_path, "--http-address", str(path), "--address-file", str(tmp_path / "a.json")) as broker:
        lines_until_ready(broker)
        qcli = Cli(json.loads((tmp_path / "a.json").read_text())["tcp_address"], str(path))
        assert qcli("pub", "clicks", stdin=b"one\n").code == 0
        assert qcli("peek", "clicks", "--format", "raw").out == b"one\n"
        assert qcli("tail", "clicks", "--from", "0", "--to", "1").out == b"one\n"
    for command in (STAT, LOG):
        assert f"No broker answers at {path}: connection refused" in run_here(qcli, *command).err


@pytest.mark.parametrize("option", ["--nsqd-tcp-address", "--nsqd-http-address"])
def test_errors_name_the_option_or_variable_of_an_address(run_here: Run, option: str) -> None:
    variable = f"QCLI_{option[2:].upper().replace('-', '_')}"
    by_flag = run_here(Cli("127.0.0.1:1", "127.0.0.1:1"), "tail", "t", option, "x")
    assert (by_flag.code, f"'{option}': 'x' is not" in by_flag.err, variable in by_flag.err) == (
        2,
        True,
        False,
    )
    by_variable = run_here(Cli("127.0.0.1:1", "127.0.0.1:1", {variable: "x"}), "tail", "t")
    assert (by_variable.code, f"'{variable}' in the environment: 'x'" in by_variable.err) == (2, True)


def test_unix_socket_for_tcp_is_refused(run_here: Run) -> None:
    for command in ("pub", "tail"):
        result = run_here(Cli("/run/nsqd.sock", "127.0.0.1:1"), command, "clicks")
        assert result.code == 2
        said = "is a unix socket, over which only --nsqd-http-address can be reached"
        assert said in result.err.replace("\n", " ")
        assert "'QCLI_NSQD_TCP_ADDRESS'" in result.err


@pytest.mark.parametrize(
    "command",
    [
        STAT,
        LOG,
        ("topic", "list"),
        ("deferred", "list", "t/c"),
        ("tail", "t", "--lookupd-http-address", "127.0.0.1:1"),
    ],
    ids="-".join,
)
def test_unused_tcp_address_is_not_checked(run_here: Run, command: tuple[str, ...]) -> None:
    result = run_here(Cli("./t.sock", "127.0.0.1:1"), *command)
    assert result.code == 3  # so it tried to connect
    assert "answers at 127.0.0.1:1" in result.err


@pytest.mark.parametrize("flags", [(), ("--snappy",), ("--deflate",)])
def test_bench_measures_a_guarded_broker(
    guarded: Guarded, run_here: Run, topic: str, flags: tuple[str, ...]
) -> None:
    qcli = guarded.cli()
    for command, count in [
        (("pub", topic, "-n", "3000", "--pipeline", "3"), 3000),
        (("sub", "--backlog", "5000"), 5000),
        (("latency", "--rate", "500", "--duration", "200ms"), 100),
    ]:
        result = run_here(qcli, "bench", *command, *flags, "--format", "json")
        assert result.code == 0, result.err
        assert result.records[0]["messages"] == count
