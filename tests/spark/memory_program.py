"""A program that reads a topic as a task does, and prints what it read and its memory. For `test_data_source`.

It is a process of its own, because the peak of a process includes all that it did before. Its argument is a JSON
object with the options of the data source.
"""

import json
import sys
from pathlib import Path

import pyarrow  # noqa: F401  # counts as memory before reading
from pyspark.sql.datasource import CaseInsensitiveDict

from trio_nsq.spark.data_source import NsqDataSource


def peak_bytes() -> int:
    """Return the largest resident size of this program so far; `ru_maxrss` would include the process that began it."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


source = NsqDataSource(CaseInsensitiveDict(json.loads(sys.argv[1])))
reader = source.reader(source.schema())
before_bytes = peak_bytes()
rows = 0
for partition in reader.partitions():
    for batch in reader.read(partition):
        rows += batch.num_rows
print(json.dumps({"rows": rows, "bytes": peak_bytes() - before_bytes}))
