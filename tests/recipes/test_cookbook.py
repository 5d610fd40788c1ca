"""The cookbook: its pages show the programs of examples/, and those that need more than a broker do what they say.

The commands of the pages run in `tests/documents`.
"""

from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from interop.peers import nsqd, qcli_serve
from recipes.support import EXAMPLES, Program, wait_until
from trio_nsq.sync import Producer

PAGES = sorted((EXAMPLES.parent / "docs/cookbook").glob("*.md"))
PROGRAMS = sorted([*(EXAMPLES / "cookbook").glob("*.py"), EXAMPLES / "worker.py"])


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_page_shows_the_short_program(program: Path) -> None:
    text = program.read_text()
    assert text.count("\n") <= 60
    shown = [page.stem for page in PAGES if f"cat > {program.name} <<'END'\n{text}END\n" in page.read_text()]
    assert len(shown) == 1


def test_each_page_is_in_the_index() -> None:
    index = (EXAMPLES.parent / "docs/cookbook/index.md").read_text()
    names = {page.stem for page in PAGES} - {"index"}
    assert {name for name in names if index.count(f"]({name}.md) | ") == 1} == names


@pytest.mark.slow
def test_worker_of_both_brokers_ends_when_nsqd_is_empty(tmp_path: Path) -> None:
    with ExitStack() as stack:
        old = stack.enter_context(nsqd(tmp_path / "old"))
        new = stack.enter_context(qcli_serve(tmp_path / "new", "--sync=interval"))
        new.create("orders", "mail")
        deferred = httpx.post(f"http://{old.http_address}/pub?topic=orders&defer=1500", content=b"later")
        deferred.raise_for_status()
        output = tmp_path / "output"

        def handled() -> list[str]:
            return output.read_text().splitlines() if output.exists() else []

        with Producer(old.tcp_address) as before, Producer(new.tcp_address) as after:
            for number in range(20):
                before.publish("orders", b"%d" % number)
            addresses = (old.http_address, old.tcp_address, new.tcp_address)
            worker = Program("cookbook/moving.py", "orders/mail", *addresses, output=output)
            stack.callback(worker.kill)
            wait_until(lambda: len(handled()) >= 20)
            for number in range(20, 30):
                after.publish("orders", b"%d" % number)
            wait_until(lambda: len(handled()) >= 30)
            assert not worker.has_ended  # a producer of the nsqd, and a deferred message
        wait_until(lambda: worker.has_ended)
    expected = {
        f"{number} from {old.tcp_address if number < 20 else new.tcp_address}" for number in range(30)
    }
    assert set(handled()) == expected | {f"later from {old.tcp_address}", "the nsqd is empty"}
