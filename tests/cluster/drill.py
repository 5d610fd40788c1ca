"""A drill: a cluster under load, faults, and the checks at its end."""

import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from cluster.checker import differences, read_log
from cluster.clients import Clients
from cluster.disks import Disk
from cluster.engines import Engine
from cluster.ledger import Epochs, Ledger, Log, Verdict
from cluster.members import Cluster, Member, NoAnswer
from cluster.network import Network
from cluster.stock import TOPIC as STOCK_TOPIC
from cluster.stock import StockClients

if TYPE_CHECKING:
    from cluster.faults import Fault

TOPIC, ONCE_TOPIC, MUCH_TOPIC = "t", "once", "much"
CHANNELS = ("a", "b")
POLL_S = 0.05
_STOCK_POLL_S = 1
_END_S = 5.0


@dataclass
class Outcome:
    """What a fault means for clients.

    Attributes:
        goes_on: Whether publishes are acknowledged while the fault lasts.
        besides: A member that cannot serve meanwhile.
        outlives_lease: The leader goes on although it cannot renew its lease: all others follow it.
        began_s: When it began.
    """

    goes_on: bool = True
    besides: Member | None = None
    outlives_lease: bool = False
    began_s: float = field(default_factory=time.monotonic)


class Drill:
    """See the module. Use `drilling`.

    Attributes:
        refused: Requests of operators that were refused; that is right while another fault lasts.
        lost_folders: The ids of folders that are gone: each is forgotten when another folder has its member's address.
        has_lost_value: Whether the engine has lost the cluster's value, so that members may wait for an administrator.
        together: How many faults last at once.
        took: For each kind of fault, how many seconds passed until another member gave an OK, and until it delivered.
    """

    def __init__(
        self,
        folder: Path,
        engine: Engine,
        seed: int,
        flags: Iterable[str],
        pause_s: float,
        largest: int,
        mounted: Sequence[Disk],
        stock: StockClients | None,
        longest_s: float,
        keeps_log: bool,
        network: Network | None,
        has_clocks: bool,
    ) -> None:
        self.chance = random.Random(seed)
        kept = ["--retention-time=forever"] if keeps_log else []
        self.refused: list[str] = []
        self.lost_folders: list[str] = []
        self.has_lost_value = False
        self.together = 1
        self._to_start: list[Member] = []
        self.engine = engine
        self.cluster = Cluster(
            engine,
            *(*flags, *kept, *(stock.flags if stock is not None else ())),
            network=network,
            clocks=folder if has_clocks else None,
        )
        self._mounted = mounted
        self._stock = stock
        self._longest_s = longest_s
        self._keeps_log = keeps_log
        self._others = trio.CancelScope()
        self._consumers: list[trio.CancelScope] = []
        self.epochs = Epochs()
        self.ledger = Ledger(folder / "acknowledged")
        self.clients = Clients(self.cluster, self.ledger, self.chance, pause_s, largest)
        self.took: dict[str, list[tuple[float, float]]] = defaultdict(list)

    @property
    def members(self) -> list[Member]:
        return self.cluster.members

    def disk_of(self, member: Member) -> Disk:
        """Return the file system that a member's data folder is on."""
        return self._mounted[self.members.index(member)]

    async def leader(self) -> Member:
        """Return the leader; if there is none at the moment, any member that runs."""
        for _ in range(20):
            if (leader := await self.cluster.leader()) is not None:
                return leader
            await trio.sleep(POLL_S)  # another process: only its answers show progress
        return self.chance.choice(self.cluster.running or self.members)

    async def leads(self, member: Member) -> bool:
        """Whether a member says that it leads; False if it does not answer."""
        try:
            return bool((await member.about())["role"] == "leader")
        except NoAnswer:
            return False

    async def roles(self) -> tuple[Member, Member]:
        """Return the leader and one of the others."""
        leader = await self.leader()
        others = [member for member in self.members if member is not leader]
        return leader, self.chance.choice([each for each in others if each.is_running] or others)

    # ------------------------------------------------------------------ load

    async def begin(self, nursery: trio.Nursery, publishers: int, much: int, operates: bool) -> None:
        """Create topics and channels, and start the clients."""
        nursery.start_soon(self.engine.watch, self.epochs)
        await self.admit("/topic/create", topic=TOPIC)
        await self.admit("/topic/create", topic=ONCE_TOPIC)
        for name in CHANNELS:
            await self._consume(nursery, TOPIC, name)
        for _ in range(publishers):
            nursery.start_soon(self.clients.publish, TOPIC)
        if much:
            await self.admit("/topic/create", topic=MUCH_TOPIC)
            await self._consume(nursery, MUCH_TOPIC, CHANNELS[0])
        for _ in range(much):
            nursery.start_soon(self.clients.publish_much, MUCH_TOPIC)
        nursery.start_soon(self.clients.publish_once, ONCE_TOPIC, "numbered")
        if operates:
            nursery.start_soon(self.clients.operate)
        if self._stock is not None:
            await self.admit("/topic/create", topic=STOCK_TOPIC)
            for name in ("go-nsq", "pynsq"):
                await self.admit("/channel/create", topic=STOCK_TOPIC, channel=name)
            self._stock.start([member.tcp_address for member in self.members], _STOCK_POLL_S)
            nursery.start_soon(self._publish_by_others, self._stock)
            # They connect again, but a program ends if its first connection fails.
            with self.cluster.patience("clients of others publish nothing", self._stock.described):
                while not all(publisher.acknowledged for publisher in self._stock.publishers):
                    await trio.sleep(POLL_S)  # other processes: only their output shows progress

    async def _consume(self, nursery: trio.Nursery, topic: str, channel: str) -> None:
        await self.admit("/channel/create", topic=topic, channel=channel)
        scope = trio.CancelScope()
        self._consumers.append(scope)

        async def consume() -> None:
            with scope:
                await self.clients.consume(self.ledger.channel(topic, channel))

        nursery.start_soon(consume)

    async def _publish_by_others(self, stock: StockClients) -> None:
        with self._others:
            async with trio.open_nursery() as nursery:
                for publisher in stock.publishers:
                    nursery.start_soon(publisher.run, 0.1)

    async def admit(self, path: str, **query: str) -> Member:
        """Make a change, until a member has confirmed it; returns this member."""
        reason = ""
        with self.cluster.patience(f"POST {path} {query}", lambda: reason):
            while True:
                member = self.chance.choice(self.members)
                try:
                    await member.ask("POST", path, **query)
                    return member
                except NoAnswer as exc:
                    reason = str(exc)
                    await trio.sleep(POLL_S)  # another process: only its answers show progress

    async def serves(
        self, besides: Member | None = None, began_s: float | None = None
    ) -> tuple[float, float]:
        """Wait for an OK and for a delivery of another member than one; returns how long after the begin they came."""
        ledger = self.ledger
        began_s = time.monotonic() if began_s is None else began_s
        name = "" if besides is None else besides.name
        answers, deliveries = len(ledger.answers), self._deliveries(name)
        found: list[float] = []

        def answered() -> bool:
            new = ledger.answers[answers:]
            return any(
                answer.server not in ("", name) and (name or answer.sent_s >= began_s) for answer in new
            )

        with self.cluster.patience(
            f"no OK and no delivery of another member than {name or 'none'}", self.described
        ):
            await ledger.until(answered)
            found.append(time.monotonic() - began_s)
            await ledger.until(lambda: self._deliveries(name) > deliveries)
        return found[0], time.monotonic() - began_s

    def _deliveries(self, besides: str) -> int:
        return sum(count for name, count in self.ledger.deliveries.items() if name != besides)

    def described(self) -> str:
        return f"epochs {self.epochs.leaders}; refusals {dict(self.ledger.refusals)}"

    # ------------------------------------------------------------------ faults

    async def kill(self, member: Member) -> bool:
        """Kill a member; returns False if a hanging disk keeps its process."""
        member.kill()
        return await member.has_ended(_END_S)

    async def restart(self, member: Member) -> None:
        """Start a member whose process was ended; later, if another fault still prevents the end."""
        if member.is_running:
            return
        if await member.has_ended(_END_S):
            member.start()
        else:
            self._to_start.append(member)

    async def endure(self, *faults: "Fault") -> None:
        """Let faults happen, alone or together; then all members must be in sync again, and serve."""
        self.refused.clear()
        self.together = len(faults)
        await self.cluster.wait_in_sync()
        print(f"{time.monotonic():.1f}: {' + '.join(fault.name for fault in faults)}", flush=True)
        async with AsyncExitStack() as stack:
            for number, fault in enumerate(faults):
                if number:
                    await trio.sleep(self.chance.uniform(0, 4))  # the moment is random: there is no condition
                outcome = await stack.enter_async_context(fault.strike(self))
            if len(faults) == 1:
                assert not self.refused, self.refused
            if len(faults) == 1 and outcome.goes_on and not await self.is_alone(outcome.besides):
                if outcome.outlives_lease:
                    await trio.sleep(self.engine.lease_s + 1)  # there is no other sign of its end
                took = await self.serves(outcome.besides, outcome.began_s if outcome.besides else None)
                if outcome.besides is not None:
                    self.took[faults[0].name].append(took)
            await trio.sleep(self.chance.uniform(0, self._longest_s))  # likewise
        await self._recover()

    async def storm(self, faults: Sequence["Fault"], seconds: float) -> None:
        """Let random faults begin and end at random moments, two at a time; then all must be in sync, and serve."""
        print(f"{time.monotonic():.1f}: a storm", flush=True)
        self.together = 2
        until_s = time.monotonic() + seconds
        lasting: list[Fault] = []

        async def strike() -> None:
            while time.monotonic() < until_s:
                await trio.sleep(self.chance.uniform(0, 5))  # the moment is random: there is no condition
                fault = self.chance.choice([each for each in faults if each.fits(*lasting)])
                print(f"{time.monotonic():.1f}: {fault.name}", flush=True)
                lasting.append(fault)
                async with fault.strike(self):
                    await trio.sleep(self.chance.uniform(0, self._longest_s))  # likewise
                lasting.remove(fault)

        async with trio.open_nursery() as nursery:
            for _ in range(self.together):
                nursery.start_soon(strike)
        await self._recover()

    async def _recover(self) -> None:
        """Wait until all members are in sync, and serve, after all faults are over."""
        with self.cluster.patience("a member does not end"):
            while self._to_start:
                await self.restart(self._to_start.pop())
        if self.has_lost_value:
            await self._promote_last()
            self.has_lost_value = False
        await self.serves()
        await self.cluster.wait_in_sync()
        await self._forgotten(self.lost_folders)
        self.lost_folders.clear()

    async def _forgotten(self, folders: Sequence[str]) -> None:
        """Wait until the leader no longer knows members."""
        known = set(folders)
        with self.cluster.patience("members are not forgotten", lambda: known):
            while known.intersection(folders):
                with suppress(NoAnswer):
                    status = await self.cluster.status(await self.leader())
                    known = {member["id"] for member in status["members"]}
                await trio.sleep(POLL_S)  # another process: only its answers show progress

    async def _promote_last(self) -> None:
        """Promote the member that led last, as an administrator does, if members wait for that."""
        said: list[dict[str, Any]] = []
        with self.cluster.patience("no member leads, and not all wait for a promotion", lambda: said):
            while await self.cluster.leader() is None:
                with suppress(NoAnswer):
                    said = [await member.about() for member in self.members]
                    if all("qcli cluster promote" in about["reason"] for about in said):
                        ranks = [(about["epoch"], not about["is_copy"], about["position"]) for about in said]
                        await self.cluster.promote(self.members[ranks.index(max(ranks))])
                await trio.sleep(POLL_S)  # another process: only its answers show progress

    async def is_alone(self, leader: Member | None) -> bool:
        """Whether a leader that is lost was the only member in sync: the others were held up when it was lost."""
        if leader is None:
            return False
        state = (await trio.to_thread.run_sync(self.engine.observe)).state
        return state is not None and state.in_sync <= leader.folder_ids

    async def endure_all(self, *faults: "Fault") -> Verdict:
        """Let faults happen, one after the other; returns the verdict."""
        for fault in faults:
            await self.endure(fault)
            await self.settle()
        return await self.finish()

    async def settle(self) -> None:
        """Let the members store which messages are finished: these must never come again."""
        leader = await self.cluster.leader()
        if leader is None:
            return
        with suppress(NoAnswer):
            epoch = (await leader.about())["epoch"]
            for channel in self.ledger.channels.values():
                left = {each for each in await self.clients.leave(channel) if each.server() == leader.name}
                for path in ("/channel/pause", "/channel/unpause"):
                    await self.admit(path, topic=channel.topic, channel=channel.name)
                about = await leader.about()
                if (about["role"], about["epoch"]) == ("leader", epoch):
                    await channel.settle(left)

    # ------------------------------------------------------------------ end

    async def finish(self) -> Verdict:
        """Let everything be delivered, and return the verdict."""
        self.cluster.mend()
        self.clients.end_publishing()
        self._others.cancel()
        with self.cluster.patience("publishers do not end", self.described):
            await self.clients.publishers_ended()
        leader = await self.cluster.wait_in_sync()
        logs = await self._logs(leader)
        if (stock := self._stock) is not None:
            with self.cluster.patience("consumers of others lack messages", stock.described):
                while any(stock.missing().values()):
                    await trio.sleep(POLL_S)  # other processes: only their output shows progress
            print(stock.described())
        await self._compare_folders(leader)
        for member in self.members:
            self._look_for_defects(member)
        self.epochs.names = self.cluster.names()
        topics = [topic["topic_name"] for topic in (await self.cluster.stats(leader))["topics"]]
        verdict = self.ledger.judge(logs, self.epochs, topics)
        print(verdict, *self.figures(), f"refusals: {dict(self.ledger.refusals)}", sep="\n", flush=True)
        return verdict

    async def _logs(self, leader: Member) -> dict[str, Log]:
        """Wait until all is delivered, and return the logs of that moment.

        A publish that a member passes on late is stored, and delivered, after its client has given up.
        """
        left: list[str] = []
        while True:
            with self.cluster.patience("not all is delivered", lambda: left):
                while left := await self._left(leader):
                    await trio.sleep(POLL_S)  # another process: only its answers show progress
            delivered = dict(self.ledger.deliveries)
            logs = {}
            for topic in sorted({each.topic for each in self.ledger.producers}) if self._keeps_log else ():
                logs[topic] = Log(self.ledger, topic)
                async for entries in read_log(leader.http_address, topic):
                    logs[topic].add(entries)
            if not await self._left(leader) and delivered == self.ledger.deliveries:
                for consumer in self._consumers:
                    consumer.cancel()
                return logs

    async def _left(self, leader: Member) -> list[str]:
        """Return which channels are not empty."""
        kinds = ("depth", "in_flight_count", "deferred_count")
        return [
            f"{topic['topic_name']}/{channel['channel_name']}: {[channel[kind] for kind in kinds]}"
            for topic in (await self.cluster.stats(leader))["topics"]
            for channel in topic["channels"]
            if any(channel[kind] for kind in kinds)
        ]

    async def _compare_folders(self, leader: Member) -> None:
        for member in self.members:
            if member is not leader and member.is_running:
                await self._compare(leader, member)

    async def _compare(self, leader: Member, member: Member) -> None:
        found: list[str] = []
        with self.cluster.patience("folders differ", lambda: "\n".join(found[:20])):
            while True:
                found = await trio.to_thread.run_sync(differences, leader.data_path, member.data_path)
                if not found:
                    return
                await trio.sleep(POLL_S)  # operations are applied after they are stored

    def _look_for_defects(self, member: Member) -> None:
        lines = member.log()
        for number, line in enumerate(lines):
            if "Traceback" in line or "internal error" in line:
                self.ledger.complain(f"{member.name}:\n" + "\n".join(lines[max(0, number - 3) : number + 30]))
                return

    def figures(self) -> list[str]:
        """Return a line about each kind of fault: the seconds until an OK, and a delivery, of another member."""
        return [
            f"{name}: {len(took)} times; first OK elsewhere after {_spread([ok for ok, _ in took])}, "
            f"first delivery after {_spread([delivery for _, delivery in took])}"
            for name, took in sorted(self.took.items())
        ]


