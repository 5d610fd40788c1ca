"""Typed topics: values become bodies and bodies values, and nothing else gets through."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pydantic
import pytest

from client.support.loops import Loop, on_both, run
from trio_nsq import JSON, Codec, DecodeFailed, Msgspec, Pydantic, Topic, sync
from trio_nsq.testing import NSQ, FakeProducer, NSQServer


class Order(msgspec.Struct):
    id: int
    item: str


class Invoice(pydantic.BaseModel):
    id: int
    item: str = pydantic.Field(alias="thing")


@dataclass
class Plain:
    id: int


class Upper:
    """A codec of a program."""

    def encode(self, value: str) -> bytes:
        return value.upper().encode()

    def decode(self, body: bytes) -> str:
        return body.decode("ascii").lower()


CASES: list[tuple[Codec[Any], object, bytes]] = [
    (JSON(), {"id": 1, "item": "ü"}, '{"id":1,"item":"ü"}'.encode()),
    (Msgspec(Order), Order(1, "ü"), '{"id":1,"item":"ü"}'.encode()),
    (Msgspec(list[Order]), [Order(1, "a")], b'[{"id":1,"item":"a"}]'),
    (Msgspec(dict[str, int]), {"a": 1}, b'{"a":1}'),
    (Msgspec(Plain), Plain(1), b'{"id":1}'),
    (Pydantic(Invoice), Invoice(id=1, thing="ü"), '{"id":1,"thing":"ü"}'.encode()),
    (Pydantic(list[Invoice]), [Invoice(id=1, thing="a")], b'[{"id":1,"thing":"a"}]'),
    (Pydantic(int), 5, b"5"),
    (Upper(), "abc", b"ABC"),
]


@pytest.mark.parametrize(("codec", "value", "body"), CASES)
def test_round_trip(codec: Codec[Any], value: object, body: bytes) -> None:
    topic = Topic("orders", codec)
    assert topic.encode(value) == body
    assert topic.decode(body) == value


@pytest.mark.parametrize("body", [b"", b"\xff", b"{", b'{"id":"x","item":"a"}', b"[" * 100_000, b"null"])
@pytest.mark.parametrize("codec", [Msgspec(Order), Pydantic(Invoice)])
def test_bodies_without_a_value(codec: Codec[Any], body: bytes) -> None:
    with pytest.raises(DecodeFailed, match="a message of topic 'orders' cannot be decoded: ") as failed:
        Topic("orders", codec).decode(body)
    assert failed.value.reason == str(failed.value.__cause__)


@pytest.mark.parametrize("body", [b"", b"\xff", b"{", b"NaN", b"[" * 100_000])
def test_bodies_that_are_not_json(body: bytes) -> None:
    with pytest.raises(DecodeFailed):
        Topic("orders", JSON()).decode(body)


@pytest.mark.parametrize(
    ("codec", "value"),
    [
        (Msgspec(Order), b'{"id":1,"item":"a"}'),
        (Msgspec(Order), {"id": 1, "item": "a"}),
        (Msgspec(Plain), Order(1, "a")),
        (Pydantic(Invoice), Order(1, "a")),
        (JSON(), b"bytes"),
        (JSON(), float("nan")),
    ],
)
def test_values_of_another_type(codec: Codec[Any], value: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        Topic("orders", codec).encode(value)


def test_invalid_names() -> None:
    with pytest.raises(ValueError, match="'no topic!' is not a valid topic name"):
        Topic("no topic!", JSON())


@on_both
def test_publish_values(loop: Loop) -> None:
    async def main() -> None:
        orders = Topic("orders", Msgspec(Order))
        async with FakeProducer() as producer:
            await producer.publish(orders, Order(1, "a"))
            await producer.publish_many(orders, (Order(number, "a") for number in (2, 3)))
            await producer.submit(orders, Order(4, "a"), defer_s=0.5).wait()
            with pytest.raises(TypeError, match="the message must be of type Order, not bytes"):
                await producer.publish(orders, b"{}")  # type: ignore[misc]  # what is refused
            wrong = [Order(5, "a"), Invoice(id=1, thing="a")]
            with pytest.raises(TypeError, match="the message must be of type Order, not Invoice"):
                await producer.publish_many(orders, wrong)  # type: ignore[misc]  # what is refused
        assert [orders.decode(body).id for body in producer.published("orders")] == [1, 2, 3, 4]
        assert producer.messages[-1].defer_s == 0.5

    run(loop, main)


@pytest.fixture(scope="module")
def nsq(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NSQ]:
    with NSQServer(tmp_path_factory.mktemp("nsq")) as server, NSQ(server) as nsq:
        yield nsq


@pytest.mark.slow  # starts a broker
def test_publish_values_without_async_code(nsq: NSQ) -> None:
    orders = Topic("orders", Pydantic(Invoice))
    with sync.Producer(nsq.tcp_address) as producer:
        producer.publish(orders, Invoice(id=1, thing="a"))
        producer.publish_many(orders, (Invoice(id=number, thing="a") for number in (2, 3)))
        producer.submit(orders, Invoice(id=4, thing="a")).wait()
        with pytest.raises(TypeError, match="the message must be of type Invoice"):
            producer.publish(orders, b"{}")  # type: ignore[misc]  # what is refused
    with sync.Consumer(orders, "c", nsqd_tcp_addresses=nsq.tcp_address, max_in_flight=4) as consumer:
        found = []
        for message in consumer:
            found.append(orders.decode(message.body).id)
            message.finish()
            if len(found) == 4:
                break
    assert found == [1, 2, 3, 4]
