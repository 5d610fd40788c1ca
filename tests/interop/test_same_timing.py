"""Send the same bytes to nsqd and our broker, and compare the frames and their approximate times."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from interop.same.stage import Stage, compare, pair, play
from interop.same.timing import FLAGS, SCRIPTS

pytestmark = pytest.mark.interop

TOPICS = {name: f"topic{number:03d}" for number, name in enumerate(SCRIPTS)}

Plays = dict[str, tuple[Future[list[str]], Future[list[str]]]]


@pytest.fixture(scope="module")
def plays(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plays]:
    """Play all scripts at once, because they mostly wait; return the answers of nsqd and of our broker."""
    folder = tmp_path_factory.mktemp("timing")
    with pair(folder, *FLAGS) as first_run:
        for topic in TOPICS.values():
            first_run.nsqd.create(topic, "c")
            first_run.ours.create(topic, "c")
    # nsqd starts the timers of existing channels at startup, and those of new channels only after some seconds.
    with pair(folder, *FLAGS) as running, ThreadPoolExecutor(2 * len(SCRIPTS)) as players:
        yield {
            name: (
                players.submit(play, Stage(running.nsqd, TOPICS[name]), script),
                players.submit(play, Stage(running.ours, TOPICS[name]), script),
            )
            for name, script in SCRIPTS.items()
        }


@pytest.mark.parametrize("name", SCRIPTS)
def test_same_timing(plays: Plays, name: str) -> None:
    theirs, ours = plays[name]
    compare(SCRIPTS[name], theirs.result(), ours.result())
