"""Prints what is damaged or missing in a data folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...framework.output import is_live_terminal, styled

if TYPE_CHECKING:
    from trio_nsq.log.inspection.findings import Finding

_STYLES = {"damage": "red", "torn": "yellow", "note": ""}


def finding_record(finding: Finding) -> dict[str, Any]:
    """A finding as an object in a JSON report."""
    return {
        "kind": finding.kind,
        "file": shown(finding.path),
        "offset": finding.offset,
        "end": finding.end,
        "what": finding.what,
        "sequence": finding.sequence,
        "messages": finding.messages,
    }


def finding_lines(findings: Sequence[Finding]) -> str:
    """Findings below a table on standard output, a line each; nothing if there are none."""
    coloured = is_live_terminal(sys.stdout)
    width = max(map(len, _STYLES))
    lines = [
        f"\n{styled(_STYLES[finding.kind] if coloured else '', finding.kind.ljust(width))}  {describe(finding)}"
        for finding in findings
    ]
    return "".join([*lines, "\n"]) if lines else ""


def shown(path: Path) -> str:
    """A path as it can be written, whatever bytes are in it."""
    return os.fsencode(path).decode(errors="replace")


def describe(finding: Finding) -> str:
    """A finding in a line: file, place, what, and what it costs."""
    text = shown(finding.path)
    if finding.end > finding.offset:
        text += f", byte {finding.offset} to {finding.end}"
    elif finding.offset:
        text += f", at byte {finding.offset}"
    text += f": {finding.what}"
    if finding.messages is None:
        text += "; how many messages it costs is not known"
    elif finding.messages:
        plural = "s" if finding.messages > 1 else ""
        text += f"; {finding.messages:,} message{plural} lost"
        if finding.sequence is not None:
            text += f", from sequence {finding.sequence} on"
    return text
