"""Run the programs of docs/how-to/python-client.md and examples/, and check their output."""

import dataclasses
import io
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from interop.peers import Broker, nsqlookupd, qcli_serve
from trio_nsq.client import DiscoverySettings, ProducerSettings
from trio_nsq.text.wording import NAME_RULE

pytestmark = pytest.mark.slow  # to start a broker

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "how-to" / "python-client.md"
TIMEOUT_S = 60


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with qcli_serve(tmp_path_factory.mktemp("documented") / "d", "--sync=interval") as running:
        yield running


def printed_by(words: str, broker: Broker) -> str:
    """Run the program of the page that contains these words; return its output."""
    source = source_of(words, broker)
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile(source, f"{DOCUMENT} ({words})", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


def source_of(words: str, broker: Broker) -> str:
    """Return the program of the page that contains these words, for this broker."""
    programs = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE)
    (program,) = [program for program in programs if words in program]
    assert "127.0.0.1:4150" in program
    return str(program.replace("127.0.0.1:4150", broker.tcp_address))


def test_all_programs_of_the_page_have_a_test() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE)
    programs = [block for block in blocks if "import " in block]
    assert len(programs) == 8  # seven have a test below, and one in test_consumer_document.py


def test_table_of_producer_options() -> None:
    text = DOCUMENT.read_text()
    section = text[text.index("### Producer options") : text.index("## Consume messages")]
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", section, re.MULTILINE))
    shared = {field.name for field in dataclasses.fields(DiscoverySettings)}
    own = {
        each.name: each.default for each in dataclasses.fields(ProducerSettings) if each.name not in shared
    }
    assert rows == {
        name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in own.items()
    }


def depth(broker: Broker, channel: str) -> int:
    stats = broker.channel_stats("clicks", channel)
    assert stats["in_flight_count"] == 0
    return int(stats["depth"])


@pytest.fixture
def channels(broker: Broker) -> None:
    broker.create("clicks", "archive", "asyncio")
    for channel in ("archive", "asyncio"):
        broker.http("POST", "/channel/empty", topic="clicks", channel=channel)


@pytest.mark.usefixtures("channels")
def test_publish(broker: Broker) -> None:
    assert printed_by("in a minute", broker) == ""
    stats = broker.channel_stats("clicks", "archive")
    assert (stats["depth"], stats["deferred_count"]) == (1003, 1)


@pytest.mark.usefixtures("channels")
def test_typed_topics(broker: Broker) -> None:
    assert printed_by("class Order", broker) == "1 tea\n2 milk\n3 sugar\n"


def test_headers(broker: Broker) -> None:
    printed = printed_by("headers={", broker)
    assert printed == "b'42' 7\nb'43' 8\nb'44' 8\nb'45' 9\nb'46' None\n"


def test_without_async_code(broker: Broker) -> None:
    assert printed_by("consumer.batches()", broker).endswith("messages, the first one b'one'\n")
    assert depth(broker, "archive") == 0


@pytest.mark.usefixtures("channels")
def test_asyncio(broker: Broker) -> None:
    printed = printed_by("async with asyncio.timeout(10)", broker)
    assert sorted(printed.split()) == ["b'0'", "b'1'", "b'2'"]
    assert depth(broker, "asyncio") == 0


@pytest.mark.parametrize(
    ("words", "end"), [("stop_on=(signal.SIGTERM", ""), ("default_int_handler", "stopped\n")]
)
@pytest.mark.usefixtures("channels")
def test_program_stops_in_order(broker: Broker, words: str, end: str) -> None:
    for body in (b"1", b"2"):
        broker.post("/pub", body, topic="clicks")
    with subprocess.Popen(
        [sys.executable, "-c", source_of(words, broker)], stdout=subprocess.PIPE, text=True
    ) as program:
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == "begun\n"
            program.send_signal(signal.SIGTERM)
            assert program.communicate(timeout=TIMEOUT_S)[0] == f"ended\n{end}"
        finally:
            program.kill()
    assert program.returncode == 0
    assert depth(broker, "archive") == 1  # the message that was handled is finished


