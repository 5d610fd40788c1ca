"""Look addresses up with a service that allows a few requests per second: python geocode.py URL

The broker limits the rate of the channel, so any number of these programs together keep it. If the service asks for a
pause (status 429 or 503), the message waits and the delivery is no attempt. Other statuses 4xx are final.
"""

import asyncio
import signal
import sys
from urllib.parse import quote

import httpx

import trio_nsq


async def main(url: str) -> None:
    """Look up each address of the topic, until SIGTERM."""
    async with (
        httpx.AsyncClient(base_url=url, timeout=10) as service,
        trio_nsq.Producer("127.0.0.1:4150") as producer,
        trio_nsq.Consumer("addresses", "geocode", nsqd_tcp_addresses="127.0.0.1:4150") as consumer,
    ):

        async def look_up(message: trio_nsq.Message) -> trio_nsq.Answer | None:
            found = await service.get("/" + quote(message.body))
            if found.status_code in (429, 503):
                pause_s = float(found.headers.get("retry-after", 1))
                return trio_nsq.Retry(delay_s=pause_s, backoff=False, count_attempt=False)
            if found.is_client_error:
                return trio_nsq.DeadLetter("addresses.failed", f"status {found.status_code}")
            found.raise_for_status()
            await producer.publish("places", found.content, headers={"address": message.body.decode()})
            return None

        def on_failure(message: trio_nsq.Message, error: Exception) -> trio_nsq.Answer | None:
            if isinstance(error, httpx.TransportError):  # the service is down: try until it is back
                return trio_nsq.Retry(delay_s=1, count_attempt=False)
            return None

        await consumer.run(
            look_up,
            on_failure=on_failure,
            max_attempts=5,
            dead_letter_topic="addresses.failed",
            stop_on=(signal.SIGTERM,),
        )


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
