"""Tables of pages as CSV and JSON, with their filter and order."""

import csv
import io
import json
from typing import Any

import pytest

from console.acting import Site
from fleet.support import subscribed, wait_until


def records(site: Site, path: str) -> list[dict[str, Any]]:
    """Return the rows of a table as JSON."""
    page = site.get(path + ("&" if "?" in path else "?") + "format=json")
    assert page.status == 200
    return [json.loads(line) for line in page.html.splitlines()]


def cells(site: Site, path: str) -> list[list[str]]:
    """Return the cells of a table as CSV."""
    page = site.get(path + ("&" if "?" in path else "?") + "format=csv")
    assert page.status == 200
    return list(csv.reader(io.StringIO(page.html)))


def test_all_rows_of_the_filter_are_in_the_file(site: Site) -> None:
    broker = site.fleet.ours[0]
    names = [f"files-{number:03}" for number in range(120)]
    for name in names:
        broker.create(name)
    path = "/?q=FILES&sort=name&order=desc"
    wait_until(lambda: "of 120 topics" in site.get(path).text, "the console knows the topics")
    page = site.get(path)
    assert 'href="/?q=FILES&amp;sort=name&amp;order=desc&amp;format=csv"' in page.html
    assert [each["name"] for each in records(site, path)] == names[::-1]
    head, *rows = cells(site, "/?q=files-00")
    assert head[:3] == ["name", "channels", "depth"]
    assert [row[:3] for row in rows] == [[name, "0", "0"] for name in names[:10]]


def test_cells_are_no_formulas(site: Site) -> None:
    broker = site.fleet.ours[0]
    broker.create("-1", "c")
    formula = '=HYPERLINK("http://x")'
    with subscribed(broker, "-1", "c", hostname=formula):
        wait_until(lambda: "HYPERLINK" in site.get("/topics/-1/c").text, "the console shows the consumer")
        head, row = cells(site, "/topics/-1/c")
        assert dict(zip(head, row, strict=True))["host"] == f"'{formula}"
        (record,) = records(site, "/topics/-1/c")
        assert (record["host"], record["broker"]) == (formula, broker.http_address)
    assert cells(site, "/?q=-1")[1][0] == "'-1"


@pytest.mark.parametrize("path", ["/nodes", "/lookup", "/counter", "/topics/every", "/topics/every/c"])
def test_every_table_has_files(site: Site, path: str) -> None:
    site.fleet.ours[0].create("every", "c")
    wait_until(lambda: site.get("/topics/every/c").status == 200, "the console knows the topic")
    assert site.get(f"{path}?format=xml").html.startswith("<!doctype html>")
    rows = records(site, path)
    assert [list(row) for row in rows] == [cells(site, path)[0]] * len(rows)


def test_nodes_have_files_of_their_topics(site: Site) -> None:
    broker = site.fleet.ours[0]
    broker.create("on-node", "c")
    path = f"/nodes/{broker.http_address}?q=on-node"
    wait_until(lambda: "/topics/on-node" in site.get(path).html, "the console knows the topic")
    assert [each["name"] for each in records(site, path)] == ["on-node"]


def test_health_has_a_file_of_all_servers(site: Site) -> None:
    found = {each["name"]: each for each in records(site, "/health")}
    fleet = site.fleet
    assert {each["kind"] for each in found.values()} == {"broker", "lookupd"}
    assert set(found) == {*fleet.http_addresses, *fleet.lookupd_addresses}
    ours = found[fleet.ours[0].http_address]
    assert ours["disk_free_bytes"] > 0
    assert ours["ok"] is (not ours["problems"])
    head, *rows = cells(site, "/health")
    row = next(row for row in rows if row[1] == ours["name"])
    assert dict(zip(head, row, strict=True))["version"] == ours["version"]
    assert site.get("/health").html.count("format=csv") == 1


def test_jobs_have_a_file(site: Site) -> None:
    report = {"kind": "replay", "name": "=x", "topic": "t", "state": "running", "done": 3, "started_at": 1}
    site.fleet.ours[0].put("/jobs/one", json.dumps(report).encode())
    wait_until(lambda: records(site, "/jobs") != [], "the console knows the job")
    (job,) = records(site, "/jobs")
    assert (job["job_id"], job["name"], job["done"], job["total"]) == ("one", "=x", 3, None)
    assert job["brokers"] == [site.fleet.ours[0].http_address]
    head, row = cells(site, "/jobs")
    assert dict(zip(head, row, strict=True))["name"] == "'=x"


def test_dead_letter_topics_have_a_file(site: Site) -> None:
    site.fleet.ours[0].create("letters", "dead-letters")
    wait_until(lambda: records(site, "/dead-letters") != [], "the console knows the topic")
    (record,) = records(site, "/dead-letters")
    assert record == {
        "topic": "letters", "broker": site.fleet.ours[0].http_address, "dead_letters": 0, "in_flight": 0,
    }  # fmt: skip
