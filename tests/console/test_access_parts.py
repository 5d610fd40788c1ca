"""The pure parts of the console's access: rights, sessions, trusted proxies, and the file of the session key."""

import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from access.support import AuthFile, Given
from trio_nsq.access.auth_file import parse_auth_file
from trio_nsq.access.policy import Identity
from trio_nsq.console.access.ended import MAX_ENDED
from trio_nsq.console.access.proxies import Proxies
from trio_nsq.console.access.rights import EVERYTHING, NOTHING, READ, rights_of
from trio_nsq.console.access.sessions import Sessions, session_key
from trio_nsq.protocol.errors import StartupError

KEY = bytes(32)


def identity(*grants: Given) -> Identity:
    """The identity of a token with these grants."""
    file = AuthFile(Path("unused"))
    file.add_token("web", *grants)
    return next(iter(parse_auth_file(file.entries["web"]).tokens.values()))


# ---------------------------------------------------------------------- rights


def test_only_what_all_brokers_allow_is_allowed() -> None:
    rights = rights_of(
        [
            identity(Given(["read", "manage"], ["a*"])),
            identity(Given(["read"], ["*"]), Given(["manage"], ["ab"])),
        ]
    )
    assert rights.allows("read", "ax")
    assert not rights.allows("read", "b")
    assert rights.allows("manage", "ab", "c")
    assert not rights.allows("manage", "ax")
    assert not rights.allows("read")
    assert rights.sees("ab")
    assert not rights.sees("b")


def test_brokers_with_the_same_auth_file_have_equal_rights() -> None:
    one, two = Given(["read"], ["a"]), Given(["publish"], ["b"])
    assert rights_of([identity(one, two)]).key == rights_of([identity(two, one), identity(one, two)]).key
    assert len(rights_of([identity(two, one), identity(one, two)]).identities) == 1
    assert rights_of([identity(one)]).key != rights_of([identity(two)]).key


def test_levels() -> None:
    assert EVERYTHING.allows("admin")
    assert READ.allows("read", "t", "c")
    assert READ.allows("read")
    assert not READ.allows("manage", "t")
    assert not NOTHING.sees("t")
    assert not NOTHING.allows("read", "t")
    assert not rights_of([identity()]).sees("t")


# -------------------------------------------------------------------- sessions


def test_a_session_is_read_until_it_expires_or_ends() -> None:
    sessions = Sessions(KEY)
    session, cookie = sessions.begin("secret", 100.0, 200.0)
    assert sessions.read(cookie, 199.0) == session
    assert session.token == "secret"
    assert sessions.read(cookie, 200.0) is None
    sessions.end(session, 150.0)
    assert sessions.read(cookie, 151.0) is None
    assert sessions.has_ended(session, 151.0)


def test_another_key_reads_nothing() -> None:
    _, cookie = Sessions(KEY).begin("secret", 0.0, 100.0)
    assert Sessions(bytes(31) + b"x").read(cookie, 1.0) is None
    assert Sessions(KEY).read(cookie, 1.0) is not None


@given(st.data())
def test_a_changed_cookie_is_not_read(data: st.DataObject) -> None:
    sessions = Sessions(KEY)
    _, cookie = sessions.begin("secret", 0.0, 100.0)
    at = data.draw(st.integers(0, len(cookie) - 5))  # the last characters have unused bits
    same = {"-": "-+", "_": "_/"}.get(cookie[at], cookie[at])  # in base64: both alphabets are read
    other = data.draw(st.characters(min_codepoint=33, max_codepoint=126).filter(lambda c: c not in same))
    assert sessions.read(cookie[:at] + other + cookie[at + 1 :], 1.0) is None


@given(st.text())
def test_text_that_is_no_cookie_is_not_read(text: str) -> None:
    sessions = Sessions(KEY)
    assert sessions.read(text, 0.0) is None
    assert sessions.visitor(text) == ""
    assert not sessions.is_form_token("id", text)


