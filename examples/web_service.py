"""A web service that publishes orders, and handles them in the background: uvicorn web_service:app"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException, Request
from pydantic import BaseModel

import trio_nsq

NSQD = os.environ.get("NSQD", "127.0.0.1:4150")


class Order(BaseModel):
    id: int
    item: str


orders = trio_nsq.Topic("orders", trio_nsq.Pydantic(Order))


async def handle(message: trio_nsq.Message, order: Order) -> None:
    print(f"order {order.id}: {order.item}", flush=True)


def on_failure(message: trio_nsq.Message, error: Exception) -> trio_nsq.Answer:
    if isinstance(error, trio_nsq.DecodeFailed) or message.attempts >= 10:
        return trio_nsq.DeadLetter("orders-failed", str(error))
    return trio_nsq.Retry(delay_s=message.attempts)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with (
        trio_nsq.Producer(NSQD, connect_timeout_s=60) as app.state.producer,
        trio_nsq.Consumer(orders, "mail", nsqd_tcp_addresses=NSQD, connect_timeout_s=60) as consumer,
    ):
        app.state.consuming = asyncio.create_task(
            consumer.run(handle, decode=orders.decode, on_failure=on_failure, concurrency=10)
        )
        yield
        await consumer.aclose()
        await app.state.consuming


def producer_of(request: Request) -> trio_nsq.Producer:
    producer: trio_nsq.Producer = request.app.state.producer
    return producer


app = FastAPI(lifespan=lifespan)


@app.post("/orders", status_code=202)
async def place(order: Order, producer: Annotated[trio_nsq.Producer, Depends(producer_of)]) -> None:
    try:
        await producer.publish(orders, order, timeout_s=10)
    except trio_nsq.PublishFailed as error:
        raise HTTPException(503, str(error)) from error


@app.get("/health")
async def health(request: Request) -> None:
    if request.app.state.consuming.done():
        raise HTTPException(503, "the consumer has stopped")