def run_example(name: str, *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    done = subprocess.run(command, input=stdin, capture_output=True, timeout=TIMEOUT_S, check=False)
    return subprocess.CompletedProcess(command, done.returncode, done.stdout.decode(), done.stderr.decode())


def test_examples(broker: Broker, tmp_path: Path) -> None:
    broker.create("lines", "archive")
    lines = b"".join(b"line %d\n" % number for number in range(500))
    published = run_example("producer.py", "lines", broker.tcp_address, "127.0.0.1:1", stdin=b"\n" + lines)
    assert (published.stdout, published.returncode) == ("500 stored\n", 0), published.stderr
    refused = run_example("producer.py", "a b", broker.tcp_address, stdin=b"line\n")
    said = f"1 not sent ('a b' is not a valid topic name: {NAME_RULE})\n"
    assert (refused.stdout, refused.stderr, refused.returncode) == (said, "", 1)
    file = tmp_path / "archive"
    archived = run_example("archive.py", "lines/archive", str(file), broker.tcp_address)
    assert (archived.stdout, archived.returncode) == (f"500 messages appended to {file}\n", 0), (
        archived.stderr
    )
    assert sorted(file.read_bytes().splitlines()) == sorted(lines.splitlines())


def test_example_of_a_producer_with_a_discovery_service(tmp_path: Path) -> None:
    with nsqlookupd() as lookupd:
        known = f"--lookupd-tcp-address={lookupd.tcp_address}"
        with qcli_serve(tmp_path / "d", known, "--broadcast-address=127.0.0.1") as broker:
            while broker.tcp_address.rpartition(":")[2] not in lookupd.http("GET", "/nodes").decode():
                pass
            done = run_example("producer.py", "lines", f"http://{lookupd.http_address}", stdin=b"1\n2\n")
            assert (done.stdout, done.returncode) == ("2 stored\n", 0), done.stderr


def test_examples_explain_themselves() -> None:
    for name in ("archive.py", "consumer.py", "producer.py", "demo.py"):
        done = run_example(name, "--help")
        assert (done.returncode, done.stderr) == (0, "")
        assert f"examples/{name}" in done.stdout or "make demo" in done.stdout


def test_examples_refuse_invalid_names_and_addresses(tmp_path: Path) -> None:
    file = str(tmp_path / "file")
    complaints = {
        ("archive.py", "lines", file, "127.0.0.1:1"): "archive.py TOPIC/CHANNEL FILE",
        ("archive.py", "a b/c", file, "127.0.0.1:1"): f"'a b' is not a valid topic name: {NAME_RULE}\n",
        ("consumer.py", "lines", "127.0.0.1:1"): "consumer.py TOPIC/CHANNEL",
        ("consumer.py", "a/c d", "127.0.0.1:1"): f"'c d' is not a valid channel name: {NAME_RULE}\n",
        ("producer.py", "lines", "localhost"): "address 'localhost' has no port; write it as host:port\n",
    }
    with ThreadPoolExecutor() as executor:
        results = executor.map(lambda program: run_example(*program), complaints)
    for done, complaint in zip(results, complaints.values(), strict=True):
        assert (done.stdout, done.returncode) == ("", 1)
        assert complaint in done.stderr
        assert "Traceback" not in done.stderr


def test_examples_without_a_broker(tmp_path: Path) -> None:
    programs = [("producer.py", "lines"), ("archive.py", "lines/archive", str(tmp_path / "file"))]
    with ThreadPoolExecutor() as executor:
        results = list(executor.map(lambda program: run_example(*program, "127.0.0.1:1"), programs))
    for done in results:
        assert (done.stdout, done.returncode) == ("", 1)
        assert done.stderr == "could not connect to 127.0.0.1:1: Connection refused\n"
