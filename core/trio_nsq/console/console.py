"""What the handlers of pages get: `console_of(request)`."""

from dataclasses import dataclass, field

from starlette.requests import Request

from ..fleet.snapshot import Snapshot
from .access.access import Access
from .access.viewer import viewer_of
from .fleet.history import History
from .fleet.rows import Rows
from .fleet.shared import Shared
from .fleet.watcher import Watcher
from .messages.bodies import Bodies
from .notices import Notices
from .notifications import Notifier
from .options import ConsoleOptions
from .upstream.client import Upstream


@dataclass(frozen=True, slots=True)
class Console:
    """The parts of a running console."""

    options: ConsoleOptions
    upstream: Upstream
    watcher: Watcher
    history: History
    notifier: Notifier
    access: Access
    bodies: Bodies
    rows: Rows = field(default_factory=Rows)
    shared: Shared = field(default_factory=Shared)
    notices: Notices = field(default_factory=Notices)


def console_of(request: Request) -> Console:
    console = request.app.state.console
    assert isinstance(console, Console)
    return console


def snapshot_of(request: Request) -> Snapshot:
    """Return the snapshot that a request is answered from.

    It stays the same while a handler waits for brokers, so that a view and its template agree about the fleet.
    """
    found = getattr(request.state, "snapshot", None)
    return found if isinstance(found, Snapshot) else take_snapshot(request)


def take_snapshot(request: Request) -> Snapshot:
    """Answer a request from the newest snapshot from now on, and return it."""
    newest = console_of(request).watcher.snapshot
    request.state.snapshot = newest
    return newest


def upstream_of(request: Request) -> Upstream:
    """Return what makes requests to brokers with the viewer's token, so that they check its roles, too."""
    return console_of(request).upstream.with_token(viewer_of(request).token)
