"""Delivery of channels to real HTTP servers, from a broker of this project and from nsqd."""

import itertools
import json
import ssl
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from connectors.http_receiver import Answer, Received, receiver
from interop.peers import Broker, nsqd, qcli_serve
from soak import in_soak
from trio_nsq.client import ConnectionOptions, Consumer, ConsumerOptions, Producer
from trio_nsq.connectors.host_pool import Mode
from trio_nsq.connectors.source.options import BrokerAddresses, SourceOptions
from trio_nsq.connectors.to_http.options import Batching, DeliveryOptions
from trio_nsq.connectors.to_http.outcomes import RetryDelays, StatusRules
from trio_nsq.connectors.to_http.payloads import PayloadFormat
from trio_nsq.connectors.to_http.run import to_http
from trio_nsq.connectors.to_http.sender import SenderSettings
from trio_nsq.connectors.to_http.statistics import Statistics
from trio_nsq.connectors.to_http.templates import HeaderTemplate, URLTemplate
from trio_nsq.protocol.names import is_valid_name

DEADLINE_S = 60.0
_numbers = itertools.count()
TLS = ssl.create_default_context()


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with qcli_serve(tmp_path_factory.mktemp("broker") / "data") as running:
        yield running


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with nsqd(tmp_path_factory.mktemp("nsqd") / "data") as running:
        yield running


@pytest.fixture
def broker(request: pytest.FixtureRequest) -> Broker:
    """A broker of this project, or the one that `on_both` names."""
    found: Broker = request.getfixturevalue(getattr(request, "param", "ours"))
    return found


on_both = pytest.mark.parametrize("broker", ["ours", "stock"], indirect=True)
on_ours = pytest.mark.parametrize("broker", ["ours", *in_soak("stock")], indirect=True)
"""The long form runs on nsqd, too."""


@pytest.fixture
def topic(broker: Broker) -> str:
    """A new topic with the channel `c`."""
    name = f"topic{next(_numbers)}"
    broker.create(name, "c")
    return name


def _options(*urls: str, method: str = "POST", **more: Any) -> DeliveryOptions:
    # A busy machine may need long for a connection.
    sender = SenderSettings(TLS, DEADLINE_S, more.pop("request_timeout_s", DEADLINE_S))
    given: dict[str, Any] = {"delays": RetryDelays(0.01, 0.05), "sender": sender, "status_every": 0} | more
    return DeliveryOptions(method, tuple(URLTemplate(url, printf=method == "GET") for url in urls), **given)


async def _publish(broker: Broker, topic: str, bodies: Sequence[bytes]) -> None:
    async with Producer(broker.tcp_address) as producer:
        await producer.publish_many(topic, bodies)


@asynccontextmanager
async def _delivering(
    broker: Broker,
    topic: str,
    options: DeliveryOptions,
    max_in_flight: int = 200,
    consumer: ConsumerOptions | None = None,
) -> AsyncIterator[Statistics]:
    """Deliver during a block."""
    sources = SourceOptions(
        "c",
        topics=(topic,),
        brokers=(BrokerAddresses(broker.tcp_address, (broker.http_address,)),),
        at_least_once=True,
        max_in_flight=max_in_flight,
        consumer=consumer or ConsumerOptions(),
    )
    statistics = Statistics()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(to_http, sources, options, ConnectionOptions(), statistics)
        with trio.fail_after(DEADLINE_S):
            yield statistics
        nursery.cancel_scope.cancel()


async def _until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(DEADLINE_S):
        while not condition():
            await trio.sleep(0.01)


async def _in_flight(broker: Broker, topic: str, count: int) -> None:
    """Wait until so many messages of the channel are in flight."""
    with trio.fail_after(DEADLINE_S):
        while broker.channel_stats(topic, "c")["in_flight_count"] != count:
            await trio.sleep(0.01)


async def _drained(broker: Broker, topic: str) -> None:
    """Wait until every message of the channel is finished."""
    with trio.fail_after(DEADLINE_S):
        while not await trio.to_thread.run_sync(broker.is_drained, topic, "c"):
            await trio.sleep(0.02)


