"""Writes messages to standard output, until a limit, a timeout or a signal."""

import math
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, Generic, TypeVar

import trio

from ...framework.errors import ExitCode, OutputClosed
from ...framework.output import RawOutput, is_terminal, print_diagnostic, show_library_warnings
from .options import TailOptions

LAST_WRITE_S = 0.5
"""How long a running write may continue after a signal."""

Source = TypeVar("Source", bound="AbstractAsyncContextManager[Any]")


class Printer(Generic[Source]):
    """Writes messages of any source, until a limit, a timeout or a signal.

    Attributes:
        as_json: Whether messages are written as JSON, and not raw.
        template: How to write a message; None: raw or as JSON.
        messages_left: How many more messages to write; infinite: no limit.
        stopped: The exit code of the signal that arrived; None: no signal.
        opened: Set when the sources are open.
    """

    def __init__(self, options: TailOptions) -> None:
        self.stopped: ExitCode | None = None
        self.opened = trio.Event()
        self.as_json = options.form == "json"
        self.template = options.format_string
        self.messages_left = math.inf if options.count is None else options.count
        self._decoded = options.decoded_bodies()
        self._delimiter = options.delimiter
        self._print_topic = options.print_topic
        self._idle_timeout_s = options.idle_timeout_s
        self._output = RawOutput()
        self._scope = trio.CancelScope()
        self._decoding = trio.CapacityLimiter(1)  # a reader of bodies may not be shared by threads
        self._lock = trio.Lock()  # one batch at a time: messages of several topics do not mix
        self._write_scope = trio.CancelScope()

    def stop(self, code: ExitCode) -> None:
        """Stop taking messages. A running write may continue for `LAST_WRITE_S`."""
        self.stopped = code
        self._scope.cancel()
        self._write_scope.deadline = trio.current_time() + LAST_WRITE_S

    async def run(
        self, sources: Sequence[tuple[str, Source]], welcome: Callable[[], str] | None = None
    ) -> None:
        """Open sources, write their messages until a limit, a timeout or a signal, and close them.

        Args:
            sources: Each with its topic.
            welcome: Returns a text for a terminal, once they are open; None: no text.

        Raises:
            ConnectionFailed: A broker is unreachable at the start. Connections that are lost later are reopened.
            OutputClosed: The reader of the output closed it.
        """
        with self._scope:
            async with AsyncExitStack() as stack:
                for _, source in sources:
                    await stack.enter_async_context(source)
                self.opened.set()
                show_library_warnings()
                if welcome is not None and is_terminal(sys.stderr):
                    print_diagnostic(welcome())
                self._scope.deadline = trio.current_time() + self._idle_timeout_s
                async with trio.open_nursery() as nursery:
                    if self._output.is_pipe:
                        nursery.start_soon(self._watch_reader)
                    async with trio.open_nursery() as passing:
                        for topic, source in sources:
                            passing.start_soon(self.pass_on, topic, source)
                    nursery.cancel_scope.cancel()

    async def pass_on(self, topic: str, source: Source) -> None:
        """Print the messages of a source."""
        raise NotImplementedError

    async def print(self, available: int, render: Callable[[int], bytes]) -> int:
        """Write messages, up to `messages_left`.

        Args:
            available: The number of messages.
            render: Returns the output for the first messages.

        Returns:
            The number of written messages. A cancellation arrives only at the caller's next checkpoint.
        """
        async with self._lock:
            self._scope.deadline = math.inf
            count = int(min(available, self.messages_left))
            await self._write(await self._rendered(render, count))
            self.messages_left -= count
            if not self.messages_left:
                self._scope.cancel()
            self._scope.deadline = trio.current_time() + self._idle_timeout_s
        return count

    def bodies_of(self, topic: str, bodies: Sequence[bytes]) -> Sequence[bytes]:
        """Return the bodies of messages of a topic as they are written: decoded, if the user wants it."""
        return bodies if self._decoded is None else self._decoded.of(topic, bodies)

    def raw(self, topic: str, bodies: Sequence[bytes]) -> bytes:
        """Return the output for messages of a topic, at least one: bodies, each followed by the delimiter."""
        prefix = f"{topic} | ".encode() if self._print_topic else b""
        return prefix + (self._delimiter + prefix).join(bodies) + self._delimiter

    async def _rendered(self, render: Callable[[int], bytes], count: int) -> bytes:
        if self._decoded is None:
            return render(count)
        # In a thread, because a schema registry may be slow, and heartbeats must be answered. It is abandoned when the
        # command ends: nothing of it is written.
        return await trio.to_thread.run_sync(render, count, abandon_on_cancel=True, limiter=self._decoding)

    async def _write(self, data: bytes) -> None:
        if self._output.never_blocks:
            self._output.write(data)
            return
        # In a thread, because a reader may be slow, such as a pager, and heartbeats must be answered. Shielded, because
        # otherwise messages would be requeued although the thread still writes them.
        with trio.CancelScope(shield=True) as self._write_scope:
            await trio.to_thread.run_sync(self._output.write, data, abandon_on_cancel=True)
        if self._write_scope.cancelled_caught:
            await trio.sleep_forever()  # until the cancellation arrives that cut the write short

    async def _watch_reader(self) -> None:
        """Detect that the reader closed the pipe, also while there is nothing to write."""
        while not self._output.reader_is_gone():
            # The writing end of a pipe never becomes readable, but a wait for that ends when the pipe breaks.
            await trio.lowlevel.wait_readable(self._output.fileno())
        raise OutputClosed
