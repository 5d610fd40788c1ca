"""`qcli to-http`: the command line, and runs as a process. tests/connectors has the delivery itself."""

import json
import ssl
import threading
from collections import Counter
from pathlib import Path

import pytest
import trustme

from cli.support import Cli, Result, Run, Running, only_ours
from connectors.http_receiver import Answer, Received, receiver
from interop.peers import Broker
from qcli.commands.to_http.command import command

URL = "http://127.0.0.1:1/x"


def _stop(running: Running, code: int = 143) -> Result:
    running.process.terminate()
    result = running.end()
    assert (result.code, result.out) == (code, b""), result.err
    return result


def _drained(qcli: Cli, source: str) -> None:
    qcli.wait_until(
        source, lambda record: not (record["depth"] or record["in_flight_count"] or record["deferred_count"])
    )


def _create(broker: Broker, topic: str, channel: str = "nsq_to_http") -> str:
    broker.create(topic, channel)
    return f"{topic}/{channel}"


# ---------------------------------------------------------------------- runs


def test_the_flags_of_nsq_to_http(broker: Broker, qcli: Cli, topic: str) -> None:
    source = _create(broker, topic, "hook")
    with receiver() as server:
        flags = [
            f"-topic={topic}",
            "-channel=hook",
            f"-post={server.url}/a",
            "-n",
            "3",
            "-content-type",
            "text/x",
        ]
        flags += [
            "-header",
            "X-One: 1",
            "-header=X-Two: a: b",
            "-max-in-flight=10",
            "-status-every=0",
            "-sample=1.0",
        ]
        flags += [
            "-mode=round-robin",
            "-http-client-connect-timeout=2s",
            "-http-client-request-timeout",
            "20s",
        ]
        with qcli.running("to-http", *flags, "-consumer-opt=max_attempts,3") as running:
            qcli.publish(topic, [b"one", b"two"])
            server.wait_for(2)
            _drained(qcli, source)
            result = _stop(running)
        assert Counter(server.bodies) == {b"one": 1, b"two": 1}
        headers = server.requests[0].headers
    assert [headers[name] for name in ("content-type", "x-one", "x-two")] == ["text/x", "1", "a: b"]
    assert result.err == "2 messages delivered\n"


def test_several_topics_and_placeholders(broker: Broker, qcli: Cli, topic: str) -> None:
    other = f"{topic}_b"
    for name in (topic, other):
        _create(broker, name)
        qcli.publish(name, [b"%d" % index for index in range(10)])
    with receiver() as server:
        line = (
            "to-http",
            topic,
            other,
            "-q",
            "--put",
            server.url + "/{{topic}}/{{body}}",
            "-H",
            "X-Id: {{id}}",
        )
        with qcli.running(*line) as running:
            server.wait_for(20)
            _stop(running)
        assert {each.target for each in server.requests} == {
            f"/{name}/{index}" for name in (topic, other) for index in range(10)
        }
        assert {(each.method, len(each.headers["x-id"])) for each in server.requests} == {("PUT", 16)}


def test_batches_with_metadata(broker: Broker, qcli: Cli, topic: str) -> None:
    source = _create(broker, topic)
    qcli.publish(topic, [b'{"n":1}', b"text", b"\xff"])
    with receiver() as server:
        line = ("to-http", topic, "--post", server.url, "--batch-size", "3", "--batch-wait", "5s")
        with qcli.running(*line, "--batch-format", "ndjson", "--with-metadata") as running:
            _drained(qcli, source)
            _stop(running)
        (request,) = server.requests
    assert request.headers["content-type"] == "application/x-ndjson"
    records = [json.loads(line) for line in request.body.splitlines()]
    assert [each.get("body") for each in records] == ['{"n":1}', "text", None]
    assert records[2]["body_base64"] == "/w=="
    assert {each["topic"] for each in records} == {topic}


