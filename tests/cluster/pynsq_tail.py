"""Print what a pynsq Reader gets, a message a line; it finds brokers by a discovery service. Runs until killed."""

import logging
import sys
from typing import Any

import nsq


def show(message: Any) -> bool:
    sys.stdout.buffer.write(message.body + b"\n")
    sys.stdout.buffer.flush()
    return True


if __name__ == "__main__":
    lookupd, topic, channel, poll_s = sys.argv[1:]
    logging.disable()  # it logs each lost connection as an error
    nsq.Reader(
        topic=topic,
        channel=channel,
        message_handler=show,
        lookupd_http_addresses=[f"http://{lookupd}"],
        lookupd_poll_interval=int(poll_s),
        max_in_flight=50,
        max_tries=0,
    )
    nsq.run()
