"""Reading auth files: every error names the file, the entry and the reason."""

import os
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from soak import examples
from trio_nsq.access.auth_file import MAX_FILE_BYTES, AuthFileError, parse_auth_file, read_auth_file
from trio_nsq.access.policy import ROLES, token_digest

HASH = token_digest(b"secret")
GRANT = '{ roles = ["read"] }'


def token(**keys: str) -> str:
    """A [[token]] with these keys as TOML; an empty value leaves a key out."""
    known = {"name": '"web"', "hash": f'"{HASH}"', "grants": f"[{GRANT}]"} | keys
    return "\n".join(["[[token]]", *(f"{key} = {value}" for key, value in known.items() if value)]) + "\n"


def certificate(**keys: str) -> str:
    """As `token`, a [[certificate]]."""
    known = {"name": '"backup"', "subject": '"CN=backup"', "grants": f"[{GRANT}]"} | keys
    return (
        "\n".join(["[[certificate]]", *(f"{key} = {value}" for key, value in known.items() if value)]) + "\n"
    )


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "auth.toml"
    path.write_text(token() + certificate(expires="2027-01-01T00:00:00Z"))
    policy = read_auth_file(path)
    web = policy.find_token(b"secret", 0)
    assert web is not None
    assert (web.name, web.source, web.key) == ("web", "token", HASH)
    backup = policy.find_certificate("CN=backup", 0)
    assert backup is not None
    assert (backup.name, backup.source, backup.key) == ("backup", "certificate", "CN=backup")
    assert backup.expires_at_s == datetime(2027, 1, 1, tzinfo=UTC).timestamp()
    path.write_text("")
    assert read_auth_file(path).find_token(b"secret", 0) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x", "Expected '=' after a key"),
        ("= 1", "line 1"),
        ("token = 1", "the file: token is not a list of tables"),
        ("token = [1]", "the file: token is not a list of tables"),
        ("[token]\n", "the file: token is not a list of tables"),
        ("[[tokens]]\n", "the file has the unknown key tokens"),
        ("version = 1", "the file has the unknown key version"),
        (token(name=""), "[[token]] number 1 needs a name of 1 to 64 of the characters A-Z a-z 0-9 . _ @ -"),
        (token(name='""'), "[[token]] number 1 needs a name"),
        (token(name="1"), "[[token]] number 1 needs a name"),
        (token(name='"a b"'), "[[token]] number 1 needs a name"),
        (token(name='"a\\n"'), "[[token]] number 1 needs a name"),
        (token(name='"é"'), "[[token]] number 1 needs a name"),
        (token(name=f'"{"a" * 65}"'), "[[token]] number 1 needs a name"),
        (token() + certificate(name='"!"'), "[[certificate]] number 1 needs a name"),
        (token() + token(name=""), "[[token]] number 2 needs a name"),
        (token(hash=""), "token web needs a hash"),
        (token(hash="1"), "token web needs a hash"),
        (token(hash='"secret"'), "token web: its hash is not sha256: and 64 hexadecimal digits"),
        (token(hash=f'"{HASH.upper()}"'), "token web: its hash is not sha256:"),
        (token(hash=f'"{HASH}0"'), "token web: its hash is not sha256:"),
        (token(hash=f'"{HASH}\\n"'), "token web: its hash is not sha256:"),
        (token(subject='"CN=x"'), "token web has the unknown key subject"),
        (token(channel='["c"]'), "token web has the unknown key channel"),
        (certificate(subject=""), "certificate backup needs a subject"),
        (certificate(subject='""'), "certificate backup needs a subject"),
        (certificate(hash=f'"{HASH}"'), "certificate backup has the unknown key hash"),
        (token() + token(), "token web: another entry has this name"),
        (token() + certificate(name='"web"'), "certificate web: another entry has this name"),
        (token() + token(name='"b"'), "token b: web has the same hash"),
        (certificate() + certificate(name='"b"'), "certificate b: backup has the same subject"),
        (token(expires="1"), "token web: expires is not a date and time such as 2027-01-01T00:00:00Z"),
        (token(expires='"2027-01-01T00:00:00Z"'), "token web: expires is not a date and time"),
        (token(expires="2027-01-01"), "token web: expires is not a date and time"),
        (token(expires="00:00:00"), "token web: expires is not a date and time"),
        (token(expires="2027-13-01T00:00:00Z"), "line"),
        (token(grants="1"), "token web: grants is not a list of tables"),
        (token(grants='["read"]'), "token web: grants is not a list of tables"),
        (
            token(grants="[{}]"),
            "token web: a grant needs roles; the roles are publish, consume, read, manage",
        ),
        (token(grants="[{ roles = [] }]"), "token web: a grant needs roles"),
        (token(grants='[{ roles = "read" }]'), "token web: roles is not a list of strings"),
        (token(grants="[{ roles = [1] }]"), "token web: roles is not a list of strings"),
        (token(grants='[{ roles = ["Read"] }]'), "token web: unknown role 'Read'; the roles are"),
        (token(grants='[{ roles = ["read", "root"] }]'), "token web: unknown role 'root'; the roles are"),
        (token(grants='[{ role = ["read"] }]'), "token web: a grant has the unknown key role"),
        (
            token(grants='[{ roles = ["read"], channel = ["c"] }]'),
            "token web: a grant has the unknown key channel",
        ),
        (token(grants='[{ roles = ["read"], topics = "t" }]'), "token web: topics is not a list of strings"),
        (
            token(grants='[{ roles = ["read"], topics = ["a b"] }]'),
            "token web: ' ' in 'a b': names have only",
        ),
        (
            token(grants='[{ roles = ["read"], channels = [""] }]'),
            "token web: a pattern has 1 to 256 characters",
        ),
        (token(grants='[{ roles = ["read"], topics = [".+"] }]'), "token web: '+' in '.+'"),
    ],
)
def test_an_error_names_the_file_the_entry_and_the_reason(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "auth.toml"
    path.write_text(text)
    with pytest.raises(AuthFileError) as caught:
        read_auth_file(path)
    message = str(caught.value)
    assert message.startswith(f"the auth file {path} is not valid: ")
    assert reason in message
    assert "\n" not in message


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "auth.toml"
    with pytest.raises(
        AuthFileError,
        match=f"cannot read the auth file {path}: No such file.*; 'qcli token create' creates it",
    ):
        read_auth_file(path)
    with pytest.raises(AuthFileError, match=r"cannot read the auth file .*: Is a directory"):
        read_auth_file(tmp_path)
    path.write_bytes(b"\xff")
    with pytest.raises(AuthFileError, match=f"the auth file {path} is not valid: 'utf-8' codec can't decode"):
        read_auth_file(path)
    path.touch()
    os.truncate(path, MAX_FILE_BYTES + 1)
    with pytest.raises(AuthFileError, match=f"longer than {MAX_FILE_BYTES} bytes"):
        read_auth_file(path)
    path.write_text("a=" + "[" * 100_000)
    with pytest.raises(AuthFileError, match="is not valid"):
        read_auth_file(path)


def test_an_error_has_no_secret(tmp_path: Path) -> None:
    """People put the token itself where the hash belongs."""
    path = tmp_path / "auth.toml"
    path.write_text(token(hash='"the-token-itself"'))
    with pytest.raises(AuthFileError) as caught:
        read_auth_file(path)
    assert "the-token-itself" not in str(caught.value)


@pytest.mark.parametrize(
    ("expires", "unix_s"),
    [
        ("2027-01-01T00:00:00Z", 1798761600),
        ("2027-01-01T00:00:00", 1798761600),
        ("2027-01-01T02:00:00+02:00", 1798761600),
        ("2027-01-01 00:00:00.5Z", 1798761600.5),
        ("0001-01-01T00:00:00+14:00", -62135647200.0),
        ("9999-12-31T23:59:59-14:00", 253402351199.0),
    ],
)
def test_when_a_token_expires(expires: str, unix_s: float) -> None:
    policy = parse_auth_file(token(expires=expires))
    assert policy.tokens[HASH].expires_at_s == unix_s
    assert policy.find_token(b"secret", unix_s - 0.001) is not None
    assert policy.find_token(b"secret", unix_s) is None


FRAGMENTS = st.sampled_from(
    [
        "[[token]]\n",
        "[[certificate]]\n",
        "[token]\n",
        'name = "web"\n',
        'name = "b"\n',
        f'hash = "{HASH}"\n',
        'subject = "CN=b"\n',
        "expires = 2027-01-01T00:00:00Z\n",
        "expires = 0001-01-01T00:00:00+23:59\n",
        "expires = 9999-12-31T23:59:59-23:59\n",
        f"grants = [{GRANT}]\n",
        'grants = [{ roles = ["manage"], topics = ["a*"], channels = ["*"] }]\n',
        "[[token.grants]]\n",
        'roles = ["publish"]\n',
        "x = 1e999\n",
        "# ",
        '"""',
        "\0",
        "\r",
        "{",
        "[",
        "\ud800",
    ]
)


@settings(max_examples=examples(400), suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(FRAGMENTS | st.text(max_size=5), max_size=14))
def test_no_text_raises_another_error(fragments: list[str]) -> None:
    try:
        policy = parse_auth_file("".join(fragments))
    except ValueError:
        return
    for entry in (*policy.tokens.values(), *policy.certificates.values()):
        assert entry.name
        assert entry.key


def test_the_documentation_s_file(tmp_path: Path) -> None:
    """And it names every role."""
    page = (Path(__file__).parents[2] / "docs/reference/access.md").read_text()
    path = tmp_path / "auth.toml"
    path.write_text(page.partition("```toml\n")[2].partition("```")[0])
    policy = read_auth_file(path)
    assert {each.name for each in (*policy.tokens.values(), *policy.certificates.values())} == {
        "web",
        "backup",
    }
    roles = page.partition("## Roles")[2].partition("No role includes another")[0]
    assert re.findall(r"^\| `(\w+)` \|", roles, re.MULTILINE) == list(ROLES)


@pytest.mark.parametrize(
    ("mode", "is_refused"), [(0o600, False), (0o644, False), (0o664, False), (0o666, True), (0o602, True)]
)
def test_a_file_that_everyone_may_write_is_refused(tmp_path: Path, mode: int, is_refused: bool) -> None:
    path = tmp_path / "auth.toml"
    path.write_text("")
    path.chmod(mode)
    if not is_refused:
        read_auth_file(path)
        return
    with pytest.raises(AuthFileError, match="chmod o-w"):
        read_auth_file(path)
