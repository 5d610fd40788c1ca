"""Waits for what clients send, for all of them in one task.

A task of its own for each read costs more than what most reads ask for. So one task asks the kernel who has sent
something, and obeys those clients in its own turn, one after the other. What all of them published in one round is
stored together. A client's own task is woken for what has to be waited for.

What threads have to tell is heard in the same rounds. What can wait is done when nobody has sent anything.
"""

import os
import select
from collections import deque
from collections.abc import Callable
from threading import Lock
from time import perf_counter
from typing import Any, Protocol

import trio

_TURN_S = 0.005
"""Clients whose data is always there already let other tasks have their turn after so much time."""
_CLIENTS_PER_ROUND = 64  # that are told of at a time
_MANY_CLIENTS = 8
"""While so many are served others have sent something, which goes into the same write: `/pub` over 16 connections
42,900 -> 44,400 messages a second; PUB over 200 connections, each synced, is no faster by that. To wait for the second
of two would only keep the first from preparing its next."""
_AWAKE_S = 0.000_05
"""Who waits for an answer before sending the next thing mostly does so within this time. Going to sleep and being woken
takes as long, and as much of the processor: so if nobody slept longer the last time, that is waited for awake."""
_AWAKE_AT_MOST_S = 0.001
"""Then trio looks who else needs a turn."""
# Edge-triggered: a client is registered once, and told each time that something comes.
_EVENTS = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET
_ENDED = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


class Client(Protocol):
    """Somebody who sends."""

    def note_unread(self, *, ended: bool) -> None:
        """Something has come; `ended`: and it is the last."""

    def serve(self) -> bool:
        """Read once and obey, without waiting. True: call me again, there may be more."""


class Poller:
    """The clients whose sockets are watched. One for a broker.

    Args:
        begin_round, end_round: Called before clients are served, and when all who had sent something are.
        is_busy: Whether a thread will soon need the event loop, which therefore is not to be kept waiting.
        idle: Called when nobody has sent anything: does something of what can wait. True: there may be more of it.
    """

    def __init__(
        self,
        begin_round: Callable[[], None],
        end_round: Callable[[], None],
        is_busy: Callable[[], bool] = lambda: False,
        idle: Callable[[], bool] = lambda: False,
    ) -> None:
        self._begin_round = begin_round
        self._end_round = end_round
        self._idle = idle
        self._is_busy = is_busy
        self._token = trio.lowlevel.current_trio_token()
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._waking = Lock()
        self._wake_fd = -1  # an eventfd, while `run` runs
        self._is_woken = False  # it was written to, and nobody has noticed yet
        self._epoll: select.epoll | None = None  # while `run` runs
        self._clients: dict[int, Client] = {}
        # In order, and each once: news of a client that is here already give it no second turn.
        self._again: dict[Client, None] = {}
        self._in_round = False
        self._stays_awake = False

    def add(self, fd: int, client: Client) -> None:
        """Watch a client's socket, until `remove`."""
        if self._epoll is not None:
            self._epoll.register(fd, _EVENTS)
        self._clients[fd] = client

    def remove(self, fd: int) -> None:
        """Forget a client; before its socket is closed."""
        del self._clients[fd]
        if self._epoll is not None:
            self._epoll.unregister(fd)

    def look_again(self, fd: int) -> None:
        """Serve a client soon that was left alone although its socket may have something."""
        if self._in_round:
            self._again[self._clients[fd]] = None
        elif self._epoll is not None:
            self._epoll.modify(fd, _EVENTS)  # that tells of what is there, and wakes us if need be

    def wake(self) -> None:
        """Look soon what there is to do. May be called in a thread."""
        with self._waking:
            self._wake()

    def _wake(self) -> None:
        if self._epoll is not None and not self._is_woken:
            self._is_woken = True
            os.eventfd_write(self._wake_fd, 1)

    def call_soon(self, call: Callable[..., None], *args: Any) -> None:
        """In any thread: have something called in the next round, or, while `run` does not run, by trio."""
        with self._waking:
            if self._epoll is not None:
                self._calls.append((call, args))
                self._wake()
                return
        self._token.run_sync_soon(call, *args)

    async def run(self) -> None:
        """Serve clients; runs until cancelled."""
        with select.epoll() as epoll:
            self._wake_fd, self._is_woken = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK), False
            epoll.register(self._wake_fd, select.EPOLLIN | select.EPOLLET)
            for fd in self._clients:
                epoll.register(fd, _EVENTS)
            self._epoll = epoll
            try:
                while True:
                    fell_asleep_s = perf_counter()
                    await trio.lowlevel.wait_readable(epoll.fileno())
                    await self._serve_all(epoll, fell_asleep_s)
            finally:
                with self._waking:
                    self._epoll = None
                    os.close(self._wake_fd)
                for call, args in self._calls:
                    self._token.run_sync_soon(call, *args)
                self._calls.clear()

    async def _serve_all(self, epoll: select.epoll, fell_asleep_s: float) -> None:
        """Serve clients, and do what could wait, until there is nothing to do."""
        awake_s = perf_counter()
        self._stays_awake = awake_s - fell_asleep_s < 2 * _AWAKE_S
        turn_over_s = awake_s + _TURN_S
        while self._serve_round(epoll) or self._idle() or self._wait_awake(epoll, awake_s + _AWAKE_AT_MOST_S):
            if perf_counter() > turn_over_s:
                await trio.lowlevel.checkpoint()
                turn_over_s = perf_counter() + _TURN_S

    def _wait_awake(self, epoll: select.epoll, until_s: float) -> bool:
        """Whether somebody soon sends something, if nobody else needs the event loop."""
        if not self._stays_awake or perf_counter() > until_s or self._is_busy():
            return False
        if trio.lowlevel.current_statistics().tasks_runnable:
            return False
        over_s = perf_counter() + _AWAKE_S
        while perf_counter() < over_s:
            if events := epoll.poll(0, _CLIENTS_PER_ROUND):
                self._note(events)
                return True
        self._stays_awake = False
        return False

    def _note(self, events: list[tuple[int, int]]) -> None:
        for fd, event in events:
            if fd == self._wake_fd:
                self._is_woken = False  # from now on whoever calls wakes us again, and his call is seen below
                continue
            client = self._clients[fd]
            client.note_unread(ended=bool(event & _ENDED))
            self._again[client] = None

    def _serve_round(self, epoll: select.epoll) -> bool:
        """Serve all who have sent something or called, while the turn lasts; False if there were none."""
        self._note(epoll.poll(0, _CLIENTS_PER_ROUND))
        clients, self._again = self._again, {}
        if not clients and not self._calls:
            return False
        late: list[Client] = []
        again: list[Client] = []
        served: set[Client] = set()
        turn_over_s = perf_counter() + _TURN_S
        self._begin_round()
        self._in_round = True
        try:
            for _ in range(len(self._calls)):  # what these call soon comes in the next round
                call, args = self._calls.popleft()
                call(*args)
            while True:
                for client in clients:
                    if perf_counter() > turn_over_s:
                        late.append(client)
                    elif client.serve():
                        again.append(client)
                if late or len(clients) < _MANY_CLIENTS:
                    break
                # Who was served has had his turn: all wait for the end of the round.
                served.update(clients)
                self._note(epoll.poll(0, _CLIENTS_PER_ROUND))
                again += [client for client in self._again if client in served]
                clients = {client: None for client in self._again if client not in served}
                self._again = {}
            self._again |= dict.fromkeys(late + again)
        finally:
            self._end_round()
            self._in_round = False
        return True
