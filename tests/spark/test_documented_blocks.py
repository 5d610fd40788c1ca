"""The commands of README's block about Parquet files work in their order, in a fresh folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cli.support import Cli
from interop.peers import qcli_serve

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 200
"""For Spark to start on a busy machine."""
_ENDLESS_OR_ELSEWHERE = ("--follow", "stock-nsqd", "--lookupd-http-address", "duckdb ")


@pytest.mark.parametrize("page", ["README.md", "docs/spark.md"])
def test_the_block_runs_in_order(page: str, tmp_path: Path) -> None:
    text = (ROOT / page).read_text()
    blocks = re.findall(r"(?:^    .*\n|^\n)+", text, re.MULTILINE)
    block = next(block for block in blocks if "qcli to-parquet clicks ./archive" in block)
    lines = [line.strip() for line in block.splitlines() if re.match(r" +qcli ", line)]
    lines = [line for line in lines if not any(word in line for word in _ENDLESS_OR_ELSEWHERE)]
    assert len(lines) > 2
    with qcli_serve(tmp_path / "data", "--sync=interval") as broker:
        qcli = Cli(broker.tcp_address, broker.http_address)
        qcli("pub", "clicks", stdin=b'{"user": "u", "url": "/error", "ts": "2026-11-21T04:14:05"}\n')
        folder = tmp_path / "fresh"
        folder.mkdir()
        for line in lines:
            path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
            done = subprocess.run(
                ["sh", "-c", line],
                cwd=folder,
                env=qcli.environment(PATH=path, HOME=str(tmp_path)),
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
            assert done.returncode == 0, (line, done.stderr)
