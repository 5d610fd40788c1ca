"""Publish and consume with gnsq, a Python client on gevent. README.md describes the options."""

import argparse
import logging
import os
import sys
from typing import Any

import gevent
import gnsq
from gnsq.backofftimer import BackoffTimer

from interop import peer_options


def fatal(_sender: object, error: Exception) -> None:
    """End the process: gnsq itself logs error frames only at debug level, and continues."""
    print(f"gnsq_peer: {error!r}", file=sys.stderr, flush=True)
    os._exit(1)


def connection(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments that Producer and Consumer pass to their connections."""
    secret = options.auth and options.auth.encode()
    return peer_options.connection(options) | {"auth_secret": secret}


def pub(options: argparse.Namespace) -> None:
    """Publish all messages before waiting for the first reply."""
    bodies = peer_options.read_bodies()
    producer = gnsq.Producer([options.addr], **connection(options))
    producer.on_error.connect(fatal)
    producer.start()
    replies = []
    for i in range(0, len(bodies), 1 if options.defer else options.batch):
        if options.batch > 1 and not options.defer:
            reply = producer.multipublish(options.topic, bodies[i : i + options.batch], raise_error=False)
        else:
            reply = producer.publish(options.topic, bodies[i], defer=options.defer or None, raise_error=False)
        replies.append(reply)
    for reply in replies:
        reply.get()
    logging.disable()  # gnsq logs its own closing as a lost connection
    producer.close()
    producer.join()


class Consumer(gnsq.Consumer):  # type: ignore[misc]  # gnsq publishes no types
    """A consumer that records the connection of the current message, and closes after CLOSE_WAIT."""

    def _create_backoff(self) -> BackoffTimer:
        """Return gnsq's backoff timer with a minimum pause: a busy machine may miss a very short random pause."""
        return BackoffTimer(max_interval=self.max_backoff_duration, min_interval=0.3)

    def handle_message(self, conn: Any, message: Any) -> None:
        self.conn = conn
        super().handle_message(conn, message)

    def handle_response(self, conn: Any, response: bytes) -> None:
        super().handle_response(conn, response)
        if response == b"CLOSE_WAIT":
            logging.disable()  # gnsq logs its own closing as a lost connection
            self.close()


def sub(options: argparse.Namespace) -> None:
    """Finish ``--n`` messages and print each delivery."""
    taken = 0

    def handle(consumer: Consumer, message: Any) -> None:
        nonlocal taken
        if options.requeue_first and message.attempts == 1:
            message.requeue(0, backoff=False)
            return
        if options.fail_first and message.attempts == 1:
            raise gnsq.errors.NSQRequeueMessage("as asked for")
        taken += 1
        peer_options.write_delivery(message.body, message.attempts)
        if options.hold_first and taken == 1:
            gevent.get_hub().threadpool.apply(sys.stdin.read)
        if options.touch:
            message.touch()
        if taken == options.n:
            consumer.conn.close()  # CLS before the last FIN, which lets the broker send another message
        message.finish()

    consumer = Consumer(
        options.topic,
        options.channel,
        [options.addr],
        message_handler=handle,
        max_in_flight=options.max_in_flight,
        max_tries=0,
        max_backoff_duration=1,
        requeue_delay=500,  # ms; without a delay, all may be redelivered and finished before the backoff starts
        **connection(options),
    )
    consumer.on_error.connect(fatal)
    consumer.start()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, handlers=[peer_options.Fatal()])
    chosen = peer_options.parse()
    (pub if chosen.command == "pub" else sub)(chosen)
