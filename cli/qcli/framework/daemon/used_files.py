"""The files that the options of a server name: none that it writes may have another use, too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trio_nsq.protocol.address import is_unix_path

from .config_file import ConfigFile
from .setting import Setting

if TYPE_CHECKING:
    from trio_nsq.server.startup_checks import OwnFiles, UsedFile


def check_used_files(ctx: click.Context, own: OwnFiles | None) -> None:
    """Check the files of all options. Raises StartupError.

    Args:
        ctx: The command's context.
        own: The server's data folder; None: it has none.
    """
    from trio_nsq.server.startup_checks import check_separate

    check_separate(_used_files(ctx), own)


def _used_files(ctx: click.Context) -> Iterator[UsedFile]:
    from trio_nsq.access.audit_writer import STDOUT
    from trio_nsq.server.startup_checks import UsedFile

    for param in ctx.command.params:
        value = ctx.params.get(param.name or "")
        is_file = isinstance(param.type, click.Path) and param.type.file_okay
        is_written = isinstance(param, Setting) and param.kind.writes
        if isinstance(value, ConfigFile):
            value = value.path
        if value and value != STDOUT and (is_file or (is_written and is_unix_path(str(value)))):
            yield UsedFile(param.opts[0], Path(value), is_written)