async def _letters(broker: Broker, topic: str, count: int) -> list[bytes]:
    """Receive this many messages of the channel `dead-letters`."""
    async with Consumer(
        topic, "dead-letters", nsqd_tcp_addresses=broker.tcp_address, max_in_flight=50
    ) as consumer:
        found: list[bytes] = []
        with trio.fail_after(DEADLINE_S):
            while len(found) < count:
                message = await anext(consumer)
                found.append(message.body)
                message.finish()
    return sorted(found)


@on_both
async def test_each_message_is_posted_once(broker: Broker, topic: str) -> None:
    bodies = [b"message %d \xff\r\n" % index for index in range(500)]
    await _publish(broker, topic, bodies)
    with receiver() as server:
        options = _options(
            server.url + "/{{topic}}?id={{id}}",
            headers=(("X-Attempt", HeaderTemplate("{{channel}} {{attempts}}")),),
        )
        async with _delivering(broker, topic, options) as statistics:
            await _drained(broker, topic)
        assert sorted(server.bodies) == sorted(bodies)
        first = server.requests[0]
        assert (first.method, first.headers["content-type"]) == ("POST", "application/octet-stream")
        assert first.headers["x-attempt"] == "c 1"
        assert {each.target.partition("?")[0] for each in server.requests} == {f"/{topic}"}
        assert len({each.target for each in server.requests}) == 500
        assert server.connections <= options.concurrency
        assert (statistics.delivered, statistics.requeued, statistics.dead) == (500, 0, 0)


async def test_get_with_the_body_in_the_query(broker: Broker, topic: str) -> None:
    await _publish(broker, topic, [b"a b&c=\xff"])
    with receiver(lambda _: 204) as server:
        async with _delivering(broker, topic, _options(server.url + "/put?data=%s", method="GET")):
            await _drained(broker, topic)
        (request,) = server.requests
    assert (request.method, request.target, request.body) == ("GET", "/put?data=a+b%26c%3D%FF", b"")
    assert "content-type" not in request.headers


async def test_a_body_with_line_breaks_makes_no_header(broker: Broker, topic: str) -> None:
    await _publish(broker, topic, [b"x\r\nX-Admin: yes\r\n\r\n"])
    with receiver() as server:
        headers = (("X-Body", HeaderTemplate("{{body}}")),)
        async with _delivering(broker, topic, _options(server.url, headers=headers)):
            await _drained(broker, topic)
        (request,) = server.requests
    assert "x-admin" not in request.headers
    assert request.headers["x-body"] == "x%0D%0AX-Admin: yes%0D%0A%0D%0A"


@on_ours
async def test_failed_messages_are_tried_again(broker: Broker, topic: str) -> None:
    seen: Counter[bytes] = Counter()

    def answer(request: Received) -> int:
        seen[request.body] += 1
        return 200 if seen[request.body] == 3 else 500

    bodies = [b"m%d" % index for index in range(20)]
    await _publish(broker, topic, bodies)
    with receiver(answer) as server:
        # One failure after the other pauses the receiver, so most messages wait for it.
        async with _delivering(
            broker, topic, _options(server.url, mode=Mode.HOSTPOOL, concurrency=4)
        ) as statistics:
            await trio.to_thread.run_sync(server.wait_for, 6)
            seen.update(dict.fromkeys(bodies, 2))
            server.answer = lambda _: 200
            await _drained(broker, topic)
    assert {each.body for each in server.requests} == set(bodies)
    assert (statistics.delivered, statistics.dead) == (20, 0)


@on_both
async def test_refused_messages_go_to_the_dead_letter_topic(broker: Broker, topic: str) -> None:
    bodies = [b"bad %d" % index for index in range(5)]
    await _publish(broker, topic, [*bodies, b"good"])
    with receiver(lambda request: 404 if b"bad" in request.body else 200) as server:
        async with _delivering(broker, topic, _options(server.url)) as statistics:
            await _drained(broker, topic)
        assert len(server.requests) == 6
    assert await _letters(broker, f"{topic}.dead", 5) == bodies
    assert (statistics.delivered, statistics.dead) == (1, 5)


