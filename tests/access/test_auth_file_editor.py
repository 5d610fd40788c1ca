"""Changes of an auth file: its text, and how it is written."""

import os
import re
import stat
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_nsq.access.auth_file import AuthFileError, read_auth_file
from trio_nsq.access.auth_file_editor import (
    GrantText,
    NameTaken,
    UnknownNames,
    add_token,
    edit_auth_file,
    entries_of,
    make_token,
    read_entries,
    remove_entries,
)

FILE = """\
# head
[[token]]  # first
name = "web"
hash = "sha256:%s"
# about grants
grants = [
    { roles = ["publish"], topics = ["clicks"] },  # why
]

# the backup's certificate
[[certificate]]
name = "backup"
subject = "CN=backup"

[[certificate.grants]]
roles = ["read"]

# the second token
  [[ "token" ]]
name = 'bill'
hash = "sha256:%s"
expires = 2027-01-01T02:00:00+02:00
# the end
""" % ("0" * 64, "1" * 64)

READ = GrantText(("read",))


def test_token_has_256_random_bits_and_a_prefix() -> None:
    tokens = {make_token() for _ in range(100)}
    assert len(tokens) == 100
    assert all(re.fullmatch(r"nsq_[A-Za-z0-9_-]{43}", token) for token in tokens)


def test_entries() -> None:
    web, bill, backup = entries_of(FILE)
    assert (web.name, web.kind, web.expires) == ("web", "token", None)
    assert web.grants == (GrantText(("publish",), ("clicks",), ("*",)),)
    assert (bill.name, bill.grants, bill.expires) == ("bill", (), datetime(2027, 1, 1, tzinfo=UTC))
    assert (backup.kind, backup.subject, backup.grants) == ("certificate", "CN=backup", (READ,))
    assert not bill.has_expired(datetime(2026, 12, 31, tzinfo=UTC))
    assert bill.has_expired(datetime(2027, 1, 1, tzinfo=UTC))


@pytest.mark.parametrize("text", ["", "# only a comment", FILE, FILE.rstrip("\n")])
def test_added_token_follows_the_old_text(text: str) -> None:
    token = make_token()
    grant = GrantText(("publish", "read"), ("a-*", "b"), ("c",))
    expires = datetime(2027, 1, 1, 1, tzinfo=timezone(timedelta(hours=1)))
    changed = add_token(text, "new", token, grant, expires)
    assert changed.startswith(text)
    assert token not in changed
    added = next(entry for entry in entries_of(changed) if entry.name == "new")
    assert (added.grants, added.expires) == ((grant,), datetime(2027, 1, 1, tzinfo=UTC))


def test_broker_accepts_the_token(tmp_path: Path) -> None:
    path, token = tmp_path / "auth.toml", make_token()
    assert edit_auth_file(path, lambda text: add_token(text, "new", token, READ))
    identity = read_auth_file(path).find_token(token.encode(), 0)
    assert identity is not None
    assert identity.allows_everywhere("read")
    assert not identity.allows("manage", "t")
    assert read_auth_file(path).find_token(token.encode() + b"x", 0) is None


def test_removed_entry_leaves_everything_else_as_it_was() -> None:
    lines = FILE.splitlines(keepends=True)
    without_web = "".join(lines[:1] + lines[8:])
    assert without_web.startswith("# head\n\n# the backup")
    assert remove_entries(FILE, ["web"]) == without_web
    without_backup = remove_entries(FILE, ["backup"])
    assert "[[certificate" not in without_backup
    assert without_backup.count("#") == FILE.count("#")
    assert [entry.name for entry in entries_of(remove_entries(FILE, ["bill", "backup"]))] == ["web"]
    assert remove_entries(FILE, ["web", "bill", "backup"]).split("\n") == [
        "# head", "", "# the backup's certificate", "", "# the second token", "# the end", ""
    ]  # fmt: skip


def test_revoked_tokens_leave_no_blank_lines() -> None:
    one = add_token(FILE, "one", make_token(), READ)
    two = add_token(one, "two", make_token(), READ)
    three = add_token(two, "three", make_token(), READ)
    assert remove_entries(two, ["two"]) == one
    assert remove_entries(two, ["one", "two"]) == FILE
    assert remove_entries(three, ["two"]).count("\n\n") == two.count("\n\n")


def test_names_that_are_taken_or_unknown() -> None:
    for name in ("web", "backup"):
        with pytest.raises(NameTaken):
            add_token(FILE, name, make_token(), READ)
    with pytest.raises(UnknownNames) as raised:
        remove_entries(FILE, ["web", "x", "y"])
    assert (raised.value.names, raised.value.known) == (["x", "y"], ["web", "bill", "backup"])


@pytest.mark.parametrize("name", ["", 'a"b', "a b", "a\nb", "x" * 65, "ä"])
def test_name_that_is_not_valid(name: str) -> None:
    with pytest.raises(ValueError, match="a name has"):
        add_token("", name, make_token(), READ)


