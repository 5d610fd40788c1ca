"""Tests of the file of contexts: what users write by hand stays, and errors name the line."""

import os
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.contexts import cli_with_contexts, contexts_file
from cli.support import Cli, Run
from qcli.contexts.toml_edit import remove_table, set_keys

FILE = """\
# my contexts

current = 'prod'   # for now

# the cluster in Frankfurt
[context.prod]
nsqd_http_address = [
    "a:1",  # the first one
    "b:1",
]
tls = true  # since May
# about the secret
auth_secret_command = "pass show prod"

# on this machine
[ context . "local.1" ]
nsqd_tcp_address = "127.0.0.1:4150"
# the end
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = contexts_file(tmp_path)
    path.parent.mkdir()
    path.write_text(FILE)
    return path


@pytest.fixture
def cli(tmp_path: Path, run_here: Run) -> Cli:
    """Runs commands in this process, with the contexts of the file."""
    return cli_with_contexts(tmp_path, run_here)


def test_commands_change_only_what_they_must(cli: Cli, file: Path) -> None:
    assert cli("context", "use", "local.1").code == 0
    used = FILE.replace("'prod'   #", '"local.1"   #')
    assert file.read_text() == used
    cli("context", "save", "prod", "--no-tls", "--nsqd-http-address", "c:1")
    changed = used.replace("tls = true  #", "tls = false  #").replace(
        used[used.index("nsqd_http_address") : used.index("tls =")], 'nsqd_http_address = ["c:1"]\n'
    )
    assert file.read_text() == changed
    cli("context", "save", "prod", "--snappy", "--auth-secret-keyring", "a/b")
    assert file.read_text() == changed.replace(
        'auth_secret_command = "pass show prod"\n', 'auth_secret_keyring = "a/b"\nsnappy = true\n'
    )
    cli("context", "save", "new", "--nsqd-tcp-address", "n:1")
    assert file.read_text().endswith('# the end\n\n[context.new]\nnsqd_tcp_address = ["n:1"]\n')
    cli("context", "delete", "new")
    assert file.read_text().endswith("# the end\n")
    cli("context", "delete", "prod", "local.1")
    assert file.read_text() == "# my contexts\n\n# the cluster in Frankfurt\n\n# on this machine\n# the end\n"


def test_first_current_follows_the_comment_at_the_top(cli: Cli, file: Path) -> None:
    for before, after in (
        ("# top\n\n[context.a]\n", '# top\n\ncurrent = "a"\n\n[context.a]\n'),
        ("# of a\n[context.a]\n", 'current = "a"\n\n# of a\n[context.a]\n'),
    ):
        file.write_text(f'{before}nsqd_tcp_address = "a:1"\n')
        cli("context", "use", "a")
        assert file.read_text() == f'{after}nsqd_tcp_address = "a:1"\n'
        cli("context", "use", "--none")
        assert file.read_text() == f'{before}nsqd_tcp_address = "a:1"\n'


@pytest.mark.parametrize(
    "text",
    [
        '[context]\na.nsqd_tcp_address = "a:1"\n',
        'context.a.nsqd_tcp_address = "a:1"\n',
        'context = { a = { nsqd_tcp_address = "a:1" } }\n',
        '[context]\na = { nsqd_tcp_address = "a:1" }\n',
    ],
)
def test_forms_that_are_read_but_not_changed(cli: Cli, file: Path, text: str) -> None:
    file.write_text(text)
    assert cli("context", "list", "--format", "json").records[0]["nsqd_tcp_address"] == ["a:1"]
    for command in (["save", "a", "--tls"], ["delete", "a"]):
        result = cli("context", *command)
        assert (result.code, "edit it by hand" in result.err) == (1, True), result.err
        assert file.read_text() == text


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("[context.a\n", None, "is not valid TOML: Expected ']' at the end of a table declaration (at line 1"),
        ('x = 1\n[context.a]\nnsqd_tcp_address = "a:1"\n', 1, "unknown key x: a context is a table [context.NAME]"),
        ('\n[contexts.a]\nnsqd_tcp_address = "a:1"\n', 2, "unknown key contexts (did you mean context?)"),
        ("context = 1\n", 1, "context is not a table [context.NAME]"),
        ('\ncurrent = ["a"]\n', 2, "current is not the name of a context"),
        ("[context]\na = 1\n", 2, "the context a: it is not a table"),
        ("\n\n[context.a]\n", 3, "the context a: it has no address: nsqd_tcp_address, nsqd_http_address or lookupd_"),
        ('[context.a]\nnsqd_tcp_address = "a"\n', 2, "nsqd_tcp_address: 'a' is not host:port"),
        ('[context.a]\nnsqd_tcp_address = [\n"a:1",\n2]\n', 2, "nsqd_tcp_address: it is not a list of strings"),
        ('[context.a]\nnsqd_tcp_address = "a:1"\ntls = "yes"\n', 3, "tls: it is not true or false"),
        ('[context.a]\nnsqd_tcp_address = "a:1"\ntls_cert = 1\n', 3, "tls_cert: it is not a string"),
        ('[context.a]\nnsqd_tcp_address = "a:1"\n\nnsqd_htp_address = "a:1"\n', 4,
         "nsqd_htp_address: unknown key (did you mean nsqd_http_address?)"),
        ('[context.a]\nnsqd_tcp_address = "a:1"\nauth_secret = "x"\n', 3,
         "auth_secret: a context holds no secret: use auth_secret_file, auth_secret_command or auth_secret_keyring"),
        ('[context.a]\nnsqd_tcp_address = "a:1"\nauth_secret_file = "x"\nauth_secret_command = "y"\n', 4,
         "auth_secret_command: auth_secret_file and auth_secret_command exclude each other"),
        ('[context.b]\nnsqd_tcp_address="a:1"\n[context."a"]\ntls_root_ca_file = "~nobody2/x"\n', 4,
         "tls_root_ca_file: Could not determine home directory"),
    ],
)  # fmt: skip
def test_mistakes_are_named_with_their_line(
    cli: Cli, file: Path, text: str, line: int | None, said: str
) -> None:
    file.write_text(text)
    result = cli("--context", "a", "stat")
    assert (result.code, result.out) == (1, b""), result.err
    assert result.err.startswith(f"Error: {file}" + (f":{line}: {said}" if line else f" {said}")), result.err


def test_current_that_does_not_exist(cli: Cli, file: Path) -> None:
    file.write_text('# x\ncurrent = "pord"\n[context.prod]\nnsqd_http_address = "127.0.0.1:1"\n')
    result = cli("stat")
    assert (result.code, result.err) == (
        2,  # as for --context and QCLI_CONTEXT
        f"Error: {file}:2: There is no context pord (did you mean prod?). {file} has prod. To choose one: qcli "
        "context use NAME\n",
    )
    assert cli("context", "use", "prod").code == 0
    assert cli("stat").code == 3


def test_other_contexts_may_be_wrong(cli: Cli, file: Path) -> None:
    file.write_text('[context.good]\nnsqd_http_address = "127.0.0.1:1"\n[context.bad]\ntls = 1\n')
    assert cli("--context", "good", "stat").code == 3
    listed = cli("context", "list", "--format", "json")
    assert (listed.code, [each["name"] for each in listed.records]) == (1, ["good"])
    assert listed.err == f"Error: {file}:4: tls: it is not true or false.\n"
    saved = cli("context", "save", "bad", "--nsqd-http-address", "a:1", "--tls")
    assert saved.code == 0, saved.err
    assert cli("context", "delete", "bad").code == 0


def test_file_that_cannot_be_used(cli: Cli, file: Path) -> None:
    file.write_bytes(b"\xff")
    assert "is not a file of contexts" in cli("context", "list").err
    assert cli("context", "use", "a").code == 1
    file.write_bytes(b"#" * 2**20 + b"#")
    assert "longer than 1048576 bytes" in cli("context", "list").err
    file.unlink()
    file.mkdir()
    assert cli("context", "list").err == f"Error: Cannot read {file}: Is a directory.\n"
    file.rmdir()
    os.mkfifo(file)
    assert cli("context", "list").err == f"Error: {file} is not a file of contexts: it is a named pipe.\n"
    assert cli("context", "use", "a").err == f"Error: {file}: it is a named pipe.\n"
    file.unlink()
    file.parent.rmdir()
    file.parent.touch()
    assert cli("context", "list").code == 0
    assert cli("context", "save", "a", "--nsqd-http-address", "a:1").err.startswith("Error: Cannot write ")


def test_relative_paths_begin_at_the_folder_of_the_file(cli: Cli, file: Path) -> None:
    file.write_text('[context.a]\nnsqd_tcp_address = "a:1"\ntls_cert = "c.pem"\nauth_secret_file = "~/s"\n')
    records = cli("context", "list", "--format", "json", env={"HOME": "/home/me"}).records
    assert records[0]["tls_cert"] == str(file.parent / "c.pem")
    assert records[0]["auth_secret_file"] == "/home/me/s"


def test_windows_line_ends(cli: Cli, file: Path) -> None:
    file.write_bytes(FILE.replace("\n", "\r\n").encode())
    assert cli("context", "save", "prod", "--no-tls").code == 0
    assert file.read_bytes().replace(b"\r\n", b"\n").decode() == FILE.replace(
        "tls = true  #", "tls = false  #"
    )


_VALUES = st.none() | st.booleans() | st.text() | st.lists(st.text(), max_size=3)
_KEYS = st.sampled_from(["tls", "auth_secret_command", "nsqd_http_address", "new", "a b"])


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["prod", "local.1", "x", "y z"]), st.dictionaries(_KEYS, _VALUES), st.booleans()
        )
    )
)
def test_any_changes_keep_the_other_lines(
    changes: list[tuple[str, dict[str, bool | str | list[str] | None], bool]],
) -> None:
    text, tables = FILE, tomllib.loads(FILE)["context"]
    for name, values, removes in changes:
        if removes and name in tables:
            text = remove_table(text, ("context", name))
            del tables[name]
        else:
            text = set_keys(text, ("context", name), values)
            table = tables.setdefault(name, {})
            for key, value in values.items():
                table.pop(key, None)
                if value is not None:
                    table[key] = value
        assert tomllib.loads(text).get("context", {}) == tables
    for comment in (
        "# my contexts",
        "# for now",
        "# the cluster in Frankfurt",
        "# on this machine",
        "# the end",
    ):
        assert comment in text
