"""Publish lines with a pynsq Writer that has several brokers: `--topic T ADDRESS...`.

A line that a broker refuses is published again. pynsq chooses the broker, whose address
is printed for each line.
"""

import argparse
import asyncio
import faulthandler
import sys
from typing import Any

import nsq

_TIMEOUT_S = 60


async def publish(writer: nsq.Writer, topic: str, line: bytes) -> str:
    """Publish a line until a broker acknowledges it; return the address of that broker."""
    while True:
        replies: asyncio.Queue[tuple[Any, object]] = asyncio.Queue()
        writer.pub(topic, line, callback=lambda *reply, replies=replies: replies.put_nowait(reply))
        connection, data = await replies.get()
        if data == b"OK":
            return f"{connection.host}:{connection.port}"
        await asyncio.sleep(0.01)  # without an open connection pynsq fails at once


async def main(options: argparse.Namespace) -> None:
    writer = nsq.Writer(options.addresses, reconnect_interval=0.2)
    while len(writer.conns) < len(options.addresses):  # pynsq has no public API to check for open connections
        await asyncio.sleep(0.005)
    while line := await asyncio.to_thread(sys.stdin.buffer.readline):
        print(await publish(writer, options.topic, line.rstrip(b"\n")), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--topic", required=True)
    parser.add_argument("addresses", nargs="+")
    faulthandler.dump_traceback_later(_TIMEOUT_S, exit=True)
    asyncio.run(main(parser.parse_args()))
