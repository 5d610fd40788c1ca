"""The synchronous client in programs whose modules gevent has replaced."""

import subprocess
import sys

import pytest

from interop.peers import Broker
from soak import in_soak

pytestmark = pytest.mark.slow  # starts a broker
TIMEOUT_S = 60
ALL = "monkey.patch_all()"


def output(program: str, *arguments: str) -> str:
    """Run a program that reports no error; return what it prints."""
    done = subprocess.run(
        # gevent warns if `ssl` was imported before, in some versions.
        [sys.executable, "-W", "ignore", "-c", "from gevent import monkey\n" + program, *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.stderr == ""
    assert done.returncode == 0
    return done.stdout


BEGINNINGS = {
    "patched before the import": f"{ALL}\nimport trio_nsq.sync",
    "patched after the import": f"import trio_nsq.sync\n{ALL}",
    "without threads": "monkey.patch_all(thread=False)\nimport trio_nsq.sync",
    "without threads and select": "monkey.patch_all(thread=False, select=False)\nimport trio_nsq.sync",
}
ALL_WAYS = """
import itertools, sys
tcp, topic = sys.argv[1:]
with trio_nsq.sync.Producer(tcp) as producer:
    producer.publish(topic, b"0", timeout_s=60)
    producer.publish_many(topic, [b"1", b"2"])
    receipt = producer.submit(topic, b"3")
    producer.flush()
    print(receipt.state, producer.stats().stored)
seen = []
with trio_nsq.sync.Consumer(topic, "c", nsqd_tcp_addresses=tcp) as consumer:
    message = consumer.get()
    seen.append(message.body)
    message.finish()
    batch = next(consumer.batches(max_messages=1))
    seen += batch.bodies
    batch.finish()

    def handler(message):
        seen.append(message.body)
        if len(seen) == 4:
            consumer.close()

    consumer.run(handler)
print(sorted(seen))
with trio_nsq.sync.Consumer(topic, "c", nsqd_tcp_addresses=tcp) as consumer:
    print(consumer.get(timeout_s=0.01))
"""


_SHORT = ("patched before the import", "without threads and select")


@pytest.mark.parametrize(
    "beginning", [*_SHORT, *in_soak(*(each for each in BEGINNINGS if each not in _SHORT))]
)
def test_all_ways_to_publish_and_to_consume(beginning: str, real_broker: Broker) -> None:
    topic = beginning.replace(" ", "-")
    printed = output(BEGINNINGS[beginning] + ALL_WAYS, real_broker.tcp_address, topic)
    assert printed == "stored 4\n[b'0', b'1', b'2', b'3']\nNone\n"


MANY = """
monkey.patch_all()
import gevent, gevent.event, sys
from trio_nsq.sync import Consumer, Producer
tcp, name = sys.argv[1:]

with Producer(tcp) as producer, Consumer("many", "c", nsqd_tcp_addresses=tcp, max_in_flight=100) as consumer:
    # Each waits for a message that another one publishes while all of them wait.
    getting = [gevent.spawn(consumer.get) for _ in range(100)]
    publishing = [gevent.spawn(producer.publish, "many", b"%d" % number) for number in range(100)]
    gevent.joinall(getting + publishing, raise_error=True)
    messages = [each.value for each in getting]
    print(sorted(int(message.body) for message in messages) == [*range(100)])
    for message in messages:
        message.requeue(0, backoff=False)

    all_run, running = gevent.event.Event(), set()

    def handler(message):
        running.add(gevent.getcurrent())
        if len(running) == 100:
            all_run.set()
            consumer.close_soon()
        all_run.wait()

    consumer.run(handler, concurrency=100)
    print(len(running))

# Another one is waited for by name, and by a greenlet that is interrupted.
with Consumer("many", "d", nsqd_tcp_addresses=name) as consumer:
    waiting = gevent.spawn(consumer.batches(max_messages=1000, max_wait_s=1000).__next__)
    with gevent.Timeout(0.05, False):
        waiting.get()
    waiting.kill()
    print(type(waiting.value).__name__)
"""


def test_many_greenlets(real_broker: Broker) -> None:
    named = "localhost" + real_broker.tcp_address[real_broker.tcp_address.rindex(":") :]
    assert output(MANY, real_broker.tcp_address, named) == "True\n100\nGreenletExit\n"


CLOSED = """
monkey.patch_all()
import os, sys
from trio_nsq.sync import Producer

def descriptors():
    return len(os.listdir("/proc/self/fd"))

def publish():
    with Producer(sys.argv[1]) as producer:
        producer.publish("closed", b"x")

publish()
before = descriptors()
for _ in range(10):
    publish()
print(descriptors() - before)
try:
    with Producer("127.0.0.1:1", connect_timeout_s=0.01):
        pass
except Exception as error:
    print(type(error).__name__)
"""


def test_nothing_is_left_behind(real_broker: Broker) -> None:
    assert output(CLOSED, real_broker.tcp_address) == "0\nConnectionFailed\n"


def test_idempotent_producer(real_broker: Broker) -> None:
    program = (
        f"{ALL}\n"
        "import sys\n"
        "from trio_nsq.client import IdempotentProducer\n"
        "print(IdempotentProducer(sys.argv[1], 'numbered', 'name').publish([b'1', b'2'], 1))\n"
    )
    assert output(program, real_broker.http_address) == "published\n"


def test_broker_says_that_it_cannot_run() -> None:
    program = f"from gevent import monkey\n{ALL}\nimport trio_nsq.broker\n"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    expected = "RuntimeError: trio cannot run: the module select has no epoll. gevent's monkey.patch_all()"
    assert expected in done.stderr.splitlines()[-1]
