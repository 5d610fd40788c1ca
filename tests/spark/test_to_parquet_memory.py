"""Tests for the memory of an export, which must not depend on the size of the messages."""

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from interop.peers import Broker, qcli_serve
from soak import SOAK, in_soak
from spark.support import cli_of
from trio_nsq.spark.export.layout import BodyFormat, Layout

TOTAL_BYTES = 300_000_000
SIZES = {"tiny": 20, "mb": 1_000_000, "mb10": 10_000_000}
LIMIT_BYTES = 256 * 1024 * 1024


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker with a topic of JSON objects of each size, which hardly compress."""
    limits = ("--max-msg-size=20000000", "--max-body-size=100000000")
    words = random.Random(1)
    with qcli_serve(tmp_path_factory.mktemp("memory") / "data", "--sync=interval", *limits) as broker:
        broker.post("/pub", b'{"n": 1, "text": "x"}', topic="small")
        for topic, size in SIZES.items():
            if size < 1000:
                bodies = [b'{"n":%d,"m":"%04d"}' % (number, number % 9999) for number in range(1_000_000)]
                cli_of(broker).publish(topic, bodies)
                continue
            if topic == "mb" and not SOAK:
                continue
            for number in range(TOTAL_BYTES // size):
                text = words.randbytes(size // 2).hex()
                broker.post("/pub", json.dumps({"n": number, "text": text}).encode(), topic=topic)
        yield broker


@pytest.mark.parametrize(
    ("topic", "body"),
    [
        ("tiny", "json"),
        ("mb10", "json"),
        *in_soak(("tiny", "binary"), ("mb", "binary"), ("mb", "json"), ("mb10", "binary")),
    ],
)
def test_memory_does_not_grow_with_the_bodies(broker: Broker, tmp_path: Path, topic: str, body: str) -> None:
    layout = Layout(body=BodyFormat(body), keep_body=body == "json")
    program = Path(__file__).with_name("export_memory_program.py")
    arguments = [broker.http_address, topic, str(tmp_path), json.dumps(layout.to_json())]
    done = subprocess.run(
        [sys.executable, str(program), *arguments], capture_output=True, timeout=300, check=True
    )
    found = json.loads(done.stdout)
    print(topic, body, found, found["bytes"] >> 20)
    assert found["messages"] == (TOTAL_BYTES // SIZES[topic] if topic != "tiny" else 1_000_000)
    assert found["bytes"] < LIMIT_BYTES
