"""A program that exports a topic in its process, and prints what it wrote and its memory. For `test_to_parquet_memory`.

It is a process of its own, because the peak of a process includes all that it did before. Its arguments are the address
of a broker, a topic, a folder, and a layout as JSON. The topic `small` is exported first: its memory is not counted.
"""

import json
import sys
from pathlib import Path

from trio_nsq.spark.export.job import open_export
from trio_nsq.spark.export.layout import Layout
from trio_nsq.spark.export.request import ExportRequest
from trio_nsq.spark.logs import BrokerPlace
from trio_nsq.spark.runtime.engine import run_inline

address, topic, folder = sys.argv[1:4]
layout = Layout.from_json(json.loads(sys.argv[4]))


def export(name: str) -> int:
    """Export a topic, and return the number of messages."""
    place = BrokerPlace(address, name)
    with open_export(ExportRequest(name, f"{folder}/{name}", layout=layout), [place]) as job:
        job.run(run_inline, job.plan([place]), lambda *_: None)
    return job.result.messages


def peak_bytes() -> int:
    """Return the largest resident size of this program so far; `ru_maxrss` would include the process that began it."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


export("small")
before_bytes = peak_bytes()
print(json.dumps({"messages": export(topic), "bytes": peak_bytes() - before_bytes}))