async def test_the_last_attempt_goes_to_the_chosen_dead_letter_topic(broker: Broker, topic: str) -> None:
    await _publish(broker, topic, [b"bad", b"good"])
    options: dict[str, Any] = {"max_attempts": 3, "dead_letter_topic": f"{topic}_rest"}
    with receiver(lambda request: 500 if b"bad" in request.body else 200) as server:
        async with _delivering(broker, topic, _options(server.url, **options)):
            await _drained(broker, topic)
        assert Counter(server.bodies) == {b"bad": 3, b"good": 1}
    assert await _letters(broker, f"{topic}_rest", 1) == [b"bad"]


async def test_refused_message_is_sent_once_if_not_all_attempts_count_at_the_broker(
    broker: Broker, topic: str
) -> None:
    """It was returned by consumers that closed; the broker needs three requeues until it is a dead letter."""
    letters = f"{topic}_rest"
    broker.create(letters, "dead-letters")
    settings = json.dumps({"max_attempts": 3, "dead_letter_topic": letters}).encode()
    broker.put("/channel/settings", settings, topic=topic, channel="c")
    await _publish(broker, topic, [b"bad"])
    for attempts in range(1, 5):
        async with Consumer(topic, "c", nsqd_tcp_addresses=broker.tcp_address) as consumer:
            assert (await anext(consumer)).attempts == attempts
    with receiver(lambda request: 404) as server:
        async with _delivering(broker, topic, _options(server.url)) as statistics:
            await _drained(broker, topic)
        assert server.bodies == [b"bad"]
    assert await _letters(broker, letters, 1) == [b"bad"]
    assert (statistics.delivered, statistics.dead) == (0, 1)


async def test_other_status_rules(broker: Broker, topic: str) -> None:
    await _publish(broker, topic, [b"500", b"401"])
    seen: Counter[bytes] = Counter()

    def answer(request: Received) -> int:
        seen[request.body] += 1
        return 200 if seen[request.body] > 1 else int(request.body)

    with receiver(answer) as server:
        rules = StatusRules(retried={401}, final={500})
        async with _delivering(
            broker, topic, _options(server.url, sender=SenderSettings(TLS, DEADLINE_S, DEADLINE_S, rules))
        ):
            await _drained(broker, topic)
        assert Counter(server.bodies) == {b"500": 1, b"401": 2}
    assert await _letters(broker, f"{topic}.dead", 1) == [b"500"]


@on_ours
async def test_retry_after_is_honoured(broker: Broker, topic: str) -> None:
    times: list[float] = []

    def answer(_: Received) -> Answer | int:
        times.append(time.monotonic())
        return Answer(429, {"Retry-After": "2"}) if len(times) == 1 else 200

    await _publish(broker, topic, [b"a", b"b", b"c"])
    with receiver(answer) as server:
        async with _delivering(broker, topic, _options(server.url, concurrency=1)) as statistics:
            await _drained(broker, topic)
        assert len(server.requests) == 4
    assert times[1] - times[0] >= 2
    assert statistics.requeued == 0  # the messages waited


async def test_other_receivers_go_on_while_one_waits(broker: Broker, topic: str) -> None:
    bodies = [b"m%d" % index for index in range(50)]
    await _publish(broker, topic, bodies)
    with receiver(lambda _: Answer(503, {"Retry-After": "600"})) as busy, receiver() as free:
        async with _delivering(broker, topic, _options(busy.url, free.url, concurrency=1)) as statistics:
            await _drained(broker, topic)
        assert len(busy.requests) == 1
        assert sorted(free.bodies) == sorted(bodies)
    assert statistics.requeued == 0


