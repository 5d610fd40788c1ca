"""Test that a data folder written by an earlier commit with this format opens with all its content."""

import zipfile
from pathlib import Path

import httpx

from broker.api import OK, Api
from broker.support import connected, running_broker

KEPT = Path(__file__).parent / "folders" / "format-2.zip"
"""Made by `qcli serve --sync=always --max-bytes-per-file=3000 --max-req-timeout=8760h`, and stopped cleanly.

orders: 43 messages, "orders NUMBER ...", in four segments. 40 and 41 are batch 7 of producer "loader"; 42 is
deferred by 364 days. Channel billing (max_attempts 2, dead letters to "dead") has finished 1, 2, 3 and 8, has
5 deferred by 360 days, and has moved six others to "dead". Channel paused is paused; no message was delivered
by paused and behind.
dead: those six, for channels dead-letters and reader.
still: "still NUMBER"; paused after 5 messages, with 3 more that channel c has not got.
"""


def test_folder_has_the_current_format() -> None:
    with zipfile.ZipFile(KEPT) as archive:
        names = archive.namelist()
        assert len([name for name in names if name.startswith("topics/orders.topic/000")]) == 4


async def consumed(address: str, topic: str, channel: str, count: int) -> list[int]:
    """Return the numbers of the ready messages of a channel, and finish them."""
    found = []
    async with connected(address) as client:
        await client.subscribe(topic, channel, ready_count=100)
        for _ in range(count):
            message = await client.message()
            found.append(int(message.body.split()[1]))
            await client.send(b"FIN %s\n" % message.id)
        await client.nothing_more()
    return found


async def test_folder_opens_with_all_its_content(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with zipfile.ZipFile(KEPT) as archive:
        archive.extractall(data)
    before = {path.relative_to(data): path.read_bytes() for path in data.rglob("*.log")}
    async with (
        running_broker(data, max_bytes_per_file=3000) as bound,
        connected(bound.tcp_address) as tcp,
        httpx.AsyncClient(base_url=f"http://{bound.http_address}") as http,
    ):
        api = Api(http, tcp)
        assert (await api.get("/ping")).text == "OK"
        stats = (await api.get("/stats", format="json")).json()
        topics = {topic["topic_name"]: topic for topic in stats["topics"]}
        channels = {
            (topic["topic_name"], channel["channel_name"]): channel
            for topic in topics.values()
            for channel in topic["channels"]
        }
        # Deferred messages become due later.
        left = {key: channel["depth"] + channel["deferred_count"] for key, channel in channels.items()}
        assert left == {
            ("orders", "billing"): 33,
            ("orders", "paused"): 43,
            ("orders", "behind"): 43,
            ("dead", "dead-letters"): 6,
            ("dead", "reader"): 6,
            ("still", "c"): 5,
        }
        assert [name for name, topic in topics.items() if topic["paused"]] == ["still"]
        assert [key for key, channel in channels.items() if channel["paused"]] == [("orders", "paused")]
        assert topics["still"]["depth"] == 3
        billing = channels["orders", "billing"]
        assert (billing["max_attempts"], billing["dead_letter_topic"]) == (2, "dead")

        # It was published before.
        assert await api.post("/mpub", b"a\nb", topic="orders", producer="loader", number=7) == OK
        assert (await api.stats(topic="orders"))["topics"][0]["message_count"] == 0

        ready = await consumed(bound.tcp_address, "orders", "billing", billing["depth"])
        dead = await consumed(bound.tcp_address, "dead", "reader", 6)
        waiting = {5, 42} if billing["deferred_count"] == 2 else set()
        assert sorted([*ready, *dead, *waiting]) == sorted({*range(43)} - {1, 2, 3, 8})
        behind = await consumed(bound.tcp_address, "orders", "behind", channels["orders", "behind"]["depth"])
        assert behind[:42] == list(range(42))
    for path, content in before.items():
        if (data / path).exists():  # retention deletes finished files
            assert (data / path).read_bytes().startswith(content)
