"""Check the tables of `bench/peers.py`, and that the page with them shows the newest results."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from bench.peer_servers import Peer, available
from bench.peers import BEGIN, END, OURS, PAGE, tables, write_page

from interop.build import PeerUnavailable


def result(
    promise: str, load: str, contender: str, rate: float, number: int = 1, **figures: float
) -> dict[str, Any]:
    found = {"rate": rate, "server_us": 1e6 / rate, "client_us": 1.0, "p50_ms": 1.0, "p99_ms": 2.0, **figures}
    return {
        "round": number,
        "promise": promise,
        "load": load,
        "contender": contender,
        "figures": found,
        "others": 0.05,
    }


def kept(*results: Mapping[str, Any]) -> dict[str, Any]:
    machine = {
        "date": "2026-11-29T00:00:00",
        "cpu": "C",
        "cpu_count": 2,
        "system": "S",
        "data_file_system": "ext4",
    }
    return {
        "machine": {**machine, "commit": "abc", "compiled": "58 modules"},
        "versions": {OURS: "1.0", "Redis": "7.0"},
        "settings": {"rounds": 5, "seconds": 3.0, "backlog": 1000},
        "promises": [
            {
                "name": "synced",
                "title": "Synced",
                "contenders": {OURS: "our setting", "Redis": "its setting"},
            },
            {"name": "unsynced", "title": "Later", "contenders": {OURS: "other", "Redis": "another"}},
        ],
        "results": results,
    }


def test_cells_have_medians_ratios_of_the_same_round_and_verdicts() -> None:
    rounds = range(1, 6)
    ours = [result("synced", "pub-1", OURS, 2000.0 * number, number) for number in rounds]
    redis = [result("synced", "pub-1", "Redis", 1000.0 * number, number) for number in rounds]
    text = tables(kept(*ours, *redis))
    assert "### Synced\n\n- trio-nsq 1.0: our setting\n- Redis 7.0: its setting\n" in text
    assert "| one message at a time, 1 connection | 6,000 | 3,000: 2.00 (2.00-2.00), ours |" in text
    assert "| one message at a time, 1 connection | 1.00 / 2.00 | 1.00 / 2.00 |" in text
    assert "| one message at a time, 1 connection | 166.7 | 333.3: 0.50 (0.50-0.50), ours |" in text
    assert "### Later" not in text
    assert "5 % of the processors" in text
    assert "busy" not in text


def test_slower_and_noisy_figures_are_named() -> None:
    rates = {"pub-1": (100, 100, 100, 100, 100), "pub-2": (1000, 3000, 1000, 3000, 1000)}
    results = []
    for load, own in rates.items():
        for number, rate in enumerate(own, 1):
            results += [
                result("synced", load, OURS, rate, number),
                result("synced", load, "Redis", 2000, number),
            ]
    text = tables(kept(*results))
    assert "| one message at a time, 1 connection | 100 | 2,000: 0.05 (0.05-0.05), theirs |" in text
    assert "| one message at a time, 2 connections | 1,000 | 2,000: 0.50 (0.50-1.50), too noisy |" in text


def test_missing_measurements_are_dashes_and_few_rounds_have_no_verdict() -> None:
    results = [
        result("synced", "pub-1", OURS, 2000),
        result("synced", "pub-1", "Redis", 1000),
        result("synced", "consume", OURS, 5000, memory_mib=40.0, disk_bytes=217.0),
        result("unsynced", "pub-1", OURS, 7000),
    ]
    text = tables(kept(*results))
    assert "| one message at a time, 1 connection | 2,000 | 1,000: 2.00 (2.00-2.00) |" in text
    assert "| consume a backlog, 1 connection | 5,000 | - |" in text
    assert "| consume a backlog, 1 connection | 217 | - |" in text
    assert "- trio-nsq 1.0: other\n\n| | trio-nsq |\n" in text


def test_tables_say_that_the_machine_was_busy() -> None:
    assert "The machine was busy" in tables(kept(result("synced", "pub-1", OURS, 1) | {"others": 0.5}))


def test_page_shows_the_newest_results(tmp_path: Path) -> None:
    page = tmp_path / "peers.md"
    shutil.copy(PAGE, page)
    write_page(page)
    assert page.read_text() == PAGE.read_text(), "run 'bench/peers.py --page docs/explanation/peers.md'"


def test_only_the_text_between_the_marks_is_written(tmp_path: Path) -> None:
    page = tmp_path / "peers.md"
    page.write_text(f"before\n\n{BEGIN}\nold\n{END}\n\nafter\n")
    write_page(page)
    text = page.read_text()
    assert text.startswith(f"before\n\n{BEGIN}\n\nMeasured on ")
    assert text.endswith(f"cpu.json`.\n\n{END}\n\nafter\n")
    assert "old" not in text
    page.write_text("no marks")
    with pytest.raises(SystemExit, match="does not have the lines"):
        write_page(page)
    assert page.read_text() == "no marks"


def test_missing_server_is_skipped_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    def check() -> None:
        raise PeerUnavailable("x-server is not installed")

    assert available([Peer("X", "x", lambda _: pytest.fail("started"), check, "")]) == []
    assert capsys.readouterr().out == "X is skipped: x-server is not installed\n"
