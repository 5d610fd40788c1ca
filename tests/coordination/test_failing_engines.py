"""Three members compete for the lead while the engine fails. A ledger outside knows what they believed."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from coordination.conftest import candidate
from coordination.etcd_server import Member, etcd
from spark.support import until
from storage.stores import Fault, Store, proxy
from trio_nsq.coordination.bucket import BucketCoordinator
from trio_nsq.coordination.etcd import EtcdCoordinator
from trio_nsq.coordination.interface import Coordinator, CoordinatorError
from trio_nsq.coordination.state import NotInSync
from trio_nsq.platform.boot_clock import boot_time_s
from trio_nsq.storage import Patience, storage_at

TTL_S = 1.0
NAMES = "ABC"


@dataclass
class Leadership:
    """What a member believed: that it led an epoch from one time, and that no other could until another."""

    epoch: int
    leader: str
    began_s: float
    certain_until_s: float
    has_resigned: bool = False


class Competition:
    """Members in threads, until the block ends."""

    def __init__(self, open_one: Callable[[], Coordinator]) -> None:
        self.ledger: list[Leadership] = []
        self.failures: list[BaseException] = []
        self._open = open_one
        self._is_over = threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        founder = self._open()
        assert founder.campaign(candidate("A")) is not None
        self._add_others(founder)
        founder.resign()
        founder.close()
        threads = [threading.Thread(target=self._compete, args=(name,)) for name in NAMES]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            for thread in threads:
                thread.join()

    def until_more(self, count: int) -> None:
        """Wait until there were more leaders."""
        wanted = len(self.ledger) + count
        until(lambda: len(self.ledger) >= wanted or bool(self.failures))
        assert not self.failures

    def _compete(self, name: str) -> None:
        draw = random.Random(name)
        try:
            while not self._is_over.is_set():
                coordinator = self._open()
                try:
                    while not self._is_over.is_set() and not self._leads(coordinator, name):
                        self._is_over.wait(0.02)
                    if coordinator.led is not None:
                        self._lead(coordinator, draw)
                finally:
                    coordinator.close()  # without `resign` as if the process had ended
        except BaseException as error:
            self.failures.append(error)

    def _leads(self, coordinator: Coordinator, name: str) -> bool:
        with suppress(CoordinatorError, NotInSync):
            epoch = coordinator.campaign(candidate(name))
            if epoch is not None:
                until_s = coordinator.certain_until_s
                assert until_s is not None
                self.ledger.append(Leadership(epoch, name, boot_time_s(), until_s))
                return True
        return False

    def _lead(self, coordinator: Coordinator, draw: random.Random) -> None:
        led = coordinator.led
        assert led is not None
        own = next(each for each in self.ledger if each.epoch == led.epoch)
        try:
            self._add_others(coordinator)
            for _ in range(draw.randrange(3)):
                coordinator.renew()
                until_s = coordinator.certain_until_s
                assert until_s is not None
                own.certain_until_s = until_s
            if draw.random() < 0.5:
                own.has_resigned = True
                coordinator.resign(draw.choice([None, *sorted(set(NAMES) - {own.leader})]))
        except CoordinatorError:
            pass

    def _add_others(self, coordinator: Coordinator) -> None:
        for name in NAMES:
            led = coordinator.led
            assert led is not None
            if name not in led.in_sync:
                coordinator.replace(led.joined(name, ()).synced(name), led)

    def check(self) -> None:
        """Check that no two members led at the same time, and that epochs grew."""
        assert not self.failures
        for before, after in zip(self.ledger, self.ledger[1:], strict=False):
            assert after.epoch > before.epoch
            assert before.has_resigned or after.began_s >= before.certain_until_s


def test_members_of_etcd_fail(tmp_path: Path) -> None:
    flags = ("--heartbeat-interval=50", "--election-timeout=500")
    with ExitStack() as stack:
        members: list[Member] = stack.enter_context(etcd(tmp_path, 3, *flags))
        competition = Competition(
            lambda: EtcdCoordinator(
                [member.address for member in members],
                "prod",
                ttl_s=TTL_S,
                patience=Patience(attempt_s=1.0, deadline_s=3.0),
            )
        )
        with competition.running():
            competition.until_more(1)
            for number, member in enumerate(members):
                if number % 2:
                    member.kill()
                    competition.until_more(1)
                    member.start()
                else:
                    with member.stopped():
                        competition.until_more(2)
                until(member.answers)
            competition.until_more(1)
    competition.check()


def test_requests_to_a_store_fail(s3: Store) -> None:
    draw = random.Random(1)
    faults = [Fault(is_sent, status) for is_sent in (False, True) for status in (None, 500, 503)]
    with proxy(s3) as broken, s3.behind(broken.endpoint).here():
        place = s3.new_place()
        competition = Competition(
            lambda: BucketCoordinator(
                storage_at(place, patience=Patience(attempt_s=5.0, deadline_s=0.3)), "prod", ttl_s=TTL_S
            )
        )
        with competition.running():
            broken.judge = lambda method, path: draw.choice(faults) if draw.random() < 0.2 else None
            for _ in range(8):
                competition.until_more(1)
    competition.check()