@only_ours
def test_dead_letters_are_counted_and_listed(broker: Broker, qcli: Cli, topic: str) -> None:
    source = _create(broker, topic)
    qcli.publish(topic, [b"bad", b"good"])
    with receiver(
        lambda request: Answer(404, body=b"no\x1bsuch") if request.body == b"bad" else 200
    ) as server:
        with qcli.running("to-http", topic, "--post", server.url + "/hook?key=secret") as running:
            _drained(qcli, source)
            result = _stop(running)
    assert result.err.splitlines() == [
        f"Warning: 1 message not delivered and stored as a dead letter; the last one: POST {server.url}/hook: 404 Not "
        f"Found: no\\x1bsuch. The dead-letter topic is {topic}.dead",
        "1 message delivered; 1 to dead-letter topics",
    ]
    (letter,) = qcli("dlq", "show", f"{topic}.dead", "--format", "json").records
    assert letter["body"] == "bad"


@only_ours
def test_the_channels_dead_letter_topic_is_used(broker: Broker, qcli: Cli, topic: str) -> None:
    """Its letters have their origin. The receiver is called once for each message."""
    source = _create(broker, topic)
    assert qcli("channel", "set", source, "max_attempts=4", f"dead_letter_topic={topic}_rest").code == 0
    bodies = [b"bad %d" % index for index in range(20)]
    qcli.publish(topic, [*bodies, b"good"])
    with receiver(lambda request: 404 if b"bad" in request.body else 200) as server:
        with qcli.running("to-http", topic, "--post", server.url) as running:
            _drained(qcli, source)
            result = _stop(running)
            assert result.err.endswith("1 message delivered; 20 to dead-letter topics\n")
            assert Counter(server.bodies) == Counter([*bodies, b"good"])
        (row,) = qcli("dlq", "list", f"{topic}_rest", "--format", "json").records
        assert (row["topic"], row["channel"], row["count"]) == (topic, "nsq_to_http", 20)
        server.answer = lambda _: 200
        assert qcli("dlq", "requeue", f"{topic}_rest").code == 0
        with qcli.running("to-http", topic, "--post", server.url) as running:
            server.wait_for(41)
            _drained(qcli, source)
            _stop(running)
        assert set(server.bodies[21:]) == set(bodies)


@only_ours
def test_a_pattern_leaves_out_dead_letter_topics(broker: Broker, qcli: Cli, topic: str) -> None:
    """Otherwise a channel of the dead-letter topic would collect copies of all dead letters."""
    source = _create(broker, f"{topic}x")
    qcli.publish(f"{topic}x.dead", [b"letter"])
    with receiver() as server:
        line = ("to-http", "--topic-pattern", f"^{topic}x", "--topic-refresh", "100ms", "--post", server.url)
        with qcli.running(*line) as running:
            qcli.publish(f"{topic}x", [b"first"])
            server.wait_for(1)
            assert qcli("topic", "create", f"{topic}xy").code == 0
            qcli.publish(f"{topic}xy", [b"second"])
            server.wait_for(2)
            _drained(qcli, source)
            _stop(running)
        assert server.bodies == [b"first", b"second"]
    (record,) = qcli("stat", f"{topic}x.dead", "--once", "--format", "json").records
    assert record["channel"] is None


# ---------------------------------------------------------------------- secrets and TLS


def test_headers_of_a_file(broker: Broker, qcli: Cli, topic: str, tmp_path: Path) -> None:
    _create(broker, topic)
    file = tmp_path / "headers"
    file.write_text("Authorization: Bearer 1:2\r\n\n  X-Tenant :  17 \nUser-Agent: hook/1\n")
    with receiver() as server:
        line = ("to-http", topic, "--post", server.url, "--header", f"@{file}")
        with qcli.running(*line) as running:
            qcli.publish(topic, [b"m"])
            (request,) = server.wait_for(1)
            _stop(running)
    names = ("authorization", "x-tenant", "user-agent")
    assert [request.headers[name] for name in names] == ["Bearer 1:2", "17", "hook/1"]


