"""Tests for headers of messages in a running broker: who gets them, what keeps them, and what is refused."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import trio

from broker.api import OK, running_api
from broker.headers import (
    ask_for_headers,
    contents,
    delivered,
    hpub,
    hpub_body,
    raw_hpub,
    read_headers,
    text_of,
)
from broker.letters import another, client_of, configure, fail, letters
from broker.moving import Mover, waiting
from broker.retention import FAST, fill
from broker.support import BOTH_SYNCS, PATIENCE_S, RawClient, dpub, identify, mpub, pub, record_counts, until
from trio_nsq.broker.moved_groups import MovedGroup
from trio_nsq.broker.restoring import restore_folder
from trio_nsq.broker.storage import retention
from trio_nsq.log.disk.carried_forward import FILE_NAME
from trio_nsq.protocol import Limits, pack_messages

TRACE = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "tenant": "sieben: ü"}
OTHER = {"tenant": "8"}
THREE: Sequence[tuple[bytes, dict[str, str]]] = [(b"1", TRACE), (b"2", {}), (b"3", OTHER)]


async def refusal(client: RawClient, command: bytes) -> str:
    """Send a command, and return the error that ends the connection."""
    await client.send(command)
    text = await client.error()
    assert await client.frame() is None
    return text


# ---------------------------------------------------------------------- delivery


@BOTH_SYNCS
async def test_only_clients_that_ask_get_headers(tmp_path: Path, sync: str) -> None:
    async with running_api(tmp_path / "d", sync=sync) as api, client_of(api) as plain, client_of(api) as asks:
        await ask_for_headers(asks)
        await plain.subscribe("t", "plain", 10)
        await asks.subscribe("t", "asks", 10)
        await api.tcp.send(hpub("t", *THREE) + pub("t", b"4"))
        await api.tcp.ok()
        await api.tcp.ok()
        plain_found = [await plain.message() for _ in range(4)]
        assert [each.body for each in plain_found] == [b"1", b"2", b"3", b"4"]
        found = [await delivered(asks) for _ in range(4)]
        assert [each.content for each in found] == [(b"1", TRACE), (b"2", None), (b"3", OTHER), (b"4", None)]
        assert [each.id for each in found] == [each.id for each in plain_found]
        assert {each.attempts for each in found} == {1}


async def test_clients_of_one_channel_may_differ(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api, client_of(api) as plain, client_of(api) as asks:
        await ask_for_headers(asks)
        await plain.subscribe("t", "c")
        await asks.subscribe("t", "c")
        await api.tcp.send(hpub("t", *THREE))
        await api.tcp.ok()
        await plain.send(b"RDY 1\n")
        assert (await plain.message()).body == b"1"
        await asks.send(b"RDY 2\n")
        assert await contents(asks, 2) == [(b"2", None), (b"3", OTHER)]


async def test_messages_without_headers_are_stored_as_before(tmp_path: Path) -> None:
    """An HPUB without headers stores the bytes of an MPUB."""
    async with running_api(tmp_path / "d") as api:
        await api.tcp.send(hpub("with", (b"1", {}), (b"2", {})) + mpub("without", b"1", b"2"))
        await api.tcp.ok()
        await api.tcp.ok()
        sizes = {each["topic_name"]: each for each in (await api.stats())["topics"]}
        raw = [(await api.get("/topic/read", topic=topic, format="raw")).content for topic in sizes]
        assert len(raw[0]) == len(raw[1])


async def test_requeued_deferred_and_timed_out_messages_keep_headers(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api, client_of(api) as asks:
        await asks.send(identify(message_headers=True, msg_timeout=1000))
        await asks.ok()
        await asks.subscribe("t", "c", 1)
        await api.tcp.send(hpub("t", (b"late", TRACE), defer_ms=20))
        await api.tcp.ok()
        for attempt in range(1, 20):  # the first ones alone, later ones from frames of the whole batch
            message = await delivered(asks)
            assert (message.content, message.attempts) == ((b"late", TRACE), attempt)
            await asks.send(b"REQ %s 0\n" % message.id)
        message = await delivered(asks)  # times out
        again = await delivered(asks)
        assert (again.content, again.attempts) == ((b"late", TRACE), 21)


async def test_headers_of_ephemeral_topics(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api, client_of(api) as asks:
        await ask_for_headers(asks)
        await asks.subscribe("t#ephemeral", "c#ephemeral", 1)
        await api.tcp.send(hpub("t#ephemeral", (b"1", TRACE)))
        await api.tcp.ok()
        message = await delivered(asks)
        await asks.send(b"REQ %s 0\n" % message.id)
        assert (await delivered(asks)).content == (b"1", TRACE)


async def test_headers_after_a_kill(tmp_path: Path) -> None:
    data_path = tmp_path / "d"
    async with running_api(data_path) as api:
        await api.tcp.send(hpub("t", *THREE) + hpub("t", (b"4", TRACE), defer_ms=3_600_000))
        await api.tcp.ok()
        await api.tcp.ok()
        async with another(api, data_path) as copy, client_of(copy) as asks:
            await ask_for_headers(asks)
            await asks.subscribe("t", "c", 10)
            assert await contents(asks, 3) == [(b"1", TRACE), (b"2", None), (b"3", OTHER)]
            assert await read_headers(copy, "t") == [TRACE, {}, OTHER, TRACE]
            # No dead letters: a record with headers is not taken for one.
            (topic,) = (await copy.stats(topic="t"))["topics"]
            assert topic["channels"][0]["depth"] == 0


async def test_large_batches_keep_their_headers_in_order(tmp_path: Path) -> None:
    """1,000 messages of 1,000 bytes with headers of 200 bytes need several records, which are one batch."""
    messages = [(b"%03d" % n + bytes(997), {"n": str(n), "pad": "x" * 190}) for n in range(1000)]
    async with running_api(tmp_path / "d") as api, client_of(api) as asks:
        await ask_for_headers(asks)
        await asks.subscribe("t", "c", 1000)
        await api.tcp.send(hpub("t", *messages))
        await api.tcp.ok()
        found = await contents(asks, 1000)
        assert found == messages
    counts = record_counts(tmp_path / "d")
    assert sum(counts) == 1000
    assert len(counts) == 5


async def test_carried_forward_messages_keep_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "PINNED_BYTES", 20_000)
    monkeypatch.setattr(retention, "CARRIED_MESSAGES_SHARE", 0.1)
    monkeypatch.setattr(retention, "RETRY_NS", 20_000_000)
    data_path = tmp_path / "d"
    async with running_api(data_path, **FAST) as api:
        await configure(api, "t", "c")
        await api.tcp.send(hpub("t", *THREE))
        await api.tcp.ok()
        async with client_of(api) as client:
            await client.subscribe("t", "c", 3)
            for _ in range(3):
                await client.send(b"REQ %s 3600000\n" % (await client.message()).id)
            await fill(api, 60)
            await client.send(b"RDY 100\n")
            for _ in range(60):
                await client.send(b"FIN %s\n" % (await client.message()).id)
            await until((data_path / "topics" / "t.topic" / FILE_NAME).exists)
        assert [each.get("headers") for each in await waiting(api, "t", "c")] == [TRACE, None, OTHER]


async def test_headers_in_an_archive(tmp_path: Path) -> None:
    """It is a link to a follower, recorded: followers store the same bytes."""
    archive = str(tmp_path / "archive")
    async with running_api(tmp_path / "d", archive=archive, archive_before_ok=True) as api:
        await configure(api, "t", "c", max_attempts=1, dead_letter_topic="dead")
        await api.tcp.send(hpub("t", *THREE) + hpub("t", (b"4", OTHER), defer_ms=3_600_000))
        await api.tcp.ok()
        await api.tcp.ok()
        async with client_of(api) as client:
            await client.subscribe("t", "c", 1)
            await fail(client, 1)
            await client.message()
            with trio.fail_after(PATIENCE_S):
                while (await api.channel("t", "c")).get("dead_letter_count") != 1:
                    await trio.lowlevel.checkpoint()
        assert (
            await api.post("/pub", b"end", topic="t")
        ) == OK  # after the letter, which the archive has then, too
    restore_folder(archive, tmp_path / "restored")
    async with running_api(tmp_path / "restored") as api:
        assert await read_headers(api, "t") == [TRACE, {}, OTHER, OTHER, {}]
        assert (await letters(api))[0]["headers"] == TRACE  # others follow when the client is gone


@BOTH_SYNCS
async def test_numbered_publishes_with_headers_are_stored_once(tmp_path: Path, sync: str) -> None:
    """Also those that need several records, and after a kill."""
    large = [(b"%d" % n + bytes(1000), {"n": str(n)}) for n in range(500)]

    def command(first: int, *messages: tuple[bytes, dict[str, str]]) -> bytes:
        line, _, rest = hpub("t", *messages).partition(b"\n")
        return b"%s 0 %d\n%s" % (line, first, rest)

    async def introduce(client: RawClient) -> None:
        await client.send(identify(feature_negotiation=True, producer="p", producer_instance="i"))
        assert await client.frame() is not None
        await client.send(b"PRODUCER t\n")
        assert await client.frame() is not None

    data_path = tmp_path / "d"
    expected = [headers for _, headers in large] + [TRACE, {}, OTHER]
    async with running_api(data_path, sync=sync) as api:
        await introduce(api.tcp)
        await api.tcp.send((command(0, *large) + command(500, *THREE)) * 2)
        for _ in range(4):
            await api.tcp.ok()
        assert await read_headers(api, "t") == expected
        async with another(api, data_path, sync=sync) as copy:
            await introduce(copy.tcp)
            await copy.tcp.send(command(0, *large) + command(500, *THREE) + command(503, (b"x", OTHER)))
            for _ in range(3):
                await copy.tcp.ok()
            assert await read_headers(copy, "t") == [*expected, OTHER]


# ---------------------------------------------------------------------- dead letters and moves


@BOTH_SYNCS
async def test_dead_letters_keep_headers_and_requeued_ones_too(tmp_path: Path, sync: str) -> None:
    data_path = tmp_path / "d"
    async with running_api(data_path, sync=sync) as api, client_of(api) as asks:
        await configure(api, "t", "c", max_attempts=1, dead_letter_topic="dead")
        await api.tcp.send(hpub("t", *THREE))
        await api.tcp.ok()
        async with client_of(api) as client:
            await client.subscribe("t", "c", 3)
            await fail(client, 3)
            with trio.fail_after(PATIENCE_S):
                while (await api.channel("t", "c")).get("dead_letter_count") != 3:
                    await trio.lowlevel.checkpoint()
            found = await letters(api)
        assert sorted((each["body"], str(each.get("headers"))) for each in found) == sorted(
            (body.decode(), str(headers or None)) for body, headers in THREE
        )
        async with another(api, data_path, sync=sync) as copy:
            assert len(await letters(copy)) == 3
            assert (await copy.channel("t", "c"))["depth"] == 0
        answer = await api.send("POST", "/dead_letters/requeue?topic=dead")
        assert answer.json()["requeued"] == 3
        await ask_for_headers(asks)
        await asks.subscribe("t", "c", 3)
        got = sorted(await contents(asks, 3), key=lambda each: each[0])
        assert got == [(b"1", TRACE), (b"2", None), (b"3", OTHER)]


async def test_large_letters_return_to_their_channel_only(tmp_path: Path) -> None:
    """Several records store them, each for this channel."""
    messages = [(b"%d" % n + bytes(100_000), {"n": str(n)}) for n in range(6)]
    async with running_api(tmp_path / "d") as api:
        await configure(api, "t", "other")
        await configure(api, "t", "c", max_attempts=1, dead_letter_topic="dead")
        await api.tcp.send(hpub("t", *messages))
        await api.tcp.ok()
        async with client_of(api) as client:
            await client.subscribe("t", "c", 6)
            await fail(client, 6)
            with trio.fail_after(PATIENCE_S):
                while (await api.channel("t", "c")).get("dead_letter_count") != 6:
                    await trio.lowlevel.checkpoint()
        assert (await api.send("POST", "/dead_letters/requeue?topic=dead")).json()["requeued"] == 6
        assert [each["headers"] for each in await waiting(api, "t", "c")] == [each for _, each in messages]
        assert (await api.channel("t", "other"))["depth"] == 6


@pytest.mark.parametrize("max_bytes", [None, 1])
async def test_moved_messages_keep_headers(tmp_path: Path, max_bytes: int | None) -> None:
    async with running_api(tmp_path / "a") as source, running_api(tmp_path / "b") as target:
        await configure(source, "t", "c", max_attempts=1, dead_letter_topic="t2")
        await source.tcp.send(hpub("t", *THREE) + pub("t", b"4"))
        await source.tcp.send(hpub("t", (b"5", OTHER), defer_ms=3_600_000))
        for _ in range(3):
            await source.tcp.ok()
        mover = Mover(source, target)
        await mover.drain()
        await mover.all(max_bytes)
        found = [(each["body"], each.get("headers")) for each in await waiting(target, "t", "c")]
        assert found == [("1", TRACE), ("2", None), ("3", OTHER), ("4", None), ("5", OTHER)]


async def test_long_headers_of_many_messages_are_moved(tmp_path: Path) -> None:
    value = "x" * 10_000  # 5 MB, if each of the messages had them
    async with running_api(tmp_path / "a") as source, running_api(tmp_path / "b") as target:
        await configure(source, "t", "c")
        lines = "\n".join(map(str, range(500))).encode()
        answer = await source.send("POST", "/mpub?topic=t", {"X-NSQ-Header-Long": value}, lines)
        assert answer.status_code == 200, answer.text
        mover = Mover(source, target)
        await mover.drain()
        await mover.all()
        found = await waiting(target, "t", "c")
        assert [each["body"] for each in found] == [str(number) for number in range(500)]
        assert all(each["headers"] == {"long": value} for each in found)


@pytest.mark.parametrize("count", [8_000, 80_000])  # answered at once, and by a task
async def test_headers_of_a_request_do_not_multiply_without_limit(tmp_path: Path, count: int) -> None:
    lines = b"x\n" * count
    async with running_api(tmp_path / "d") as api:
        await configure(api, "t", "c")
        for headers in (
            {"X-NSQ-Header-Long": "x" * 16_000},
            {"X-NSQ-Header-Long": "x" * 9_000, "traceparent": TRACE["traceparent"]},
        ):
            answer = await api.send("POST", "/mpub?topic=t", headers, lines)
            assert (answer.status_code, "HEADERS_TOO_BIG" in answer.text) == (413, True)
        # No publish fails because of its trace.
        traces = {"traceparent": TRACE["traceparent"], "tracestate": "a=" + "b" * 1000}
        for number in (1000, count):
            answer = await api.send("POST", "/mpub?topic=t", traces, lines[: 2 * number])
            assert (answer.status_code, answer.text) == OK
        found = await read_headers(api, "t")
        assert found[999] == traces
        assert found[1000] == (traces if count * 1100 < 64 * 1024**2 else {})
        assert len(found) == 1000 + count


async def test_moved_groups_with_wrong_headers_are_refused(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await configure(api, "t", "c")
        for headers in (["a:1\n", "b:2\n"], ["A:1\n"], [1], {"a": "1"}, ["a:1"]):
            group = MovedGroup(0, 2, pack_messages([b"1", b"2", b"3"]), headers=headers)  # type: ignore[arg-type]
            status, text = await api.post("/topic/move/store", group.encode(), topic="t", producer="move-1:t")
            assert (status, "headers" in text) == (400, True), text


# ---------------------------------------------------------------------- HTTP


async def test_http_publishes_with_headers(tmp_path: Path) -> None:
    given = {
        "X-NSQ-Header-Tenant": "sieben: ü".encode().decode("latin-1"),
        "Traceparent": TRACE["traceparent"],
    }
    async with running_api(tmp_path / "d") as api:
        for path in ("/pub?topic=t", "/pub?topic=t", "/mpub?topic=t", "/pub?topic=t&producer=p&number=1"):
            raw = [(name.encode(), value.encode("latin-1")) for name, value in given.items()]
            answer = await api.client.post(path, headers=raw, content=b"a\nb")
            assert (answer.status_code, answer.text) == OK
        found = await read_headers(api, "t")
        assert found == [TRACE | {}] * 5
        await configure(api, "t", "c")
        answer = await api.send("POST", "/channel/pub?topic=t&channel=c", {"X-NSQ-Header-a": "1"}, b"x")
        assert answer.status_code == 200
        assert (await read_headers(api, "t"))[-1] == {"a": "1"}
        peeked = await waiting(api, "t", "c")
        in_order = sorted(peeked, key=lambda each: each["sequence"])
        assert [each.get("headers") for each in in_order] == [*found, {"a": "1"}]


async def test_http_bad_headers(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        assert await api.post("/pub", b"x", topic="t") == OK  # so that the next ones need no task
        for name, value, reason in (
            ("X-NSQ-Header-", "1", "name"),
            ("X-NSQ-Header-a", "1\t2", "control character"),
            ("X-NSQ-Header-a", "x" * 16_400, "more than 16384"),
            ("X-NSQ-Header-" + "a" * 129, "1", "name"),
            ("X-NSQ-Header-a", "\xff", "decode"),
        ):
            raw = [(name.encode(), value.encode("latin-1"))]
            answer = await api.client.post("/pub?topic=t", headers=raw, content=b"x")
            assert answer.status_code == 400, answer.text
            assert answer.json()["message"].startswith("INVALID_HEADER: "), answer.text
            assert reason in answer.json()["message"]
        # Other programs' trace headers never make a publish fail.
        for bad in (b"a\tb", b"\xff", b"x" * 2000):
            answer = await api.client.post("/pub?topic=t", headers=[(b"tracestate", bad)], content=b"x")
            assert (answer.status_code, answer.text) == OK
        own = [(b"traceparent", b"1"), (b"X-NSQ-Header-Traceparent", b"2"), (b"traceparent", b"3")]
        answer = await api.client.post("/pub?topic=t", headers=own, content=b"x")
        assert (answer.status_code, answer.text) == OK
        assert await read_headers(api, "t") == [{}, {}, {}, {}, {"traceparent": "2"}]


async def test_hpub_over_http(tmp_path: Path) -> None:
    body = hpub_body(*((body, text_of(headers)) for body, headers in THREE))
    async with running_api(tmp_path / "d") as api:
        assert await api.post("/hpub", body, topic="t") == OK
        for _ in range(2):
            assert await api.post("/hpub", body, topic="t", producer="p", number=1) == OK
        assert await read_headers(api, "t") == [TRACE, {}, OTHER] * 2
        answer = await api.post("/hpub", hpub_body((b"x", b"A:1\n")), topic="t")
        assert answer == (400, "BAD_MESSAGE: HPUB message(0): invalid headers")
        assert await api.post("/hpub", hpub_body(*[(b"x", b"")] * 1025), topic="t") == (413, "BAD_BODY")
        assert await api.post("/hpub", hpub_body((b"", b"a:1\n")), topic="t") == (
            400,
            "BAD_MESSAGE: HPUB message(0) without a body",
        )
        assert len(await read_headers(api, "t")) == 6


async def test_read_answers_have_headers(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        await api.tcp.send(hpub("t", *THREE))
        await api.tcp.ok()
        lines = (await api.get("/topic/read", topic="t")).text.splitlines()
        assert '"headers":{"traceparent":' in lines[0]
        assert "headers" not in lines[1]
        assert json.loads(lines[2])["headers"] == OTHER


# ---------------------------------------------------------------------- what is refused


BAD: dict[str, tuple[bytes, str]] = {
    "no line feed": (b"a:1", "invalid headers"),
    "no colon": (b"a\n", "invalid headers"),
    "upper case": (b"A:1\n", "invalid headers"),
    "empty name": (b":1\n", "invalid headers"),
    "space": (b"a b:1\n", "invalid headers"),
    "control character": (b"a:1\0\n", "invalid headers"),
    "no UTF-8": (b"a:\xff\n", "'utf-8' codec"),
    "twice": (b"a:1\na:2\n", "a header occurs twice"),
    "too many": (b"".join(b"h%d:\n" % n for n in range(65)), "65 headers, more than 64"),
    "too long": (b"a:" + b"x" * 16_382 + b"\n", "headers of 16385 bytes, more than 16384"),
    "name too long": (b"a" * 129 + b":1\n", "invalid headers"),
}


@pytest.mark.parametrize("what", BAD)
async def test_bad_headers(tmp_path: Path, what: str) -> None:
    text, reason = BAD[what]
    async with running_api(tmp_path / "d") as api:
        error = await refusal(api.tcp, raw_hpub("t", (b"good", b"a:1\n"), (b"bad", text)))
        assert error.startswith(f"E_BAD_HEADERS HPUB message(1): {reason}")
        assert (await api.stats())["topics"] == []


async def test_headers_at_the_limits(tmp_path: Path) -> None:
    longest = {"a": "x" * 16_381}
    many = {f"{n:0128d}": "" for n in range(64)}
    async with running_api(tmp_path / "d", limits=Limits(max_msg_size=10)) as api, client_of(api) as asks:
        await ask_for_headers(asks)
        await asks.subscribe("t", "c", 10)
        await api.tcp.send(hpub("t", (b"x" * 10, longest), (b"y", many)))
        await api.tcp.ok()
        assert await contents(asks, 2) == [(b"x" * 10, longest), (b"y", many)]
        assert await refusal(api.tcp, hpub("t", (b"x" * 11, OTHER))) == (
            "E_BAD_MESSAGE HPUB message(0) too big 11 > 10"
        )


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (b"HPUB t\n\0\0\0\x0b\0\0\0\1\0\0\0\3\0\5a", "E_BAD_HEADERS HPUB message(0): incomplete headers"),
        (b"HPUB t\n\0\0\0\x09\0\0\0\1\0\0\0\1\0", "E_BAD_HEADERS HPUB message(0): incomplete headers"),
        (b"HPUB t\n\0\0\0\x0a\0\0\0\1\0\0\0\2\0\0", "E_BAD_MESSAGE HPUB message(0) without a body"),
        (b"HPUB t\n\0\0\0\x08\0\0\0\1\0\0\0\0", "E_BAD_MESSAGE HPUB invalid message(0) body size 0"),
        (b"HPUB t\n\0\0\0\x08\0\0\4\1\0\0\0\0", "E_BAD_BODY HPUB invalid message count 1025"),
        (b"HPUB t\n\0\0\0\0", "E_BAD_BODY HPUB invalid body size 0"),
        (b"HPUB t\n\x7f\xff\xff\xff", "E_BAD_BODY HPUB body too big 2147483647 > 5242880"),
        (b"HPUB t x\n", "E_INVALID HPUB could not parse timeout x"),
        (b"HPUB t 31536000001\n", "E_INVALID HPUB timeout 31536000001 out of range 0-31536000000"),
        (b"HPUB t|\n", 'E_BAD_TOPIC HPUB topic name "t|" is not valid'),
        (b"HPUB\n", "E_INVALID HPUB insufficient number of parameters"),
        (
            raw_hpub("t", *[(b"x", b"a:" + b"x" * 16_000 + b"\n")] * 66),
            "E_BAD_HEADERS HPUB message(65): more than 1048576 bytes of headers in all",
        ),
    ],
)
async def test_bad_commands(tmp_path: Path, command: bytes, error: str) -> None:
    async with running_api(tmp_path / "d") as api:
        assert await refusal(api.tcp, command) == error
        assert (await api.stats())["topics"] == []


async def test_hpub_in_pieces_and_among_others(tmp_path: Path) -> None:
    commands = [
        pub("t", b"0"),
        hpub("t", *THREE),
        dpub("t", 1, b"d"),
        mpub("t", b"4", b"5"),
        hpub("t", (b"6", OTHER)),
    ]
    async with running_api(tmp_path / "d") as api:
        for byte in b"".join(commands):
            await api.tcp.send(bytes([byte]))
        for _ in commands:
            await api.tcp.ok()
        await api.tcp.send(b"".join(commands))
        for _ in commands:
            await api.tcp.ok()
        expected = [{}, TRACE, {}, OTHER, {}, {}, {}, OTHER]
        assert await read_headers(api, "t") == expected * 2


async def test_refused_hpub_stores_nothing_and_names_the_verb(tmp_path: Path) -> None:
    async with running_api(tmp_path / "d") as api:
        assert (await api.send("PUT", "/config/draining", body=b"true")).status_code == 200
        await api.tcp.send(identify(survive_refusals=True) + hpub("t", *THREE))
        await api.tcp.ok()
        assert (await api.tcp.error()).startswith("E_HPUB_FAILED HPUB failed DRAINING")


async def test_second_identify_changes_nothing_for_a_subscriber(tmp_path: Path) -> None:
    """A client that stops asking before it subscribes gets plain frames."""
    async with running_api(tmp_path / "d") as api:
        await ask_for_headers(api.tcp)
        await api.tcp.send(identify())
        await api.tcp.ok()
        await api.tcp.send(hpub("t", (b"1", TRACE)))
        await api.tcp.ok()
        await api.tcp.subscribe("t", "c", 1)
        assert (await api.tcp.message()).body == b"1"
