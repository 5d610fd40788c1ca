"""Tests with the greatest accepted value of every numeric option of `qcli serve`: its use must not overflow."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import click
import httpx
import pytest

from broker.support import connected, dpub, identify, running_broker
from cli.support import options
from qcli.commands.serve.settings import SETTINGS
from qcli.framework.daemon.setting import Setting

_OF_THE_TEST = ("data_path", "tcp_address", "http_address", "https_address")
NUMERIC = [each for each in SETTINGS if each.metavar in ("N", "BYTES", "DURATION") and not each.hidden]


def greatest(setting: Setting) -> int | None:
    """Return the greatest number that an option accepts; None without a limit."""
    unit = "ms" if setting.metavar == "DURATION" else ""

    def accepts(number: int) -> bool:
        try:
            setting.type.convert(f"{number}{unit}", None, None)
        except click.UsageError:
            return False
        return True

    bits = next((bits for bits in range(1, 130) if not accepts(2**bits)), None)
    if bits is None:
        return None
    low, high = 1 << (bits - 1), 1 << bits
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if accepts(middle) else (low, middle)
    return low


@pytest.mark.parametrize("setting", NUMERIC, ids=lambda setting: setting.name)
def test_every_number_has_a_limit(setting: Setting) -> None:
    limit = greatest(setting)
    assert limit is not None
    assert limit < 2**63


async def test_a_broker_works_with_the_greatest_values(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flags = [
        f"{setting.opts[0]}={greatest(setting)}{'ms' if setting.metavar == 'DURATION' else ''}"
        for setting in NUMERIC
    ]
    given = options(*flags, f"--archive={tmp_path / 'archive'}")
    fields: dict[str, Any] = {
        field.name: getattr(given, field.name)
        for field in dataclasses.fields(given)
        if field.name not in _OF_THE_TEST
    }
    limits = given.limits
    async with running_broker(tmp_path / "d", **fields) as bound:
        async with connected(bound.tcp_address) as client:
            await client.send(
                identify(
                    heartbeat_interval=limits.max_heartbeat_interval_ms, msg_timeout=limits.max_msg_timeout_ms
                )
            )
            await client.ok()
            await client.subscribe("t", "c", ready_count=limits.max_rdy_count)
            await client.publish("t", b"x")
            await client.send(dpub("t", limits.max_defer_ms, b"later"))
            await client.ok()
            message = await client.message()
            await client.send(b"TOUCH %s\nREQ %s %d\n" % (message.id, message.id, limits.max_req_timeout_ms))
            await client.nothing_more()
        async with httpx.AsyncClient(base_url=f"http://{bound.http_address}") as http:
            defer: dict[str, str | int] = {"topic": "t", "defer": limits.max_defer_ms}
            assert (await http.post("/pub", params=defer, content=b"later")).status_code == 200
            of_channel = {"topic": "t", "channel": "c"}
            for path in ("/stats", "/metrics", "/channel/deferred", "/channel/deferred/counts"):
                assert (await http.get(path, params=of_channel)).status_code == 200
    async with running_broker(tmp_path / "d", **fields) as bound, httpx.AsyncClient() as http:
        answer = await http.get(f"http://{bound.http_address}/channel/deferred/counts", params=of_channel)
        assert json.loads(answer.content)["deferred_count"] == 3
    assert not [record for record in caplog.records if record.exc_info]