def test_user_and_password_of_a_url(broker: Broker, qcli: Cli, topic: str) -> None:
    _create(broker, topic)
    with receiver() as server:
        url = server.url.replace("://", "://hook:p%20w@")
        with qcli.running("to-http", topic, "--post", url) as running:
            qcli.publish(topic, [b"m"])
            (request,) = server.wait_for(1)
            result = _stop(running)
    assert request.headers["authorization"] == "Basic aG9vazpwIHc="
    assert "p%20w" not in result.err


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def ca_file(ca: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tls") / "ca.pem"
    ca.cert_pem.write_to_path(str(path))
    return str(path)


def _server_tls(ca: trustme.CA) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("127.0.0.1").configure_cert(context)
    return context


def test_receivers_have_their_own_tls_options(
    broker: Broker, qcli: Cli, topic: str, ca: trustme.CA, ca_file: str
) -> None:
    _create(broker, topic)
    with receiver(tls=_server_tls(ca)) as server:
        with qcli.running(
            "to-http", topic, "--post", server.url, "--receiver-tls-root-ca-file", ca_file
        ) as running:
            qcli.publish(topic, [b"m"])
            server.wait_for(1)
            _stop(running)


def test_an_untrusted_receiver_is_reported(broker: Broker, qcli: Cli, topic: str, ca: trustme.CA) -> None:
    _create(broker, topic)
    with (
        receiver(tls=_server_tls(ca)) as server,
        qcli.running("to-http", topic, "--post", server.url) as running,
    ):
        qcli.publish(topic, [b"m"])
        assert running.hear_line() == (
            f"Warning: POST {server.url}: its certificate is not trusted: unable to get local issuer certificate; "
            "tried again in 1 s\n"
        )
        _stop(running)
        assert server.requests == []


# ---------------------------------------------------------------------- the command line


@pytest.mark.parametrize("concurrency", [["-n=7"], ["--n=7"], ["-n", "7"], ["-concurrency=7"]])
def test_flags_in_the_way_of_go(concurrency: list[str]) -> None:
    line = ["-quiet", "-post=http://h/x", *concurrency, "-follow-redirects", "-put", "-x", "t"]
    with command.make_context("to-http", line) as ctx:
        found = [
            ctx.params[name] for name in ("quiet", "post", "concurrency", "follow_redirects", "put", "topics")
        ]
    assert found == [True, ("http://h/x",), 7, True, ("-x",), ("t",)]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (["t"], "Missing option '--post', '--put' or '--get'"),
        (["--post", URL], "Missing argument 'TOPIC...'"),
        (["t", "--post", URL, "--get", f"{URL}?%s"], "--post and --get exclude each other."),
        (["t", "--get", URL], "has no placeholder"),
        (["t", "--post", f"{URL}/%s"], "write {{body}}"),
        (["t", "--post", "127.0.0.1:8080"], "must begin with http:// or https://"),
        (["t", "--post", f"{URL}/{{{{nothing}}}}"], "{{nothing}} is no placeholder"),
        (["t", "--post", URL, "--mode", "hostpol"], "'hostpol' is not one of"),
        (["t", "--post", URL, "--header", "X-One"], "--header: a value is not 'Name: value'."),
        (
            ["t", "--post", URL, "--header", "X One: 1"],
            "--header 'X One: ...': a value is not 'Name: value'.",
        ),
        (["t", "--post", URL, "--header", "X-One: a\r\nX-Two: b"], "must not contain control characters"),
        (["t", "--post", URL, "--header", "content-length: 5"], "content-length is set by this command"),
        (["t", "--post", URL, "--header", "@/nowhere/x"], "--header @/nowhere/x: no such file or directory."),
        (["t", "--post", URL, "--content-type", "a\nb"], "is not a media type"),
        (["t", "--get", f"{URL}?%s", "--batch-size", "2"], "--get sends no content"),
        (["t", "--post", f"{URL}/{{{{id}}}}", "--batch-size", "2"], "{{id}} is of one message"),
        (["t", "--post", URL, "-H", "X: {{body}}", "--with-metadata"], "{{body}} is of one message"),
        (["t", "--post", URL, "--retry-status", "4x"], "'4x' is not an HTTP status"),
        (["t", "--post", URL, "--final-status", "200"], "always a success"),
        (["t", "--post", URL, "--retry-status", "4xx", "--final-status", "404"], "both name 404"),
        (["t", "--post", URL, "--sample", "2"], "2.0 is not in the range"),
        (["t", "--post", URL, "--dead-letter-topic", "t"], "its messages would be sent again and again"),
        (["t", "--post", URL, "--dead-letter-topic", "a b"], "is not a topic name"),
        (["t", "--post", URL, "--receiver-tls-key", __file__], "give --receiver-tls-cert, too"),
    ],
)
def test_wrong_command_lines(nowhere: Cli, run_here: Run, line: list[str], error: str) -> None:
    result = run_here(nowhere, "to-http", *line)
    assert (result.code, result.out) == (2, b""), result.err
    assert error in " ".join(result.err.split())