@pytest.mark.parametrize("mode", [*Mode])
async def test_a_receiver_that_is_down_is_left_out(broker: Broker, topic: str, mode: Mode) -> None:
    bodies = [b"m%d" % index for index in range(50)]
    await _publish(broker, topic, bodies)
    with receiver() as gone:
        pass
    with receiver() as server:
        async with _delivering(broker, topic, _options(gone.url, server.url, mode=mode)) as statistics:
            await _drained(broker, topic)
        assert sorted(server.bodies) == sorted(bodies)
    assert (statistics.requeued, statistics.dead) == (0, 0)


async def test_messages_wait_for_a_receiver_that_comes_back(
    broker: Broker, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "trio_nsq.connectors")
    bodies = [b"m%d" % index for index in range(50)]
    await _publish(broker, topic, bodies)
    with receiver() as gone:
        port = gone.port
    async with _delivering(broker, topic, _options(f"http://127.0.0.1:{port}/x?key=secret")) as statistics:
        await _until(lambda: bool(caplog.messages))
        with receiver(port=port) as server:
            await _drained(broker, topic)
            assert sorted(server.bodies) == sorted(bodies)
    label = f"POST http://127.0.0.1:{port}/x"
    assert caplog.messages == [
        f"{label}: connection refused; tried again in 1 s",
        f"{label} takes requests again",
    ]
    assert (statistics.requeued, statistics.dead) == (0, 0)


async def test_all_receivers_get_each_message(broker: Broker, topic: str) -> None:
    bodies = [b"m%d" % index for index in range(20)]
    await _publish(broker, topic, bodies)
    failing = Counter(bodies[:3])  # a receiver that fails more often in a row pauses

    def fail_once(request: Received) -> int:
        failing[request.body] -= 1
        return 200 if failing[request.body] < 0 else 500

    with receiver() as first, receiver(fail_once) as second:
        async with _delivering(broker, topic, _options(first.url, second.url, mode=None)) as statistics:
            await _drained(broker, topic)
        assert sorted(first.bodies) == sorted(bodies)  # those that it has accepted do not come again
        assert set(second.bodies) == set(bodies)
    assert statistics.delivered == 20


# ---------------------------------------------------------------------- batches


@on_ours
async def test_batches(broker: Broker, topic: str) -> None:
    bodies = [json.dumps({"n": index}).encode() for index in range(95)]
    await _publish(broker, topic, bodies)
    with receiver() as server:
        options = _options(
            server.url + "/{{topic}}", batching=Batching(10, wait_s=0.2, form=PayloadFormat.JSON)
        )
        async with _delivering(broker, topic, options) as statistics:
            await _drained(broker, topic)
        batches = [json.loads(body) for body in server.bodies]
        assert server.requests[0].headers["content-type"] == "application/json"
    assert sorted(each["n"] for batch in batches for each in batch) == list(range(95))
    assert max(map(len, batches)) == 10
    assert len(batches) <= 30
    assert statistics.delivered == 95


async def test_a_batch_has_limited_bytes(broker: Broker, topic: str) -> None:
    await _publish(broker, topic, [b"x" * 1000] * 12)
    with receiver() as server:
        batching = Batching(100, bytes=5000, wait_s=1.0, form=PayloadFormat.NDJSON)
        async with _delivering(broker, topic, _options(server.url, batching=batching)):
            await _drained(broker, topic)
        assert max(body.count(b"\n") for body in server.bodies) == 5
        assert server.requests[0].headers["content-type"] == "application/x-ndjson"


async def test_a_batch_does_not_wait_for_more_than_may_be_in_flight(broker: Broker, topic: str) -> None:
    await _publish(broker, topic, [b"%d" % index for index in range(10)])
    with receiver() as server:
        batching = Batching(1000, wait_s=600, form=PayloadFormat.JSON)
        async with _delivering(broker, topic, _options(server.url, batching=batching), max_in_flight=5):
            await trio.to_thread.run_sync(server.wait_for, 1)


