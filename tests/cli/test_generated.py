"""Tests for the help of every command, and for the generated files."""

import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from cli.support import all_contexts
from interop.peers import system_program
from qcli.app import root
from qcli.broker.address_options import HTTP_VARIABLE, TCP_VARIABLE
from qcli.framework.command import DocumentedCommand
from qcli.framework.errors import ExitCode
from qcli.framework.options import CONNECTION_OPTIONS
from qcli.generate import generated_files, stale_files, write_files

REPOSITORY = Path(__file__).parents[2]


MAN = REPOSITORY / "man"
CONTEXTS = all_contexts()
everywhere = pytest.mark.parametrize("ctx", CONTEXTS, ids=[ctx.command_path for ctx in CONTEXTS])


def man_pages() -> dict[str, str]:
    """Return the text of each manual page that is generated, by the name of its file."""
    return {
        path.removeprefix("man/"): text for path, text in generated_files().items() if path.startswith("man/")
    }


def test_all_contexts_include_every_command() -> None:
    paths = {ctx.command_path for ctx in CONTEXTS}
    assert {f"qcli {name}" for name in root.list_commands(CONTEXTS[0])} < paths
    for group in ("topic", "channel", "dlq", "deferred", "log", "spark", "token"):
        assert any(path.startswith(f"qcli {group} ") for path in paths)


@everywhere
def test_every_command_is_documented(ctx: click.Context) -> None:
    command = ctx.command
    assert isinstance(command, DocumentedCommand)
    assert command.help
    assert command.help.split("\n\n")[0].endswith(".")
    assert command.examples
    for about, line in command.examples.items():
        assert "qcli" in line
        assert about
    assert {ExitCode.OK, ExitCode.USAGE, ExitCode.INTERRUPTED} <= command.exits.keys()


@everywhere
def test_every_option_is_documented(ctx: click.Context) -> None:
    for param in ctx.command.get_params(ctx):
        if isinstance(param, click.Argument):
            assert param.metavar
            continue
        assert isinstance(param, click.Option)
        assert param.help, param.name
        assert param.help.endswith("."), param.name
        assert param.is_flag or param.metavar or isinstance(param.type, click.Choice), param.name


@everywhere
def test_help_fits_two_screens_and_names_the_manual_page(ctx: click.Context) -> None:
    command = ctx.command
    assert isinstance(command, DocumentedCommand)
    with click.Context(command, ctx.parent, ctx.info_name, terminal_width=100, max_content_width=100) as wide:
        text = wide.get_help()
    assert len(text.splitlines()) <= 80
    shown = [line for line in command.examples.values() if f"  {line}\n" in text]
    assert len(shown) == min(4, len(command.examples))
    assert "-h, --help" in text
    page = text.splitlines()[-1].removeprefix("More: man ")
    assert f"{page}.1" in man_pages()


@everywhere
def test_help_names_every_option(ctx: click.Context) -> None:
    text = ctx.get_help()
    for param in ctx.command.get_params(ctx):
        if isinstance(param, click.Option) and not param.hidden:
            named = param.opts[0] in text
            assert named != (getattr(param, "section", None) == CONNECTION_OPTIONS), param.name


def test_manual_pages_have_all_examples_exit_codes_and_details() -> None:
    page = man_pages()["qcli-pub.1"]
    (pub,) = (ctx.command for ctx in all_contexts() if ctx.command_path == "qcli pub")
    assert isinstance(pub, DocumentedCommand)
    assert page.count("\n.EX\n") == len(pub.examples) > 6
    for text in (".SH SEVERAL BROKERS", ".SH EXIT STATUS\n.TP\n.B 0\n", "\\-\\-tls\\-root\\-ca\\-file"):
        assert text in page