@pytest.mark.parametrize(
    "text",
    [
        'token = [{ name = "web", hash = "sha256:%s" }]\n' % ("0" * 64),
        'token = [{ name = "web", hash = "sha256:%s" }]\n' % ("0" * 64)
        + "[[certificate]]\nname='x'\nsubject='''\n[[token]]\n'''\n",
    ],
)
def test_form_that_cannot_be_edited_is_left_alone(text: str) -> None:
    with pytest.raises(ValueError, match="edit it by hand"):
        add_token(text, "new", make_token(), READ)
    with pytest.raises(ValueError, match="edit it by hand"):
        remove_entries(text, ["web"])


@given(
    st.lists(st.sampled_from([*FILE.splitlines(), "[[token]]", 'x = """', "[[token.grants]]"]), max_size=30)
)
def test_any_text_is_refused_or_changed_as_asked(lines: list[str]) -> None:
    text = "\n".join(lines)
    try:
        before = entries_of(text)
    except ValueError:
        return
    try:
        changed = add_token(text, "new", make_token(), READ)
        assert {e.name for e in entries_of(changed)} == {e.name for e in before} | {"new"}
        assert entries_of(remove_entries(changed, ["new"])) == before
        for entry in before:
            assert entries_of(remove_entries(text, [entry.name])) == [e for e in before if e != entry]
    except ValueError as error:
        if "edit it by hand" not in str(error):
            raise


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (FILE + "[[token]]\nname = 'b'\n", "line 24: token b needs a hash"),
        ("[[token]]\nname = \n", "line 2"),
        ("[[certificate]]\n[[token]]\nname = 'a'\nrole = 1\n", "line 2: token a has the unknown key role"),
        ("\xff", "codec can't decode"),
    ],
)  # fmt: skip
def test_invalid_file_names_the_line(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "auth.toml"
    path.write_bytes(text.encode("latin-1"))
    for act in (
        lambda: read_entries(path),
        lambda: read_auth_file(path),
        lambda: edit_auth_file(path, lambda text: add_token(text, "new", make_token(), READ)),
    ):
        with pytest.raises(AuthFileError, match=reason):
            act()
    assert path.read_bytes() == text.encode("latin-1")
    assert os.listdir(tmp_path) == ["auth.toml"]


def test_file_that_cannot_be_written(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no" / "auth.toml"):
        with pytest.raises(AuthFileError, match=f"cannot write the auth file {path}: "):
            edit_auth_file(path, lambda text: text)


def test_failed_change_leaves_no_new_file(tmp_path: Path) -> None:
    def fail(text: str) -> str:
        raise NameTaken("x")

    with pytest.raises(NameTaken):
        edit_auth_file(tmp_path / "auth.toml", fail)
    assert os.listdir(tmp_path) == []


# ---------------------------------------------------------------------- the file


def test_modes(tmp_path: Path) -> None:
    path = tmp_path / "auth.toml"
    assert edit_auth_file(path, lambda text: text)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    assert not edit_auth_file(path, lambda text: text + "# more\n")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert path.read_text().endswith("# more\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_owner_stays(tmp_path: Path) -> None:
    path = tmp_path / "auth.toml"
    path.touch(mode=0o640)
    os.chown(path, 4711, 4712)
    edit_auth_file(path, lambda text: text)
    assert (path.stat().st_uid, path.stat().st_gid) == (4711, 4712)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_symbolic_link_stays(tmp_path: Path) -> None:
    path, link = tmp_path / "auth.toml", tmp_path / "link"
    path.touch()
    link.symlink_to(path)
    edit_auth_file(link, lambda text: add_token(text, "new", make_token(), READ))
    assert link.is_symlink()
    assert [entry.name for entry in read_entries(path)] == ["new"]


def test_concurrent_changes_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "auth.toml"

    def add(writer: int) -> None:
        for number in range(20):
            name = f"{writer}-{number}"
            edit_auth_file(path, lambda text, name=name: add_token(text, name, make_token(), READ))  # type: ignore[misc]

    threads = [threading.Thread(target=add, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = {entry.name for entry in read_entries(path)}
    assert names == {f"{writer}-{number}" for writer in range(4) for number in range(20)}
    assert os.listdir(tmp_path) == ["auth.toml"]


def test_kill_before_the_rename_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "auth.toml"
    path.write_text(FILE)
    program = """if True:
        import os, signal, sys
        from pathlib import Path
        from trio_nsq.access.auth_file_editor import edit_auth_file, remove_entries

        def kill(new, old):
            assert "web" not in new.read_text()
            os.kill(os.getpid(), signal.SIGKILL)

        edit_auth_file(Path(sys.argv[1]), lambda text: remove_entries(text, ["web"]), replace=kill)
    """
    done = subprocess.run([sys.executable, "-c", program, str(path)])
    assert done.returncode == -9
    assert path.read_text() == FILE
    edit_auth_file(path, lambda text: remove_entries(text, ["web"]))  # the lock is free, the rest is replaced
    assert path.read_text() == remove_entries(FILE, ["web"])
    assert os.listdir(tmp_path) == ["auth.toml"]