async def test_only_the_refused_messages_of_a_batch_become_dead_letters(broker: Broker, topic: str) -> None:
    bodies = [b'"bad"' if index in (3, 11) else b"%d" % index for index in range(16)]
    await _publish(broker, topic, bodies)
    accepted: list[Any] = []

    def answer(request: Received) -> int:
        if b"bad" in request.body:
            return 422
        accepted.extend(json.loads(request.body))
        return 200

    with receiver(answer) as server:
        batching = Batching(16, wait_s=1, form=PayloadFormat.JSON)
        async with _delivering(broker, topic, _options(server.url, batching=batching)) as statistics:
            await _drained(broker, topic)
    assert sorted(accepted) == [index for index in range(16) if index not in (3, 11)]
    assert await _letters(broker, f"{topic}.dead", 2) == [b'"bad"', b'"bad"']
    assert (statistics.delivered, statistics.dead) == (14, 2)


# ---------------------------------------------------------------------- bad receivers

ENDLESS = b"HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n" + b"x" * 1_000_000


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"SSH-2.0-x\r\n\r\n", id="garbage"),
        pytest.param(b"HTTP/1.1 404 Not Found\r\nContent-Length: 100\r\n\r\nx", id="cut off"),
        pytest.param(b"HTTP/1.1 999999 OK\r\n\r\n", id="status"),
        pytest.param(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 100_000, id="headers"),
    ],
)
async def test_a_broken_response_is_a_failure(broker: Broker, topic: str, raw: bytes) -> None:
    await _publish(broker, topic, [b"m"])
    answers = iter([Answer(raw=raw)])
    with receiver(lambda _: next(answers, Answer())) as server:
        async with _delivering(broker, topic, _options(server.url)) as statistics:
            await _drained(broker, topic)
        assert server.bodies == [b"m", b"m"]
    assert (statistics.delivered, statistics.requeued) == (1, 1)


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(Answer(raw=b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nx"), id="cut off"),
        pytest.param(Answer(200, {"Content-Length": "100"}, b"x"), id="never complete"),
        pytest.param(Answer(raw=b"HTTP/1.1 201 OK\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n"), id="garbage"),
    ],
)
async def test_an_accepted_request_is_not_sent_again_because_of_its_body(
    broker: Broker, topic: str, answer: Answer
) -> None:
    """As in nsq_to_http: the status says that the receiver has the message."""
    await _publish(broker, topic, [b"m"])
    with receiver(lambda _: answer) as server:
        async with _delivering(broker, topic, _options(server.url)) as statistics:
            await _drained(broker, topic)
        assert server.bodies == [b"m"]
    assert (statistics.delivered, statistics.requeued) == (1, 0)


async def test_a_long_response_is_not_read_to_its_end(broker: Broker, topic: str) -> None:
    """The status counts; the connection is closed."""
    await _publish(broker, topic, [b"m"])
    with receiver(lambda _: Answer(raw=ENDLESS)) as server:
        async with _delivering(broker, topic, _options(server.url)) as statistics:
            await _drained(broker, topic)
    assert (len(server.requests), statistics.delivered) == (1, 1)


async def test_a_slow_receiver_costs_one_slot_until_the_timeout(broker: Broker, topic: str) -> None:
    """The limit is for the whole request: a byte now and then does not extend it."""
    await _publish(broker, topic, [b"slow", *[b"m%d" % index for index in range(30)]])
    first = threading.Event()
    released = threading.Event()

    def answer(request: Received) -> Answer | int:
        if request.body == b"slow" and not first.is_set():
            first.set()
            released.wait(DEADLINE_S)
        return 200

    with receiver(answer) as server:
        options = _options(server.url, concurrency=2, request_timeout_s=0.5)
        async with _delivering(broker, topic, options) as statistics:
            await _drained(broker, topic)
        released.set()
        assert Counter(server.bodies)[b"slow"] >= 2
    assert (statistics.delivered, statistics.dead) == (31, 0)


async def test_a_message_that_cannot_be_sent_is_no_result_of_the_receiver(broker: Broker, topic: str) -> None:
    await _publish(broker, topic, [b"x" * 70_000])
    with receiver() as server:
        async with _delivering(broker, topic, _options(server.url + "/{{body}}")) as statistics:
            await _drained(broker, topic)
        assert server.requests == []
    assert (statistics.dead, statistics.requests) == (1, {})
    assert await _letters(broker, f"{topic}.dead", 1) == [b"x" * 70_000]


