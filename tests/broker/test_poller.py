"""Tests for the poller, which executes all clients' commands in one task: its turns, and the handover of
clients.
"""

import gc
import json
import os
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from broker.api import running_api
from broker.support import (
    BOTH_SYNCS,
    HeldFiles,
    PolledClient,
    RawClient,
    connected,
    identify,
    mpub,
    pub,
    record_counts,
    running_broker,
    send_for_ever,
    settle,
)
from broker.upgrading import upgrade
from trio_nsq.broker.session.session import Session
from trio_nsq.broker.state.settings import TopicSettings
from trio_nsq.event_loop.pacing import Pacing
from trio_nsq.event_loop.reactor import Poller


async def oks(client: RawClient, count: int) -> None:
    for _ in range(count):
        await client.ok()


# ---------------------------------------------------------------------- turns


class Talker(PolledClient):
    """A client whose socket has new data each time that it is served."""

    def __init__(self, name: str, served: list[str], poller: Poller) -> None:
        super().__init__(name, served, poller)
        self.read_bytes = 1

    def serve_data(self, data: bytes | None) -> None:
        self.other.send(b"x")
        super().serve_data(data)


def served_by_round(poller: Poller, served: list[str], count: int) -> list[str]:
    """Return who is served in each of the next rounds."""
    rounds: list[str] = []
    poller.open()
    for _ in range(count):
        before = len(served)
        assert poller.poll()
        poller.serve()
        rounds.append(" ".join(served[before:]))
    poller.close()
    return rounds


async def test_client_that_sends_continuously_has_one_turn_per_round() -> None:
    served: list[str] = []
    poller = Poller()
    talkers = [Talker("a", served, poller), Talker("b", served, poller)]
    rounds = served_by_round(poller, served, 10)
    assert {" ".join(sorted(each.split())) for each in rounds} == {"a b"}
    for talker in talkers:
        talker.close()


async def test_clients_left_by_a_short_turn_are_first_in_the_next() -> None:
    now_s = 1000.0

    class Slow(Talker):
        def serve_data(self, data: bytes | None) -> None:
            nonlocal now_s
            now_s += 0.6
            super().serve_data(data)

    served: list[str] = []
    poller = Poller(Pacing(turn_s=1), lambda: now_s)
    talkers = [Slow(name, served, poller) for name in "abcd"]
    rounds = served_by_round(poller, served, 4)
    assert ["".join(sorted(each.split())) for each in rounds] == ["ab", "cd", "ab", "cd"]
    for talker in talkers:
        talker.close()


async def test_data_that_arrives_while_many_are_served_belongs_to_the_same_round() -> None:
    class Prompter(Talker):
        """Lets another client send when it is served."""

        def serve_data(self, data: bytes | None) -> None:
            if "late" not in served:
                late.other.send(b"x")
            super().serve_data(data)

    served: list[str] = []
    poller = Poller(Pacing(turn_s=1000))
    late = Talker("late", served, poller)
    assert late.receive_now() == b"x"
    talkers = [(Prompter if n == 3 else Talker)(f"{n}", served, poller) for n in range(8)]
    first, second = served_by_round(poller, served, 2)
    assert first.split() == [*"01234567", "late"]
    assert sorted(second.split()) == [*"01234567", "late"]
    for talker in [late, *talkers]:
        talker.close()


async def test_client_that_sends_again_in_its_round_is_served_again() -> None:
    class Last(PolledClient):
        """The first client sends again when this one is served."""

        def serve_data(self, data: bytes | None) -> None:
            super().serve_data(data)
            clients[0].other.send(b"x")

    served: list[str] = []
    poller = Poller(Pacing(turn_s=1000))
    clients = [(Last if n == 7 else PolledClient)(f"{n}", served, poller) for n in range(8)]
    assert served_by_round(poller, served, 2) == ["0 1 2 3 4 5 6 7", "0"]
    for client in clients:
        client.close()


async def count_turns(turns: list[int]) -> None:
    while True:
        await trio.lowlevel.checkpoint()
        turns[0] += 1


@pytest.mark.parametrize(
    ("topics", "compression"),
    [(("a", "b"), None), (("a#ephemeral", "b#ephemeral"), None), (("a#ephemeral", "b#ephemeral"), "deflate")],
)
async def test_pipelined_publishes_to_alternating_topics_let_others_be_served(
    tmp_path: Path, topics: tuple[str, str], compression: str | None
) -> None:
    """Each is a separate write, and one read may return thousands."""
    pacing = Pacing(turn_s=0.000_01)
    async with running_broker(tmp_path / "d", sync="interval", pacing=pacing) as bound:
        async with connected(bound.tcp_address) as client:
            client.stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1_000_000)
            await upgrade(client, None, compression)
            for topic in topics:
                await client.publish(topic, b"makes the file")
            turns = [0]
            async with trio.open_nursery() as nursery:
                nursery.start_soon(count_turns, turns)
                await client.send(b"".join(pub(topics[n % 2], b"x") for n in range(2000)))
                await oks(client, 2000)
                nursery.cancel_scope.cancel()
            assert turns[0] > 200


