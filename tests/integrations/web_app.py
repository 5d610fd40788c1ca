"""The web service of docs/how-to/web-services.md, which notes what it has done: `uvicorn integrations.web_app:app`."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException, Request

import trio_nsq

LEDGER = Path(os.environ["LEDGER"])
NSQD = os.environ["NSQD"]


async def handle(message: trio_nsq.Message) -> None:
    await asyncio.sleep(float(os.environ["HANDLE_S"]))
    note(f"handled {message.body.decode()}")


def note(line: str) -> None:
    """Append a line to the ledger, whole also if the process is killed."""
    with LEDGER.open("ab", buffering=0) as ledger:
        ledger.write(f"{line}\n".encode())


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with (
        trio_nsq.Producer(NSQD, connect_timeout_s=60) as app.state.producer,
        trio_nsq.Consumer(
            "orders", "mail", nsqd_tcp_addresses=NSQD, max_in_flight=10, connect_timeout_s=60
        ) as consumer,
    ):
        app.state.consuming = asyncio.create_task(consumer.run(handle, concurrency=10))
        yield
        await consumer.aclose()
        await app.state.consuming
    note("left")


def producer(request: Request) -> trio_nsq.Producer:
    found: trio_nsq.Producer = request.app.state.producer
    return found


app = FastAPI(lifespan=lifespan)


@app.post("/orders/{number}", status_code=202)
async def order(number: int, producer: Annotated[trio_nsq.Producer, Depends(producer)]) -> None:
    try:
        await producer.publish("orders", b"%d" % number)
    except trio_nsq.PublishFailed as error:
        raise HTTPException(503, str(error)) from error


@app.get("/health")
async def health(request: Request) -> None:
    if request.app.state.consuming.done():
        raise HTTPException(503, "the consumer has stopped")