async def test_redirects_are_followed_only_if_asked(broker: Broker, topic: str) -> None:
    await _publish(broker, topic, [b"m"])

    def answer(request: Received) -> Answer | int:
        return Answer(307, {"Location": "/new"}) if request.target == "/old" else 200

    with receiver(answer) as server:
        async with _delivering(broker, topic, _options(server.url + "/old")):
            await _drained(broker, topic)
        assert [each.target for each in server.requests] == ["/old"]
        assert await _letters(broker, f"{topic}.dead", 1) == [b"m"]
        await _publish(broker, topic, [b"m2"])
        sender = SenderSettings(TLS, DEADLINE_S, DEADLINE_S, follow_redirects=True)
        async with _delivering(broker, topic, _options(server.url + "/old", sender=sender)):
            await _drained(broker, topic)
        assert [(each.method, each.target, each.body) for each in server.requests[1:]] == [
            ("POST", "/old", b"m2"),
            ("POST", "/new", b"m2"),
        ]


@pytest.mark.parametrize(
    "location",
    [
        *("http://localhost:{port}/x", "//127.0.0.2:{port}/x", "http://127.0.0.1:1/x", "/old"),
        *("file:///etc/passwd", "http://[", "//127.0.0.1:99999/", "x" * 70_000),
    ],
)
async def test_redirects_to_other_servers_invalid_ones_and_circles_are_not_followed(
    broker: Broker, topic: str, location: str
) -> None:
    await _publish(broker, topic, [b"m"])
    with receiver() as server:
        server.answer = lambda _: Answer(302, {"Location": location.format(port=server.port)})
        sender = SenderSettings(TLS, DEADLINE_S, DEADLINE_S, follow_redirects=True)
        async with _delivering(broker, topic, _options(server.url + "/old", sender=sender)):
            await _drained(broker, topic)
        assert len(server.requests) == (6 if location == "/old" else 1)
    assert await _letters(broker, f"{topic}.dead", 1) == [b"m"]


async def test_connections_that_the_receiver_closed_are_replaced(broker: Broker, topic: str) -> None:
    with receiver() as server:
        async with _delivering(broker, topic, _options(server.url)) as statistics:
            for index in range(5):
                await _publish(broker, topic, [b"%d" % index])
                await trio.to_thread.run_sync(server.wait_for, index + 1)
                await _drained(broker, topic)
                server.drop_connections()
        assert sorted(server.bodies) == [b"0", b"1", b"2", b"3", b"4"]
    assert (statistics.delivered, statistics.requeued) == (5, 0)


# ---------------------------------------------------------------------- limits


async def test_requests_and_messages_in_flight_are_limited(broker: Broker, topic: str) -> None:
    """As long as nothing tells how fast the receiver is, no messages wait."""
    released = [threading.Event(), threading.Event()]

    def answer(request: Received) -> int:
        released[request.body[0]].wait(DEADLINE_S)
        return 200

    with receiver(answer) as server:
        async with _delivering(broker, topic, _options(server.url, concurrency=5), max_in_flight=20):
            for which, expected in enumerate((5, 20)):
                server.requests.clear()
                await _publish(broker, topic, [bytes([which])] * 100)
                await trio.to_thread.run_sync(server.wait_for, 5)
                await _in_flight(broker, topic, expected)
                assert len(server.requests) == 5
                released[which].set()
                await _drained(broker, topic)
                assert len(server.requests) == 100


@on_ours
async def test_nothing_more_arrives_while_no_receiver_works(broker: Broker, topic: str) -> None:
    """After a pause one message is delivered at a time."""
    await _publish(broker, topic, [b"%d" % index for index in range(100)])
    with receiver(lambda _: Answer(429, {"Retry-After": "600"})) as server:
        async with _delivering(broker, topic, _options(server.url), max_in_flight=10):
            await trio.to_thread.run_sync(server.wait_for, 1)
            await _until(lambda: broker.channel_stats(topic, "c")["clients"][0]["ready_count"] == 0)
            assert broker.channel_stats(topic, "c")["in_flight_count"] <= 10
        stats = broker.channel_stats(topic, "c")
    assert (stats["depth"], stats["in_flight_count"]) == (100, 0)  # all are back


