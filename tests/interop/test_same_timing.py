"""Send the same bytes to nsqd and our broker, and compare the frames and their approximate times."""

import itertools
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import pytest

from interop.same.stage import Pair, Stage, check, compare, pair, play
from interop.same.timing import FLAGS, SCRIPTS

pytestmark = pytest.mark.interop

ATTEMPTS = 4
TOPICS = {
    name: [f"topic{number:03d}.{attempt}" for attempt in range(ATTEMPTS)]
    for number, name in enumerate(SCRIPTS)
}


@dataclass(frozen=True)
class Plays:
    """Both brokers, and the answers of nsqd and of ours to each script."""

    brokers: Pair
    answers: dict[str, tuple[Future[list[str]], Future[list[str]]]]


@pytest.fixture(scope="module")
def plays(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plays]:
    """Play all scripts at once, because they mostly wait."""
    folder = tmp_path_factory.mktemp("timing")
    with pair(folder, *FLAGS) as first_run:
        for topic in itertools.chain.from_iterable(TOPICS.values()):
            first_run.nsqd.create(topic, "c")
            first_run.ours.create(topic, "c")
    # nsqd starts the timers of existing channels at startup, and those of new channels only after some seconds.
    with pair(folder, *FLAGS) as running, ThreadPoolExecutor(2 * len(SCRIPTS)) as players:
        answers = {
            name: (
                players.submit(play, Stage(running.nsqd, TOPICS[name][0]), script),
                players.submit(play, Stage(running.ours, TOPICS[name][0]), script),
            )
            for name, script in SCRIPTS.items()
        }
        yield Plays(running, answers)


@pytest.mark.parametrize("name", SCRIPTS)
def test_same_timing(plays: Plays, name: str) -> None:
    """A script that fails is played again, alone: a busy machine delays answers. A real difference fails each time."""
    theirs, ours = plays.answers[name]
    try:
        compare(SCRIPTS[name], theirs.result(), ours.result())
    except pytest.fail.Exception:
        _play_again(plays.brokers, name)


def _play_again(brokers: Pair, name: str) -> None:
    *some, last = TOPICS[name][1:]
    for topic in some:
        with suppress(pytest.fail.Exception):
            check(brokers, topic, SCRIPTS[name])
            return
    check(brokers, last, SCRIPTS[name])
