"""The same requests to nsqadmin 1.3.0 and to the console, over the same brokers and discovery services."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from console.support import Answer, ask
from fleet.support import Fleet, running_fleet
from interop.peers import nsqadmin, qcli_admin
from interop.same.administering import SCRIPTS, Names, Script, play
from interop.same.stage import compare

pytestmark = pytest.mark.interop

_numbers = itertools.count()


@dataclass(frozen=True)
class Stage:
    """A console or nsqadmin at `address`, for one script."""

    address: str
    fleet: Fleet
    names: Names

    def ask(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> Answer:
        return ask(self.address, method, path, body, headers)

    def prepare(self, path: str, brokers: Sequence[int]) -> None:
        for server in [self.fleet.brokers[number] for number in brokers] or self.fleet.lookupds:
            answer = ask(server.http_address, "POST", path, b"x")
            assert answer.status == 200, (path, answer)

    def register(self) -> None:
        self.fleet.await_registered(self.names.topic)

    def named(self, text: str) -> str:
        return self.names.named(text)

    def anonymous(self, text: str) -> str:
        return self.names.anonymous(text)


@dataclass(frozen=True)
class Consoles:
    """nsqadmin and ours, with the same fleet."""

    fleet: Fleet
    theirs: str
    ours: str


@pytest.fixture(scope="module")
def consoles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Consoles]:
    with ExitStack() as stack:
        fleet = stack.enter_context(running_fleet(tmp_path_factory.mktemp("fleet"), ours=2))
        theirs = stack.enter_context(nsqadmin(fleet.lookupd_addresses))
        flags = [f"--lookupd-http-address={address}" for address in fleet.lookupd_addresses]
        ours = stack.enter_context(qcli_admin(*flags))
        yield Consoles(fleet, theirs, ours.http_address)


@pytest.mark.parametrize("name", SCRIPTS)
def test_same_answers(consoles: Consoles, name: str) -> None:
    script = SCRIPTS[name]
    compare(script, played(consoles, consoles.theirs, script), played(consoles, consoles.ours, script))


def played(consoles: Consoles, address: str, script: Script) -> list[str]:
    """Play a script with a topic of its own, and return the answers."""
    fleet = consoles.fleet
    names = Names(f"topic{next(_numbers)}", fleet.http_addresses, fleet.lookupd_addresses)
    return play(Stage(address, fleet, names), script)
