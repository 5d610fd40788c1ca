"""The tasks of the worker processes of the tests: `celery -A integrations.celery_tasks worker`."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from celery import Celery, Task
from celery.exceptions import Reject

F = TypeVar("F", bound=Callable[..., object])

LEDGER = Path(os.environ["LEDGER"])

app = Celery(broker=os.environ.get("NSQ_URL", "nsq://"))
app.conf.update(
    broker_transport="trio_nsq.integrations.kombu:Transport",
    broker_transport_options={
        "visibility_timeout": float(os.environ.get("VISIBILITY_S", "60")),
        "nsqd_http_address": os.environ.get("NSQD_HTTP"),
    },
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=1,
    worker_hijack_root_logger=False,
    result_backend=None,
    task_ignore_result=True,
)


def task(name: str, **options: bool | int) -> Callable[[F], F]:
    """`app.task`, with types."""
    decorator: Callable[[F], F] = app.task(name=name, **options)
    return decorator


def note(line: str) -> None:
    """Append a line to the ledger, whole also if the process is killed."""
    with LEDGER.open("ab", buffering=0) as ledger:
        ledger.write(f"{line}\n".encode())


@task("record")
def record(word: str) -> None:
    note(f"done {word}")


@task("late", acks_late=True, reject_on_worker_lost=True)
def late(word: str, gate: str | None = None) -> None:
    """A task that is acknowledged when it ends; it ends when there is a file `gate`."""
    note(f"begin {word}")
    while gate is not None and not Path(gate).exists():
        time.sleep(0.02)
    note(f"end {word}")


@task("again", bind=True, max_retries=3)
def again(self: "Task", word: str) -> None:
    note(f"try {self.request.retries} {word}")
    if self.request.retries < 2:
        raise self.retry(countdown=0.3)


@task("rejected", bind=True, acks_late=True)
def rejected(self: "Task", word: str) -> None:
    note(f"rejected {self.request.delivery_info['redelivered']} {word}")
    raise Reject("the test wants it", requeue=not self.request.delivery_info["redelivered"])


@task("fan")
def fan(word: str) -> None:
    """A task that publishes another, from a process of the pool."""
    app.send_task("record", [word])
