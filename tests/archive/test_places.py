"""What may be given with --archive and --restore-from."""

from errno import ESTALE
from pathlib import Path
from typing import Any

import pytest

from broker.support import connected, running_broker
from storage.stores import Store
from trio_nsq.broker.archiving import archive_of
from trio_nsq.broker.options import BrokerOptions
from trio_nsq.broker.startup_check import startup_problems
from trio_nsq.cluster.member import check_restore
from trio_nsq.cluster.options import ClusterOptions
from trio_nsq.protocol.errors import StartupError


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()


def problem(archive: str) -> str:
    """Return what a check of the configuration says about an archive; empty: nothing."""
    return "".join(startup_problems(BrokerOptions(Path("data/here").absolute(), archive=archive)))


@pytest.mark.parametrize(
    ("archive", "reason"),
    [
        ("data/here", "is in the data folder"),
        ("data/here/../here/sub", "is in the data folder"),
        ("data", "has the data folder in it"),
        (".", "has the data folder in it"),
        (" ", "' ' is no name of a folder"),
        ("a\nb", r"'a\nb' is no name of a folder"),
        ("/dev/null", "/dev/null cannot be a folder"),
        ("file", "file cannot be a folder"),
        ("file/sub/folder", "is none"),
        ("x" * 300, "File name too long"),
        ("ftp://host/x", "ftp://host/x is not supported"),
        ("s3://", "has no bucket"),
        ("broken", "@archive.json is damaged, and no checkpoint has a record"),
    ],
)
def test_an_archive_that_cannot_be_used(tmp_path: Path, archive: str, reason: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "@archive.json").write_bytes(b"?")
    found = problem(archive)
    assert (found.startswith("--archive: "), reason in found) == (True, True), found


@pytest.mark.parametrize(
    "archive", ["archive", "archive/", "deep/er/archive", "ü/ñ", "a b%20c?x=1#y", "data2"]
)
def test_an_archive_that_can_be_used(tmp_path: Path, archive: str) -> None:
    assert problem(archive) == ""
    assert [each.name for each in tmp_path.iterdir()] == ["data"], "nothing is made by a check"


def test_a_mount_that_is_away_keeps_no_broker_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, found = tmp_path / "mount", Path.stat

    def stat(path: Path, **options: Any) -> Any:
        if path == place:
            raise OSError(ESTALE, "Stale file handle")
        return found(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    assert archive_of(BrokerOptions(tmp_path / "data", archive=str(place))).shown == str(place)


def test_a_bucket_that_is_missing(s3: Store) -> None:
    with s3.here():
        assert problem(s3.new_place()) == ""
        found = problem("s3://no-such-bucket/nsq")
        assert (found.startswith("--archive: "), "the bucket no-such-bucket does not exist" in found) == (
            True,
            True,
        ), found


@pytest.mark.parametrize("slashes", [("", "/"), ("/", ""), ("//", "/.")])
async def test_slashes_at_the_end_make_no_other_archive(tmp_path: Path, slashes: tuple[str, str]) -> None:
    """The first start begins the archive, the second one restores it."""
    archive, restored_from = (f"{tmp_path}/archive{each}" for each in slashes)
    options: Any = {"archive": archive, "restore_from": restored_from, "archive_before_ok": True}
    async with running_broker(tmp_path / "one", **options) as bound, connected(bound.tcp_address) as nsq:
        await nsq.publish("t", b"one")
    async with running_broker(tmp_path / "two", **options):
        assert (tmp_path / "two" / "topics" / "t.topic").is_dir()


@pytest.mark.parametrize(
    ("archive", "restored_from", "same"),
    [
        ("s3://bucket/x", "s3://bucket/x/", True),
        ("s3://bucket/x/", "s3://bucket/x", True),
        ("s3://key:secret@bucket/x", "s3://bucket/x", True),
        ("s3://bucket/x", "s3://bucket/y", False),
        ("", "s3://bucket/x", False),
        ("/a/b/", "/a/b", True),
    ],
)
def test_a_member_is_restored_from_its_own_archive(
    tmp_path: Path, archive: str, restored_from: str, same: bool
) -> None:
    options = BrokerOptions(tmp_path, archive=archive)
    cluster = ClusterOptions("prod", "etcd://", restore_from=restored_from)
    if same:
        check_restore(options, cluster)
    else:
        with pytest.raises(StartupError, match="--restore-from: a member of a cluster is restored from"):
            check_restore(options, cluster)
