"""The lines of audit logs, as tests compare them."""

import json
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def lines_of(path: Path) -> list[Line]:
    """Return the lines, without their times and the ports of clients."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        assert line.pop("time").endswith("Z")
        if "address" in line:
            line["address"] = line["address"].rpartition(":")[0]
    return lines


def line(event: str, name: str = "", **fields: object) -> Line:
    who = {"name": name, "source": "token"} if name else {}
    return {"event": event, "address": "127.0.0.1", **who, **fields}
