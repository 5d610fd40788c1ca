"""`/debug`: tasks, profile and memory of a running broker. nsqd has the profiles of Go's runtime there."""

import gc
import io
import marshal
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import trio

from ...http.messages import HTTPError, Request, Response
from ...platform import malloc_tuning as heap
from ..server import Server

INDEX = """\
GET  /debug/tasks               the task tree: each task and the call it waits in
GET  /debug/profile?seconds=30  profile the event loop for 1 to 300 s; &format=pstats for Python's pstats
GET  /debug/memory              memory of the process, the garbage collector and the message cache
POST /debug/freememory          collect garbage, and return free memory to the system
"""
DEFAULT_PROFILE_S = 30
MAX_PROFILE_S = 300
_PROFILE_ROWS = 100
_PROFILE_HEADING = """\
Profile of the event loop over {seconds} s, sorted by each function's own time. Time in poll is idle time.
"""
_ALL_THREADS = "This version of Python also counts worker threads, which write, sync and read files.\n"


async def index(server: Server, request: Request) -> Response:
    """List the endpoints."""
    return Response.text(INDEX)


async def pprof(server: Server, request: Request) -> Response:
    """Refuse: tools for Go's profiles cannot read Python's."""
    raise HTTPError(404, "NOT_FOUND: these are profiles of a Go program; /debug lists what there is here")


async def tasks(server: Server, request: Request) -> Response:
    return Response.text(task_tree())


async def profile(server: Server, request: Request) -> Response:
    """Profile for `seconds`, then answer. One profile at a time: two would profile each other."""
    text = request.query.get("seconds", str(DEFAULT_PROFILE_S))
    seconds = int(text) if re.fullmatch(r"[0-9]{1,3}", text, re.ASCII) else 0
    if not 1 <= seconds <= MAX_PROFILE_S:
        raise HTTPError(400, "INVALID_SECONDS")
    output = request.query.get("format", "text")
    if output not in ("text", "pstats"):
        raise HTTPError(400, "INVALID_FORMAT")
    if sys.getprofile() is not None:
        raise HTTPError(409, "ALREADY_PROFILING")
    return await _profile(seconds, output)


async def memory(server: Server, request: Request) -> Response:
    """Return memory usage: bytes and counts; null for values that the system does not provide."""
    broker = server.broker
    status = _process_status()
    topics = {
        name: {"bytes": size_bytes, "batches": batches}
        for name, (size_bytes, batches) in sorted(broker.cache.by_topic().items())
    }
    return Response.json(
        {
            "rss_bytes": status.get("VmRSS"),
            "peak_rss_bytes": status.get("VmHWM"),
            "gc": {
                "objects": len(gc.get_objects()),
                "counts": gc.get_count(),
                "thresholds": gc.get_threshold(),
                "collections": [generation["collections"] for generation in gc.get_stats()],
            },
            "connections": len(server.sessions.connected),
            "topics": len(broker.topics),
            "channels": sum(len(topic.channels) for topic in broker.topics.values()),
            "cache": {
                "bytes": broker.cache.size_bytes,
                "max_bytes": server.options.cache_bytes,
                "batches": len(broker.cache),
                "topics": topics,
            },
        }
    )


async def free_memory(server: Server, request: Request) -> Response:
    """Collect garbage and trim the heap. The garbage collection blocks the event loop; the message cache stays."""
    before = _process_status().get("VmRSS")
    collected = gc.collect()
    await trio.to_thread.run_sync(heap.trim)
    after = _process_status().get("VmRSS")
    return Response.json({"collected_objects": collected, "rss_bytes": after, "rss_bytes_before": before})


# ---------------------------------------------------------------------- tasks


def task_tree() -> str:
    """Format the tasks of this trio run as a tree: name, stack (outermost call first), children.

    Equal siblings are shown once, with their number.
    """
    root = trio.lowlevel.current_root_task()
    assert root is not None
    living = trio.lowlevel.current_statistics().tasks_living
    return "\n".join([f"{living} tasks", "", *_describe(root)]) + "\n"


def _describe(task: trio.lowlevel.Task) -> tuple[str, ...]:
    lines = [task.name]
    for frame, line_number in task.iter_await_frames():
        place = f"{frame.f_globals.get('__name__', '?')}:{line_number}"
        lines.append(f"    {frame.f_code.co_qualname} ({place})")
    children = [child for nursery in task.child_nurseries for child in nursery.child_tasks]
    alike = Counter(_describe(child) for child in sorted(children, key=lambda child: child.name))
    for (name, *rest), count in alike.items():
        times = f"{count} x " if count > 1 else ""
        lines += [f"  {times}{name}", *(f"  {line}" for line in rest)]
    return tuple(lines)


# ---------------------------------------------------------------------- profile


async def _profile(seconds: int, output: str) -> Response:
    import cProfile
    import pstats

    profiler = cProfile.Profile()
    try:
        profiler.enable()
    except ValueError as exc:  # from Python 3.12 on, only one profiler can be active
        raise HTTPError(409, "ALREADY_PROFILING") from exc
    try:
        await trio.sleep(seconds)
    finally:
        profiler.disable()
    text = io.StringIO()
    stats: Any = pstats.Stats(profiler, stream=text)
    if output == "pstats":
        return Response(200, marshal.dumps(stats.stats), "application/octet-stream")
    text.write(_PROFILE_HEADING.format(seconds=seconds))
    if sys.version_info >= (3, 12):
        text.write(_ALL_THREADS)
    stats.sort_stats("tottime").print_stats(_PROFILE_ROWS)
    return Response.text(text.getvalue())


# ---------------------------------------------------------------------- memory


def _process_status() -> dict[str, int]:
    """Return the sizes in /proc/self/status in bytes; empty on systems without it."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines if line.endswith(" kB"))
    return {name.rstrip(":"): int(size) * 1024 for name, size, _ in fields}