def _spread(values: list[float]) -> str:
    return f"{quantile(values, 0.5):.2f} s (p50), {quantile(values, 0.99):.2f} s (p99)"


def quantile(values: Iterable[float], share: float) -> float:
    """Return the smallest value that so many are not above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@asynccontextmanager
async def drilling(
    folder: Path,
    engine: Engine,
    members: int,
    seed: int,
    *flags: str,
    publishers: int = 3,
    much: int = 0,
    pause_s: float = 0.01,
    largest: int = 20,
    mounted: Sequence[Disk] = (),
    stock: StockClients | None = None,
    longest_s: float = 0.0,
    keeps_log: bool = True,
    network: Network | None = None,
    has_clocks: bool = False,
    operates: bool = True,
) -> AsyncIterator[Drill]:
    """Run a cluster with clients, until the end of the block.

    Args:
        folder: For files of members, if there are no `mounted` file systems for these, one for each member.
        seed: Of all random choices.
        flags: Further options of `qcli serve`.
        publishers: The number of clients that publish.
        much: The number of clients that publish large batches of small messages.
        pause_s, largest: See `Clients`.
        stock: Clients of others.
        longest_s: How long a fault goes on at most; if members shall serve in spite of it, after they do.
        keeps_log: Whether messages stay in the log, where the checks at the end look for them.
        network: See `Cluster`.
        has_clocks: Whether each member has a clock of its own.
        operates: Whether topics are created all the time, and most of them deleted.
    """
    drill = Drill(
        folder,
        engine,
        seed,
        flags,
        pause_s,
        largest,
        mounted,
        stock,
        longest_s,
        keeps_log,
        network,
        has_clocks,
    )
    data_paths = [disk.path / "d" for disk in mounted] or [folder / f"m{n}" for n in range(members)]
    try:
        async with drill.cluster.serving(data_paths, folder), trio.open_nursery() as nursery:
            await drill.begin(nursery, publishers, much, operates)
            yield drill
            nursery.cancel_scope.cancel()
    finally:
        drill.ledger.close()