async def test_client_with_endless_data_does_not_delay_others(tmp_path: Path) -> None:
    """It fills each read."""
    async with running_broker(tmp_path / "d", sync="interval") as bound:
        async with connected(bound.tcp_address) as greedy, connected(bound.tcp_address) as other:
            await other.publish("t", b"makes the file")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(send_for_ever, greedy)
                for n in range(8):
                    await other.publish("t", b"%d" % n)
                nursery.cancel_scope.cancel()


# ---------------------------------------------------------------------- answers


def write_at_once(client: RawClient, data: bytes) -> None:
    """Send within one turn of the event loop."""
    assert os.write(client.stream.socket.fileno(), data) == len(data)


async def order_of_publishes(address: str, *sent: tuple[RawClient, bytes]) -> list[bytes]:
    """Return the bodies in the topic `order`, in the order of the log, after clients have sent all these
    messages at once.
    """
    async with connected(address) as reader:
        await reader.publish("order", b"makes the file")
        await reader.subscribe("order", "c", ready_count=100)
        await reader.send(b"FIN %s\n" % (await reader.message()).id)
        await settle()
        for client, data in sent:
            write_at_once(client, data)
        found = [await reader.message() for _ in sent]
        for message in found:
            await reader.send(b"FIN %s\n" % message.id)
        await settle()
        return [message.body for message in found]


@pytest.mark.parametrize(
    "flood", [b"RDY 0\n", b"NOP\r\n", b"TOUCH 0123456789abcdef\n", b"REQ 0123456789abcdef 0\n"]
)
async def test_many_commands_at_once_let_others_be_served(tmp_path: Path, flood: bytes) -> None:
    async with running_broker(tmp_path / "d", sync="interval", pacing=Pacing(commands_s=0)) as bound:
        async with connected(bound.tcp_address) as one, connected(bound.tcp_address) as other:
            for client in (one, other):
                await client.subscribe("t", "c")
            many = one, flood * 200 + pub("order", b"behind many")
            few = other, pub("order", b"from another")
            assert await order_of_publishes(bound.tcp_address, many, few) == [b"from another", b"behind many"]


async def test_flood_of_nops_is_one_command(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d", sync="interval", pacing=Pacing(commands_s=0)) as bound:
        async with connected(bound.tcp_address) as one, connected(bound.tcp_address) as other:
            for behind in (b"NOP\n" * 10_000 + b"NOP", b""):
                many = one, b"\n" * (not behind) + b"NOP\n" * 10_000 + pub("order", b"behind many") + behind
                few = other, pub("order", b"from another")
                order = await order_of_publishes(bound.tcp_address, many, few)
                assert order == [b"behind many", b"from another"]
                await one.ok()


@BOTH_SYNCS
async def test_ten_thousand_pipelined_publishes_to_two_topics_in_turn(tmp_path: Path, sync: str) -> None:
    """No deep recursion, no loss, and in order."""
    async with running_broker(tmp_path / "d", sync=sync) as bound:
        async with connected(bound.tcp_address) as client, connected(bound.tcp_address) as reader:
            await client.publish("a", b"makes the file")
            await client.publish("b", b"makes the file")
            count = 10_000 if sync == "interval" else 500  # here each waits for a thread
            content = b"".join(pub("ab"[n % 2], b"%d" % n) for n in range(count))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.send, content)
                await oks(client, count)
            await reader.subscribe("a", "c", 2500)
            await reader.message()
            for n in range(0, min(count, 4000), 2):
                message = await reader.message()
                assert message.body == b"%d" % n
                await reader.send(b"FIN %s\n" % message.id)


async def test_ten_thousand_pipelined_publishes_to_two_ephemeral_topics(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        content = b"".join(pub(f"{'ab'[n % 2]}#ephemeral", b"x") for n in range(10_000))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.send, content)
            await oks(client, 10_000)


