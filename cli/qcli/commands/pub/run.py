"""Runs `pub`: connects, publishes all input, and shows progress."""

from functools import partial

import trio

from ...broker.failures import note_if_slow
from ...framework.output import print_diagnostic, silence_library
from ...framework.signals import at_first_signal
from ..shared.rate_limiter import RateLimiter
from .batches import BatchSource, Lines
from .input import READ_BYTES, FrameSplitter, MessageSplitter, Splitter
from .keys import in_field, matching, whole_bodies
from .options import HASH, ROUND_ROBIN, PubOptions
from .pipeline import PublishPipeline
from .records import RecordParser, Records
from .results import PublishResult
from .send import connect
from .strategy import AllBrokers, KeyHash, RoundRobin, Strategy

RATED_READ_BYTES = 4096
"""The most with --rate: what was read when a signal arrives is published at once, so read little ahead."""

FORGET_S = 5.0
"""How long to wait at the end until a broker has deleted its batch numbers; it deletes them later by itself."""


async def publish(options: PubOptions, brokers: dict[str, str]) -> PublishResult:
    """Publish all input. `brokers` has their HTTP addresses by TCP address.

    Raises Failure: a broker is unreachable; nothing was published.
    """
    silence_library()
    strategy = _strategy(options)
    async with trio.open_nursery() as nursery:
        connected, unanswered = trio.Event(), list(brokers)
        if not options.quiet:
            nursery.start_soon(note_if_slow, unanswered, connected)
        senders = await connect(options, brokers, options.is_spread, nursery, unanswered)
        connected.set()
        batch_size = min(sender.batch_size for sender in senders.values())
        if options.is_spread:
            batch_size *= len(senders)  # which a batch is divided among
        limiter = RateLimiter(options.rate, trio.current_time()) if options.rate else None
        pipeline = PublishPipeline(
            senders,
            _source(options, batch_size, limiter),
            strategy=strategy,
            retry=not options.no_retry,
            limiter=limiter,
        )
        at_first_signal(pipeline.stop)
        result = pipeline.result
        if options.welcome is not None:
            print_diagnostic(options.welcome)
        if options.shows_progress:
            from ...terminal.progress import show_progress

            nursery.start_soon(
                show_progress, lambda: (result.acknowledged, result.acknowledged_bytes, result.share)
            )
        await pipeline.run(options.inputs, RATED_READ_BYTES if options.rate else READ_BYTES)
        with trio.move_on_after(FORGET_S):
            for broker in result.brokers:
                if broker.failure is None:
                    await senders[broker.address].end()
        nursery.cancel_scope.cancel()
    return result


def _strategy(options: PubOptions) -> type[Strategy] | partial[KeyHash]:
    if options.strategy == ROUND_ROBIN:
        return RoundRobin
    if options.strategy != HASH:
        return AllBrokers
    if options.key is not None:
        return partial(KeyHash, keys=matching(options.key))
    return partial(KeyHash, keys=in_field(options.key_field) if options.key_field else whole_bodies)


def _source(options: PubOptions, batch_size: int, limiter: RateLimiter | None) -> BatchSource:
    """Return the maker of batches; `batch_size` counts unless the user or the limiter sets another size."""
    batch_size = options.batch_size or batch_size
    if limiter is not None:
        batch_size = min(batch_size, limiter.max_messages)
    if options.reads_json:
        parser = RecordParser(
            options.common_topic,
            options.common_defer_ms,
            options.max_msg_size,
            options.key_field,
            options.common_headers,
        )
        return Records(parser, options.max_msg_size, batch_size, skip_bad=options.skip_bad)
    assert options.topic is not None
    splitter: MessageSplitter
    if options.framing == "length":
        splitter = FrameSplitter(options.max_msg_size)
    else:
        splitter = Splitter(options.delimiter, options.max_msg_size, strip_cr=options.strip_cr)
    return Lines(splitter, batch_size, options.topic, options.defer_ms, options.common_headers)