@everywhere
def test_client_commands_share_the_options_of_connections(ctx: click.Context) -> None:
    if isinstance(ctx.command, click.Group) or ctx.info_name in ("serve", "lookupd", "admin", "help"):
        return
    if ctx.parent is not None and ctx.parent.info_name in ("log", "spark", "archive"):
        return  # they work on files
    if ctx.command_path == "qcli token list":
        return  # this does, too
    if ctx.parent is not None and ctx.parent.info_name == "context" and ctx.info_name != "show":
        return  # and so do these
    if ctx.command_path == "qcli tombstone":
        return  # it uses discovery services only
    options = {param.opts[0]: param for param in ctx.command.params if isinstance(param, click.Option)}
    tcp, http = options["--nsqd-tcp-address"], options["--nsqd-http-address"]
    assert tcp.default == (("127.0.0.1:4150",) if tcp.multiple else "127.0.0.1:4150")
    assert tcp.envvar == TCP_VARIABLE
    assert http.default == (("127.0.0.1:4151",) if http.multiple else "127.0.0.1:4151")
    assert http.envvar == HTTP_VARIABLE
    assert (TCP_VARIABLE, HTTP_VARIABLE) == ("QCLI_NSQD_TCP_ADDRESS", "QCLI_NSQD_HTTP_ADDRESS")
    files = ("tls-root-ca-file", "tls-cert", "tls-key", "auth-secret-file")
    for name in (*files, "tls-insecure-skip-verify", "auth-secret"):
        # Not QCLI_TLS_CERT, which is an option of the broker.
        assert options[f"--{name}"].envvar == f"QCLI_CLIENT_{name.replace('-', '_').upper()}"
    assert options["--context"].envvar == "QCLI_CONTEXT"
    over_tcp = (
        "pub",
        "tail",
        "replay",
        "to-file",
        "to-parquet",
        "to-http",
        "to-nsq",
        "bench pub",
        "bench sub",
        "bench latency",
        "context show",
    )
    assert ("--snappy" in options) == (ctx.command_path.removeprefix("qcli ") in over_tcp)
    assert ExitCode.UNREACHABLE in getattr(ctx.command, "exits", {})


def test_generated_files_are_current() -> None:
    assert stale_files(REPOSITORY) == [], "run 'make generate'"


def test_generated_files_do_not_depend_on_the_environment() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "qcli.generate", "--check"],
        env=os.environ | {"COLUMNS": "33", "LANG": "C", "NO_COLOR": "1", TCP_VARIABLE: "elsewhere:1"},
        capture_output=True,
        timeout=30,
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_stale_missing_and_surplus_files_are_repaired(tmp_path: Path) -> None:
    write_files(tmp_path)
    assert stale_files(tmp_path) == []
    (tmp_path / "man" / "qcli.1").write_text("changed")
    (tmp_path / "man" / "qcli-gone.1").write_text("")
    (tmp_path / "completions" / "_qcli").unlink()
    assert stale_files(tmp_path) == ["completions/_qcli", "man/qcli-gone.1", "man/qcli.1"]
    write_files(tmp_path)
    assert stale_files(tmp_path) == []


def test_each_command_has_a_page() -> None:
    pages = {f"qcli-{name}.1" for name in root.list_commands(CONTEXTS[0])} | {"qcli.1"}
    written = man_pages()
    assert set(written) == pages
    for ctx in CONTEXTS:
        page = "-".join(ctx.command_path.split()[:2]) + ".1"
        for param in ctx.command.params:
            for name in param.opts if isinstance(param, click.Option) and not param.hidden else []:
                assert name.replace("-", r"\-") in written[page], (page, name)


def test_defaults_are_words_of_users() -> None:
    pages = "\n".join(man_pages().values())
    assert "Sentinel" not in pages
    assert "Default: .." not in pages


def test_default_with_several_values_equals_the_help() -> None:
    page = man_pages()["qcli-pub.1"]
    assert "or repeat the option. Default: 127.0.0.1:4150.\n" in page


def test_generated_text_is_plain() -> None:
    for name, text in generated_files().items():
        assert text.isascii(), name
        assert text.endswith("\n"), name
        assert not any(line != line.rstrip() for line in text.splitlines()), name


@pytest.mark.parametrize("name", sorted(path.name for path in MAN.iterdir()))
def test_man_pages_render(name: str) -> None:
    done = subprocess.run(
        [system_program("groff"), "-man", "-Tutf8", "-ww", MAN / name],
        capture_output=True,
        timeout=30,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    text = re.sub(
        r".\x08|\x1b\[\d*m", "", done.stdout.decode()
    )  # bold and underlined text, in both traditional encodings
    for title in ("NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "EXAMPLES", "EXIT STATUS", "SEE ALSO"):
        assert title in text