@on_ours
async def test_an_interruption_lets_running_requests_end(broker: Broker, topic: str) -> None:
    await _publish(broker, topic, [b"m"])
    released = threading.Event()

    def answer(_: Received) -> int:
        released.wait(DEADLINE_S)
        return 200

    with receiver(answer) as server:
        async with _delivering(broker, topic, _options(server.url)):
            await trio.to_thread.run_sync(server.wait_for, 1)
            threading.Timer(0.2, released.set).start()
        stats = broker.channel_stats(topic, "c")
        assert (stats["depth"], stats["in_flight_count"], len(server.requests)) == (0, 0, 1)


async def test_after_an_interruption_no_request_begins(broker: Broker, topic: str) -> None:
    """Otherwise a receiver that refuses batches slowly would delay the end by a request for each half."""
    bodies = [b"%d" % index for index in range(8)]
    await _publish(broker, topic, bodies)
    released = threading.Event()

    def answer(_: Received) -> int:
        released.wait(DEADLINE_S)
        return 413

    options: dict[str, Any] = {"batching": Batching(8, wait_s=DEADLINE_S, form=PayloadFormat.JSON)}
    with receiver(answer) as server:

        async def deliver() -> None:
            async with _delivering(broker, topic, _options(server.url, **options)):
                await trio.sleep_forever()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(deliver)
            await trio.to_thread.run_sync(server.wait_for, 1)
            nursery.cancel_scope.cancel()
            released.set()
        assert len(server.requests) == 1
    await _until(lambda: bool(broker.channel_stats(topic, "c")["depth"] == 8))


async def test_a_part_of_the_messages_is_sampled(broker: Broker, topic: str) -> None:
    await _publish(broker, topic, [b"%d" % index for index in range(400)])
    with receiver() as server:
        async with _delivering(broker, topic, _options(server.url, sample=0.25)) as statistics:
            await _drained(broker, topic)
        assert 40 < len(server.requests) < 180
    assert statistics.delivered + statistics.sampled_out == 400


@on_both
async def test_messages_do_not_time_out_while_they_wait(broker: Broker, topic: str) -> None:
    """One is being sent, the others wait for their turn, all for longer than the message timeout."""
    await _publish(broker, topic, [b"%d" % index for index in range(5)])
    slow = threading.Event()  # never set

    def answer(request: Received) -> int:
        if request.headers["x-attempts"] == "1":
            slow.wait(1.2)
        return 200

    with receiver(answer) as server:
        options = _options(
            server.url, concurrency=1, headers=(("X-Attempts", HeaderTemplate("{{attempts}}")),)
        )
        consumer = ConsumerOptions(msg_timeout_s=3)
        async with _delivering(broker, topic, options, consumer=consumer):
            await _drained(broker, topic)
        stats = broker.channel_stats(topic, "c")
        assert (stats["timeout_count"], stats["requeue_count"]) == (0, 0)
        assert sorted(server.bodies) == [b"0", b"1", b"2", b"3", b"4"]


async def test_answered_messages_do_not_stay_in_memory(broker: Broker, topic: str) -> None:
    """Also if one that arrived before them takes long."""
    tracemalloc.start()
    released = threading.Event()

    def answer(request: Received) -> int:
        if request.body == b"slow":
            released.wait(DEADLINE_S)
        return 200

    try:
        with receiver(answer) as server:
            async with _delivering(broker, topic, _options(server.url, concurrency=2)) as statistics:
                await _publish(broker, topic, [b"slow"])
                await trio.to_thread.run_sync(server.wait_for, 1)
                for _ in range(8):
                    done = statistics.delivered
                    await _publish(broker, topic, [b"x" * 500_000] * 20)
                    await _until(lambda done=done: statistics.delivered >= done + 20)  # type: ignore[misc]
                    server.requests.clear()
                assert tracemalloc.get_traced_memory()[0] < 45_000_000  # of 80 MB that were sent
                released.set()
    finally:
        released.set()
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["t", "t" * 64, "t" * 59 + ".dead", "t" * 54 + "#ephemeral", "t.dead"])
def test_a_dead_letter_never_goes_back_to_its_topic(name: str) -> None:
    found = _options("http://h/").dead_letter_topic_of(name)
    assert is_valid_name(found)
    assert found != name
    assert found.endswith(".dead")


