"""One run of `to-parquet` of a channel: receives into a spool, and exports the spool."""

import dataclasses
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack

import trio

from trio_nsq.client import AuthRefused, ConnectionFailed, Consumer, Producer
from trio_nsq.client.errors import BrokerUnreachable
from trio_nsq.protocol import NSQError
from trio_nsq.spark.export.job import ExportJob
from trio_nsq.spark.runtime.engine import Advance
from trio_nsq.spark.spool.collect import FIRST_IN_FLIGHT, CollectLimits, Collector, StopReason
from trio_nsq.spark.spool.spool import Spool
from trio_nsq.text.wording import count_of, is_or_are

from ...broker.connection_options import ConnectOptions
from ...broker.failures import connection_failure
from ...framework.errors import ExitCode, Failure, Terminated, leaf_exceptions
from ...framework.output import print_diagnostic, show_library_warnings, silence_library
from ...framework.signals import at_first_signal, run_trio
from ...terminal.progress import message_progress
from .export_run import ExportRun
from .options import ToParquetOptions

_FILES_AT_ONCE = 4
"""Export after receiving this many files: the spool needs disk space in addition to the files."""


def check_reachable(addresses: Sequence[str]) -> None:
    """Raises Failure if no broker is reachable, before a spool is created."""

    async def connect() -> None:
        async with Producer(addresses, close_timeout_s=0, **ConnectOptions.of_command().options()):
            pass

    silence_library()
    try:
        run_trio(connect)
    except ConnectionFailed as failure:
        raise connection_failure(failure) from failure


class SpoolExportRun(ExportRun):
    """An export whose rounds begin with receiving; see `ExportRun`."""

    def __init__(self, job: ExportJob, options: ToParquetOptions, stack: ExitStack) -> None:
        if options.engine == "auto":  # the spool is too small for Spark to be faster
            options = dataclasses.replace(options, engine="inline")
        elif options.engine == "spark" and "PYSPARK_GATEWAY_PORT" in os.environ:
            raise Failure(
                "The spool is on this machine's disk, which workers of spark-submit cannot read: use --engine inline."
            )
        super().__init__(job, options, stack)
        assert options.spool is not None
        assert options.channel is not None
        spool = Spool(options.spool, options.topic, options.channel, job.exported)
        self._spool = stack.enter_context(spool)
        self._channel = options.channel
        self._connection = ConnectOptions.of_command().options()
        self._began_ns = time.time_ns()
        self._end: StopReason | None = None
        self._signal: ExitCode | None = None  # a signal while messages were received
        self._connected = False
        if not options.quiet:
            print_diagnostic(
                f"Note: {options.topic}/{options.channel} is consumed, through the spool {self._spool.folder}: "
                "at least once."
            )

    def _all(self, addresses: Sequence[str]) -> None:
        while self._end in (None, StopReason.FULL):
            self._round(addresses)
        if self._end is StopReason.UNREACHABLE:
            raise Failure(
                "Some brokers are unreachable; their messages are not in files.",
                ExitCode.UNREACHABLE,
            )

    def _round(self, addresses: Sequence[str]) -> None:
        try:
            self._export_spool()  # messages of an interrupted run or round
            self._receive(addresses)
            if self._options.interval_s is not None:
                self._begun_s = time.monotonic()  # the rate is that of the export, without waiting
            self._export_spool()
        except Exception:
            self._report_spooled()
            raise
        if self._signal is not None:
            raise KeyboardInterrupt if self._signal is ExitCode.INTERRUPTED else Terminated

    def _export_spool(self) -> None:
        if self._spool.messages:
            self._export(self._spool.places(by_hour=self.job.request.layout.is_by_publish_time))
            self._spool.discard(self.job.exported)

    def _pause(self, until_s: float, failing: bool) -> None:
        if failing:  # else receiving took the time
            super()._pause(until_s, failing)

    def conclude(self) -> None:
        super().conclude()
        self._report_spooled()

    def _report_spooled(self) -> None:
        if (count := self._spool.messages) and not self._options.quiet:
            print_diagnostic(
                f"{count_of(count, 'message')} {is_or_are(count)} in the spool, and no longer in the channel."
            )

    def _receive(self, addresses: Sequence[str]) -> None:
        """Receive until it is time to export.

        Raises:
            Failure: No broker is reachable.
            BrokerUnreachable: All connections are lost.
            NSQError: Messages cannot be stored.
        """
        if not self._connected:
            silence_library()
        failure: NSQError | None = None
        try:
            with message_progress(None, self._options.quiet) as advance:
                run_trio(self._receive_some, addresses, advance)
        except* NSQError as group:
            failure = next(leaf for leaf in leaf_exceptions(group) if isinstance(leaf, NSQError))
        if isinstance(failure, ConnectionFailed):
            if self._connected and not isinstance(failure, AuthRefused):
                raise BrokerUnreachable(failure.address, failure.reason)
            raise connection_failure(failure)
        if failure is not None:
            raise failure

    async def _receive_some(self, addresses: Sequence[str], advance: Advance) -> None:
        request, options = self.job.request, self._options
        consumer = Consumer(
            options.topic,
            self._channel,
            nsqd_tcp_addresses=addresses,
            lookupd_http_addresses=options.lookupd_addresses,
            lookupd_allowed_hosts=options.lookupd_allowed_hosts,
            max_in_flight=max(len(addresses), min(FIRST_IN_FLIGHT, options.max_in_flight)),
            **self._connection,
        )
        spool_bytes = _FILES_AT_ONCE * request.target_bytes
        if options.interval_s is None:
            until = CollectLimits(
                spool_bytes,
                idle_s=options.idle_timeout_ms / 1000,
                began_ns=self._began_ns,
                connections=len(addresses),
            )
        else:
            until = CollectLimits(spool_bytes, time_s=options.interval_s, connections=len(addresses))
        collecting = Collector(self._spool, consumer, until, options.max_in_flight, advance)
        connecting = trio.CancelScope()

        def stop(code: ExitCode) -> None:
            self._signal = code
            if connected:
                collecting.stop()
            else:
                connecting.cancel()

        connected = False
        async with trio.open_nursery() as nursery:
            at_first_signal(stop)
            with connecting:
                async with consumer:
                    connected = True
                    self._show_warnings()
                    self._end = await collecting.run()
                    self.job.result.repeated += collecting.repeated
            nursery.cancel_scope.cancel()

    def _show_warnings(self) -> None:
        """Print the library's warnings, from the first connection on."""
        if not self._connected:
            self._connected = True
            show_library_warnings()
