"""Publish the rows of a CSV file as JSON, each once: python csv_topic.py FILE TOPIC

The name of the producer is that of the file, and the number of a message is its row. So a program that was interrupted,
or is started again with a longer file, continues after the last row that the broker has.
"""

import csv
import json
import sys
from itertools import islice
from pathlib import Path

import trio_nsq
import trio_nsq.sync


def main(path: Path, topic: str) -> int:
    """Publish the rows that the broker does not have; return their number."""
    count = 0
    with path.open(newline="") as file, trio_nsq.sync.Producer("127.0.0.1:4150", name=path.stem) as producer:
        last = producer.last_number(topic)
        rows = islice(csv.DictReader(file), 0 if last is None else last + 1, None)
        while bodies := [json.dumps(row).encode() for row in islice(rows, 1000)]:
            producer.publish_many(topic, bodies)
            count += len(bodies)
    return count


if __name__ == "__main__":
    try:
        print(f"{main(Path(sys.argv[1]), sys.argv[2])} rows published")
    except (trio_nsq.NSQError, OSError) as error:
        sys.exit(str(error))
