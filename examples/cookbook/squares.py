"""Ask a service and wait for its answer: python squares.py serve | ask NUMBER...

The question names a topic for its answer, and has an id. Both are headers. The topic is ephemeral: it ends with its
program.
"""

import asyncio
import signal
import sys
from uuid import uuid4

import trio_nsq

NSQD = "127.0.0.1:4150"


async def serve() -> None:
    """Answer questions until SIGTERM."""
    async with trio_nsq.Producer(NSQD) as producer:

        async def answer(message: trio_nsq.Message) -> None:
            number = int(message.body)
            reply_to, question = message.headers["reply-to"], message.headers["id"]
            await producer.publish(reply_to, b"%d" % number**2, headers={"id": question})

        async with trio_nsq.Consumer("squares", "service", nsqd_tcp_addresses=NSQD) as consumer:
            await consumer.run(answer, concurrency=10, max_attempts=3, stop_on=(signal.SIGTERM,))


async def ask(numbers: list[str]) -> None:
    """Ask all questions at once, and print the answers in their order."""
    reply_to = f"replies-{uuid4().hex}#ephemeral"
    async with (
        trio_nsq.Consumer(reply_to, "all#ephemeral", nsqd_tcp_addresses=NSQD, max_in_flight=100) as consumer,
        trio_nsq.Producer(NSQD) as producer,
        asyncio.timeout(10),
    ):
        answers: dict[str, str] = {}
        for question in range(len(numbers)):
            headers = {"reply-to": reply_to, "id": f"{question}"}
            await producer.publish("squares", numbers[question].encode(), headers=headers)
        async for message in consumer:
            answers[message.headers["id"]] = message.body.decode()
            message.finish()
            if len(answers) == len(numbers):
                break
        for question, number in enumerate(numbers):
            print(f"{number}: {answers[str(question)]}")


if __name__ == "__main__":
    try:
        asyncio.run(serve() if sys.argv[1:] == ["serve"] else ask(sys.argv[2:]))
    except TimeoutError:
        sys.exit("no answer in 10 s: does the service run?")
