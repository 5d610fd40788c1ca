"""Publish and consume with pynsq, the official Python client (Tornado). README.md describes the options."""

import argparse
import asyncio
import base64
import functools
import json
import logging
import sys
from typing import Any

import nsq

from interop import peer_options


async def pub(options: argparse.Namespace) -> None:
    """Publish all messages before waiting for the first reply."""
    bodies = peer_options.read_bodies()
    writer = nsq.Writer([options.addr], **peer_options.connection(options))
    # pynsq has no public API to check for an open connection; pub() itself uses this table of connections.
    while not writer.conns:
        await asyncio.sleep(0.005)

    replies: list[asyncio.Future[None]] = []

    def reply() -> Any:
        """Return the callback of one publish; it completes the newest future in ``replies``."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        replies.append(future)

        def settle(_conn: object, data: object) -> None:
            if data == b"OK":
                future.set_result(None)
            elif not future.done():
                future.set_exception(RuntimeError(f"the broker answered {data!r}"))

        return settle

    for i in range(0, len(bodies), 1 if options.defer else options.batch):
        if options.defer:
            writer.dpub(options.topic, options.defer, bodies[i], callback=reply())
        elif options.batch > 1:
            writer.mpub(options.topic, bodies[i : i + options.batch], callback=reply())
        else:
            writer.pub(options.topic, bodies[i], callback=reply())
    await asyncio.gather(*replies)


async def fail_over(options: argparse.Namespace) -> None:
    """Publish each message until a broker has accepted it, with one Writer for all brokers; print its failures."""
    addresses = options.addr.split(",")
    writer = nsq.Writer(addresses, **peer_options.connection(options))
    while len(writer.conns) < len(addresses):
        await asyncio.sleep(0.005)
    while line := await asyncio.to_thread(sys.stdin.readline):
        failures: list[str] = []
        while True:
            reply: asyncio.Future[object] = asyncio.get_running_loop().create_future()
            callback = functools.partial(_set_reply, reply)
            writer.pub(options.topic, base64.b64decode(line), callback=callback)
            if (answer := await reply) == b"OK":
                break
            failures.append(str(answer))
            if len(failures) % len(addresses) == 0:
                await asyncio.sleep(0.05)  # no broker accepts it at the moment
        print(json.dumps({"failures": failures}), flush=True)


def _set_reply(reply: asyncio.Future[object], _conn: object, data: object) -> None:
    reply.set_result(data)


async def sub(options: argparse.Namespace) -> None:
    """Finish ``--n`` messages and print each delivery."""
    taken = 0
    done = asyncio.Event()

    async def handle(message: Any) -> bool | None:
        nonlocal taken
        if options.requeue_first and message.attempts == 1:
            message.requeue(delay=0, backoff=False)
            return None
        if options.fail_first and message.attempts == 1:
            return False
        taken += 1
        first, last = taken == 1, taken == options.n
        peer_options.write_delivery(message.body, message.attempts)
        if options.hold_first and first:
            await asyncio.to_thread(sys.stdin.read)
        if options.touch:
            message.touch()
        if last:
            reader.set_max_in_flight(0)  # before the last FIN, which lets the broker send another message
        message.finish()
        if last:
            done.set()
        return None

    reader = nsq.Reader(
        topic=options.topic,
        channel=options.channel,
        nsqd_tcp_addresses=[options.addr],
        message_handler=handle,
        max_in_flight=options.max_in_flight,
        max_tries=0,
        requeue_delay=0,
        max_backoff_duration=3,
        **peer_options.connection(options),
    )
    await done.wait()
    logging.disable()  # pynsq logs its own closing as an error
    reader.close()


if __name__ == "__main__":
    chosen = peer_options.parse()
    handler = logging.NullHandler() if chosen.command == "fail-over" else peer_options.Fatal()
    logging.basicConfig(level=logging.ERROR, handlers=[handler])
    asyncio.run({"pub": pub, "sub": sub, "fail-over": fail_over}[chosen.command](chosen))
