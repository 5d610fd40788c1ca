"""`qcli token`: creates, lists and revokes tokens, as a running broker accepts them."""

import json
import re
import subprocess
from pathlib import Path

import pytest

import processes
from cli.support import DEADLINE_S, Cli, Run, command_line, lines_until_ready, serving
from processes import popen

TOKEN = re.compile(rb"nsq_[A-Za-z0-9_-]{43}\n")


@pytest.fixture
def file(tmp_path: Path) -> str:
    """The path of an auth file that does not exist."""
    return str(tmp_path / "auth.toml")


def names(nowhere: Cli, file: str) -> list[str]:
    return [
        record["name"] for record in nowhere("token", "list", "--auth-file", file, "--format", "json").records
    ]


def test_only_the_token_is_on_stdout(nowhere: Cli, run_here: Run, file: str) -> None:
    result = run_here(
        nowhere, "token", "create", "web", "--role", "publish,read", "--topic", "a-*", "--topic", "b",
        "--channel", "c", "--expires", "2099-01-31T00:00Z", "--auth-file", file,
    )  # fmt: skip
    assert result.code == 0, result.err
    assert TOKEN.fullmatch(result.out)
    assert result.err.splitlines() == [
        f"{file} created: only this user can read it. The server needs to read it, too.",
        "token web created: publish, read on topics a-*, b on channels c until 2099-01-31 00:00:00 UTC",
        "A running server reads the file at SIGHUP. A broker also with --reload.",
    ]
    assert result.out.decode().strip() not in Path(file).read_text()
    again = run_here(nowhere, "token", "create", "admin", "--role", "all", "--auth-file", file)
    assert "created: only" not in again.err
    assert again.out != result.out


def test_what_clients_without_credentials_see_is_listed(nowhere: Cli, run_here: Run, file: str) -> None:
    Path(file).write_text('[anonymous]\ntopics = ["clicks", "orders-*"]\n')
    listed = run_here(nowhere, "token", "list", "--auth-file", file)
    assert listed.out.decode() == (
        "name         kind       roles  topics           channels  expires\n"
        "[anonymous]  anonymous         clicks orders-*  *         never\n"
    )
    (record,) = run_here(nowhere, "token", "list", "--auth-file", file, "--format", "json").records
    assert record == {
        "name": "[anonymous]",
        "kind": "anonymous",
        "grants": [{"roles": [], "topics": ["clicks", "orders-*"], "channels": ["*"]}],
        "expires": None,
        "expired": False,
    }


def test_list(nowhere: Cli, run_here: Run, file: str) -> None:
    Path(file).write_text(
        """
[[token]]
name = "old"
hash = "sha256:%s"
expires = 2020-01-01T00:00:00Z
grants = [{ roles = ["publish"], topics = ["a"] }, { roles = ["consume"], channels = ["c"] }]
[[certificate]]
name = "backup"
subject = "CN=backup"
grants = [{ roles = ["read"] }]
"""
        % ("0" * 64)
    )
    result = run_here(nowhere, "token", "list", "--auth-file", file)
    assert result.out.decode() == (
        "name    kind         roles    topics  channels  expires\n"
        "old     token        publish  a       *         2020-01-01 00:00:00 EXPIRED\n"
        "old     token        consume  *       c         2020-01-01 00:00:00 EXPIRED\n"
        "backup  certificate  read     *       *         never\n"
    )
    old, backup = run_here(nowhere, "token", "list", "--auth-file", file, "--format", "json").records
    assert old == {
        "name": "old",
        "kind": "token",
        "grants": [
            {"roles": ["publish"], "topics": ["a"], "channels": ["*"]},
            {"roles": ["consume"], "topics": ["*"], "channels": ["c"]},
        ],
        "expires": "2020-01-01T00:00:00Z",
        "expired": True,
    }
    assert (backup["subject"], backup["expires"], backup["expired"]) == ("CN=backup", None, False)


def test_revoke(nowhere: Cli, run_here: Run, file: str) -> None:
    for name in ("a", "b", "c"):
        assert run_here(nowhere, "token", "create", name, "--role", "read", "--auth-file", file).code == 0
    unknown = run_here(nowhere, "token", "revoke", "a", "x", "--auth-file", file)
    assert (unknown.code, unknown.err) == (1, f"Error: {file} has no entry x. Nothing was revoked.\n")
    assert names(nowhere, file) == ["a", "b", "c"]
    done = run_here(nowhere, "token", "revoke", "c", "a", "--auth-file", file)
    assert done.err.splitlines()[:2] == ["c revoked", "a revoked"]
    assert names(nowhere, file) == ["b"]
    typo = run_here(nowhere, "token", "revoke", "bb", "--auth-file", file)
    assert "has no entry bb (did you mean b?)" in typo.err


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["create", "a b", "--role", "read"], 2, "'a b' is not a name"),
        (["create", "a"], 2, "Missing option '--role'"),
        (["create", "a", "--role", "reed"], 2, "'reed' is not a role (did you mean read?): publish,"),
        (["create", "a", "--role", "read", "--topic", "a b"], 2, "' ' in 'a b': names have only letters"),
        (["create", "a", "--role", "read", "--expires", "1d", "--expires", "2d"], 2, "--expires is given 2 times"),
        (["create", "a", "--role", "read", "--expires", "2020-01-01"], 2, "is not in the future"),
        (["create", "a", "--role", "read", "--expires", "0"], 2, "is not in the future"),
        (["create", "a", "--role", "read", "--expires", "soon"], 2, "'soon' is neither a duration such as 30d"),
        (["create", "a", "--role", "read", "--expires", "999999999d"], 2, "is neither a duration"),
        (["create", "a", "--role", "all", "--topic", "t"], 2, "The role admin is for the whole server, so --topic"),
        (["list"], 1, "No such file or directory"),
        (["revoke", "a"], 1, "does not exist"),
    ],
)  # fmt: skip
def test_errors(nowhere: Cli, run_here: Run, file: str, args: list[str], code: int, text: str) -> None:
    result = run_here(nowhere, "token", *args, "--auth-file", file)
    assert (result.code, result.out) == (code, b""), result.err
    assert text in " ".join(result.err.split())
    assert not Path(file).exists()


