"""Checks the command lines of files for systemd, Docker and Kubernetes."""

import click
import pytest

from qcli.app import root


def check_command(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises UsageError if qcli does not understand a command line; configuration files need not be there."""
    words = [word for word in words if word != "--config" and not word.endswith(".toml")]
    top = click.Context(root, info_name="qcli")
    command = root.get_command(top, words[0])
    assert command is not None
    monkeypatch.chdir("/")
    command.make_context(words[0], words[1:], parent=top)