@BOTH_SYNCS
@pytest.mark.parametrize("unix", [False, True])
async def test_commands_that_arrive_with_the_end_are_executed_and_answered(
    tmp_path: Path, sync: str, unix: bool
) -> None:
    place: dict[str, Any] = {"tcp_address": str(tmp_path / "socket")} if unix else {}
    async with running_broker(tmp_path / "d", sync=sync, **place) as bound:
        for n in range(20):
            stream: Any
            if unix:
                stream = await trio.open_unix_socket(str(tmp_path / "socket"))
            else:
                host, _, port = bound.tcp_address.rpartition(":")
                stream = await trio.open_tcp_stream(host, int(port))
            async with stream:
                client = RawClient(stream)
                await client.send(b"  V2" + pub("t", b"1") + pub(f"other{n}", b"2") + pub("t", b"3"))
                await stream.send_eof()
                await oks(client, 3)
                assert await client.frame() is None
    assert sum(record_counts(tmp_path / "d")) == 40


@pytest.mark.parametrize("survives", [False, True])
@BOTH_SYNCS
async def test_commands_after_a_refused_publish(tmp_path: Path, sync: str, survives: bool) -> None:
    async with running_api(tmp_path / "d", sync=sync) as api:
        await api.post("/topic/create", topic="t")
        settings = json.dumps({"max_messages": 2}).encode()
        await api.send("PUT", "/topic/settings?topic=t", body=settings)
        host, port = api.tcp.stream.socket.getpeername()
        async with connected(f"{host}:{port}") as client:
            await client.send(identify(survive_refusals=survives))
            await client.ok()
            behind = mpub("t", b"1", b"2", b"3") + pub("u", b"x") + pub("t", b"1") + b"NOPE\n"
            await client.send(pub("u", b"before") + behind)
            await client.ok()
            assert (await client.error()).startswith(
                "E_TOPIC_FULL MPUB failed topic t cannot take 3 messages"
            )
            if survives:
                await oks(client, 2)
                assert await client.error() == "E_INVALID invalid command NOPE"
            assert await client.frame() is None
    assert sum(record_counts(tmp_path / "d", "u")) == 1 + survives
    assert sum(record_counts(tmp_path / "d")) == survives


async def test_subscription_after_a_refused_publish(tmp_path: Path) -> None:
    defaults = TopicSettings(max_messages=1)
    async with running_broker(tmp_path / "d", topic_defaults=defaults) as bound:
        async with connected(bound.tcp_address) as client:
            await client.send(identify(survive_refusals=True))
            await client.ok()
            await client.send(mpub("t", b"1", b"2") + b"SUB t c\n")
            assert (await client.error()).startswith("E_TOPIC_FULL ")
            await client.ok()


async def test_each_publish_of_a_refused_run_gets_an_error(tmp_path: Path) -> None:
    defaults = TopicSettings(max_messages=2)
    async with running_broker(tmp_path / "d", topic_defaults=defaults) as bound:
        async with connected(bound.tcp_address) as client:
            await client.send(identify(survive_refusals=True) + pub("t", b"1"))
            await oks(client, 2)
            await client.send(pub("t", b"2") * 3 + b"SUB t c\n")
            for _ in range(3):
                assert (await client.error()).startswith(
                    "E_TOPIC_FULL PUB failed topic t cannot take 3 messages"
                )
            await client.ok()
    assert sum(record_counts(tmp_path / "d")) == 1


async def test_publishes_of_one_round_are_one_record(tmp_path: Path) -> None:
    """With --sync=interval. They are sent before the broker looks, because everything is one task."""
    async with running_broker(tmp_path / "d", sync="interval") as bound, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connected(bound.tcp_address)) for _ in range(5)]
        for client in clients:
            await client.publish("t", b"makes the file")
        await settle()
        for client in clients:
            with socket.socket(fileno=os.dup(client.stream.socket.fileno())) as sock:
                sock.send(pub("t", b"x"))
        for client in clients:
            await client.ok()
    assert record_counts(tmp_path / "d") == [1] * 5 + [5]


