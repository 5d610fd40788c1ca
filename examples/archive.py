"""Append the messages of a channel to a file, then exit: python examples/archive.py TOPIC/CHANNEL FILE ADDRESS...

A script without async code, for example for cron. It finishes each batch of messages after the file is synced, so that
no message is lost; after a crash some may be in the file twice.
"""

import os
import sys
from collections.abc import Sequence

import trio_nsq
import trio_nsq.sync

IDLE_S = 0.5


def main(source: str, path: str, addresses: Sequence[str]) -> int:
    """Archive the messages of the channel; return the exit code."""
    topic, _, channel = source.partition("/")
    count = 0
    try:
        with (
            open(path, "ab") as file,
            trio_nsq.sync.Consumer(
                topic, channel, nsqd_tcp_addresses=addresses, max_in_flight=2500, idle_timeout_s=IDLE_S
            ) as consumer,
        ):
            for batch in consumer.batches(max_messages=1000, max_wait_s=0.2):
                file.writelines(body + b"\n" for body in batch.bodies)
                file.flush()
                os.fsync(file.fileno())
                batch.finish()
                count += len(batch)
    except (
        trio_nsq.ConnectionFailed,
        OSError,
        ValueError,
    ) as error:  # ValueError: an invalid name or address
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass  # unfinished messages were returned to the broker
    print(f"{count} messages appended to {path}")
    return 0


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
        sys.exit()
    if len(sys.argv) < 4 or "/" not in sys.argv[1]:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
