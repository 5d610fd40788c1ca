"""Tests for failures at the start of a broker, or of a topic: one sentence says why, and nothing is lost."""

import os
import socket
from importlib import import_module
from pathlib import Path

import pytest
import trio

from broker.support import connected, refusal, running_broker
from faults.scenario import http
from trio_nsq.broker import BrokerOptions, serve


async def complaint(data_path: Path) -> str:
    """Return the broker's message at its start."""
    async with running_broker(data_path) as bound:
        assert bound.http_address is not None
        status, text = await http(bound.http_address, "GET", "/ping")
        assert status == 500
        return text.decode()


async def publish_one(data_path: Path) -> Path:
    """Let a broker store a message in topic t; return the topic's folder."""
    async with running_broker(data_path) as bound, connected(bound.tcp_address) as client:
        await client.publish("t", b"kept")
    return data_path / "topics" / "t.topic"


async def test_locked_folder(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "d"):
        text = await refusal(tmp_path / "d")
    holder = f"process {os.getpid()}, probably another broker"
    end = "Stop it, or choose another --data-path"
    assert text == f"--data-path: {tmp_path / 'd'} is in use by {holder}. {end}"


async def test_missing_parent_folder(tmp_path: Path) -> None:
    text = await refusal(tmp_path / "no" / "d")
    assert text == f"--data-path: the folder {tmp_path / 'no'} does not exist; create it first"


async def test_data_path_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "d").write_text("")
    assert "is not a folder" in await refusal(tmp_path / "d")


async def test_folder_not_writable() -> None:
    """In /proc no user can create a folder. Root ignores modes, so a mode would not do."""
    assert "--data-path: cannot use" in await refusal(Path("/proc/trio-nsq"))


async def test_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = "127.0.0.1:%d" % taken.getsockname()[1]
        with pytest.raises(ExceptionGroup) as caught:
            async with trio.open_nursery() as nursery:
                await nursery.start(serve, BrokerOptions(data_path=tmp_path / "d", tcp_address=address))
        text = f"--tcp-address: cannot listen on {address}: Address already in use. Another server may be running: "
        assert str(caught.value.exceptions[0]) == f"{text}stop it, or choose another --tcp-address"


async def test_stray_file_is_named_and_the_topic_is_unavailable(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = await publish_one(tmp_path / "d")
    stray = folder / "00000000000000000099.log"
    stray.write_bytes(b"127.0.0.1 - - GET /index.html\n" * 3)
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.subscribe("t", "c", ready_count=1)
        assert (await client.message()).body == b"kept"
    assert f"{stray}: set aside as {stray.name}.damaged" in caplog.text
    assert stray.with_name(f"{stray.name}.damaged").read_bytes().startswith(b"127.0.0.1")


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"format":1}', b'{"format":99}'])
async def test_damaged_topic_state_is_named(tmp_path: Path, damage: bytes) -> None:
    folder = await publish_one(tmp_path / "d")
    (folder / "state.json").write_bytes(damage)
    assert f"{folder / 'state.json'} is damaged" in await complaint(tmp_path / "d")


async def test_missing_topic_state_loses_only_the_channels(tmp_path: Path) -> None:
    folder = await publish_one(tmp_path / "d")
    for path in folder.glob("state.json*"):
        path.unlink()
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        await client.subscribe("t", "c", ready_count=1)
        assert (await client.message()).body == b"kept"


async def test_damaged_broker_file(tmp_path: Path) -> None:
    await publish_one(tmp_path / "d")
    for name in ("broker.json", "broker.json.copy"):
        (tmp_path / "d" / name).write_text("?")
    assert "broker.json is damaged" in await refusal(tmp_path / "d")
    (tmp_path / "d" / "broker.json").unlink()
    assert "broker.json is missing" in await refusal(tmp_path / "d")


async def test_folder_of_nsqd_is_refused(tmp_path: Path) -> None:
    (tmp_path / "nsqd.dat").write_text('{"topics":[],"version":"1.3.0"}')
    assert "holds the queues of an nsqd" in await refusal(tmp_path)
    assert os.listdir(tmp_path) == ["nsqd.dat"]


async def test_torn_tail_is_cut_and_the_rest_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = await publish_one(tmp_path / "d")
    segment = folder / "00000000000000000000.log"
    segment.write_bytes(segment.read_bytes() + b"NSQB torn")
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        assert f"{segment}: cut 9 bytes of an unfinished record" in caplog.text
        await client.publish("t", b"after")
        await client.subscribe("t", "c", ready_count=2)
        assert [(await client.message()).body for _ in range(2)] == [b"kept", b"after"]


async def test_a_python_without_the_gil_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for enabled in (True, False):
        module = import_module("trio_nsq.broker.serve")
        monkeypatch.setattr(module, "has_gil", lambda enabled=enabled: enabled)
        async with running_broker(tmp_path / "d"):
            assert ("runs without the GIL" in caplog.text) is not enabled
