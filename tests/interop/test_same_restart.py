"""Send the same bytes to nsqd and our broker before and after a clean restart, and compare the frames."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from interop.same.restarting import SCRIPTS
from interop.same.stage import PATIENCE_S, Pair, Script, Stage, check, compare, pair, play

pytestmark = pytest.mark.interop

TOPICS = {name: f"topic{number:03d}" for number, name in enumerate(SCRIPTS)}


@dataclass(frozen=True)
class Restarted:
    """The brokers after their restart, and their answers before it: of nsqd, then of our broker."""

    brokers: Pair
    before: dict[str, tuple[list[str], list[str]]]


@pytest.fixture(scope="module")
def restarted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Restarted]:
    folder = tmp_path_factory.mktemp("restart")
    with ThreadPoolExecutor(2 * len(SCRIPTS)) as players:
        with pair(folder) as first_run:

            def start(stage: Stage, script: Script) -> tuple[Stage, Future[list[str]]]:
                return stage, players.submit(play, stage, script)

            playing = {
                name: [
                    start(Stage(broker, TOPICS[name]), parts.before)
                    for broker in (first_run.nsqd, first_run.ours)
                ]
                for name, parts in SCRIPTS.items()
            }
            # The brokers stop while the connections are still open, after all steps are done.
            for both in playing.values():
                for stage, _ in both:
                    assert stage.steps_done.wait(PATIENCE_S)
        before = {name: (theirs[1].result(), ours[1].result()) for name, (theirs, ours) in playing.items()}
    with pair(folder) as second_run:
        yield Restarted(second_run, before)


@pytest.mark.parametrize("name", SCRIPTS)
def test_same_after_restart(restarted: Restarted, name: str) -> None:
    compare(SCRIPTS[name].before, *restarted.before[name])
    check(restarted.brokers, TOPICS[name], SCRIPTS[name].after)
