"""Prints damage and gaps of a data folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...framework.output import is_live_terminal, styled
from ...records.files import FindingRecord

if TYPE_CHECKING:
    from trio_nsq.log.inspection.findings import Finding

_STYLES = {"damage": "red", "torn": "yellow", "note": ""}


def finding_record(finding: Finding) -> FindingRecord:
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
    """Return the lines of findings, for below a table on standard output."""
    coloured = is_live_terminal(sys.stdout)
    width = max(map(len, _STYLES))
    lines = [
        f"\n{styled(_STYLES[finding.kind] if coloured else '', finding.kind.ljust(width))}  {describe(finding)}"
        for finding in findings
    ]
    return "".join([*lines, "\n"]) if lines else ""


def shown(path: Path) -> str:
    """Return a path as text; bytes that are not UTF-8 are replaced."""
    return os.fsencode(path).decode(errors="replace")


def describe(finding: Finding) -> str:
    """Return a line for a finding: file, position, damage, and lost messages."""
    text = shown(finding.path)
    if finding.end > finding.offset:
        text += f", byte {finding.offset} to {finding.end}"
    elif finding.offset:
        text += f", at byte {finding.offset}"
    text += f": {finding.what}"
    if finding.messages is None:
        text += "; unknown number of messages lost"
    elif finding.messages:
        plural = "s" if finding.messages > 1 else ""
        text += f"; {finding.messages:,} message{plural} lost"
        if finding.sequence is not None:
            text += f", from sequence {finding.sequence} on"
    return text
