"""Tests for the checks of logs and folders."""

from pathlib import Path

from broker.support import connected, mpub, running_broker
from cluster.checker import content_of, differences, read_log
from faults.ledger import body_of


async def test_a_whole_log_is_read(tmp_path: Path) -> None:
    bodies = [body_of(number) for number in range(300)]  # some are not UTF-8
    async with running_broker(tmp_path / "d") as bound, connected(bound.tcp_address) as client:
        for start in range(0, 300, 100):
            await client.send(mpub("t", *bodies[start : start + 100]))
            await client.ok()
        assert bound.http_address is not None
        log = [each async for page in read_log(bound.http_address, "t", page=70) for each in page]
    assert [entry.body for entry in log] == bodies
    assert len({entry.id for entry in log}) == 300
    assert [entry.sequence for entry in log] == [*range(log[0].sequence, log[0].sequence + 300)]


def test_folders_are_compared_without_what_each_member_has_for_itself(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        (folder / "topics" / "empty").mkdir(parents=True)
        (folder / "topics" / "log").write_bytes(b"same")
        (folder / "cluster.json").write_text(folder.name)
        (folder / "write-ahead.1").write_text(folder.name)
    (other / "diverged-7").mkdir()
    (other / "diverged-7" / "log").write_bytes(b"old")
    assert differences(one, other) == []
    assert content_of(one).keys() == {b"topics/", b"topics/empty/", b"topics/log"}

    (other / "topics" / "log").write_bytes(b"Same")
    assert len(differences(one, other)) == 1
    (one / "state").write_bytes(b"")
    (other / "topics" / "empty").rmdir()
    assert [each.partition(":")[0] for each in differences(one, other)] == [
        "state",
        "topics/empty/",
        "topics/log",
    ]
