"""Run the consumer of docs/how-to/python-client.md and of examples/, and compare the tables of the page with
the code.
"""

import dataclasses
import io
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from interop.peers import Broker, qcli_serve
from trio_nsq.client.connection.options import ConnectionSettings
from trio_nsq.client.consuming.options import ConsumerSettings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "python-client.md").read_text()
TIMEOUT_S = 60


def section(title: str) -> str:
    """Return a section of the page about the client, up to the next one of the same level."""
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


@pytest.mark.slow
def test_program_of_the_page(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", section("Consume messages"), re.DOTALL | re.MULTILINE)
    (program,) = [block for block in blocks if "import " in block]
    with qcli_serve(tmp_path / "data", "--sync=interval") as broker:
        broker.create("clicks", "archive")
        broker.post("/mpub", b"one\ntwo\nthree\nend", topic="clicks")
        source = program.replace("127.0.0.1:4150", broker.tcp_address)
        assert source != program
        with redirect_stdout(io.StringIO()) as printed:
            exec(compile(source, "python-client.md", "exec"), {"__name__": "__main__"})
        assert printed.getvalue().splitlines() == ["b'one' 1", "b'two' 1", "b'three' 1", "b'end' 1"]
        stats = broker.channel_stats("clicks", "archive")
        assert (stats["depth"], stats["in_flight_count"]) == (0, 0)


def test_table_of_options() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", section("Consumer options"), re.MULTILINE))
    own = {field.name: field.default for field in dataclasses.fields(ConsumerSettings)}
    for field in dataclasses.fields(ConnectionSettings):
        del own[field.name]
    told = {name: default for name, default in rows.items() if name in own}
    assert told == {
        name: ("all" if default == () else str(default))
        if isinstance(default, str | bool | tuple)
        else f"{default:g}"
        for name, default in own.items()
    }


@pytest.mark.slow
def test_example(tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "data", "--sync=interval") as broker:
        broker.create("people", "greeter")
        broker.create("people-failed", "look")
        broker.post("/mpub", b'{"name": "Ada"}\nnonsense\n{"name": "Bob"}', topic="people")
        command = [
            sys.executable,
            str(ROOT / "examples" / "consumer.py"),
            "people/greeter",
            broker.tcp_address,
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            try:
                until(lambda: broker.channel_stats("people-failed", "look")["depth"] == 1)
                until(lambda: unfinished(broker) == 0)
                process.send_signal(signal.SIGTERM)
                while process.poll() is None:  # further signals change nothing
                    process.send_signal(signal.SIGINT)
                    process.send_signal(signal.SIGTERM)
                    time.sleep(0.002)
                said, complained = process.communicate(timeout=TIMEOUT_S)
            finally:
                process.kill()
    assert process.returncode == 0
    assert sorted(said.split(b"\n")) == [b"", b"hello, Ada", b"hello, Bob"]
    assert b"is given up: it failed 3 times" in complained
    assert complained.endswith(b"\n3 done, 2 put back\n")


def unfinished(broker: Broker) -> int:
    stats = broker.channel_stats("people", "greeter")
    return int(stats["depth"] + stats["in_flight_count"] + stats["deferred_count"])


def until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds; each check takes the broker a moment."""
    while not condition():
        time.sleep(0.02)