def test_ended_sessions_stay_ended_when_there_are_too_many() -> None:
    sessions = Sessions(KEY)
    ended = [sessions.begin("t", 10.0, 100.0) for _ in range(MAX_ENDED + 2)]
    still_open = sessions.begin("t", 10.0, 100.0)[1]
    for session, _ in ended:
        sessions.end(session, 20.0)
    assert all(sessions.read(cookie, 21.0) is None for _, cookie in ended)
    assert sessions.read(still_open, 21.0) is None  # has to log in again
    assert sessions.read(sessions.begin("t", 30.0, 100.0)[1], 31.0) is not None


def test_the_token_of_forms_belongs_to_one_session() -> None:
    sessions = Sessions(KEY)
    assert sessions.is_form_token("a", sessions.form_token("a"))
    assert not sessions.is_form_token("b", sessions.form_token("a"))
    assert sessions.visitor(sessions.visitor_cookie("a")) == "a"
    assert sessions.visitor(sessions.visitor_cookie("a").replace("a.", "b.")) == ""


# ---------------------------------------------------------------- the key's file


def test_the_key_file_is_created_for_its_owner_only_and_used_again(tmp_path: Path) -> None:
    path = tmp_path / "key"
    key = session_key(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert session_key(path) == key
    assert session_key(None) != session_key(None)


@pytest.mark.parametrize(
    ("text", "mode", "reason"),
    [
        ("00" * 32, 0o644, "other users may read"),
        ("00" * 31, 0o600, "64 hexadecimal digits"),
        ("", 0o600, "64 hexadecimal digits"),
        ("é", 0o600, "64 hexadecimal digits"),
    ],
)
def test_a_key_file_that_cannot_be_trusted_is_refused(
    tmp_path: Path, text: str, mode: int, reason: str
) -> None:
    path = tmp_path / "key"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(StartupError, match=reason):
        session_key(path)


def test_a_key_file_in_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="No such file"):
        session_key(tmp_path / "missing" / "key")


# --------------------------------------------------------------------- proxies

PROXIES = Proxies(["127.0.0.0/8", "10.1.2.3", "fd00::/8"], "X-Forwarded-User", ["alice"])


@pytest.mark.parametrize(
    ("peer", "trusted"),
    [
        ("127.0.0.9", True),
        ("10.1.2.3", True),
        ("10.1.2.4", False),
        ("fd12::1", True),
        ("fe80::1%eth0", False),
        ("::ffff:127.0.0.1", True),
        ("::ffff:10.1.2.4", False),
        ("", False),
        ("/run/socket", False),
    ],
)
def test_only_proxies_of_named_networks_are_trusted(peer: str, trusted: bool) -> None:
    assert PROXIES.trusts(peer) is trusted
    assert (PROXIES.viewer(peer, {"x-forwarded-user": "bob"}) == "bob") is trusted
    assert (PROXIES.client(peer, {"x-forwarded-for": "1.1.1.1, 2.2.2.2"}) == "2.2.2.2") is trusted
    assert PROXIES.is_secure(peer, {"x-forwarded-proto": "https"}, "http") is trusted
    assert (PROXIES.host(peer, {"x-forwarded-host": "a", "host": "b"}) == "a") is trusted


@pytest.mark.parametrize("name", ["", " ", "bob, alice", "a\x00", "x" * 129])
def test_a_name_that_is_not_plain_does_not_count(name: str) -> None:
    assert PROXIES.viewer("127.0.0.1", {"x-forwarded-user": name}) == ""


def test_without_admin_users_the_header_does_not_count() -> None:
    assert (
        Proxies(["127.0.0.1"], "X-Forwarded-User", []).viewer("127.0.0.1", {"x-forwarded-user": "bob"}) == ""
    )


def test_an_address_that_is_none_is_not_believed() -> None:
    assert PROXIES.client("127.0.0.1", {"x-forwarded-for": "<script>"}) == "127.0.0.1"


def test_a_network_that_is_none_is_refused() -> None:
    with pytest.raises(StartupError, match=r"--trusted-proxy: 10\.0\.0\.0/99 is not"):
        Proxies(["10.0.0.0/99"], "X-Forwarded-User", [])
