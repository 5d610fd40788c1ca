"""A member of a cluster that answers HTTP requests as a test says: states that real members leave at once."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

IDS = ("3f2a9c0d1e2b4a55", "9b1c44d2a0e0f713", "9b0ffee012345678")


def addresses(number: int) -> list[str]:
    """The URLs of a member."""
    return [f"tcp://10.0.0.{number}:4150", f"http://10.0.0.{number}:4151"]


def member(number: int, state: str = "in sync", **values: Any) -> dict[str, Any]:
    """A member in the answer of `/cluster`; without other values, it lacks nothing."""
    nothing = {"lag_operations": 0, "lag_bytes": 0, "lag_s": 0.0, "since": 1_700_000_000}
    is_in_sync = state in ("leading", "in sync")
    about = {"id": IDS[number], "addresses": addresses(number), "state": state, "in_sync": is_in_sync}
    return about | nothing | values


def cluster(*members: dict[str, Any], **values: Any) -> dict[str, Any]:
    """The answer of `/cluster`; without members, three that are in sync."""
    return {
        "cluster": "prod",
        "epoch": 7,
        "leader": IDS[0],
        "since": 1_700_000_000,
        "coordinator": "etcd://10.0.0.20:2379",
        "coordinator_error": "",
        "min_in_sync": 1,
        "refuses_because": "",
        "members": list(members) or [member(0, "leading"), member(1), member(2)],
    } | values


def about_itself(number: int = 1, **values: Any) -> dict[str, Any]:
    """The answer of `/cluster/member`; without other values, of a follower in sync."""
    return {
        "cluster": "prod",
        "id": IDS[number],
        "role": "follower",
        "epoch": 7,
        "leader": IDS[0],
        "leader_addresses": addresses(0),
        "addresses": addresses(number),
        "is_following": True,
        "in_sync": True,
        "position": 5,
        "reason": "",
        "coordinator": "etcd://10.0.0.20:2379",
        "coordinator_error": "",
    } | values


ALONE = about_itself(leader=None, leader_addresses=[], is_following=False, reason="no member was elected yet")
"""Of a member that knows no leader."""
INFO = {"version": "1", "hostname": "h", "broadcast_address": "10.0.0.0", "tcp_port": 4150, "http_port": 4151}
STATS = {
    "version": "1",
    "health": "OK",
    "start_time": 1_700_000_000,
    "topics": [],
    "cluster": {"name": "prod", "epoch": 7, "role": "leader", "in_sync": 2, "members": 3},
}
Answer = tuple[int, Any]


class ScriptedMember:
    """What it answers by method and path: one answer after the other, the last one again and again.

    Attributes:
        answers: A status and a JSON value for each; what has none is answered with 404.
        seen: The method and the target of each request.
        ended: Ends requests that are not answered.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.seen: list[str] = []
        self.ended = threading.Event()
        self._silent: set[str] = set()
        self.answers: dict[str, list[Answer]] = {}
        self.say("GET /info", INFO)
        self.say("GET /stats", STATS)
        self.say("GET /cluster", cluster())
        self.say("GET /cluster/member", about_itself())

    def say(self, request: str, *values: Any, status: int = 200) -> None:
        """Answer a request with these values."""
        self.answers[request] = [(status, value) for value in values]

    def refuse(self, request: str, status: int, message: str) -> None:
        """Answer a request with an error."""
        self.say(request, {"message": message}, status=status)

    def keep_silent(self, *requests: str) -> None:
        """Do not answer these requests, as a member whose clients wait for a leader."""
        self._silent.update(requests)

    def answer(self, method: str, target: str) -> Answer:
        self.seen.append(f"{method} {target}")
        if f"{method} {target.partition('?')[0]}" in self._silent:
            self.ended.wait()
        answers = self.answers.get(f"{method} {target.partition('?')[0]}", [(404, {"message": "NOT_FOUND"})])
        return answers.pop(0) if len(answers) > 1 else answers[0]

    @property
    def changes(self) -> list[str]:
        """The requests that would have changed something."""
        return [each.removeprefix("POST ") for each in self.seen if each.startswith("POST ")]


@contextmanager
def scripted_member() -> Iterator[ScriptedMember]:
    """Run a member on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, value = running.answer(self.command, self.path)
            body = b"" if value is None else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_request(self, code: object = "-", size: object = "-") -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running = ScriptedMember(f"127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=partial(server.serve_forever, 0.01))
    thread.start()
    try:
        yield running
    finally:
        running.ended.set()
        server.shutdown()
        thread.join()
        server.server_close()