@BOTH_SYNCS
async def test_client_that_may_have_sent_more_stays_with_the_poller(
    tmp_path: Path, sync: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed_over: list[Session] = []
    hand_over = Session.hand_over

    def noted(session: Session) -> None:
        handed_over.append(session)
        hand_over(session)

    monkeypatch.setattr(Session, "hand_over", noted)
    async with running_broker(tmp_path / "d", sync=sync) as bound, connected(bound.tcp_address) as client:
        await client.publish("t", b"makes the topic and the segment")
        handed_over.clear()
        for _ in range(3):
            # All missing bytes are read, and there may be more.
            await client.publish("t", *[b"x" * 1000] * 300)
        await client.send(mpub("t", *[b"x" * 1000] * 300) + pub("t", b"behind it"))
        await oks(client, 2)
        assert not handed_over


@BOTH_SYNCS
async def test_data_that_arrives_while_the_log_stores_is_read_afterwards(tmp_path: Path, sync: str) -> None:
    files = HeldFiles()
    async with (
        running_broker(tmp_path / "d", files=files, sync=sync, max_bytes_per_file=300_000) as bound,
        connected(bound.tcp_address) as client,
    ):
        await client.publish("t", b"makes the segment")
        files.hold("write", "sync")
        await client.send(mpub("t", *[b"x" * 1000] * 300))  # a new file: a thread writes it
        await files.reached()
        await client.send(pub("t", b"behind it"))
        await settle()  # the poller was notified, and cannot act yet
        files.release()
        await oks(client, 2)


async def test_commands_that_arrive_while_the_log_stores_wait_for_it(tmp_path: Path) -> None:
    files = HeldFiles()
    async with running_broker(tmp_path / "d", files=files) as bound:
        async with connected(bound.tcp_address) as client:
            await client.publish("t", b"makes the file")
            files.hold("sync")
            await client.send(pub("t", b"x"))
            await files.reached()
            await client.send(b"SUB t c\n" + b"RDY 5\n")
            await client.send(pub("u", b"y"))
            await settle()
            files.release()
            await oks(client, 3)
            assert [(await client.message()).body for _ in range(2)] == [b"makes the file", b"x"]


@BOTH_SYNCS
async def test_publishes_after_a_new_file_wait_and_keep_their_order(tmp_path: Path, sync: str) -> None:
    """A thread creates a new file of the log."""
    options: dict[str, Any] = {"max_bytes_per_file": 2000, "sync": sync}
    async with running_broker(tmp_path / "d", **options) as bound:
        async with connected(bound.tcp_address) as one, connected(bound.tcp_address) as two:
            bodies = [b"%03d" % n * 100 for n in range(60)]
            for body in bodies:
                await one.send(pub("t", body) + pub("u", body))
                await two.send(pub("u", body))
            await oks(one, 120)
            await oks(two, 60)
            await two.subscribe("t", "c", 100)
            assert [(await two.message()).body for _ in bodies] == bodies


async def test_client_that_disconnects_during_a_commit_affects_no_other(tmp_path: Path) -> None:
    """Its later commands are not executed for a closed connection, and others continue."""
    files = HeldFiles()
    async with running_broker(tmp_path / "d", files=files) as bound:
        async with connected(bound.tcp_address) as other:
            await other.publish("t", b"makes the file")
            async with connected(bound.tcp_address) as leaver:
                await leaver.send(identify(heartbeat_interval=1000))
                await leaver.ok()
                files.hold("sync")
                await leaver.send(pub("t", b"stored") + pub("u", b"behind"))
                await files.reached()
                leaver.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            await settle()
            files.release()
            await other.publish("t", b"after")
            await settle()
    assert sum(record_counts(tmp_path / "d")) == 3


# ---------------------------------------------------------------------- memory


@contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def connections() -> int:
    return sum(isinstance(thing, Session) for thing in gc.get_objects())


ENDS = {
    "an invalid command": b"NOPE\n",
    "one behind publishes": pub("t", b"x") + b"NOPE\n",
    "a refused publish": pub("t", b""),
    "publishes": pub("t", b"x") * 3,
    "a subscription": b"SUB t c\nRDY 1\n",
    "a subscription that is refused": b"SUB t $\n",
    "a subscription that IDENTIFY rules out": identify(private_channel=True) + b"SUB t c\n",
}


@pytest.mark.parametrize("end", ENDS)
async def test_closed_connection_is_freed_at_once(tmp_path: Path, end: str) -> None:
    async with running_broker(tmp_path / "d") as bound:
        async with connected(bound.tcp_address) as client:
            await client.publish("t", b"makes the file")
        await settle()
        with no_collector():
            before = connections()
            async with connected(bound.tcp_address) as client:
                await client.send(ENDS[end])
                await settle()
            for _ in range(100):  # a thread may be saving its subscription
                await settle()
                if connections() == before:
                    break
            assert connections() == before


# ---------------------------------------------------------------------- states


async def test_client_changes_hands_only_as_its_states_allow() -> None:
    poller, served = Poller(), list[str]()
    client = PolledClient("one", served, poller)
    try:
        for leave in (client.rest, client.await_completion, client.hand_over):
            with pytest.raises(AssertionError):
                leave()  # the poller has it: only `serve` begins something
        assert client.serve() is False
        assert served == ["one"]
        client.stop_polling()
        with pytest.raises(AssertionError):
            client.await_completion()  # its task has it, and would read at the same time
        client.hand_over()  # wakes the task
        client.rest()
    finally:
        client.close()
