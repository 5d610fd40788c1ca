"""Pages and files of one broker, which the address names with `broker=`: another broker's never answer instead."""

import csv
import json
from pathlib import Path

from broker.api import DONE, Api, running_api
from console.message_support import http_address, running_console
from fleet.support import take_down
from interop.peers import free_ports, qcli_serve

LISTS = {
    "/dead-letters/t?": 502,
    "/dead-letters/t?format=json&": 502,
    "/dead-letters/t?format=csv&": 502,
    "/topics/t/messages?format=json&": 502,
    "/topics/t/messages?format=csv&": 502,
    "/topics/t/messages?": 200,  # a page with the form, to select another
    "/topics/t/messages/0?": 502,
    "/topics/t/messages/0/body?": 502,
    "/topics/t/messages.ndjson?from=0&until=1&": 502,
    "/topics/t/dead-letters/seek?to=earliest&": 422,
    "/topics/t/dead-letters/disconnect?client=127.0.0.1:1&": 502,
}
"""The status of each page if the broker is down."""


async def publish(broker: Api) -> None:
    """Publish a message to the topic, which has dead letters."""
    assert await broker.post("/topic/create", topic="t") == DONE
    assert await broker.post("/channel/create", topic="t", channel="dead-letters") == DONE
    await broker.tcp.publish("t", b"of another")


async def test_broker_that_is_down_is_an_error_that_names_it(tmp_path: Path) -> None:
    with qcli_serve(tmp_path / "b") as doomed:
        doomed.create("t", "dead-letters")
        doomed.post("/pub", b"of the broker that is down", topic="t")
        async with (
            running_api(tmp_path / "a") as alive,
            running_console([http_address(alive), doomed.http_address], request_timeout_ms=500) as site,
        ):
            await publish(alive)
            await site.until_shown("/dead-letters/t", "of the broker that is down", "of another")
            take_down(doomed)
            # This page asks no broker: it shows the last poll.
            await site.until_shown("/topics/t/dead-letters/seek", "refused")
            for path, status in LISTS.items():
                answer = await site.get(f"{path}broker={doomed.http_address}")
                assert answer.status_code == status, path
                assert "of another" not in answer.text, path
                assert (
                    f"{doomed.http_address}: " in answer.text
                    or f"{doomed.http_address}</strong>: " in answer.text
                )
                assert "refused" in answer.text, path
            for path in "/jobs", "/dead-letters":
                lines = [json.loads(line) for line in (await site.get(path, format="json")).text.splitlines()]
                rows = list(csv.DictReader((await site.get(path, format="csv")).text.splitlines()))
                for records in lines, rows:
                    (gap,) = [each["gap"] for each in records if each.get("gap")]
                    assert gap.startswith("no answer: ")
                    assert [each["broker"] for each in records if each.get("gap")] == [doomed.http_address]
            assert f"{doomed.http_address} does not tell its jobs" in (await site.page("/jobs")).text


async def test_unknown_broker_is_an_error_that_names_it(tmp_path: Path) -> None:
    async with running_api(tmp_path) as alive, running_console([http_address(alive)]) as site:
        await publish(alive)
        await site.until_shown("/dead-letters/t", "of another")
        for path in LISTS:
            answer = await site.get(f"{path}broker=127.0.0.1:1")
            assert answer.status_code == (422 if "seek" in path else 404), path
            assert "of another" not in answer.text, path
            assert "127.0.0.1:1" in answer.text, path


async def test_broker_that_was_never_up_is_named_in_files(tmp_path: Path) -> None:
    down = f"127.0.0.1:{free_ports(1)[0]}"
    async with running_api(tmp_path) as alive, running_console([http_address(alive), down]) as site:
        await publish(alive)
        await site.until_shown("/dead-letters/t", "of another", "refused")
        for path in "/dead-letters/t", "/topics/t/dead-letters/deferred":
            records = [json.loads(line) for line in (await site.get(path, format="json")).text.splitlines()]
            (gap,) = [each for each in records if "gap" in each]
            assert gap["broker"] == down, path
            assert gap["gap"].startswith("no answer: "), path
            assert gap["gap"].count("answer") == 1, path