@pytest.mark.parametrize("start", [nsqd, qcli_serve])
async def test_messages_wait_no_longer_than_the_broker_allows(
    tmp_path: Path, start: Callable[..., AbstractContextManager[Broker]]
) -> None:
    """Otherwise the broker would deliver them again, and after the pause each would be sent twice."""
    bodies = [b"%d" % index for index in range(20)]
    with start(tmp_path / "data", "--msg-timeout=1s", "--max-msg-timeout=2s") as short:
        short.create("t", "c")
        with receiver() as server:
            port = server.port
        async with _delivering(short, "t", _options(f"http://127.0.0.1:{port}/")) as statistics:
            await _publish(short, "t", bodies)
            await _until(lambda: statistics.requeued >= 20)  # by the program, before the broker's timeout
            with receiver(port=port) as server:
                await _drained(short, "t")
                assert set(server.bodies) == set(bodies)


async def test_receivers_slower_than_the_message_timeout(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The tool takes no more messages than the receiver takes before the broker delivers them again."""
    slow = threading.Event()  # never set
    bodies = [b"%d" % index for index in range(6)]
    with qcli_serve(tmp_path / "data", "--msg-timeout=1s", "--max-msg-timeout=2500ms") as broker:
        broker.create("t", "c")
        with receiver(lambda _: slow.wait(1.4) or 200) as server:
            async with _delivering(broker, "t", _options(server.url, concurrency=2)):
                await _publish(broker, "t", bodies)
                await _drained(broker, "t")
            assert sorted(server.bodies) == bodies
        stats = broker.channel_stats("t", "c")
    assert (stats["timeout_count"], stats["requeue_count"]) == (0, 0)
    assert not caplog.messages


async def test_a_request_that_ends_after_the_message_timed_out_is_not_repeated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slow = threading.Event()  # never set
    with qcli_serve(tmp_path / "data", "--msg-timeout=500ms", "--max-msg-timeout=500ms") as broker:
        broker.create("t", "c")
        with receiver(lambda _: slow.wait(1.2) or 200) as server:
            async with _delivering(broker, "t", _options(server.url, concurrency=4)) as statistics:
                await _publish(broker, "t", [b"a", b"b"])
                await _drained(broker, "t")
            assert sorted(server.bodies) == [b"a", b"b"]
    assert statistics.delivered == 2
    (warning,) = caplog.messages
    assert "--max-msg-timeout" in warning


async def test_messages_that_wait_are_not_sent_after_their_connection_was_lost(tmp_path: Path) -> None:
    """The broker delivers them again; otherwise each would be sent twice."""
    bodies = [b"%d" % index for index in range(20)]
    with receiver() as server:
        port = server.port
    with qcli_serve(tmp_path / "data") as first:
        tcp, http = first.tcp_address, first.http_address
        first.create("t", "c")
        await _publish(first, "t", bodies)
        async with _delivering(first, "t", _options(f"http://127.0.0.1:{port}/")) as statistics:
            await _until(lambda: first.channel_stats("t", "c")["in_flight_count"] == 20)
            await _until(lambda: statistics.requests.total() >= 2)  # it waits
            first.process.terminate()
            await trio.to_thread.run_sync(first.process.wait)
            with (
                qcli_serve(tmp_path / "data", f"--tcp-address={tcp}", f"--http-address={http}") as second,
                receiver(port=port) as server,
            ):
                await _drained(second, "t")
    assert sorted(server.bodies) == sorted(bodies)
    assert (statistics.delivered, statistics.requeued) == (20, 0)