def test_taken_name_and_invalid_file(nowhere: Cli, run_here: Run, file: str) -> None:
    for _ in range(2):
        result = run_here(nowhere, "token", "create", "web", "--role", "read", "--auth-file", file)
    assert (result.code, result.out) == (1, b"")
    assert result.err == (
        f"Error: {file} has an entry web already. Choose another name, or revoke it: "
        f"qcli token revoke web --auth-file {file}\n"
    )
    with open(file, "a") as text:
        text.write("[[token]]\nname = 'x'\n")
    for args in (["create", "y", "--role", "read"], ["list"], ["revoke", "web"]):
        result = run_here(nowhere, "token", *args, "--auth-file", file)
        assert result.err == f"Error: the auth file {file} is not valid: line 7: token x needs a hash\n"
        assert (result.code, result.out) == (1, b"")


def test_token_that_cannot_be_printed_is_not_created(nowhere: Cli, file: str) -> None:
    with open("/dev/full", "wb") as full:
        done = processes.run(
            command_line("token", "create", "web", "--role", "read", "--auth-file", file),
            stdout=full,
            env=nowhere.environment(),
        )
    assert (done.returncode, done.stderr) == (
        1,
        b"Error: No token was created: standard output cannot be written.\n",
    )
    assert names(nowhere, file) == []


def test_concurrent_creates_lose_nothing(nowhere: Cli, file: str) -> None:
    wanted = {f"t{number}" for number in range(6)}
    creating = [
        popen(
            command_line("token", "create", name, "--role", "read", "--auth-file", file),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=nowhere.environment(),
        )
        for name in sorted(wanted)
    ]
    for process in creating:
        out, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0
        assert TOKEN.fullmatch(out)
    assert set(names(nowhere, file)) == wanted


def test_names_and_roles_are_completed(nowhere: Cli, file: str) -> None:
    for name in ("web", "bill"):
        nowhere("token", "create", name, "--role", "read", "--auth-file", file)

    def complete(line: str) -> list[str]:
        *words, current = line.split(" ")
        env = {"_QCLI_COMPLETE": "zsh_complete", "QCLI_WORDS": "\n".join(words), "QCLI_CURRENT": current}
        result = nowhere(env=env | {"QCLI_AUTH_FILE": file})
        assert result.err == ""
        return [answer.split("\t")[1] for answer in result.out.decode().splitlines() if answer]

    assert complete("qcli token revoke ") == ["web", "bill"]
    assert complete("qcli token revoke --auth-file /nowhere w") == []
    assert complete("qcli token create x --role re") == ["read", "register", "replicate"]


def test_running_broker_accepts_and_forgets_tokens(tmp_path: Path, file: str) -> None:
    addresses = tmp_path / "addresses.json"
    nowhere = Cli("127.0.0.1:1", "127.0.0.1:1", {"QCLI_AUTH_FILE": file})
    admin = nowhere("token", "create", "admin", "--role", "all").out.decode().strip()
    with serving(tmp_path, "--auth-file", file, "--address-file", str(addresses)) as broker:
        lines_until_ready(broker)
        bound = json.loads(addresses.read_text())
        env = {"QCLI_AUTH_FILE": file, "QCLI_CLIENT_AUTH_SECRET": admin}
        qcli = Cli(bound["tcp_address"], bound["http_address"], env)
        created = qcli("token", "create", "web", "--role", "publish", "--topic", "t", "--reload")
        assert created.code == 0, created.err
        assert f"the broker at {bound['http_address']} has read {file} again" in created.err
        web = {"QCLI_CLIENT_AUTH_SECRET": created.out.decode().strip()}
        assert qcli("pub", "t", stdin=b"x\n", env=web).code == 0
        assert qcli("pub", "other", stdin=b"x\n", env=web).code != 0
        assert qcli("token", "revoke", "web", "--reload").code == 0
        assert qcli("pub", "t", stdin=b"x\n", env=web).code != 0
        late = qcli("token", "revoke", "admin", "--reload", env={"QCLI_CLIENT_AUTH_SECRET": "wrong"})
        assert late.code == 4
        assert late.err.startswith("admin revoked\nError: The file was changed, but: ")
        assert late.err.endswith(" SIGHUP also makes the server read the file.\n")
