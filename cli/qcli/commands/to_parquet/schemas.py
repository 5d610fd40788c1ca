"""Prints the schema of an export."""

from trio_nsq.spark.export.sampling import find_columns
from trio_nsq.spark.schemas.arrow_json import print_schema

from ...broker.brokers import distinct_brokers
from ...framework.errors import ExitCode
from ...framework.output import write
from ..shared.engine import library_errors
from .brokers import find_brokers, when_refused
from .options import ToParquetOptions


def print_columns(options: ToParquetOptions) -> int:
    """Print the schema that the folder has, or else a sample of the messages. Raises Failure: there is none."""
    request = options.request()
    with library_errors(when_refused):
        found = [] if options.consume else find_brokers(options)
        addresses = found if options.from_segments else distinct_brokers(found)
        columns = find_columns(request, [options.place(address) for address in addresses])
    write(print_schema(columns))
    return ExitCode.OK