def test_a_file_that_is_no_certificate(nowhere: Cli, run_here: Run) -> None:
    result = run_here(nowhere, "to-http", "t", "--post", URL, "--receiver-tls-root-ca-file", __file__)
    assert (result.code, result.err.count("\n")) == (1, 1)
    assert result.err.startswith(f"Error: --receiver-tls-root-ca-file {__file__}: ")


def test_no_broker(nowhere: Cli, run_here: Run) -> None:
    result = run_here(nowhere, "to-http", "t", "--post", URL)
    assert (result.code, result.out, result.err.count("\n")) == (3, b"", 1)
    assert "127.0.0.1:1" in result.err


def test_a_second_signal_ends_the_command_at_once(broker: Broker, qcli: Cli, topic: str) -> None:
    _create(broker, topic)
    released = threading.Event()

    def answer(_: Received) -> int:
        released.wait(30)
        return 200

    with receiver(answer) as server, qcli.running("to-http", topic, "--post", server.url) as running:
        qcli.publish(topic, [b"m"])
        server.wait_for(1)
        running.process.terminate()
        assert running.hear_line() == "Stopping; interrupt again to stop at once.\n"
        running.process.terminate()
        result = running.end()
        released.set()
    assert (result.code, result.err) == (143, "")


def test_an_interruption(broker: Broker, qcli: Cli, topic: str) -> None:
    _create(broker, topic)

    def answer(_: Received) -> Answer | int:
        return Answer(429, {"Retry-After": "600"})

    with receiver(answer) as server, qcli.running("to-http", topic, "--post", server.url) as running:
        qcli.publish(topic, [b"m"])
        assert running.hear_line().endswith("429 Too Many Requests: OK; tried again in 600 s\n")
        running.process.send_signal(2)
        assert running.end().code == 130
    qcli.wait_until(
        f"{topic}/nsq_to_http", lambda record: record["depth"] == 1 and not record["in_flight_count"]
    )


def test_counts_are_shown_on_a_terminal(broker: Broker, qcli: Cli, topic: str) -> None:
    """Without messages, too: otherwise nothing tells a user that the command works."""
    source = _create(broker, topic, "hook")
    with receiver() as server:
        line = ("to-http", topic, "--channel=hook", f"--post={server.url}/a")
        with qcli.on_terminal(*line) as terminal:
            terminal.expect(b"0 messages delivered, ")
            qcli.publish(topic, [b"one"])
            _drained(qcli, source)
            terminal.expect(b"1 message delivered, ")
            assert terminal.interrupt() == 130
        with qcli.on_terminal(*line, "--quiet") as terminal:
            qcli.publish(topic, [b"two"])
            _drained(qcli, source)
            assert terminal.interrupt() == 130
    assert b"delivered" not in terminal.shown
